"""A wheel of cubins: what it is, and that a module is joined from it where there is no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import release
from tests.unit.jit import prebuilt_kernels
from tests.unit.test_distributions import backend

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "version.txt").read_text().strip()
pytestmark = pytest.mark.compiler

pytest.importorskip("build", reason="needs the 'build' package (extra dev)")

LOAD = """
import torch
from flashinfer.jit.activation import gen_act_and_mul_module
spec = gen_act_and_mul_module("silu", torch.bfloat16)
spec.build_and_load()
print(*spec.find().manifest["ingredients"]["toolchain"], sep="|")
"""


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    keep = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    return subprocess.run(
        [sys.executable, *arguments], env=keep | env, capture_output=True, text=True
    )


def build(out: Path, cubins: Path) -> Path:
    command = ["-m", "build", "--no-isolation", "--skip-dependency-check", "--wheel", "-o", out]
    project = ROOT / "flashinfer-cubin"
    result = python(*map(str, [*command, f"--config-setting=cubins={cubins}", project]))
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = out.glob("flashinfer_cubin-*.whl")
    return wheel


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``host``, ``cubins``, and the wheel of these, unpacked in ``site``."""
    folder = tmp_path_factory.mktemp("cubin-wheel")
    prebuilt_kernels.make(folder)
    with zipfile.ZipFile(build(folder, folder / "cubins")) as archive:
        archive.extractall(folder / "site")
    return folder


def test_what_the_wheel_says(made: Path):
    (wheel,) = made.glob("*.whl")
    assert wheel.name.startswith(f"flashinfer_cubin-{VERSION}-py3-none-linux_")
    assert release.metadata(wheel)["Requires-Dist"] == f"flashinfer-python=={VERSION}"
    code = "import flashinfer_cubin as c; print(c.__version__, c.get_cubin_dir(), *c.list_cubins())"
    version, folder, *names = python("-c", code, PYTHONPATH=str(made / "site")).stdout.split()
    assert (version, len(names)) == (VERSION, len(prebuilt_kernels.ARCHS))
    assert folder == str(made / "site" / "flashinfer_cubin" / "cubins")


def test_a_module_is_joined_where_there_is_no_compiler(made: Path, tmp_path: Path):
    env = {
        "PYTHONPATH": f"{made / 'site'}:{ROOT}",
        "FLASHINFER_HOST_DIR": str(made / "host"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_DISABLE_JIT": "1",
        "PATH": "/nonexistent",
    }
    loaded = python("-c", LOAD, **env)
    assert loaded.stdout.strip() == "cubin 90a|host part|tvm_ffi", loaded.stderr
    listed = python("-m", "flashinfer", "list-cubins", **env)
    assert listed.returncode == 0 and "2 cubins, 0 refused" in listed.stdout


def test_the_same_inputs_give_the_same_bytes(made: Path, tmp_path: Path):
    (first,) = made.glob("*.whl")
    assert build(tmp_path, made / "cubins").read_bytes() == first.read_bytes()


def test_a_release_signs_off_the_cubins_that_it_has(made: Path, tmp_path: Path):
    (wheel,) = made.glob("*.whl")
    package = tmp_path / "package.whl"
    for settings, fits in (({"cubins": str(made / "cubins")}, True), (None, False)):
        with zipfile.ZipFile(package, "w") as archive:
            text = f'__cubins_sha256__ = "{backend().cubins_sha256(settings)}"\n'
            archive.writestr("flashinfer/_build_meta.py", text)
        if fits:
            release.check_cubins(wheel, package)
        else:
            with pytest.raises(release.ReleaseError, match="does not sign off the manifest"):
                release.check_cubins(wheel, package)


def test_damaged_cubins_make_no_wheel(made: Path, tmp_path: Path):
    shutil.copytree(made / "cubins", tmp_path / "cubins")
    damaged = sorted((tmp_path / "cubins").rglob("*.cubin"))[0]
    damaged.write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="is refused: it is corrupted"):
        build(tmp_path, tmp_path / "cubins")
