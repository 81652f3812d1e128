"""PEP 517 build backend of the prebuilt modules: `flashinfer.aot`, then setuptools.

Wheels only, and only from a checkout: what is built must be the modules of the very sources beside
it. Like the backend of `flashinfer-python` it works in a temporary copy.

The same sources, compilers and settings give the same bytes: manifests and files have the time
`SOURCE_DATE_EPOCH` (1980 by default), and what the build leaves of its paths is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from setuptools import build_meta as _setuptools

__all__ = ["build_wheel", "get_requires_for_build_wheel", "prepare_metadata_for_build_wheel"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@contextlib.contextmanager
def _staged() -> Iterator[Path]:
    """A temporary copy of this project as working directory."""
    version = (ROOT / "version.txt").read_text().strip()
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="flashinfer-jit-cache-") as temp:
        stage = Path(temp)
        for file in (HERE / "pyproject.toml", HERE / "README.md", ROOT / "LICENSE"):
            shutil.copy2(file, stage)
        (stage / "flashinfer_jit_cache").mkdir()
        for file in sorted((HERE / "flashinfer_jit_cache").glob("*.py")):
            shutil.copy2(file, stage / "flashinfer_jit_cache")
        (stage / "version.txt").write_text(version + "\n")
        (stage / "requirements.txt").write_text(f"flashinfer-python=={version}\n")
        # Python of any version, but one platform. The tag needs no extension module to say so.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        (stage / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {platform}\n")
        os.chdir(stage)
        try:
            yield stage
        finally:
            os.chdir(before)


def _compile(out_dir: Path, settings: Mapping[str, str]) -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from flashinfer import aot
        from flashinfer.jit import shipping

        specs = aot.select_modules(settings.get("preset"), settings.get("modules", "").split())
        aot.compile_and_package_modules(out_dir, specs)
        shipping.make_reproducible(out_dir, _source_date())
        shipping.write_table(out_dir, out_dir.parent / shipping.TABLE)
    finally:
        sys.path.remove(str(ROOT))


def _source_date() -> int:
    """The time that every file of the wheel has: `SOURCE_DATE_EPOCH`, else 1980 as in zip files."""
    return int(os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800"))


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    target = os.path.abspath(metadata_directory)
    with _staged():
        return _setuptools.prepare_metadata_for_build_wheel(target)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    target = os.path.abspath(wheel_directory)
    with _staged() as stage:
        _compile(stage / "flashinfer_jit_cache" / "jit_cache", config_settings or {})
        return _setuptools.build_wheel(target)
