"""Calls of the attention functions and wrappers for the tests that walk all operations, and what
their optional arguments do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flashinfer
import flashinfer.sparse
from flashinfer.testing.tensors import clone_arguments, iter_tensors
from tests.trace import attention_wrapper_cases, mla_cases, segment_cases

if TYPE_CHECKING:
    from tests.trace.calls import Operation

Case = Callable[["Operation", str, dict[str, Any]], None]
HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 32, 4
QO_LENS, KV_LENS = (2, 3, 1), (7, 4, 9)


def planned_call(
    template: Any, dtype: torch.dtype, device: torch.device, seed: int, backend: bool = True
) -> Any:
    """Arguments of a wrapper's `run`, the planned wrapper as `self` among them.

    On a CPU it is the reference backend that plans, unless `backend` is False.
    """
    turned = template.name_prefix.endswith("_heads_first")
    prefix = template.name_prefix.removesuffix("_heads_first")
    calls = {**attention_wrapper_cases.CALLS, **mla_cases.CALLS, **segment_cases.CALLS}
    whole = calls.get(template.name_prefix)
    build = whole or _WRAPPERS[prefix.removesuffix("_lse")]
    dtype = torch.float16 if dtype == torch.float32 else dtype
    by_reference = backend and device.type == "cpu"
    with flashinfer.reference_backend() if by_reference else contextlib.nullcontext():
        arguments = build(_Values(dtype, device, seed))
    if prefix.endswith("_lse") and whole is None:
        arguments["return_lse"] = True
    if turned:
        arguments["lse_layout"] = "HN"
    return arguments


class _Values:
    """Random tensors and index tensors of one call."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)
        self.dtypes = {"q_data_type": dtype, "kv_data_type": dtype}

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def workspace(self) -> torch.Tensor:
        return torch.empty(32 << 20, dtype=torch.uint8, device=self.device)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        starts = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
        indices = torch.tensor([5, 2, 0, 3, 6, 1], dtype=torch.int32, device=self.device)
        return starts, indices, torch.tensor([3, 4, 1], dtype=torch.int32)

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(self(7, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))


