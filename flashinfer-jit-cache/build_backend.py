"""PEP 517 build backend of the prebuilt modules: `flashinfer.aot`, then setuptools.

The same sources, compilers and settings give the same bytes: what the build leaves of its times
and paths is removed.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "flashinfer_jit_cache"
sys.path.append(str(HERE.parent))

import prebuilt_wheels  # noqa: E402

__all__ = ["build_wheel", "get_requires_for_build_wheel", "prepare_metadata_for_build_wheel"]


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return prebuilt_wheels.metadata(HERE, PACKAGE, metadata_directory)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    settings = config_settings or {}

    def fill(package: Path) -> None:
        from flashinfer import aot
        from flashinfer.jit import shipping

        modules = package / "jit_cache"
        specs = aot.select_modules(settings.get("preset"), settings.get("modules", "").split())
        aot.compile_and_package_modules(modules, specs)
        shipping.make_reproducible(modules, prebuilt_wheels.source_date())
        shipping.write_table(modules, package / shipping.TABLE)

    return prebuilt_wheels.wheel(HERE, PACKAGE, wheel_directory, fill)
