"""Arguments of the attention wrappers: index tensors, lengths, scales, helper functions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import utils
from flashinfer._attention.checks import scalar
from flashinfer._attention.index_tensors import (
    copy_to_buffer,
    device_indices,
    host_indices,
    host_page_table,
)
from flashinfer.reference_backend import reference_backend

BF16 = torch.bfloat16
HEADS = (8, 2, 64, 4)  # query heads, key heads, head size, page size
NAMES = ("qo_indptr", "indptr", "last_page_len")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- Index tensors ----


def test_index_tensors_become_contiguous_int32():
    strided = torch.arange(10, dtype=torch.int32)[::2]
    first, second, third = host_indices(
        {"a": torch.tensor([1, 2**31 - 1]), "b": strided, "c": int32(7)}
    )
    assert first.dtype == torch.int32 and first.tolist() == [1, 2**31 - 1]
    assert second.is_contiguous() and second.tolist() == [0, 2, 4, 6, 8]
    assert third.tolist() == [7]


@pytest.mark.parametrize(
    "tensor, error, message",
    [
        (torch.tensor([0, 2**31]), ValueError, "`x` must have values that fit int32"),
        (torch.tensor([0, -(2**31) - 1]), ValueError, "`x` must have values that fit int32"),
        (
            torch.tensor([0.0, 1.0]),
            ValueError,
            "`x` must have dtype int32, int64 or uint32, got float32",
        ),
        (torch.tensor([[0, 1]]), ValueError, "`x` must have 1 dimension"),
        ([0, 1], TypeError, "`x` must be a torch.Tensor, got list"),
    ],
)
def test_other_index_tensors_are_refused(tensor: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        host_indices({"x": tensor})


def test_page_numbers_beyond_int32_do_not_become_others():
    """They may be on the GPU; a kernel follows none that the cache does not have."""
    numbers = torch.tensor([3, 2**31 - 1, 2**31, 2**32 + 5, -1, -(2**32)])
    expected = [3, *[2**31 - 1] * 3, -1, -1]
    assert device_indices("indices", numbers, torch.device("cpu")).tolist() == expected
    buffer = torch.zeros(8, dtype=torch.int32)
    assert copy_to_buffer("indices", numbers, buffer).tolist() == [*expected, 0, 0]


def test_lengths_come_from_what_is_given():
    indptr, last, lens = int32(0, 2, 2), int32(3, 0), int32(7, 0)
    usual = host_page_table(None, indptr, last, None, 4, NAMES)
    assert usual[1] is indptr and usual[3] is last and usual[0] is usual[2] is None
    qo, starts, kv_len, last_len = host_page_table(int32(0, 1, 1), indptr, last, lens, 4, NAMES)
    assert qo.tolist() == [0, 1, 1] and starts is indptr
    assert kv_len.tolist() == [7, 0] and last_len.tolist() == [3, 0]


# ---- Plans of decoding ----


def planned(plan: Any, *args: Any, **kwargs: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    with reference_backend():
        plan(wrapper)(*args, **kwargs)
    return wrapper._problem


def test_fast_decode_plan_is_the_plan_with_lengths_of_the_host():
    table = (int32(0, 2, 5), torch.arange(5), int32(4, 1))
    options = {"window_left": 3, "sm_scale": 0.5, "fixed_split_size": 64, "q_len_per_req": 2}
    slow = planned(lambda w: w.plan, *table, *HEADS, q_data_type=BF16, **options)
    fast = planned(
        lambda w: functools.partial(flashinfer.fast_decode_plan, w),
        *(table[0].clone(), *table[1:], *HEADS),
        data_type=BF16,
        global_override_indptr_cpu=table[0],
        **options,
    )
    lengths = [plan.requests.kv_lengths().tolist() for plan in (fast, slow)]
    assert lengths == [[8, 9], [8, 9]]
    assert fast.spec == slow.spec and fast.spec.causal
    assert fast.requests.tokens_per_request == slow.requests.tokens_per_request == 2
    default = planned(lambda w: functools.partial(flashinfer.fast_decode_plan, w), *table, *HEADS)
    assert default.spec.q_data_type == default.spec.kv_data_type == torch.float16
    with pytest.raises(TypeError, match="`self`"):
        flashinfer.fast_decode_plan(None, *table, *HEADS)


def test_positional_options_keep_their_old_order():
    table = (int32(0, 2), torch.arange(2), int32(4))
    problem = planned(lambda w: w.plan, *table, *HEADS, "ALIBI", 5, 2.0, BF16, torch.float8_e5m2)
    assert (problem.spec.pos_encoding_mode, problem.spec.window_left) == ("ALIBI", 5)
    assert problem.spec.logits_soft_cap == 2.0 and problem.spec.kv_data_type == torch.float8_e5m2
    assert torch.equal(problem.tensors.alibi_slopes, utils.get_alibi_slopes(8))


def test_a_plan_that_fails_leaves_none():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    table = (int32(0, 2), torch.arange(2), int32(4))
    with reference_backend():
        wrapper.plan(*table, *HEADS)
        with pytest.raises(ValueError, match="`window_left`"):
            wrapper.plan(*table, *HEADS, window_left=-2)
    with pytest.raises(ValueError, match=r"plan\(\) must be called"):
        wrapper.run(torch.zeros(1, 8, 64), torch.zeros(2, 2, 4, 2, 64))


# ---- Scales ----


def test_scales_are_numbers_of_the_host():
    assert scalar("k_scale", 2) == scalar("k_scale", torch.tensor([2.0])) == 2.0
    meta = torch.ones(1, device="meta")
    for value, error in (
        (torch.ones(2), ValueError),
        (meta, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("1", TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match="`k_scale`"):
            scalar("k_scale", value)


# ---- Questions of serving engines ----


def test_backends():
    options = (0, False, False, BF16, BF16)
    assert not utils.is_cutlass_backend_supported(*options)
    for wrapper in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    ):
        assert wrapper.is_backend_supported("fa2") and wrapper.is_backend_supported("auto", 90)
        assert wrapper.is_backend_supported("fa2", (8, 0))
        assert not wrapper.is_backend_supported("fa2", 75)
        assert wrapper.is_backend_supported("fa3", 90)
        assert not wrapper.is_backend_supported("fa3", (10, 0))
        assert not wrapper.is_backend_supported("cutlass", 90)


def test_alibi_slopes():
    assert utils.get_alibi_slopes(4).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    # Six heads: those of four, then every other one of eight.
    assert utils.get_alibi_slopes(6)[4:].tolist() == [2.0**-1, 2.0**-3]
    assert utils.get_alibi_slopes(1).tolist() == [2.0**-8]


def test_additional_arguments_of_variants():
    names = ["maybe_custom_mask", "bias", "table"]
    found = utils.prepare_jit_additional_args(names, {"maybe_custom_mask": None}, (1, 2, 0.5))
    assert found == [None, 1, 2, 0.5]
    with pytest.raises(ValueError, match="`user_args`"):
        utils.prepare_jit_additional_args(names, {}, (1, 2))


@pytest.mark.parametrize("check, good", [("check_lse_base", "ln"), ("check_lse_layout", "HN")])
def test_forms_of_log_sum_exps(check: str, good: str):
    getattr(utils, check)(good)
    with pytest.raises(ValueError, match=f"`{check.removeprefix('check_')}`"):
        getattr(utils, check)("NHD")


@pytest.mark.parametrize(
    ("pages", "window", "message"),
    [
        ([2, -1], None, "`indices` of .* page numbers from 0 to 4, got -1"),
        ([2, 5], None, "`indices` of .* page numbers from 0 to 4, got 5"),
        ([2, 4], -5, "`window_left` must be at least -1, got -5"),
    ],
)
def test_what_the_reference_sees(pages, window, message):
    """The kernel takes a page beyond the cache for one of zeros: it cannot wait for its number."""
    with reference_backend():
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20))
        table = (torch.tensor([0, 2]), torch.tensor(pages), torch.tensor([3]))
        wrapper.plan(*table, 8, 2, 64, 4)
        q, cache = torch.zeros(1, 8, 64).half(), torch.zeros(5, 2, 4, 2, 64).half()
        with pytest.raises(ValueError, match=message):
            wrapper.run(q, cache, window_left=window)
