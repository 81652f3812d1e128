"""The checks of a release refuse what is not fit to publish."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import release
from tests.unit.test_packaging import ROOT, VERSION
from tests.unit.test_packaging import dist as dist
from tests.unit.test_packaging import wheel as wheel


def test_version_and_changelog_of_this_checkout_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    release.check_version(VERSION, changelog, [f"v{VERSION}", "nightly"])


@pytest.mark.parametrize(
    "version, changelog, tags, message",
    [
        ("1.2", "## 1.2\n\n- a\n", [], "major.minor.patch"),
        ("1.2.3.dev1", "", [], "major.minor.patch"),
        ("1.2.3", "# Changes\n", [], "no heading"),
        ("1.2.3", "## 1.2.2\n\n- a\n", [], "begins with 1.2.2"),
        ("1.2.3", "## 1.2.3\n\n## 1.2.2\n- a\n", [], "says nothing"),
        ("1.2.3", "## 1.2.3\n\n- a\n", ["v1.2.2"], "tag v1.2.2"),
    ],
)
def test_a_version_that_does_not_fit_is_refused(version, changelog, tags, message):
    with pytest.raises(release.ReleaseError, match=message):
        release.check_version(version, changelog, tags)


def test_a_post_release_is_a_version():
    release.check_version("1.2.3.post1", "## 1.2.3.post1 (today)\n\n- a\n", ["v1.2.3.post1"])


def test_a_missing_compiler_is_told_before_anything_is_built(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(release.nvrtc, "library", lambda: None)
    monkeypatch.setattr(release.toolchain, "require_toolkit", lambda: None)
    monkeypatch.setattr(release.toolchain, "require_host_compiler", lambda: None)
    monkeypatch.setattr(release, "build", lambda *_: pytest.fail("something was built"))
    assert release.main(["--out", str(tmp_path / "dist")]) == 1
    assert "libnvrtc was not found" in capsys.readouterr().err


def test_the_wheel_and_the_sdist_of_this_checkout_pass(dist: Path, wheel: Path):
    release.check_wheel(wheel, VERSION)
    (sdist,) = dist.glob("*.tar.gz")
    release.check_sdist(sdist, wheel)


def test_a_large_wheel_or_another_version_is_refused(wheel: Path, monkeypatch):
    with pytest.raises(release.ReleaseError, match="is flashinfer-python"):
        release.check_wheel(wheel, "9.9.9")
    monkeypatch.setattr(release, "MAX_WHEEL_BYTES", 1000)
    with pytest.raises(release.ReleaseError, match="1000 at most"):
        release.check_wheel(wheel, VERSION)


def test_an_sdist_without_a_header_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("flashinfer/data/csrc/a.cu", "")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a/csrc/b.cu"), io.BytesIO())
    with pytest.raises(release.ReleaseError, match="lacks csrc/a.cu"):
        release.check_sdist(tmp_path / "a.tar.gz", tmp_path / "a.whl")


def test_a_folder_with_older_distributions_is_refused(tmp_path: Path):
    for name in ("a.whl", "b.whl"):
        (tmp_path / name).touch()
    with pytest.raises(release.ReleaseError, match="has 2 files"):
        release._only(tmp_path, "*.whl")


def test_a_wheel_with_host_parts_is_of_a_platform(tmp_path: Path):
    import lzma

    from tests.unit.test_distributions import backend

    with pytest.raises(ValueError, match="has no libraries"):
        backend().platform_tag(tmp_path)
    library = lzma.compress(b"\0GLIBC_2.2.5\0GLIBC_2.31\0GLIBC_2.14\0")
    (tmp_path / "0123456789abcdef.xz").write_bytes(library)
    assert backend().platform_tag(tmp_path).startswith("manylinux_2_31_")
