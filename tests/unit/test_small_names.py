"""Small public names: what each answers."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from flashinfer import aot, api_logging, cutile, gemm, prefill, topk, utils
from flashinfer.compilation_context import CompilationContext
from flashinfer.cutile import cutile_common
from flashinfer.jit import core, cpp_ext


def test_words_of_a_command_line() -> None:
    assert aot.parse_bool("True") and not aot.parse_bool("0")
    assert aot.parse_head_dim("192,128") == (192, 128)
    for wrong in ("yes", ""):
        with pytest.raises(ValueError, match="`s`"):
            aot.parse_bool(wrong)
    for wrong in ("128", "1,2,3", "a,b"):
        with pytest.raises(ValueError, match="head_dim"):
            aot.parse_head_dim(wrong)


def test_targets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a 12.0f")
    monkeypatch.setattr(aot, "current_compilation_context", CompilationContext())
    found = aot.detect_sm_capabilities()
    assert [name for name, is_there in found.items() if is_there] == ["sm90", "sm120"]


def test_lists_are_compared() -> None:
    calls = []

    @prefill.make_hashable_cache
    def record(*args: object, **kwargs: object) -> int:
        calls.append((args, kwargs))
        return len(calls)

    assert record([1, [2]], name=[3]) == record([1, [2]], name=[3]) == 1
    assert record([1, [2]], name=[4]) == 2 and calls[0] == (((1, (2,)),), {"name": (3,)})


def test_experimental_backends() -> None:
    with pytest.warns(api_logging.ExperimentalWarning, match="backend 'x' of f, which was chosen"):
        api_logging.warn_experimental_backend_once("f", "x", automatic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api_logging.warn_experimental_backend_once("f", "x")
    assert not api_logging.experimental_auto_backends_allowed()
    with pytest.raises(RuntimeError, match="a feature needs"):
        api_logging.require_experimental_auto_backends("a feature")


def test_flags_of_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", "-O1 '-DA=b c'")
    assert cpp_ext.parse_env_flags("FLASHINFER_EXTRA_CUDAFLAGS") == ["-O1", "-DA=b c"]
    for name in ("HOME", "FLASHINFER_LOGLEVEL"):
        with pytest.raises(ValueError, match=name):
            cpp_ext.parse_env_flags(name)
    assert cpp_ext.join_multiline(["a", "b"]) == "a $\n    b"
    assert isinstance(cpp_ext.host_compiler_is_gcc(), bool)


def test_folders() -> None:
    first, second = core.get_tmpdir(), core.get_tmpdir()
    assert first != second and first.is_dir() and not list(first.iterdir())


def test_facts() -> None:
    assert core.JitSpecNvcc is core.JitSpec
    assert [level.name for level in utils.LogLevel][::5] == ["TRACE", "CRITICAL"]
    assert utils.cvt_rs_supported_arches_text() == "SM100, SM103, SM107"
    assert topk.roundup_kbyte(1) == 1024 and topk.roundup_kbyte(2048) == 2048
    assert not topk.can_use_cub_topk("auto", torch.zeros(1), 0, False)
    assert isinstance(utils.is_confidential_compute(), bool)
    with pytest.raises(ValueError, match="cuda device"):
        utils.get_default_generators(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert not utils.is_cvt_rs_supported()


def test_tiles_in_python_need_their_package_and_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_tile = sys.modules["flashinfer._common.cuda_tile"]
    assert cutile_common.is_cuda_tile_available is gemm.is_cuda_tile_available
    assert cutile.is_cuda_tile_available is gemm.is_cuda_tile_available
    assert not gemm.is_cuda_tile_available()
    monkeypatch.setattr(cuda_tile.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, answer in (((9, 0), False), ((10, 0), True), ((12, 1), True)):
        monkeypatch.setattr(cuda_tile, "get_compute_capability", lambda device, c=capability: c)
        assert gemm.is_cuda_tile_available("cuda:0") is gemm.is_cuda_tile_available() is answer
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not gemm.is_cuda_tile_available()


def test_modules_of_segments_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for ahead of time, without a configuration, can be built."""
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    old, new = gemm.gen_gemm_module(), gemm.gen_gemm_sm90_module()
    assert old.name == new.name and old.identity() == new.identity()
