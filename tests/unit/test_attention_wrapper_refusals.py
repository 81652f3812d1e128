"""Bad arguments of the wrappers for sparse, mixed and cascaded attention, refused without a GPU.

Plans are made by the reference backend, which has the kernels' checks; runs whose own checks are
tested are called without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.reference_backend import reference_backend
from flashinfer.sparse import convert_bsr_mask_layout

HEADS = (8, 2, 64)
LONG = torch.ones(3, dtype=torch.int64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float16)


# ---- plans that are fine, as arguments by name -------------------------------------------------

_HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
_TABLE = (ints(0, 2, 3), ints(4, 1, 0), ints(3, 16))
_WRONG_TABLES: list[tuple[str, Any]] = [
    ("indptr", ints(0, 3, 2)),
    ("indptr", torch.zeros(3)),
    ("indptr", [0, 2, 3]),
    ("last_page_len", ints(3, 17)),
    ("last_page_len", ints(0, 16)),
    ("last_page_len", ints(3)),
]
_WRONG_OPTIONS: list[tuple[str, Any]] = [
    ("num_qo_heads", 7),
    ("num_qo_heads", 0),
    ("num_qo_heads", 8.0),
    ("num_kv_heads", -2),
    ("head_dim", 72),
    ("head_dim", 8),
    ("pos_encoding_mode", "ROPE"),
    ("sm_scale", float("nan")),
    ("sm_scale", "1"),
    ("q_data_type", torch.float32),
    ("q_data_type", "half precision"),
    ("kv_data_type", torch.bfloat16),
]
_WRONG_WINDOWS: list[tuple[str, Any]] = [("window_left", -2), ("window_left", 1.5)]


def plan_bsr(**changes: Any) -> Any:
    arguments = {
        "indptr": ints(0, 2, 3, 5),
        "indices": ints(0, 1, 2, 1, 3),
        **{"M": 48, "N": 64, "R": 16, "C": 16},
        **_HEADS,
    }
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace())
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def plan_variable(**changes: Any) -> Any:
    arguments = {
        "block_mask_map": torch.ones(2, 2, 3, dtype=torch.bool),
        "block_row_sz": torch.tensor([[4, 6], [5, 5]]),
        "block_col_sz": torch.tensor([[8, 8, 16], [16, 0, 16]]),
        **_HEADS,
    }
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace())
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def plan_pod(**changes: Any) -> Any:
    names = ("indptr", "indices", "last_page_len")
    arguments = {**dict(zip(names, _TABLE, strict=True)), **_HEADS, "page_size": 16}
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def plan_batch_pod(**changes: Any) -> Any:
    arguments: dict[str, Any] = {**_HEADS, "page_size": 16}
    for part, lengths in (("p", ints(0, 20, 27)), ("d", ints(0, 1, 2))):
        names = (f"kv_indptr_{part}", f"kv_indices_{part}", f"last_page_len_{part}")
        arguments |= {f"qo_indptr_{part}": lengths, **dict(zip(names, _TABLE, strict=True))}
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def plan_mixed(**changes: Any) -> Any:
    arguments = {
        **{"qo_indptr": ints(0, 20, 21), "kv_indptr": _TABLE[0], "kv_indices": _TABLE[1]},
        **{"kv_len_arr": ints(19, 16), "num_qo_heads": 8, "num_kv_heads": 2},
        **{"head_dim_qk": 64, "head_dim_vo": 64, "page_size": 16},
        **{"q_data_type": torch.float16, "kv_data_type": torch.float16},
    }
    wrapper = flashinfer.BatchAttention(device="cpu")
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def plan_cascade(**changes: Any) -> Any:
    arguments = {
        "qo_indptr_arr": [ints(0, 2), ints(0, 1, 2)],
        "paged_kv_indptr_arr": [ints(0, 1), _TABLE[0]],
        "paged_kv_indices_arr": [ints(3), _TABLE[1]],
        "paged_kv_last_page_len": [ints(16), _TABLE[2]],
        **_HEADS,
        "page_size": 16,
    }
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def plan_sinks(**changes: Any) -> Any:
    made = {"head_dim_qk": 64, "head_dim_vo": 64, "q_data_type": torch.float16}
    made["kv_data_type"] = torch.float16
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), **made)
    arguments = {
        **{"qo_indptr": ints(0, 20, 21), "paged_kv_indptr": _TABLE[0]},
        **{"paged_kv_indices": _TABLE[1], "paged_kv_last_page_len": _TABLE[2]},
        **{"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 16},
    }
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def _for_part(part: str) -> list[tuple[str, Any]]:
    return [
        (f"kv_{name}_{part}" if name == "indptr" else f"{name}_{part}", value)
        for name, value in _WRONG_TABLES
    ]


WRONG_PLANS: dict[Callable[..., Any], list[tuple[str, Any]]] = {
    plan_bsr: [
        *_WRONG_OPTIONS,
        ("indptr", ints(0, 2, 3)),
        ("indptr", ints(1, 2, 3, 5)),
        ("indptr", ints(0, 3, 2, 5)),
        ("indptr", torch.zeros(4)),
        ("indptr", None),
        ("indices", ints(0, 1, 2, 1)),
        ("indices", ints(0, 1, 2, 1, 4)),
        ("indices", ints(0, -1, 2, 1, 3)),
        ("indices", ints(1, 1, 2, 1, 3)),
        ("M", 47),
        ("N", 60),
        ("R", 0),
        ("C", 16.0),
        ("mask", torch.ones(5, 16, 15, dtype=torch.bool)),
        ("mask", torch.ones(5, 16, 16)),
        ("mask", [True]),
        ("packed_custom_mask|packed_mask", torch.zeros(3, dtype=torch.uint8)),
        ("causal", 1),
        ("pos_encoding_mode", "ALIBI"),
        ("pos_encoding_mode", "ROPE_LLAMA"),
        ("use_fp16_qk_reduction", True),
        ("logits_soft_cap", float("nan")),
        ("o_data_type", torch.float32),
        ("non_blocking", 1),
        ("block_mask", torch.ones(3, 4)),
        ("kv_block_lens", LONG),
        ("q2k_indices", LONG),
        ("q2k_num", LONG),
        ("kv_splits", 2),
        ("use_clc", True),
        ("q_scale", LONG),
        ("k_scale", LONG),
        ("v_scale", LONG),
    ],
    plan_variable: [
        *_WRONG_OPTIONS,
        ("block_mask_map", torch.ones(2, 2, 3)),
        ("block_mask_map", torch.ones(1, 2, 3, dtype=torch.bool)),
        ("block_mask_map", torch.ones(2, 3, dtype=torch.bool)),
        ("block_mask_map", [[True]]),
        ("block_row_sz", torch.tensor([[4, 6], [5, 6]])),
        ("block_row_sz", torch.tensor([[4, 6]])),
        ("block_row_sz", torch.tensor([[-4, 14], [5, 5]])),
        ("block_col_sz", torch.ones(2, 3)),
        ("block_col_sz", torch.tensor([[8, 8], [8, 8]])),
        ("causal", "yes"),
        ("pos_encoding_mode", "ALIBI"),
        ("use_fp16_qk_reduction", True),
    ],
    plan_pod: [
        *_WRONG_OPTIONS,
        *_WRONG_WINDOWS,
        *_WRONG_TABLES,
        ("page_size", 0),
        ("indices", torch.zeros(3)),
        ("data_type", torch.float32),
        ("non_blocking", None),
    ],
    plan_batch_pod: [
        *_WRONG_OPTIONS,
        *_WRONG_WINDOWS,
        *_for_part("p"),
        *_for_part("d"),
        ("qo_indptr_p", ints(0, 20, 19)),
        ("qo_indptr_d", ints(0, 1)),
        ("kv_indices_d", torch.zeros(3)),
        ("page_size", 16.0),
    ],
    plan_mixed: [
        *(o for o in _WRONG_OPTIONS if o[0] not in ("head_dim", "pos_encoding_mode")),
        ("head_dim_qk", 72),
        ("head_dim_vo", 8),
        ("qo_indptr", ints(0, 20, 19)),
        ("kv_indptr", ints(0, 2, 1)),
        ("kv_indices", [4, 1, 0]),
        ("kv_len_arr", ints(33, 16)),
        ("kv_len_arr", ints(-1, 16)),
        ("kv_len_arr", ints(19)),
        ("page_size", -16),
        ("causal", None),
        ("logits_soft_cap", float("inf")),
        ("use_profiler", 1),
    ],
    plan_cascade: [
        *_WRONG_OPTIONS,
        *_WRONG_WINDOWS,
        ("window_left", 5),
        ("pos_encoding_mode", "ALIBI"),
        ("qo_indptr", [ints(0, 2), ints(0, 2, 1)]),
        ("qo_indptr_arr", [ints(0, 2), ints(0, 1, 3)]),
        ("qo_indptr_arr", [ints(0, 2)]),
        ("paged_kv_indptr_arr", ints(0, 1)),
        ("paged_kv_last_page_len", [ints(17), _TABLE[2]]),
        ("use_fp16_qk_reduction", True),
        ("causal", 1),
    ],
    plan_sinks: [
        ("head_dim_qk", 128),
        ("q_data_type", torch.bfloat16),
        ("kv_data_type", torch.float8_e4m3fn),
        ("paged_kv_last_page_len", ints(3, 17)),
    ],
}
_PLANS = [(plan, name, value) for plan, bad in WRONG_PLANS.items() for name, value in bad]


def argument_of(plan: Callable[..., Any], name: str) -> str:
    if name == "qo_indptr" and plan is plan_cascade:
        return "qo_indptr_arr"
    return name.split("|")[-1]


@pytest.mark.parametrize(
    ("plan", "name", "value"),
    _PLANS,
    ids=[f"{p.__name__}-{n}-{i}" for i, (p, n, _) in enumerate(_PLANS)],
)
def test_plan_refuses(plan, name, value):
    argument = argument_of(plan, name)
    # A head size may be called by the name that the other wrappers have for it.
    pattern = "head_dim" if name == "head_dim" else name
    with reference_backend(), pytest.raises((TypeError, ValueError), match=pattern):
        plan(**{argument: value})


@pytest.mark.parametrize("plan", WRONG_PLANS, ids=lambda plan: plan.__name__)
def test_without_a_gpu_a_plan_says_so(plan):
    with reference_backend():
        plan()  # the arguments are not to blame
    with pytest.raises(ValueError, match="(?i)cuda"):
        plan()


@pytest.mark.parametrize(
    "make",
    [
        lambda: flashinfer.BlockSparseAttentionWrapper(workspace(), backend="cutlass"),
        lambda: flashinfer.VariableBlockSparseAttentionWrapper(workspace(), backend="vsa"),
        lambda: flashinfer.BlockSparseAttentionWrapper([1]),
        lambda: flashinfer.PODWithPagedKVCacheWrapper(workspace(), "HDN"),
        lambda: flashinfer.PODWithPagedKVCacheWrapper(workspace(), jit_args=["mine"]),
        lambda: flashinfer.PODWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True),
        lambda: flashinfer.BatchPODWithPagedKVCacheWrapper(workspace()[1:]),
        lambda: flashinfer.BatchAttention("NHDD", device="cpu"),
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(0, workspace()),
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(2.0, workspace()),
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD", True),
        lambda: flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), window_left=-3),
        lambda: flashinfer.BatchAttentionWithAttentionSinkWrapper(
            workspace(), use_fp16_qk_reduction=True
        ),
        lambda: flashinfer.BatchAttentionWithAttentionSinkWrapper(
            workspace(), q_data_type=torch.float32
        ),
        lambda: flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(), "DHN"),
        lambda: flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper("workspace"),
    ],
)
def test_constructors_refuse(make):
    with pytest.raises((TypeError, ValueError), match="`"):
        make()


def test_a_workspace_off_its_alignment_is_named():
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()[1:])


def test_a_number_of_tokens_is_explained_by_the_length_of_requests():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    assert wrapper._plan_info is None
    with flashinfer.reference_backend():
        wrapper.plan(ints(0, 1, 2), ints(0, 1), ints(3, 4), 2, 2, 64, 4, q_len_per_req=2)
    assert wrapper._plan_info == [4, 2]
    cache = torch.zeros(2, 2, 4, 2, 64).half()

    def refuse(*args):
        raise ValueError("`q` must have 4 tokens as planned")

    wrapper._executor._run = refuse
    with pytest.raises(ValueError, match="2 requests were planned with `q_len_per_req` of 2"):
        wrapper.run(torch.zeros(3, 2, 64).half(), cache)
    with pytest.raises(ValueError, match="as planned$"):
        wrapper.run(torch.zeros(4, 2, 64).half(), cache)
    with flashinfer.reference_backend(), pytest.raises(ValueError, match="`q_len_per_req` is 2"):
        wrapper.run(torch.zeros(3, 2, 64).half(), cache)


@pytest.mark.parametrize(
    ("mask", "indptr", "name"),
    [
        (torch.ones(5, 2, 2), ints(0, 5), "mask"),
        (torch.ones(5, 4, dtype=torch.bool), ints(0, 5), "mask"),
        (torch.ones(4, 2, 2, dtype=torch.bool), ints(0, 5), "mask"),
        (torch.ones(5, 2, 2, dtype=torch.bool), ints(0, 3, 2, 5), "indptr"),
        (torch.ones(5, 2, 2, dtype=torch.bool), ints(1, 5), "indptr"),
        (torch.ones(5, 2, 2, dtype=torch.bool), torch.zeros(0, dtype=torch.int32), "indptr"),
        ([[True]], ints(0, 5), "mask"),
    ],
)
def test_convert_bsr_mask_layout_refuses(mask, indptr, name):
    with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
        convert_bsr_mask_layout(mask, indptr)


def test_a_plan_with_sinks_takes_the_module_of_its_runs():
    """The other one would be compiled for nothing."""
    with flashinfer.reference_backend():
        assert plan_sinks()._executor.config.sinks
