"""Calls, buffers and attributes that serving engines use, on the reference backend."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.reference_backend import reference_backend

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
LENGTHS = torch.tensor([5, 1, 7], dtype=torch.int32)
INDPTR = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
LAST = torch.ones(3, dtype=torch.int32)
PAGES = torch.arange(13, dtype=torch.int32).flip(0)
HEAD_COUNTS = (HEADS, KV_HEADS, HEAD_DIM, 1)


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with reference_backend():
        yield


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(3, HEADS, HEAD_DIM, dtype=torch.bfloat16)


@pytest.fixture
def cache() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (16, 1, KV_HEADS, HEAD_DIM)
    return torch.randn(shape).to(torch.float8_e4m3fn), torch.randn(shape).to(torch.float8_e4m3fn)


def _workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


def _decode(**options: Any) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", **options)


def _planned(**dtypes: Any) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = _decode()
    wrapper.plan(INDPTR, PAGES, LAST, *HEAD_COUNTS, **dtypes)
    return wrapper


def test_data_type_is_the_caches_beside_a_q_data_type(q: torch.Tensor, cache: Any) -> None:
    dtypes = {"data_type": torch.float8_e4m3fn, "q_data_type": torch.bfloat16}
    expected = _planned(q_data_type="bfloat16", kv_data_type="float8_e4m3fn").run(q, cache)
    assert torch.equal(_planned(**dtypes).run(q, cache), expected)
    sizes = _decode().workspace_size(INDPTR, PAGES, LAST, *HEAD_COUNTS, **dtypes)
    assert sizes == _decode().workspace_size(
        *(INDPTR, PAGES, LAST, *HEAD_COUNTS), q_data_type="bfloat16", kv_data_type="float8_e4m3fn"
    )


@pytest.mark.parametrize(
    ("given", "q_dtype", "kv_dtype"),
    [
        ({"data_type": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"data_type": "float8_e4m3fn"}, torch.float16, torch.float8_e4m3fn),
        ({"data_type": torch.float16, "kv_data_type": "float16"}, torch.float16, torch.float16),
    ],
)
def test_data_type_alone(given: dict[str, Any], q_dtype: Any, kv_dtype: Any) -> None:
    wrapper = _planned(**given)
    k = torch.randn(16, 1, KV_HEADS, HEAD_DIM).to(kv_dtype)
    assert wrapper.run(torch.randn(3, HEADS, HEAD_DIM, dtype=q_dtype), (k, k)).dtype == q_dtype


def test_data_type_that_contradicts() -> None:
    with pytest.raises(ValueError, match="`data_type` must be left out or the `kv_data_type`"):
        _planned(data_type="bfloat16", kv_data_type="float8_e4m3fn")


def test_a_fast_plan_in_place_of_begin_forward(q: torch.Tensor, cache: Any) -> None:
    wrapper: Any = _decode(
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(4, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(100, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.ones(3, dtype=torch.int32),
    )
    buffer = wrapper._paged_kv_indices_buf
    buffer[:13] = PAGES  # engines write page numbers where the graph reads them
    dtypes = {"data_type": torch.float8_e4m3fn, "q_data_type": torch.bfloat16}
    wrapper.begin_forward(INDPTR, buffer, LAST, *HEAD_COUNTS, **dtypes)
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    wrapper.begin_forward(
        *(INDPTR, buffer, LAST, *HEAD_COUNTS),
        non_blocking=True,
        fixed_split_size=None,
        global_override_indptr_cpu=INDPTR.clone(),
        **dtypes,
    )
    out = wrapper.forward(q, cache, sm_scale=0.1, logits_soft_cap=0.0, k_scale=1.0, v_scale=1.0)
    plain = _planned(sm_scale=0.1, **dtypes)
    assert torch.equal(out, plain.run(q, cache))
    assert torch.equal(wrapper._paged_kv_indptr_buf, INDPTR)
    assert torch.equal(wrapper._paged_kv_last_page_len_buf, LAST)


def test_a_fast_plan_keeps_the_dtype_of_results(cache: Any) -> None:
    """It has no argument for it: vLLM plans 8-bit queries once with it, and then without."""
    wrapper = _decode()
    dtypes = {"q_data_type": torch.float8_e4m3fn, "kv_data_type": torch.float8_e4m3fn}
    table = (INDPTR, PAGES, LAST, *HEAD_COUNTS)
    wrapper.plan(*table, o_data_type=torch.bfloat16, **dtypes)
    q = torch.randn(3, HEADS, HEAD_DIM).to(torch.float8_e4m3fn)
    first = wrapper.run(q, cache)
    flashinfer.fast_decode_plan(wrapper, *table, **dtypes)
    assert torch.equal(wrapper.run(q, cache), first) and first.dtype == torch.bfloat16


def test_no_fixed_split_size_is_also_minus_one(q: torch.Tensor, cache: Any) -> None:
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
    wrapper = _planned(fixed_split_size=-1, disable_split_kv=False, **dtypes)
    assert torch.equal(wrapper.run(q, cache), _planned(**dtypes).run(q, cache))
    with pytest.raises(ValueError, match="`fixed_split_size` must be from 1"):
        _planned(fixed_split_size=-2, **dtypes)
    with pytest.raises(ValueError, match="`fixed_split_size` must be from 1"):
        wrapper.workspace_size(INDPTR, PAGES, LAST, *HEAD_COUNTS, fixed_split_size=0)


def test_cuts_that_are_switched_off_beside_a_split_size(q: torch.Tensor, cache: Any) -> None:
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
    wrapper = _planned(fixed_split_size=2048, disable_split_kv=True, **dtypes)
    assert torch.equal(wrapper.run(q, cache), _planned(**dtypes).run(q, cache))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_cache_of_tokens_in_place_of_pages_of_one(fused: bool, layout: str) -> None:
    """[tokens, heads, head_dim], as engines with pages of one token keep it."""
    kv = torch.randn(16, 2, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    axis = 2 if layout == "NHD" else 3
    tokens: Any = kv if fused else tuple(kv.unbind(1))
    pages: Any = kv.unsqueeze(axis) if fused else tuple(kv.unsqueeze(axis).unbind(1))
    q = torch.randn(3, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    heads, dtype = (HEADS, KV_HEADS, HEAD_DIM), {"q_data_type": torch.bfloat16}
    wrappers: list[Any] = [
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), layout),
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), layout),
        flashinfer.BatchAttention(layout, "cpu"),
    ]
    wrappers[0].begin_forward(INDPTR, PAGES, LAST, *heads, 1, **dtype)
    wrappers[1].begin_forward(torch.arange(4), INDPTR, PAGES, LAST, *heads, 1, **dtype)
    wrappers[2].plan(torch.arange(4), INDPTR, PAGES, LENGTHS, *heads, HEAD_DIM, 1, **dtype)
    for wrapper in wrappers:
        result, expected = wrapper.run(q, tokens), wrapper.run(q, pages)
        assert all(map(torch.equal, result, expected))
    wrappers[1].begin_forward(torch.arange(4), INDPTR, PAGES, LAST, *heads, 2, **dtype)
    with pytest.raises(ValueError, match="`paged_kv_cache` must have pages of 2"):
        wrappers[1].run(q, tokens)


def test_a_mask_of_the_largest_batch_in_a_graph() -> None:
    buffers = {
        "qo_indptr_buf": torch.zeros(3, dtype=torch.int32),
        "paged_kv_indptr_buf": torch.zeros(3, dtype=torch.int32),
        "paged_kv_indices_buf": torch.zeros(50, dtype=torch.int32),
        "paged_kv_last_page_len_buf": torch.ones(2, dtype=torch.int32),
    }
    masks = {"custom_mask_buf": torch.zeros(99, dtype=torch.uint8), "mask_indptr_buf": LAST.clone()}
    graph = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(), use_cuda_graph=True, **buffers, **masks
    )
    mask = torch.rand(60) < 0.5
    table = (torch.tensor([0, 2, 4]), torch.tensor([0, 3, 7]), PAGES, LAST[:2], *HEAD_COUNTS)
    q = torch.randn(4, HEADS, HEAD_DIM, dtype=torch.float16)
    kv = torch.randn(13, 2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float16)
    graph.begin_forward(*table, custom_mask=mask)
    eager = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace())
    eager.begin_forward(*table, custom_mask=mask[: 2 * 3 + 2 * 4])
    assert torch.equal(graph.forward(q, kv, causal=True), eager.forward(q, kv, causal=True))
    with pytest.raises(ValueError, match=r"`custom_mask` must have shape \[14\]"):
        graph.begin_forward(*table, custom_mask=mask[:13])
    with pytest.raises(ValueError, match=r"`custom_mask` must have shape \[14\]"):
        eager.begin_forward(*table, custom_mask=mask)


def test_planned_options_that_engines_assert() -> None:
    wrapper = _planned(sm_scale=0.25, window_left=3, logits_soft_cap=None)
    assert (wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap) == (0.25, 3, 0.0)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace())
    assert prefill._causal is None
    options = {"causal": True, "sm_scale": 0.5, "logits_soft_cap": 30.0}
    prefill.plan(torch.arange(4).int(), INDPTR, PAGES, LAST, *HEAD_COUNTS, **options)
    assert prefill._causal and prefill._window_left == -1
    assert (prefill._sm_scale, prefill._logits_soft_cap) == (0.5, 30.0)


def test_an_int_workspace_that_wrappers_share() -> None:
    first, second = _decode(), _decode()
    second._int_workspace_buffer = first._int_workspace_buffer
    assert second._int_workspace_buffer is first._int_workspace_buffer
    assert first._float_workspace_buffer is not second._float_workspace_buffer
    with pytest.raises(TypeError, match="int_workspace_buffer"):
        second._int_workspace_buffer = "8 MiB"  # type: ignore[assignment]


@pytest.mark.parametrize("layout", ["ragged", "paged", "single"])
def test_a_mask_of_bytes_is_one_of_bools(layout: str) -> None:
    qo_indptr, kv_indptr = torch.tensor([0, 4]), torch.tensor([0, 6])
    q = torch.randn(4, HEADS, HEAD_DIM, dtype=torch.float16)
    kv = torch.randn(6, KV_HEADS, HEAD_DIM, dtype=torch.float16)
    mask = torch.rand(4, 6) < 0.7

    def attend(mask: torch.Tensor) -> Any:
        if layout == "single":
            return flashinfer.single_prefill_with_kv_cache(q, kv, kv, custom_mask=mask)
        wrapper: Any
        if layout == "ragged":
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace())
            arguments = (qo_indptr, kv_indptr, HEADS, KV_HEADS, HEAD_DIM)
            wrapper.plan(*arguments, custom_mask=mask.flatten())
            return wrapper.run(q, kv, kv)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace())
        pages, last = torch.arange(6), torch.ones(1, dtype=torch.int32)
        wrapper.plan(qo_indptr, kv_indptr, pages, last, *HEAD_COUNTS, custom_mask=mask.flatten())
        # Engines say `causal` to every layer; the mask takes its place.
        return wrapper.forward(q, (kv[:, None], kv[:, None]), causal=True)

    assert torch.equal(attend(mask.to(torch.uint8) * 3), attend(mask))
    assert not torch.equal(attend(mask), attend(~mask))
    with pytest.raises(ValueError, match="`custom_mask` must"):
        attend(mask.int())


def test_data_type_of_pod() -> None:
    pod: Any = flashinfer.PODWithPagedKVCacheWrapper(_workspace())
    dtypes = {"data_type": torch.float8_e4m3fn, "q_data_type": torch.bfloat16}
    pod.plan(INDPTR, PAGES, LAST, *HEAD_COUNTS, **dtypes)
    spec = pod._base.spec
    assert (spec.q_data_type, spec.kv_data_type) == (torch.bfloat16, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="`data_type` must be left out or the `kv_data_type`"):
        pod.plan(INDPTR, PAGES, LAST, *HEAD_COUNTS, data_type="bfloat16", kv_data_type="float16")


def test_names_that_engines_import() -> None:
    """At the top of vLLM's and SGLang's backends, where one that is missing ends everything."""
    from flashinfer.cascade import merge_state
    from flashinfer.decode import fast_decode_plan, trtllm_batch_decode_with_kv_cache
    from flashinfer.prefill import trtllm_batch_context_with_kv_cache
    from flashinfer.utils import FP4Tensor

    functions = (merge_state, fast_decode_plan, trtllm_batch_decode_with_kv_cache)
    assert all(map(callable, (*functions, trtllm_batch_context_with_kv_cache)))
    data, scale = torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1).to(torch.float8_e4m3fn)
    out = FP4Tensor(data, scale, scale_start_index=1, original_shape=(2, 16))
    assert (out.data, out.scale_start_index, out.original_shape) == (data, 1, (2, 16))


def test_block_tables_beside_the_index_tensors(q: torch.Tensor, cache: Any) -> None:
    """As vLLM passes both: the index tensors are read."""
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
    tables = torch.zeros(3, 7, dtype=torch.int32)
    wrapper = _planned(block_tables=tables, **dtypes)
    assert torch.equal(wrapper.run(q, cache), _planned(**dtypes).run(q, cache))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD")
    prefill.plan(torch.arange(4), INDPTR, PAGES, LAST, *HEAD_COUNTS, block_tables=tables, **dtypes)
    for wrong in (tables[0], tables.float()):
        with pytest.raises(ValueError, match="`block_tables` must be an int32 or int64 matrix"):
            _planned(block_tables=wrong, **dtypes)
    with pytest.raises(TypeError, match="`block_tables` must be a torch.Tensor or None"):
        _planned(block_tables=[[1]], **dtypes)


def test_an_upper_bound_beside_offsets_on_the_host_changes_nothing(q: torch.Tensor) -> None:
    """The lengths are those of `indptr`, wherever that is."""
    wrappers = _decode(), _decode()
    for wrapper, bound in zip(wrappers, (INDPTR, torch.arange(4) * 7), strict=True):
        flashinfer.fast_decode_plan(
            wrapper, INDPTR, PAGES, LAST, *HEAD_COUNTS, global_override_indptr_cpu=bound
        )
    lengths = [wrapper._problem.requests.kv_lengths().tolist() for wrapper in wrappers]
    assert lengths[0] == lengths[1]
    with pytest.raises(TypeError, match="`global_override_indptr_cpu`"):
        flashinfer.fast_decode_plan(
            wrappers[0], INDPTR, PAGES, LAST, *HEAD_COUNTS, global_override_indptr_cpu=[0, 1]
        )
