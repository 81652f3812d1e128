"""`flashinfer.artifacts` and its commands, on repositories that are served from loopback."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashinfer import artifacts
from flashinfer.artifacts import ArtifactPath, CheckSumHash
from flashinfer.cli import main
from flashinfer.jit import cubins_build, locks
from flashinfer.jit.cubin_manifest import MANIFEST
from flashinfer.jit.errors import ArtifactError
from flashinfer.version import __version__
from tests.unit.jit.prebuilt_kernels import served

NAMES = [f"{__version__}/norm/{'1' * 24}-90a.cubin", f"{__version__}/norm/{'1' * 24}-80.cubin"]


def flashinfer(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """A signed-off repository of two files on loopback, and an empty folder for downloads."""
    folder = tmp_path / "repository"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.setenv("FLASHINFER_CUBINS_SHA256", cubins_build.write_manifest(folder))
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "cubins"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with served(folder) as server:
        server.folder, server.kept = folder, tmp_path / "cubins"
        monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", server.address)
        yield server


def kept(server) -> set[str]:
    files = (p for p in server.kept.rglob("*") if p.is_file() and p.name != locks.LOCK)
    return {str(path.relative_to(server.kept)) for path in files}


def test_what_a_repository_has(server):
    listed = dict(artifacts.get_subdir_file_list())
    assert set(listed) == set(NAMES)
    assert all(hashlib.sha256(n.encode()).hexdigest() == sha for n, sha in listed.items())
    assert artifacts.get_checksums([ArtifactPath.MODULES]) == listed
    names = tuple(sorted(name.rpartition("/")[2] for name in NAMES))
    for place in (
        f"{server.address}/{__version__}/norm",
        str(server.folder / __version__ / "norm"),
    ):
        assert artifacts.get_available_cubin_files(place) == names
        assert artifacts.get_available_header_files(place) == ()
    with pytest.raises(ArtifactError, match="404"):
        artifacts.get_available_cubin_files(f"{server.address}/absent")


def test_download_status_and_removal(server):
    assert dict(artifacts.get_artifacts_status()) == dict.fromkeys(NAMES, False)
    artifacts.download_artifacts()
    assert dict(artifacts.get_artifacts_status()) == dict.fromkeys(NAMES, True)
    assert kept(server) == {*NAMES, f"{__version__}/{MANIFEST}"}
    server.paths.clear()
    (server.kept / NAMES[0]).write_text("damaged")
    artifacts.download_artifacts()
    assert server.paths == [f"/{__version__}/{MANIFEST}", f"/{NAMES[0]}"]
    (server.kept / "of the user").mkdir()
    artifacts.clear_cubin()
    assert [path.name for path in server.kept.iterdir()] == ["of the user"]


def test_the_manifest_comes_last(server):
    (server.folder / NAMES[0]).write_text("changed")
    (server.folder / NAMES[1]).unlink()
    with pytest.raises(ArtifactError) as error:
        artifacts.download_artifacts()
    assert f"{NAMES[0]} is refused: it is corrupted" in str(error.value)
    assert f"{NAMES[1]} cannot be downloaded" in str(error.value)
    assert kept(server) == set()


def test_a_manifest_that_nobody_signed_off_is_refused(server, monkeypatch):
    monkeypatch.delenv("FLASHINFER_CUBINS_SHA256")
    monkeypatch.setitem(CheckSumHash.map_checksums, f"{__version__}/{MANIFEST}", "unknown")
    with pytest.raises(ArtifactError, match=r"is refused: it is not signed off. Its SHA-256 is"):
        artifacts.download_artifacts()
    assert server.paths == [f"/{__version__}/{MANIFEST}"] and kept(server) == set()


def test_a_manifest_that_changed_is_refused(server):
    manifest = server.folder / __version__ / MANIFEST
    manifest.write_text(manifest.read_text().replace("1", "2", 1))
    with pytest.raises(ArtifactError, match=r"is refused: its SHA-256 is \w+, the one signed off"):
        artifacts.download_artifacts()
    assert kept(server) == set()


def test_the_hash_that_the_package_was_built_with_counts(server, monkeypatch):
    sha256 = hashlib.sha256((server.folder / __version__ / MANIFEST).read_bytes()).hexdigest()
    monkeypatch.delenv("FLASHINFER_CUBINS_SHA256")
    monkeypatch.setitem(CheckSumHash.map_checksums, f"{__version__}/{MANIFEST}", sha256)
    artifacts.download_artifacts()
    assert len(kept(server)) == 3


def test_a_manifest_of_another_version_is_refused(server, monkeypatch):
    manifest = server.folder / __version__ / MANIFEST
    manifest.write_text(manifest.read_text().replace(f"  {__version__}", "  9.9.9"))
    sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
    monkeypatch.setenv("FLASHINFER_CUBINS_SHA256", sha256)
    with pytest.raises(ArtifactError, match="lists cubins of FlashInfer 9.9.9"):
        artifacts.download_artifacts()


def test_commands(server, monkeypatch):
    assert "There are no cubins" in flashinfer("list-cubins").output
    done = flashinfer("download-cubin")
    assert done.exit_code == 0 and f"2 cubins are in {server.kept}" in done.output
    assert "2 cubins, 0 refused" in flashinfer("list-cubins").output
    (server.kept / NAMES[0]).write_text("damaged")
    listed = flashinfer("list-cubins")
    assert listed.exit_code == 3 and "it is corrupted" in listed.output
    (server.folder / NAMES[0]).write_text("damaged")
    failed = flashinfer("download-cubin")
    assert failed.exit_code == 1 and "it is corrupted" in failed.output
    assert flashinfer("clear-cubin", "--yes").exit_code == 0
    assert kept(server) == set()
    monkeypatch.delenv("FLASHINFER_CUBINS_REPOSITORY")
    done = flashinfer("download-cubin")
    assert done.exit_code == 0 and "nothing is downloaded" in done.output
    with pytest.raises(ArtifactError, match="FLASHINFER_CUBINS_REPOSITORY is not set"):
        artifacts.download_artifacts()


@pytest.mark.parametrize(
    "command, wheels",
    [
        ("install-cubin-wheel", {"flashinfer-cubin"}),
        ("install-jit-cache-wheel", {"flashinfer-jit-cache"}),
        ("download-kernels", {"flashinfer-cubin", "flashinfer-jit-cache"}),
    ],
)
def test_wheels_come_from_where_the_user_says(command: str, wheels: set[str], monkeypatch):
    monkeypatch.delenv("FLASHINFER_WHEELS_REPOSITORY", raising=False)
    calls: list[list[str]] = []
    answers = iter([0, 1])

    def run(words: list[str]) -> subprocess.CompletedProcess:
        calls.append(words)
        return subprocess.CompletedProcess(words, next(answers))

    monkeypatch.setattr(subprocess, "run", run)
    refused = flashinfer(command)
    assert refused.exit_code == 2 and "FLASHINFER_WHEELS_REPOSITORY" in refused.output
    dry = flashinfer(command, "--from", "some folder", "--dry-run")
    assert dry.exit_code == 0 and "--no-index --find-links 'some folder'" in dry.output
    assert calls == []
    monkeypatch.setenv("FLASHINFER_WHEELS_REPOSITORY", "/wheels")
    assert flashinfer(command).exit_code == 0
    assert set(re.findall(rf"(\S+)=={__version__}", " ".join(calls[0]))) == wheels
    assert calls[0][calls[0].index("--find-links") + 1] == "/wheels"
    failed = flashinfer(command)
    assert failed.exit_code == 1 and "pip did not install" in failed.output
