"""Modules that are joined from a host part and cubins; cubins that are refused, each by name."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import prebuilt_kernels
import pytest
import torch
from prebuilt_kernels import NAME, content, spec

from flashinfer import artifacts
from flashinfer.jit import (
    JitError,
    MissingJITCacheError,
    cubin_manifest,
    cubins,
    cubins_build,
    host_parts,
    host_parts_build,
    nvrtc,
    places,
)
from flashinfer.jit.attention import gen_attention_plan_module
from flashinfer.jit.binary import read_kernels
from flashinfer.jit.cubin_manifest import MANIFEST, file_name, needed_cuda, parse_manifest
from flashinfer.jit.errors import ArtifactError, ToolchainError, UntrustedError
from flashinfer.version import __version__

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prebuilt")
    prebuilt_kernels.make(folder)
    return folder


@pytest.fixture
def bare(made: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cubins, in an environment without nvcc, NVRTC and a host compiler."""
    shutil.copytree(made / "host", tmp_path / "host")
    shutil.copytree(made / "cubins", tmp_path / "cubins")
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(tmp_path / "host"))
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "cubins"))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("flashinfer.jit.toolchain.SYSTEM_TOOLKIT", "/nonexistent")
    monkeypatch.setattr("flashinfer.jit.toolchain._pypi_toolkits", lambda: [])
    monkeypatch.setattr("flashinfer.jit.nvrtc.library", lambda: None)
    return tmp_path / "cubins"


def cubin(folder: Path, arch: str = "90a") -> Path:
    return folder / file_name(NAME, content(), arch)


def sign(folder: Path) -> None:
    """List what the folder has now: for faults that a hash does not show."""
    cubins_build.write_manifest(folder)


def refusal(folder: Path) -> str:
    """What `flashinfer list-cubins` says of the one cubin that is refused."""
    (problem,) = filter(None, artifacts.cubin_problems().values())
    assert str(cubin(folder)) in problem
    return problem


def test_a_module_is_joined_without_any_compiler(bare: Path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    module = spec().build_and_load()
    entry = spec().find()
    assert entry is not None
    sha256 = hashlib.sha256(cubin(bare).read_bytes()).hexdigest()
    assert entry.manifest["ingredients"]["toolchain"]["cubin 90a"] == sha256
    assert {kernel.arch for kernel in read_kernels(entry.library)} == {"sm_90a"}
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="must be a CUDA tensor|cpu"):
        module.act_and_mul(torch.zeros(2, 8, dtype=torch.bfloat16), x, None)


def test_every_target_needs_its_cubin(bare: Path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    spec().build()
    assert {kernel.arch for kernel in read_kernels(spec().find().library)} == {"sm_80", "sm_90a"}
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 10.0a")
    with pytest.raises(ToolchainError):
        spec().build()


def test_other_sources_and_named_compilers_do_not_meet_cubins(bare: Path, monkeypatch):
    assert cubins.find(NAME, content(), ["90a"]) is not None
    assert cubins.find(NAME, "0" * 24, ["90a"]) is None
    for compiler in ("nvcc", "nvrtc"):
        monkeypatch.setenv("FLASHINFER_COMPILER", compiler)
        assert cubins.find(NAME, content(), ["90a"]) is None


def test_the_nvrtc_of_this_machine_makes_such_a_folder(
    made: Path, cache: Path, tmp_path: Path, monkeypatch
):
    if nvrtc.library() is None:
        pytest.skip("needs libnvrtc: pip install nvidia-cuda-nvrtc")
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(made / "host"))
    sha256, left_out = cubins_build.build([spec()], tmp_path / "new")
    manifest = tmp_path / "new" / __version__ / MANIFEST
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() == sha256 and left_out == {}
    assert list(parse_manifest(manifest.read_bytes(), manifest)) == [
        file_name(NAME, content(), "90a")
    ]
    cubins_build.copy(tmp_path / "new", tmp_path / "copy")
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "copy"))
    assert spec().prebuilt() is not None