def _indptr(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _decode(values: _Values) -> dict[str, Any]:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(values.workspace())
    wrapper.plan(*values.pages(), HEADS, KV_HEADS, HEAD_DIM, PAGE, **values.dtypes)
    return {"self": wrapper, "q": values(3, HEADS, HEAD_DIM), "paged_kv_cache": values.cache()}


def _decode_multi(values: _Values) -> dict[str, Any]:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(values.workspace())
    heads = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
    wrapper.plan(*values.pages(), *heads, q_len_per_req=2, **values.dtypes)
    return {"self": wrapper, "q": values(6, HEADS, HEAD_DIM), "paged_kv_cache": values.cache()}


def _codes(tokens: int) -> Callable[[_Values], dict[str, Any]]:
    def case(values: _Values) -> dict[str, Any]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(values.workspace())
        dtypes = {**values.dtypes, "o_data_type": torch.float8_e4m3fn}
        wrapper.plan(*values.pages(), HEADS, KV_HEADS, 128, PAGE, q_len_per_req=tokens, **dtypes)
        q = values(3 * tokens, HEADS, 128)
        cache = tuple(values(7, PAGE, KV_HEADS, 128) for _ in range(2))
        scale = torch.zeros(q.shape[:2], device=q.device)
        return {"self": wrapper, "q": q, "paged_kv_cache": cache, "out_scale": scale}

    return case


def _paged(values: _Values) -> dict[str, Any]:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(values.workspace())
    heads = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
    wrapper.plan(_indptr(QO_LENS), *values.pages(), *heads, causal=True, **values.dtypes)
    q = values(sum(QO_LENS), HEADS, HEAD_DIM)
    return {"self": wrapper, "q": q, "paged_kv_cache": values.cache()}


def _ragged(values: _Values) -> dict[str, Any]:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(values.workspace())
    lengths = (_indptr(QO_LENS), _indptr(KV_LENS))
    wrapper.plan(*lengths, HEADS, KV_HEADS, HEAD_DIM, causal=True, **values.dtypes)
    k, v = (values(sum(KV_LENS), KV_HEADS, HEAD_DIM) for _ in range(2))
    return {"self": wrapper, "q": values(sum(QO_LENS), HEADS, HEAD_DIM), "k": k, "v": v}


def _block_sparse(values: _Values) -> dict[str, Any]:
    wrapper = flashinfer.sparse.BlockSparseAttentionWrapper(values.workspace())
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    columns = torch.tensor([0, 2, 1], dtype=torch.int32)
    wrapper.plan(
        *(starts, columns, 6, 15, 2, 5, HEADS, KV_HEADS, HEAD_DIM),
        **values.dtypes,
        o_data_type=values.dtype,
    )
    k, v = (values(15, KV_HEADS, HEAD_DIM) for _ in range(2))
    return {"self": wrapper, "q": values(6, HEADS, HEAD_DIM), "k": k, "v": v}


def _variable_block_sparse(values: _Values) -> dict[str, Any]:
    wrapper = flashinfer.sparse.VariableBlockSparseAttentionWrapper(values.workspace())
    blocks = torch.tensor([[[1, 0], [0, 1], [1, 1]], [[0, 1], [0, 0], [1, 0]]]).bool()
    rows, columns = torch.tensor([[1, 4, 2], [3, 3, 1]]), torch.tensor([[5, 6], [2, 9]])
    sizes = (rows.to(torch.int32), columns.to(torch.int32))
    wrapper.plan(blocks, *sizes, HEADS, KV_HEADS, HEAD_DIM, **values.dtypes)
    k, v = (values(KV_HEADS, 11, HEAD_DIM) for _ in range(2))
    return {"self": wrapper, "q": values(HEADS, 7, HEAD_DIM), "k": k, "v": v}


_WRAPPERS: dict[str, Callable[[_Values], dict[str, Any]]] = {
    "attention_sink": attention_wrapper_cases.with_sinks,
    "bidirectional_ranges": attention_wrapper_cases.with_ranges,
    "gqa_paged_decode": _decode,
    "gqa_paged_decode_multi": _decode_multi,
    "gqa_paged_decode_codes": _codes(1),
    "gqa_paged_decode_multi_codes": _codes(2),
    "gqa_paged_prefill": _paged,
    "gqa_ragged_prefill": _ragged,
    "block_sparse_attention": _block_sparse,
    "variable_block_sparse_attention": _variable_block_sparse,
}


# ---- optional arguments ------------------------------------------------------------------------


def _results(operation: Operation, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(iter_tensors(operation.api(**clone_arguments(arguments))))


def _equal(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def becomes(value: Any, **others: Any) -> Case:
    """`value` in place of the default gives another result; `others` may bring it into effect."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        chosen = value(arguments) if callable(value) else value
        usual = {**arguments, **others}
        assert not _equal(_results(operation, usual), _results(operation, {**usual, name: chosen}))

    return case


def is_left_out(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Other backends' arguments are refused by name."""
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: torch.ones(2)})


def receives_scales(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Results of 8 bits need a place for their scales, others must not have one."""
    if arguments.get(name) is None:
        is_left_out(operation, name, arguments)
        return
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: None})
    scale = torch.full_like(arguments[name], float("nan"))
    operation.api(**{**arguments, name: scale})
    assert bool((scale > 0).all())


def has_no_effect(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A hint: the same bits; what is no bool is refused."""
    usual = _results(operation, arguments)
    assert _equal(usual, _results(operation, {**arguments, name: True}))
    with pytest.raises(TypeError, match=name):
        operation.api(**{**arguments, name: "yes"})


def is_refused_when_on(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    assert _equal(usual, _results(operation, {**arguments, name: False}))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: True})


def names_a_backend(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    assert _equal(usual, _results(operation, {**arguments, name: "fa2"}))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: "fa7"})


def adds_the_lse(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    without = _results(operation, {**arguments, name: False})
    both = _results(operation, {**arguments, name: True})
    assert len(without) == 1 and len(both) == 2 and torch.equal(without[0], both[0])
    with pytest.raises(TypeError, match=name):
        operation.api(**{**arguments, name: 1})


def receives(index: int) -> Case:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        expected = _results(operation, {**arguments, "return_lse": True})[index]
        destination = torch.full_like(expected, float("nan"))
        results = _results_into(operation, {**arguments, name: destination})
        assert torch.equal(destination, expected)
        if len(results) > index:
            assert results[index] is destination
        for wrong in (destination[:-1], destination.double()):
            with pytest.raises(ValueError, match=name):
                operation.api(**{**arguments, name: wrong})

    return case


def _results_into(operation: Operation, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    returned = operation.api(**arguments)
    return returned if isinstance(returned, tuple) else (returned,)


def is_what_was_planned(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    planned = len(arguments["q"]) // 3
    assert _equal(usual, _results(operation, {**arguments, name: planned}))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: planned + 1})


def heads_first(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    moved = {key: arguments[key].transpose(0, 1).contiguous() for key in ("k", "v")}
    assert _equal(usual, _results(operation, {**arguments, **moved, name: "HND"}))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: "DNH"})


