"""A wheel of prebuilt modules is found, and loads without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "version.txt").read_text().strip()
MODULE = "act_and_mul_activation_silu_dtype_bf16"

pytest.importorskip("build", reason="needs the 'build' package (extra dev)")

LOAD = """
import torch
from flashinfer.jit.activation import gen_act_and_mul_module
spec = gen_act_and_mul_module("silu", torch.bfloat16)
spec.build_and_load()
print(spec.get_library_path())
"""


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    return subprocess.run(
        [sys.executable, *arguments], env=keep | env, capture_output=True, text=True
    )


def build(folder: Path) -> Path:
    """The wheel with one module for sm_90a, compiled in a cache of its own."""
    result = python(
        *["-m", "build", "--no-isolation", "--skip-dependency-check", "--wheel", "-o"],
        str(folder),
        f"--config-setting=modules={MODULE}",
        str(ROOT / "flashinfer-jit-cache"),
        FLASHINFER_CUDA_ARCH_LIST="9.0a",
        FLASHINFER_WORKSPACE_BASE=str(folder / "cache"),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import folder with the wheel unpacked."""
    folder = tmp_path_factory.mktemp("jit-cache")
    wheel = build(folder)
    assert wheel.name.startswith(f"flashinfer_jit_cache-{VERSION}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"flashinfer_jit_cache-{VERSION}.dist-info/METADATA").decode()
        archive.extractall(folder / "site")
    assert f"Requires-Dist: flashinfer-python=={VERSION}" in metadata
    return folder / "site"


@pytest.mark.compiler
def test_prebuilt_module_loads_without_a_compiler(site: Path, tmp_path: Path):
    result = python(
        "-c",
        LOAD,
        PYTHONPATH=f"{site}:{ROOT}",
        FLASHINFER_CUDA_ARCH_LIST="9.0a",
        FLASHINFER_WORKSPACE_BASE=str(tmp_path),
        FLASHINFER_DISABLE_JIT="1",
        PATH="/nonexistent",
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(site)


@pytest.mark.compiler
def test_other_architecture_is_not_served(site: Path, tmp_path: Path):
    result = python(
        "-c",
        LOAD,
        PYTHONPATH=f"{site}:{ROOT}",
        FLASHINFER_CUDA_ARCH_LIST="8.0",
        FLASHINFER_WORKSPACE_BASE=str(tmp_path),
        FLASHINFER_DISABLE_JIT="1",
    )
    assert result.returncode != 0
    assert "MissingJITCacheError" in result.stderr and "FLASHINFER_DISABLE_JIT" in result.stderr


@pytest.mark.compiler
def test_another_build_takes_what_the_wheel_has(site: Path, tmp_path: Path):
    """Without a compiler, `flashinfer.aot` makes a folder of the wheel's modules, and no others."""
    folder = tmp_path / "modules"
    without_tools = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "PATH": "/nonexistent"}

    def aot(arch: str, name: str) -> subprocess.CompletedProcess:
        paths = {"PYTHONPATH": f"{site}:{ROOT}", "FLASHINFER_CUDA_ARCH_LIST": arch}
        command = ("-m", "flashinfer.aot", "--out-dir", str(folder), name)
        return python(*command, **paths, **without_tools, CUDA_HOME="/nonexistent")

    done = aot("9.0a", MODULE)
    assert done.returncode == 0, done.stderr
    source = site / "flashinfer_jit_cache" / "jit_cache"
    assert done.stdout.splitlines()[-2:] == [
        f"1 modules for 9.0a in {folder}",
        f"1 of them were taken from {source}",
    ]
    (shipped,), (copied,) = source.rglob("*.so"), folder.rglob("*.so")
    assert copied.read_bytes() == shipped.read_bytes()

    switches = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_DISABLE_JIT": "1"}
    moved = {"PYTHONPATH": str(ROOT), "FLASHINFER_AOT_DIR": str(folder)}
    loaded = python("-c", LOAD, **moved, **switches, **without_tools)
    assert loaded.stdout.strip() == str(copied), loaded.stderr

    for arch, name in (("8.0", MODULE), ("9.0a", MODULE.replace("bf16", "f16"))):
        refused = aot(arch, name)
        assert refused.returncode == 1, refused.stdout
        assert "No host C++ compiler" in refused.stderr, refused.stderr


@pytest.mark.compiler
def test_the_same_inputs_give_the_same_bytes(site: Path, tmp_path: Path):
    (first,) = site.parent.glob("*.whl")
    assert build(tmp_path).read_bytes() == first.read_bytes()


@pytest.mark.compiler
def test_the_table_has_every_module(site: Path):
    code = "import flashinfer_jit_cache as c; print(c.__version__, c.get_jit_cache_dir())"
    found = python("-c", code, PYTHONPATH=str(site)).stdout.split()
    assert found == [VERSION, str(site / "flashinfer_jit_cache" / "jit_cache")]
    table = python("-m", "flashinfer_jit_cache", PYTHONPATH=str(site)).stdout
    assert f"sm_90a           {MODULE}\n1 modules of flashinfer-python {VERSION}" in table


@pytest.mark.compiler
def test_another_version_is_refused_unless_the_check_is_off(site: Path, tmp_path: Path):
    def load(**env: str) -> subprocess.CompletedProcess:
        code = "import flashinfer.jit.cache as c; c.__version__ = '9.9.9'" + LOAD
        paths = {"PYTHONPATH": f"{site}:{ROOT}", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
        switches = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_DISABLE_JIT": "1"}
        return python("-c", code, **paths, **switches, **env)

    refused = load()
    assert f"is of FlashInfer {VERSION}, this is 9.9.9" in refused.stderr
    accepted = load(FLASHINFER_DISABLE_VERSION_CHECK="1")
    assert accepted.returncode == 0, accepted.stderr


@pytest.mark.compiler
def test_checkout_stays_clean(site: Path):
    """Nothing was written beside the sources while the wheel was built."""
    names = {p.name for p in (ROOT / "flashinfer-jit-cache").rglob("*")}
    assert not {n for n in names if n.endswith((".so", ".egg-info")) or n in ("build", "jit_cache")}
