"""Environment variables and target architectures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashinfer import env
from flashinfer.compilation_context import CompilationContext, parse_arch_list
from flashinfer.jit import check_cuda_arch
from flashinfer.jit import env as jit_env

ROOT = Path(env.__file__).parents[1]


def test_documentation_is_up_to_date():
    assert (ROOT / "docs/environment.md").read_text() == env.markdown()


def test_documented_defaults_are_what_is_read():
    documented = {name: variable.shown_default for name, variable in env.VARIABLES.items()}
    assert documented["FLASHINFER_LOGLEVEL"] == documented["FLASHINFER_JIT_DEBUG"] == "0"
    assert documented["FLASHINFER_DISABLE_JIT"] == documented["FLASHINFER_AOT_DIR"] == "unset"


def test_nobody_else_reads_the_environment():
    pattern = re.compile(r"\bos\.(environ|getenv)\b|\bgetenv\(")
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "flashinfer").rglob("*.py")
        if pattern.search(path.read_text())
    ]
    # The other is a program of its own, which takes the compiler's variables away from it.
    assert sorted(readers) == ["flashinfer/env.py", "flashinfer/jit/cute_dsl_compile.py"]


def test_every_variable_is_used():
    code = "".join(
        path.read_text()
        for path in (ROOT / "flashinfer").rglob("*.py")
        if path.name != "env.py" or path.parent.name == "jit"
    )
    unused = [name for name in env.VARIABLES if not re.search(rf"\b{name}\b", code)]
    assert unused == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("MAX_JOBS", "0", "integer >= 1"),
        ("MAX_JOBS", "many", "integer >= 1"),
        ("FLASHINFER_JIT_VERBOSE", "maybe", "0 or 1"),
        ("FLASHINFER_LOGGING_LEVEL", "LOUD", "DEBUG / INFO"),
        ("FLASHINFER_BACKEND", "fast", "auto / reference"),
        ("FLASHINFER_DUMP_MAX_SIZE_GB", "-1", "number > 0"),
        ("FLASHINFER_EXTRA_CFLAGS", "'open", "shell words"),
    ],
)
def test_bad_value(monkeypatch, name, text, expected):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=re.escape(f"{name}={text!r} is not valid")) as caught:
        env.VARIABLES[name].get()
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", env.VARIABLES)
def test_empty_is_unset(monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert env.VARIABLES[name].get() == env.VARIABLES[name].default
    assert not env.VARIABLES[name].is_set()


def test_values(monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-DX='a b' -O3")
    assert env.FLASHINFER_EXTRA_CFLAGS.get() == ("-DX=a b", "-O3")
    monkeypatch.setenv("FLASHINFER_LOGGING_LEVEL", "warning")
    assert env.FLASHINFER_LOGGING_LEVEL.get() == "WARNING"
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "yes")
    assert env.FLASHINFER_DISABLE_JIT.get() is True


# --- Architectures ----------------------------------------------------------------------------

ALL = "7.5 8.0 8.6 8.9 9.0a 10.0a 10.3a 11.0a 12.0a 12.1a"


def test_arch_list(monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a,12.0f;10.3a")
    context = CompilationContext()
    assert {(8, "0"), (9, "0a"), (12, "0f"), (10, "3a")} == context.TARGET_CUDA_ARCHS
    assert context.get_nvcc_flags_list() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_103a,code=sm_103a",
        "-gencode=arch=compute_120f,code=sm_120f",
    ]
    assert context.get_nvcc_flags_list([9]) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert len(parse_arch_list(ALL)) == 10


@pytest.mark.parametrize("text", ["sm_90", "9", "9.0b", "9.0a x", "90a"])
def test_bad_arch_list(monkeypatch, text):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", text)
    with pytest.raises(ValueError, match="FLASHINFER_CUDA_ARCH_LIST=.* is not an architecture"):
        CompilationContext().get_nvcc_flags_list()


def test_no_supported_target(monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 8.9")
    message = r"No supported CUDA architectures found for major versions \[9, 10\]"
    with pytest.raises(RuntimeError, match=message):
        CompilationContext().get_nvcc_flags_list(supported_major_versions=[9, 10])


def test_check_cuda_arch(monkeypatch):
    check_cuda_arch()
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "7.0 9.0a")
    with pytest.raises(RuntimeError, match=r"7.5 or later, got \['7.0'\]"):
        check_cuda_arch()


class FakeNvml:
    """NVML of a machine with four GPUs."""

    NVMLError = RuntimeError
    capabilities = ((8, 0), (9, 0), (10, 3), (12, 0))

    def __init__(self, broken=False):
        self.broken = broken

    def nvmlInit(self):
        if self.broken:
            raise RuntimeError("no driver")

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.capabilities)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}abc"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self.capabilities[handle]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {(8, "0"), (9, "0a"), (10, "3a"), (12, "0a")}),
        ("1", {(9, "0a")}),
        ("0,1", {(8, "0"), (9, "0a")}),
        ("GPU-2", {(10, "3a")}),
        ("1,-1,0", {(9, "0a")}),  # CUDA ignores what follows an invalid entry
        ("-1", set()),
        ("7", set()),
    ],
)
def test_detection(monkeypatch, visible, expected):
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml())
    CompilationContext().reset()
    assert expected == CompilationContext().TARGET_CUDA_ARCHS
    CompilationContext().reset()


def test_no_driver(monkeypatch):
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml(broken=True))
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    CompilationContext().reset()
    with pytest.raises(RuntimeError, match="set FLASHINFER_CUDA_ARCH_LIST"):
        CompilationContext().get_nvcc_flags_list()
    # What was not found without a context may be found with one.
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 7))
    assert {(8, "7")} == CompilationContext().TARGET_CUDA_ARCHS
    CompilationContext().reset()


def test_assigned_targets():
    context = CompilationContext()
    context.TARGET_CUDA_ARCHS = {(10, "7a")}
    assert context.get_nvcc_flags_list(map_sm107_to_100f=True) == [
        "-gencode=arch=compute_100f,code=sm_100f"
    ]
    assert context.get_nvcc_flags_list() == ["-gencode=arch=compute_107a,code=sm_107a"]
    context.reset()
    assert {(9, "0a")} == context.TARGET_CUDA_ARCHS


def test_folders(cache):
    base = cache / ".cache" / "flashinfer"
    assert jit_env.FLASHINFER_JIT_DIR.parts[-2:] == ("90a", "cached_ops")
    assert jit_env.FLASHINFER_GEN_SRC_DIR.parts[-2:] == ("90a", "generated")
    assert jit_env.FLASHINFER_JIT_DIR.is_relative_to(base)
    assert (jit_env.FLASHINFER_INCLUDE_DIR / "flashinfer").is_dir()
    assert (jit_env.FLASHINFER_CSRC_DIR / "tvm_ffi_utils.h").is_file()
    assert "FLASHINFER_JIT_DIR" in dir(jit_env)
    with pytest.raises(AttributeError):
        jit_env.FLASHINFER_NOTHING  # noqa: B018