def takes_the_logarithm(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    arguments = {**arguments, "return_lse": True}
    base_2 = _results(operation, arguments)[1]
    natural = _results(operation, {**arguments, name: "ln"})[1]
    torch.testing.assert_close(natural, base_2 * 0.6931471805599453)
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: "log10"})


def turns_the_lse(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    first, second = (
        _results(operation, {**arguments, "return_lse": True, name: value})[1]
        for value in ("NH", "HN")
    )
    assert torch.equal(first.T, second)
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, "return_lse": True, name: "H"})


def encodes(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    found = [_results(operation, {**arguments, name: m}) for m in ("NONE", "ROPE_LLAMA", "ALIBI")]
    assert _equal(found[0], _results(operation, arguments))
    assert not any(_equal(found[i], found[i - 1]) for i in range(3))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: "ROPE"})


def sets_the_dtype(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    other = torch.float16 if arguments["q"].dtype == torch.bfloat16 else torch.bfloat16
    assert _results(operation, {**arguments, name: other})[0].dtype == other
    with pytest.raises(ValueError):
        operation.api(**{**arguments, name: torch.int32})


def masks(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    q, k = arguments["q"], arguments["k"]
    mask = torch.arange(len(q) * len(k), device=q.device).view(len(q), len(k)) % 3 > 0
    chosen = mask
    if name.startswith("packed"):
        chosen = flashinfer.packbits(mask.flatten(), bitorder="little")
    usual = _results(operation, {**arguments, "causal": False})
    assert not _equal(usual, _results(operation, {**arguments, name: chosen}))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: chosen[:-1]})


def scales_heads(heads: int) -> Case:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        becomes(2.0)(operation, name, arguments)
        device = arguments["q"].device
        if operation.template.name_prefix.startswith("bidirectional_ranges"):
            with pytest.raises(ValueError, match=f"{name}.* must be .*number"):
                operation.api(**{**arguments, name: torch.ones(heads, device=device)})
            return
        ascending = 1 + torch.arange(heads, device=device) / heads
        becomes(ascending)(operation, name, arguments)
        becomes(torch.full((1,), 2.0, device=device))(operation, name, arguments)
        becomes(ascending.double())(operation, name, arguments)
        for wrong in (ascending.repeat(2), ascending.int(), ascending[:, None]):
            with pytest.raises(ValueError, match=name):
                operation.api(**{**arguments, name: wrong})

    return case


CASES: dict[str, Case] = {
    "backend": names_a_backend,
    "causal": becomes(False),
    "causal_window_left": becomes(0),
    "custom_mask": masks,
    "enable_pdl": has_no_effect,
    "k_scale": scales_heads(KV_HEADS),
    "kv_cache_sf": is_left_out,
    "kv_layout": heads_first,
    "logits_soft_cap": becomes(0.5),
    "lse": receives(1),
    "lse_base": takes_the_logarithm,
    "lse_layout": turns_the_lse,
    "o_dtype": sets_the_dtype,
    "o_scale": is_left_out,
    "out": receives(0),
    "out_scale": receives_scales,
    "packed_custom_mask": masks,
    "pos_encoding_mode": encodes,
    "q_len_per_req": is_what_was_planned,
    "q_scale": scales_heads(HEADS),
    # All earlier keys are seen anyway, unless causality has a window.
    "range_window_left": becomes(0, causal_window_left=0),
    "return_lse": adds_the_lse,
    "rope_scale": becomes(2.0, pos_encoding_mode="ROPE_LLAMA"),
    "rope_theta": becomes(100.0, pos_encoding_mode="ROPE_LLAMA"),
    "scale_k": scales_heads(KV_HEADS),
    "scale_q": scales_heads(HEADS),
    "scale_v": scales_heads(KV_HEADS),
    "sinks": becomes(lambda arguments: torch.ones(HEADS, device=arguments["q"].device)),
    "skip_softmax_threshold_scale_factor": is_left_out,
    "sm_scale": becomes(0.05),
    "use_fp16_qk_reduction": is_refused_when_on,
    "use_fp16_softmax": is_left_out,
    "use_tensor_cores": has_no_effect,
    "uses_spcompress": is_left_out,
    "v_scale": scales_heads(KV_HEADS),
    "window_left": becomes(1),
}
