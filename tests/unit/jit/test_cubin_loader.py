"""Files from a repository: fetched from loopback, compared, kept; refused ones leave no trace."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prebuilt_kernels import served

from flashinfer.jit import cubin_loader, locks
from flashinfer.jit.cubin_loader import (
    download_file,
    ensure_symlink,
    get_artifact,
    get_meta_hash,
    load_cubin,
    safe_urljoin,
    setup_cubin_loader,
    verify_cubin,
    verify_symlinked_headers,
)
from flashinfer.jit.errors import ArtifactError

DATA = b"some kernel"
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """A repository on loopback, with one file ``a/b.cubin``, and an empty folder for downloads."""
    folder = tmp_path / "repository"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "b.cubin").write_bytes(DATA)
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "cubins"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with served(folder) as server:
        server.folder, server.kept = folder, tmp_path / "cubins"
        monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", server.address)
        yield server


def files_of(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.is_file() and p.name != locks.LOCK]


def test_an_artifact_is_fetched_once_and_kept(server):
    assert get_artifact("a/b.cubin", SHA256) == DATA
    assert get_artifact("a/b.cubin", SHA256) == DATA
    assert server.paths == ["/a/b.cubin"] and files_of(server.kept) == ["b.cubin"]
    assert (server.kept / "a" / "b.cubin").stat().st_mode & 0o777 == 0o644


def test_nothing_is_fetched_unless_the_user_says_from_where(server, monkeypatch):
    monkeypatch.delenv("FLASHINFER_CUBINS_REPOSITORY")
    with pytest.raises(ArtifactError, match="FLASHINFER_CUBINS_REPOSITORY is not set"):
        get_artifact("a/b.cubin", SHA256)
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", server.address)
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    with pytest.raises(ArtifactError, match="FLASHINFER_NO_DOWNLOAD is set"):
        get_artifact("a/b.cubin", SHA256)
    assert server.paths == []


def test_a_changed_artifact_is_refused_and_not_kept(server):
    (server.folder / "a" / "b.cubin").write_bytes(b"another kernel")
    with pytest.raises(ArtifactError, match=r"/a/b.cubin is refused: it is corrupted"):
        get_artifact("a/b.cubin", SHA256)
    assert files_of(server.kept) == []


def test_a_damaged_copy_is_replaced(server):
    get_artifact("a/b.cubin", SHA256)
    (server.kept / "a" / "b.cubin").write_bytes(b"damaged")
    assert not verify_cubin(str(server.kept / "a" / "b.cubin"), SHA256)
    assert get_artifact("a/b.cubin", SHA256) == DATA
    assert load_cubin(str(server.kept / "a" / "b.cubin"), SHA256) == DATA


def test_a_repository_may_be_a_folder(server, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", str(server.folder))
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    assert get_artifact("a/b.cubin", SHA256) == DATA
    assert server.paths == []


@pytest.mark.parametrize("name", ["../b", "/etc/passwd", "http://elsewhere/b", "//elsewhere/b"])
def test_names_lead_nowhere_else(server, name: str):
    with pytest.raises(ValueError, match="path must be relative"):
        get_artifact(name, SHA256)


def test_joining():
    assert safe_urljoin("http://host/a", "b/c") == safe_urljoin("http://host/a/", "b/c")
    assert safe_urljoin("http://host/a", "b/c") == "http://host/a/b/c"


def test_attempts(server, tmp_path: Path, messages: list[str]):
    target = tmp_path / "out" / "file"
    server.failures = 2
    assert download_file(f"{server.address}/a/b.cubin", str(target), retries=3, delay=0)
    assert target.read_bytes() == DATA and len(server.paths) == 3
    server.failures = 2
    assert not download_file(f"{server.address}/a/b.cubin", str(target), retries=2, delay=0)
    assert "503" in messages[-1]
    assert not download_file(f"{server.address}/absent", str(target), retries=3, delay=0)
    assert "404" in messages[-1] and server.paths.count("/absent") == 1
    with pytest.raises(ValueError, match="retries must be at least 1, got 0"):
        download_file(f"{server.address}/a", str(target), retries=0)
    with pytest.raises(ValueError, match="http\\(s\\) address or a path, got 'ftp://a/b'"):
        download_file("ftp://a/b", str(target))


def test_a_transfer_that_ends_early_is_none(server, tmp_path: Path, messages: list[str]):
    target = tmp_path / "file"
    assert not download_file(f"{server.address}/truncated", str(target), retries=1)
    assert not target.exists() and "cannot be downloaded" in messages[-1]


def test_a_session_of_the_caller_asks(server):
    asked = []

    def get(address: str, timeout: float) -> SimpleNamespace:
        asked.append((address, timeout))
        return SimpleNamespace(content=DATA, raise_for_status=lambda: None)

    assert get_artifact("a/b.cubin", SHA256, session=SimpleNamespace(get=get)) == DATA
    assert asked == [(f"{server.address}/a/b.cubin", 10)] and server.paths == []


def test_another_writer_is_waited_for(server, tmp_path: Path, messages: list[str]):
    target = tmp_path / "out" / "file"
    release = threading.Event()
    held = threading.Event()

    def hold() -> None:
        with locks.building(target.parent, lambda waited: None):
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    assert not download_file(f"{server.address}/a/b.cubin", str(target), lock_timeout=0)
    assert "another process has written" in messages[-1]
    release.set()
    thread.join()
    assert download_file(f"{server.address}/a/b.cubin", str(target), lock_timeout=30)


def test_hashes_of_a_manifest():
    manifest = f"{'1' * 64}  include/flashinferMetaInfo.h\n{'2' * 64}  a/x.h\n{'3' * 64}  b/x.h\n"
    assert get_meta_hash(manifest.encode()) == "1" * 64
    assert get_meta_hash(manifest.encode(), "a/x.h") == "2" * 64
    for name in ("x.h", "nfo.h", "absent.h"):
        with pytest.raises(ValueError, match=f"target_file .* got '{name}'"):
            get_meta_hash(manifest.encode(), name)


def test_links_are_made_and_replaced(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.h").write_text(name)
        ensure_symlink(tmp_path / "deep" / "link", tmp_path / name)
        assert (tmp_path / "deep" / "link" / "a.h").read_text() == name
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.h").touch()
    ensure_symlink(str(tmp_path / "folder"), str(tmp_path / "one"))
    assert (tmp_path / "folder" / "a.h").read_text() == "one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "folder", "one", "two"]


def test_headers_are_compared(tmp_path: Path):
    header = tmp_path / "a.h"
    header.write_text("int a;")
    line = f"{hashlib.sha256(b'int a;').hexdigest()}  include/a.h\n".encode()
    verify_symlinked_headers(tmp_path, ["a.h"], line)
    header.write_text("int b;")
    with pytest.raises(ArtifactError, match="a.h is refused"):
        verify_symlinked_headers(tmp_path, ["a.h"], line)
    header.unlink()
    with pytest.raises(ArtifactError, match="a.h cannot be read"):
        verify_symlinked_headers(tmp_path, ["a.h"], line)


LIBRARY = """
static void (*ask)(const char*, const char*);
static int size = -1;
static char first;
extern "C" void FlashInferSetCubinCallback(void (*f)(const char*, const char*)) { ask = f; }
extern "C" void FlashInferSetCurrentCubin(const char* data, int n) { first = data[0]; size = n; }
extern "C" int ask_for(const char* name, const char* sha) {
  size = -1;
  ask(name, sha);
  return size;
}
"""


@pytest.mark.compiler
def test_a_library_of_the_user_asks_by_name_and_hash(server, tmp_path: Path, messages: list[str]):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (tmp_path / "a.cc").write_text(LIBRARY)
    path = str(tmp_path / "a.so")
    command = [compiler, "-shared", "-fPIC", "-o", path, str(tmp_path / "a.cc")]
    subprocess.run(command, check=True)
    setup_cubin_loader(path)
    setup_cubin_loader(path)
    library = ctypes.CDLL(path)
    assert library.ask_for(b"a/b.cubin", SHA256.encode()) == len(DATA)
    assert library.ask_for(b"a/b.cubin", b"0" * 64) == -1
    assert "it is corrupted" in messages[-1]
    assert cubin_loader._callbacks.pop(path)
