"""What the build backends of flashinfer-jit-cache and flashinfer-cubin share: setuptools in a copy.

Wheels only, and only from a checkout: what is built must be of the very sources beside it. Like the
backend of `flashinfer-python` it works in a temporary copy. Files have the time
`SOURCE_DATE_EPOCH` (1980 by default), so that the same inputs give the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from setuptools import build_meta as _setuptools

ROOT = Path(__file__).resolve().parent


def source_date() -> int:
    """The time that every file of a wheel has: `SOURCE_DATE_EPOCH`, else 1980 as in zip files."""
    return int(os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800"))


@contextlib.contextmanager
def _staged(project: Path, package: str) -> Iterator[Path]:
    """A temporary copy of a project as working directory."""
    version = (ROOT / "version.txt").read_text().strip()
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix=f"{project.name}-") as temp:
        stage = Path(temp)
        for file in (project / "pyproject.toml", project / "README.md", ROOT / "LICENSE"):
            shutil.copy2(file, stage)
        (stage / package).mkdir()
        for file in sorted((project / package).glob("*.py")):
            shutil.copy2(file, stage / package)
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


def metadata(project: Path, package: str, target: str) -> str:
    """Write the metadata of a wheel; as `prepare_metadata_for_build_wheel`."""
    target = os.path.abspath(target)
    with _staged(project, package):
        return _setuptools.prepare_metadata_for_build_wheel(target)


def wheel(project: Path, package: str, target: str, fill: Callable[[Path], None]) -> str:
    """Build a wheel; as `build_wheel`.

    Parameters
    ----------
    project : Path
        Folder with pyproject.toml, README.md and the package.
    package : str
        Import name.
    target : str
        Folder for the wheel.
    fill : callable
        Writes into the package's folder in the copy what is compiled; it may import flashinfer.
    """
    target = os.path.abspath(target)
    source_date()
    with _staged(project, package) as stage:
        sys.path.insert(0, str(ROOT))
        try:
            fill(stage / package)
        finally:
            sys.path.remove(str(ROOT))
        return _setuptools.build_wheel(target)
