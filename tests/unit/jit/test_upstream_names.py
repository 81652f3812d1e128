"""Names of the JIT that code written for FlashInfer reads."""

from __future__ import annotations

import pytest
import torch

from flashinfer.jit.errors import MissingJITCacheError
from flashinfer.jit.norm import NormConfig, gen_norm_module
from flashinfer.jit.utils import filename_safe_dtype_map


def test_dtypes_as_file_names_write_them():
    assert filename_safe_dtype_map[torch.bfloat16] == "bf16"
    assert len(set(filename_safe_dtype_map.values())) == len(filename_safe_dtype_map)


def test_what_is_missing_says_where_a_prebuilt_library_would_be(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "prebuilt"))
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    spec = gen_norm_module(NormConfig(torch.float16, torch.float16))
    with pytest.raises(MissingJITCacheError) as error:
        spec.build()
    path = error.value.spec.aot_path
    assert path == tmp_path / "prebuilt" / spec.name / f"{spec.name}.so" and not path.exists()
