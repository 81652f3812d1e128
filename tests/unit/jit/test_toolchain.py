"""Where compilers are found, and that they are asked once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from flashinfer.jit import cpp_ext, toolchain

FAKE_NVCC = """
root={root}
case "$*" in
*--version*) echo "Cuda compilation tools, release 13.0, V{version}"; echo "Build cuda_13.0/x";;
*) echo "#$ TOP=$root/bin/.."
   echo "#$ INCLUDES=\\"-I$root/bin/../include\\"  "
   echo "#$ SYSTEM_INCLUDES=\\"-isystem\\" \\"$root/bin/../include/cccl\\"  "
   echo "#$ LIBRARIES=  \\"-L$root/bin/../lib/stubs\\" \\"-L$root/bin/../lib\\"";;
esac
echo x >> {record}
"""


@pytest.fixture
def fake_toolkit(tmp_path: Path):
    """Makes toolkits that consist of an nvcc which only answers questions."""
    record = tmp_path / "asked"
    record.touch()

    def make(place: str, version: str = "13.0.88") -> Path:
        root = tmp_path / place
        for folder in ("bin", "include/cccl", "lib/stubs"):
            (root / folder).mkdir(parents=True)
        (root / "lib/libcudart_static.a").touch()
        nvcc = root / "bin/nvcc"
        text = FAKE_NVCC.format(root=f"'{root}'", version=version, record=record)
        nvcc.write_text("#!/bin/sh\n" + text)
        nvcc.chmod(0o755)
        return root

    make.asked = lambda: len(record.read_text().split())
    return make


@pytest.fixture(autouse=True)
def only_what_a_test_makes(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "SYSTEM_TOOLKIT", "/nowhere")
    monkeypatch.setattr(toolchain, "_pypi_toolkits", lambda: [])


def test_search_order(fake_toolkit, monkeypatch):
    places = ["system", "site/nvidia/cu13", "on path", "cuda path", "home", "asked for"]
    system, pypi, path, cuda_path, home, asked = map(fake_toolkit, places)
    assert toolchain.find_toolkit() is None

    def found() -> str:
        toolkit = toolchain.find_toolkit()
        assert toolkit is not None
        return toolkit.root

    monkeypatch.setattr(toolchain, "SYSTEM_TOOLKIT", str(system))
    assert found() == str(system)
    monkeypatch.setattr(toolchain, "_pypi_toolkits", lambda: [str(pypi)])
    assert found() == str(pypi)
    monkeypatch.setenv("PATH", f"{path}/bin:/usr/bin:/bin")
    assert found() == str(path)
    monkeypatch.setenv("CUDA_PATH", str(cuda_path))
    assert found() == str(cuda_path)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert found() == str(cuda_path), "a toolkit without nvcc is passed over"
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert found() == str(home)
    monkeypatch.setenv("FLASHINFER_NVCC", f"{asked}/bin/nvcc")
    assert found() == str(asked)


@pytest.mark.parametrize("place", ["with space", "with:colon", "with$dollar"])
def test_odd_places(fake_toolkit, monkeypatch, place):
    root = fake_toolkit(place)
    monkeypatch.setenv("CUDA_HOME", str(root))
    toolkit = toolchain.require_toolkit()
    assert toolkit.include_dirs == (f"{root}/include", f"{root}/include/cccl")
    assert toolkit.library_dirs == (f"{root}/lib",)  # the stub of the driver is never linked
    assert toolkit.static_cudart() == f"{root}/lib"


def test_search_path_as_cuda_home(fake_toolkit, monkeypatch):
    root = fake_toolkit("cuda")
    monkeypatch.setenv("CUDA_HOME", f":{root}:/other")
    assert toolchain.require_toolkit().root == str(root)


@pytest.mark.parametrize("kind", ["link", "wrapper"])
def test_nvcc_outside_its_toolkit(fake_toolkit, tmp_path, monkeypatch, kind):
    root = fake_toolkit("real")
    outside = tmp_path / "bin"
    outside.mkdir()
    if kind == "link":
        (outside / "nvcc").symlink_to(root / "bin/nvcc")
    else:
        (outside / "nvcc").write_text(f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
        (outside / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{outside}:/usr/bin:/bin")
    toolkit = toolchain.require_toolkit()
    assert toolkit.nvcc == str(outside / "nvcc")
    assert toolkit.root == str(root) and toolkit.include_dirs[0] == f"{root}/include"


def test_asked_once_until_it_changes(fake_toolkit, tmp_path, monkeypatch):
    root = fake_toolkit("real")
    wrapper = tmp_path / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_NVCC", str(wrapper))

    def version() -> str:
        toolchain._remembered_for.cache_clear()  # as in a new process
        return toolchain.require_toolkit().version

    assert version() == "V13.0.88 cuda_13.0/x"
    asked = fake_toolkit.asked()
    assert version() == "V13.0.88 cuda_13.0/x" and fake_toolkit.asked() == asked
    # The toolkit that the wrapper calls is replaced; the wrapper stays as it is.
    shutil.rmtree(root)
    fake_toolkit("real", version="13.2.1")
    assert version() == "V13.2.1 cuda_13.0/x" and fake_toolkit.asked() > asked


def test_damaged_memory_is_ignored(fake_toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit("cuda")))
    for damage in ("", "[]", "{", '{"%s": {}}'):
        memory = toolchain._memory_file()
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(damage)
        toolchain._remembered_for.cache_clear()
        assert toolchain.require_toolkit().release == (13, 0)


def test_shared_cudart_without_link(fake_toolkit, monkeypatch):
    """PyPI ships `libcudart.so.13` without `libcudart.so`."""
    root = fake_toolkit("cuda")
    (root / "lib/libcudart_static.a").rename(root / "lib/libcudart.so.13")
    monkeypatch.setenv("CUDA_HOME", str(root))
    toolkit = toolchain.require_toolkit()
    assert toolkit.static_cudart() is None
    assert toolkit.shared_cudart() == f"{root}/lib/libcudart.so.13"


def test_cuda_version(fake_toolkit, monkeypatch):
    root = fake_toolkit("cuda", "12.10.3")
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert cpp_ext.get_cuda_path() == str(root)
    assert str(cpp_ext.get_cuda_version()) == "12.10"
    assert cpp_ext.is_cuda_version_at_least("12.9") and not cpp_ext.is_cuda_version_at_least("13.0")


def test_pypi_layout(tmp_path, monkeypatch):
    monkeypatch.undo()
    for name in ("cu12", "cu13", "cudnn"):
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    roots = [root for root in toolchain._pypi_toolkits() if root.startswith(str(tmp_path))]
    assert [os.path.basename(root) for root in roots] == ["cu13", "cu12"]


def test_host_compiler(monkeypatch, tmp_path):
    found = toolchain.require_host_compiler()
    assert os.path.basename(found.path) in ("g++", "c++", "clang++")
    assert "version" in found.version and os.sep not in found.version.split(";")[0]
    named = tmp_path / "my-c++"
    named.symlink_to(os.path.realpath(found.path))
    monkeypatch.setenv("CXX", str(named))
    assert toolchain.require_host_compiler() == toolchain.HostCompiler(str(named), found.version)
