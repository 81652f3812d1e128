"""NumPy's numbers are taken for counts, scales and flags as Python's are, and give the same.

The kernels compute where there is a GPU, else the reference backend does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import flashinfer
from flashinfer._attention.checks import scalar, split_size
from flashinfer._common.checks import count as check_count
from flashinfer._common.checks import flag as check_flag
from flashinfer.gemm.groupwise import check_groups
from flashinfer.quantization import per_token_group_quant_8bit
from flashinfer.reference_backend import reference_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDPTR = torch.tensor([0, 2, 3], dtype=torch.int32)
INDICES = torch.arange(3, dtype=torch.int32)
LAST = torch.tensor([3, 16], dtype=torch.int32)
QO_INDPTR = torch.arange(3, dtype=torch.int32)
ROWS = torch.randn(4, 256, dtype=torch.bfloat16)
Q = torch.randn(2, 8, 64, dtype=torch.float16)
CACHE = torch.randn(5, 2, 16, 2, 64, dtype=torch.float16)
PROBS = torch.rand(4, 256).softmax(1)
TENSORS = ("INDPTR", "INDICES", "LAST", "QO_INDPTR", "ROWS", "Q", "CACHE", "PROBS")

Numbers = tuple[Callable[[int], Any], Callable[[float], Any], Callable[[bool], Any]]
PYTHON: Numbers = (int, float, bool)
NUMPY: Numbers = (np.int64, np.float32, np.bool_)


@pytest.fixture(autouse=True)
def _somewhere() -> Iterator[None]:
    for name in TENSORS:  # now and not at the import: a collection shall make no CUDA context
        globals()[name] = globals()[name].to(DEVICE)
    with contextlib.nullcontext() if DEVICE == "cuda" else reference_backend():
        yield


def _workspace() -> torch.Tensor:
    return torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)


def _decode(i: Any, f: Any, b: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), use_tensor_cores=b(1))
    wrapper.plan(
        *(INDPTR, INDICES, LAST, i(8), i(2), i(64), i(16)),
        window_left=i(5),
        sm_scale=f(0.125),
        logits_soft_cap=f(8),
        fixed_split_size=i(-1),
        disable_split_kv=b(1),
        q_len_per_req=i(1),
    )
    wrapper.plan(INDPTR, INDICES, LAST, i(8), i(2), i(64), i(16), fixed_split_size=i(64))
    out = wrapper.run(Q, CACHE, q_scale=f(2), k_scale=f(0.5), window_left=i(4), q_len_per_req=i(1))
    return out, wrapper.run(Q, CACHE, f(2), f(1), f(0.5))


def _prefill(i: Any, f: Any, b: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace())
    arguments = (QO_INDPTR, INDPTR, INDICES, LAST, i(8), i(2), i(64), i(16))
    wrapper.plan(*arguments, causal=b(1), max_token_per_sequence=i(1), non_blocking=b(0))
    return wrapper.run(Q, CACHE, q_scale=f(2), return_lse=b(1))


def _others(i: Any, f: Any, b: Any) -> Any:
    mixed = flashinfer.BatchAttention(device=DEVICE)
    sizes = (i(8), i(2), i(64), i(64), i(16))
    lengths, types = torch.tensor([19, 16]), {"q_data_type": Q.dtype, "kv_data_type": Q.dtype}
    mixed.plan(QO_INDPTR, INDPTR, INDICES, lengths, *sizes, causal=b(1), **types)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace())
    ragged.plan(QO_INDPTR, QO_INDPTR, i(8), i(2), i(64), i(64), causal=b(1))
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(i(1), _workspace())
    cascade.plan([QO_INDPTR], [INDPTR], [INDICES], [LAST], i(8), i(2), i(64), i(16), causal=b(1))
    pod = flashinfer.PODWithPagedKVCacheWrapper(_workspace())
    pod.plan(INDPTR, INDICES, LAST, i(8), i(2), i(64), i(16), non_blocking=b(1))
    k, v = CACHE[0, :, :2]
    return (
        mixed.run(Q, CACHE, k_scale=f(0.5)),
        ragged.run(Q, k, v),
        cascade.run(Q, CACHE),
        pod.run(Q, k, v, Q, CACHE, causal_p=b(1)),
        flashinfer.single_prefill_with_kv_cache(Q, k, v, window_left=i(3), sm_scale=f(0.5)),
    )


def _sparse(i: Any, f: Any, b: Any) -> Any:
    wrapper = flashinfer.BlockSparseAttentionWrapper(_workspace())
    blocks = (torch.tensor([0, 1, 2]), torch.tensor([0, 1]))
    wrapper.plan(*blocks, i(2), i(32), i(1), i(16), i(8), i(2), i(64), causal=b(0), sm_scale=f(0.5))
    kv = CACHE[:2, 0].flatten(0, 1)
    return wrapper.run(Q, kv, kv)


def _elementwise(i: Any, f: Any, b: Any) -> Any:
    positions = torch.arange(2, dtype=torch.int32, device=DEVICE)
    table = torch.ones(8, 64, device=DEVICE)
    flat = Q.flatten(1)
    return (
        flashinfer.apply_rope_pos_ids(Q, Q, positions, i(64), b(0), f(2), f(1e4)),
        flashinfer.apply_rope_with_cos_sin_cache(positions.long(), flat, flat, i(64), table),
        flashinfer.get_batch_indices_positions(QO_INDPTR, LAST, i(2)),
        flashinfer.get_seq_lens(INDPTR, LAST, i(16)),
        per_token_group_quant_8bit(ROWS, i(128), f(0.5)),
        flashinfer.mxfp8_quantize(ROWS, alignment=i(64)),
        flashinfer.fp4_quantize(ROWS, torch.ones(1, device=DEVICE), i(16), b(0), b(0), b(0), b(1)),
        flashinfer.rmsnorm(ROWS, ROWS[0], f(0.5)),
        flashinfer.top_k(PROBS, i(5), sorted=b(1)),
        _video(i, f, b),
    )


def _video(i: Any, f: Any, b: Any) -> Any:
    weight = torch.ones(64, dtype=ROWS.dtype, device=DEVICE)
    sizes = {"ppf": i(1), "pph": i(2), "ppw": i(2), "head_dim": i(32)}
    sizes |= {f"num_{axis}_channels": i(8) for axis in ("frame", "height")}
    sizes |= {"num_width_channels": i(16), "num_heads_q": i(2), "num_heads_k": i(2)}
    options = {"eps": f(0.5), "interleave": b(0), "is_qk_norm": b(1), "output_fp8": b(0)}
    qkv = ROWS[:, :192]
    return flashinfer.fused_qk_rmsnorm_rope(
        qkv, weight, weight, **sizes, num_heads_v=i(2), **options
    )


def _sampling(i: Any, f: Any, b: Any) -> Any:
    return (
        flashinfer.top_k_top_p_sampling_from_probs(PROBS, i(5), f(0.5), seed=i(3), offset=i(4)),
        flashinfer.top_k_top_p_sampling_from_probs(PROBS, i(300), f(0.5), seed=i(3), offset=i(4)),
        flashinfer.min_p_sampling_from_probs(PROBS, f(0.5), seed=i(3)),
    )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first.float(), second.float())
    return len(first) == len(second) and all(map(_equal, first, second))


@pytest.mark.parametrize("call", [_decode, _prefill, _others, _sparse, _elementwise, _sampling])
def test_numpys_numbers_do_what_pythons_do(call: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    expected = call(*PYTHON)
    torch.manual_seed(0)
    assert _equal(call(*NUMPY), expected)


def test_what_is_kept_is_pythons() -> None:
    assert type(check_count("page_size", np.uint16(5))) is int
    assert type(split_size(np.int32(64))) is int and split_size(np.int32(-1)) is None
    assert type(scalar("sm_scale", np.float16(0.5))) is float
    assert check_flag("causal", np.True_) is True


@pytest.mark.parametrize("value", [np.float64(16), np.True_, np.str_("16"), np.array([16]), 16.0])
def test_what_is_no_count(value: Any) -> None:
    with pytest.raises(TypeError, match="`page_size` must be an int"):
        check_count("page_size", value)


def test_bounds_hold_for_them_too() -> None:
    with pytest.raises(ValueError, match="`page_size` must be from 1"):
        check_count("page_size", np.int8(0))
    with pytest.raises(ValueError, match="`sm_scale` must be finite"):
        scalar("sm_scale", np.float32("nan"))
    with pytest.raises(TypeError, match="`causal` must be a bool"):
        check_flag("causal", np.int64(1))


def test_flags_that_choose_a_check() -> None:
    codes = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    call = {"a": codes, "b": codes[None], "a_scale": torch.ones(128, 1)}
    call |= {"b_scale": torch.ones(1, 1, 1), "m_indices": torch.ones(128, dtype=torch.int32)}
    call |= {"out": None, "out_dtype": None}
    assert check_groups(**call, validate_indices=np.False_)
    with pytest.raises(ValueError, match="`m_indices` must name groups below 1"):
        check_groups(**call, validate_indices=np.True_)
    with pytest.raises(TypeError, match="`validate_indices` must be a bool"):
        check_groups(**call, validate_indices=1)
