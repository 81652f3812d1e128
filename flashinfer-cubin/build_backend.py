"""PEP 517 build backend of the wheel of cubins: `flashinfer build-cubins`, then setuptools.

The same sources, NVRTC and settings give the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "flashinfer_cubin"
sys.path.append(str(HERE.parent))

import prebuilt_wheels  # noqa: E402

__all__ = ["build_wheel", "get_requires_for_build_wheel", "prepare_metadata_for_build_wheel"]


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return prebuilt_wheels.metadata(HERE, PACKAGE, metadata_directory)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    settings = config_settings or {}
    # Before the working directory changes.
    made = Path(settings["cubins"]).absolute() if "cubins" in settings else None

    def fill(package: Path) -> None:
        from flashinfer import aot
        from flashinfer.jit import cubins_build

        cubins = package / "cubins"
        if made:
            cubins_build.copy(made, cubins)
        else:
            specs = aot.select_modules(settings.get("preset"), settings.get("modules", "").split())
            cubins_build.build(specs, cubins)

    return prebuilt_wheels.wheel(HERE, PACKAGE, wheel_directory, fill)