def test_modules_without_host_part_are_left_out_by_name(bare: Path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_HOST_DIR", str(bare / "empty"))
    with pytest.raises(JitError, match=f"(?s)No kernels.*{NAME}: there is no prebuilt host part"):
        cubins_build.build([spec()], bare / "new")


def _corrupted(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _cut_to_a_few_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize(
    "damage, message",
    [
        (_corrupted, r"it is corrupted: its SHA-256 is [0-9a-f]{64}, the manifest says"),
        (_truncated, r"it is truncated to \d+ of \d+ bytes"),
        (_cut_to_a_few_bytes, r"it is truncated to 20 of 64 bytes"),
        (Path.unlink, r"it cannot be read \(No such file or directory\)"),
    ],
)
def test_a_damaged_cubin_is_refused_by_name(
    bare: Path, messages: list[str], monkeypatch, damage: Callable[[Path], None], message: str
):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    damage(cubin(bare))
    with pytest.raises(MissingJITCacheError):
        spec().build()
    logged = [text for text in messages if str(cubin(bare)) in text]
    assert len(logged) == 1 and NAME in logged[0]
    with pytest.raises(ArtifactError, match=message):
        raise ArtifactError(refusal(bare))


def test_a_cubin_of_another_architecture_is_refused_by_name(bare: Path):
    shutil.copyfile(cubin(bare, "80"), cubin(bare))
    sign(bare)
    assert "it has code for sm_80, its name says sm_90a" in refusal(bare)
    assert cubins.find(NAME, content(), ["90a"]) is None
    assert cubins.find(NAME, content(), ["80"]) is not None


def test_a_manifest_of_another_version_is_refused_by_name(bare: Path, messages: list[str]):
    manifest = bare / __version__ / MANIFEST
    manifest.write_text(manifest.read_text().replace(f"  {__version__}/", "  9.9.9/"))
    assert cubins.find(NAME, content(), ["90a"]) is None
    message = f"lists cubins of FlashInfer 9.9.9, not of {__version__}"
    with pytest.raises(ArtifactError, match=message):
        cubins.read_manifest(bare)
    assert any(message in text for text in messages)


@pytest.mark.parametrize(
    "line", ["", "text", f"{'0' * 64}  ../a", f"{'0' * 64}  /etc/passwd", f"{'0' * 63}  a"]
)
def test_a_damaged_manifest_is_refused(line: str):
    with pytest.raises(ArtifactError, match="m is no manifest: line 2"):
        parse_manifest(f"{'0' * 64}  b\n{line}\n".encode(), "m")


def test_what_the_manifest_does_not_list_is_not_there(bare: Path):
    manifest = bare / __version__ / MANIFEST
    manifest.write_text("".join(manifest.read_text().splitlines(True)[:1]))
    assert cubins.find(NAME, content(), ["90a"]) is None


def test_a_cubin_that_others_can_write_is_refused(bare: Path):
    cubin(bare).chmod(0o666)
    with pytest.raises(UntrustedError, match="everybody can write it"):
        spec().build()


@pytest.fixture
def packed(made: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cubins beside the host part instead, as in a wheel."""
    host = bare.parent / "host"
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    with monkeypatch.context() as patch:
        # Instead of compiling, which leaves such a folder.
        patch.setattr(
            cubins_build, "build", lambda _, to, __: shutil.copytree(bare, to, dirs_exist_ok=True)
        )
        host_parts_build.add_cubins([spec()], host)
    shutil.rmtree(bare)
    return host


def test_cubins_beside_the_host_part_are_joined(packed: Path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert len(list(packed.glob("*.xz"))) == 2
    spec().build()
    entry = spec().find()
    assert {kernel.arch for kernel in read_kernels(entry.library)} == {"sm_80", "sm_90a"}
    part = host_parts.find(NAME, content())
    made_of = entry.manifest["ingredients"]["toolchain"]
    assert {made_of[f"cubin {arch}"] for arch in part.cubins} == {
        cubin.sha256 for cubin in part.cubins.values()
    }
    for compiler in ("nvcc", "nvrtc"):
        monkeypatch.setenv("FLASHINFER_COMPILER", compiler)
        assert cubins.find(NAME, content(), ["90a"]) is None
    monkeypatch.setenv("FLASHINFER_COMPILER", "auto")
    assert cubins.find(NAME, content(), ["90a"]) is not None
    assert cubins.find(NAME, content(), ["90a", "100a"]) is None


def test_long_kernels_are_those_of_many_lines(cache: Path, tmp_path: Path, monkeypatch):
    chosen: list[str] = []
    monkeypatch.setattr(host_parts_build, "_LONG", 20)
    monkeypatch.setattr(
        host_parts_build, "add_cubins", lambda specs, *_: chosen.extend(s.name for s in specs)
    )
    specs = [spec(), gen_attention_plan_module()]  # the latter has no kernels
    assert host_parts_build.build(specs, tmp_path / "host") == {} and chosen == []
    host_parts_build.build(specs, tmp_path / "host", long_kernels=True)
    assert chosen == [NAME]


def test_a_host_part_that_is_built_again_loses_its_cubins(packed: Path):
    part = host_parts.read_index(packed).parts[NAME]
    del part["cubins"]
    host_parts_build._extend_index(packed, {}, {NAME: part})
    assert host_parts.find(NAME, content()).cubins == {}
    assert [path.name for path in packed.glob("*.xz")] == [part["archive"]]


def test_damaged_cubins_beside_a_host_part_are_refused(packed: Path):
    archive = host_parts.find(NAME, content()).cubins["90a"].archive
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(JitError, match=f"host parts .*{archive.name} are damaged"):
        spec().build()


def test_a_driver_of_an_older_cuda_gets_no_cubin(
    bare: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
):
    needed = needed_cuda(cubin(bare).read_bytes())
    monkeypatch.setattr(cubin_manifest, "driver_cuda", lambda: needed)
    assert spec().prebuilt() is not None
    monkeypatch.setattr(cubin_manifest, "driver_cuda", lambda: needed - 1)
    assert spec().prebuilt() is None
    assert f"needs a driver of CUDA {needed}" in messages[0]


def test_a_driver_of_an_older_cuda_gets_none_of_the_wheel_and_no_warning(
    packed: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cubin_manifest, "driver_cuda", lambda: 13)
    assert spec().prebuilt() is not None
    monkeypatch.setattr(cubin_manifest, "driver_cuda", lambda: 11)
    assert spec().prebuilt() is None and not messages


@pytest.fixture
def package(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cubins in an installed package flashinfer_cubin instead."""
    folder = bare.parent / "site" / "flashinfer_cubin"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    bare.rename(folder / "cubins")
    monkeypatch.syspath_prepend(str(folder.parent))
    places.cubin_package.cache_clear()
    yield folder / "cubins"
    places.cubin_package.cache_clear()


def test_an_installed_package_is_used_and_not_written(package: Path, monkeypatch):
    from flashinfer.jit import env as jit_env

    assert jit_env.has_flashinfer_cubin()
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR")
    assert package == jit_env.FLASHINFER_CUBIN_DIR
    assert places.cubin_dir() != package
    cubin(package).chmod(0o666)  # whoever can write a package can do more than that
    assert spec().prebuilt() is not None
    artifacts.clear_cubin()
    assert cubin(package).is_file()


def test_a_package_of_another_version_is_refused_unless_the_check_is_off(
    package: Path, monkeypatch
):
    (package / __version__).rename(package / "9.9.9")
    manifest = package / "9.9.9" / MANIFEST
    manifest.write_text(manifest.read_text().replace(f"  {__version__}/", "  9.9.9/"))
    message = f"flashinfer-cubin is of FlashInfer 9.9.9, this is {__version__}"
    with pytest.raises(JitError, match=message):
        spec().build()
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    spec().build()
    assert spec().is_built()


def test_a_damaged_host_part_is_no_way_in(bare: Path, monkeypatch):
    (archive,) = (bare.parent / "host").glob("*.xz")
    archive.write_bytes(b"damaged")
    with pytest.raises(JitError, match="The host parts .* are damaged"):
        spec().build()
