"""Third-party headers are found where they are, and the refusal says what to install."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashinfer.jit import thirdparty
from flashinfer.jit.thirdparty import CUTLASS, find_include_dir


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site-packages, and a package folder without headers of its own."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(thirdparty, "PACKAGE_DIR", tmp_path / "checkout" / "flashinfer")
    find_include_dir.cache_clear()
    yield tmp_path
    find_include_dir.cache_clear()


def install(site: Path, version: str, probe: str = CUTLASS.probe) -> Path:
    info = site / f"nvidia_cutlass-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: {version}\n"
    )
    header = site / CUTLASS.include / probe
    header.parent.mkdir(parents=True)
    header.touch()
    return site / CUTLASS.include


def test_installed_package_is_found(site: Path):
    include = install(site, CUTLASS.version)
    assert find_include_dir(CUTLASS) == include


def test_own_copy_comes_first(site: Path):
    install(site, CUTLASS.version)
    own = site / "checkout" / "3rdparty" / "cutlass" / "include"
    (own / CUTLASS.probe).parent.mkdir(parents=True)
    (own / CUTLASS.probe).touch()
    assert find_include_dir(CUTLASS) == own


def test_missing_package_says_what_to_install(site: Path):
    with pytest.raises(FileNotFoundError, match=r'pip install "nvidia-cutlass==4\.2\.0\.0"'):
        find_include_dir(CUTLASS)


def test_other_version_is_refused(site: Path):
    install(site, "3.8.0.0")
    with pytest.raises(
        FileNotFoundError, match=r"3\.8\.0\.0 is installed, but 4\.2\.0\.0 is needed"
    ):
        find_include_dir(CUTLASS)


def test_package_without_headers_is_refused(site: Path):
    install(site, CUTLASS.version, probe="other.h")
    with pytest.raises(FileNotFoundError, match="does not contain cutlass/cutlass.h"):
        find_include_dir(CUTLASS)


def test_every_pin_is_exact():
    assert CUTLASS.requirement == "nvidia-cutlass==4.2.0.0"
    assert replace(CUTLASS, version="1.0").requirement == "nvidia-cutlass==1.0"
