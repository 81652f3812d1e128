"""Calls of the wrappers for mixed batches and cascades, and what their optional arguments do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flashinfer
from flashinfer.testing.tensors import clone_arguments, iter_tensors

if TYPE_CHECKING:
    from tests.trace.calls import Operation

Case = Callable[["Operation", str, dict[str, Any]], None]
HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 32, 4
QO_LENS, KV_LENS = (2, 3, 1), (7, 4, 9)


def _indptr(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _batch_attention(values: Any) -> dict[str, Any]:
    wrapper = flashinfer.BatchAttention(device=str(values.device))
    starts, indices, _ = values.pages()
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    sizes = (HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, PAGE)
    wrapper.plan(_indptr(*QO_LENS), starts, indices, lengths, *sizes, causal=True, **values.dtypes)
    q = values(sum(QO_LENS), HEADS, HEAD_DIM)
    return {"self": wrapper, "q": q, "kv_cache": values.cache()}


def with_sinks(values: Any) -> dict[str, Any]:
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        values.workspace(), head_dim_qk=HEAD_DIM, head_dim_vo=HEAD_DIM, **values.dtypes
    )
    heads = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
    wrapper.plan(_indptr(*QO_LENS), *values.pages(), *heads, causal=True, **values.dtypes)
    q = values(sum(QO_LENS), HEADS, HEAD_DIM)
    sinks = torch.linspace(-1, 2, HEADS, device=values.device)
    return {"self": wrapper, "q": q, "paged_kv_cache": values.cache(), "sinks": sinks}


def with_ranges(values: Any) -> dict[str, Any]:
    wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(
        values.workspace(), head_dim_qk=HEAD_DIM, head_dim_vo=HEAD_DIM, **values.dtypes
    )
    wrapper.plan(_indptr(*QO_LENS), *values.pages(), HEADS, KV_HEADS, HEAD_DIM, PAGE)
    q = values(sum(QO_LENS), HEADS, HEAD_DIM)
    ranges = torch.tensor([[5, 6], [5, 6], [-1, -1], [2, 3], [2, 3], [3, 8]], device=values.device)
    return {
        **{"self": wrapper, "q": q, "paged_kv_cache": values.cache()},
        "bidirectional_ranges": ranges.int(),
    }


def _cascade(values: Any) -> dict[str, Any]:
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, values.workspace())
    starts, indices, last = values.pages()
    upper = torch.tensor([4, 5], dtype=torch.int32, device=values.device)
    wrapper.plan(
        [_indptr(sum(QO_LENS)), _indptr(*QO_LENS)],
        [_indptr(2), starts],
        [upper, indices],
        [torch.tensor([3], dtype=torch.int32), last],
        *(HEADS, KV_HEADS, HEAD_DIM, PAGE),
        causal=True,
        **values.dtypes,
    )
    q = values(sum(QO_LENS), HEADS, HEAD_DIM)
    return {"self": wrapper, "q": q, "paged_kv_cache": values.cache()}


def _pod(values: Any) -> dict[str, Any]:
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(values.workspace())
    wrapper.plan(*values.pages(), HEADS, KV_HEADS, HEAD_DIM, PAGE, **values.dtypes)
    k_p, v_p = (values(11, KV_HEADS, HEAD_DIM) for _ in range(2))
    q_p, q_d = (values(tokens, HEADS, HEAD_DIM) for tokens in (5, len(KV_LENS)))
    cache = values.cache()
    return {
        **{"self": wrapper, "q_p": q_p, "k_p": k_p, "v_p": v_p, "q_d": q_d},
        **{"paged_kv_cache_d": cache, "causal_p": True},
    }


def _batch_pod(values: Any) -> dict[str, Any]:
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(values.workspace())
    prefill = (_indptr(3, 6), _indptr(2, 2), torch.tensor([0, 2, 3, 5], dtype=torch.int32))
    last = torch.tensor([4, 1], dtype=torch.int32)
    decode = (_indptr(1, 1, 1), *values.pages())
    prefill = (*prefill[:2], prefill[2].to(values.device), last)
    wrapper.plan(*prefill, *decode, HEADS, KV_HEADS, HEAD_DIM, PAGE, **values.dtypes)
    q_p, q_d = (values(tokens, HEADS, HEAD_DIM) for tokens in (9, 3))
    return {
        **{"self": wrapper, "q_p": q_p, "paged_kv_cache_p": values.cache(), "q_d": q_d},
        **{"paged_kv_cache_d": values.cache(), "causal_p": True},
    }


def _with(build: Callable[[Any], dict[str, Any]], **flags: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda values: {**build(values), **flags}


CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "batch_attention": _batch_attention,
    "cascade_attention": _cascade,
    "pod": _pod,
    "pod_lse_p": _with(_pod, return_lse_p=True),
    "pod_lse_d": _with(_pod, return_lse_d=True),
    "pod_lse_p_lse_d": _with(_pod, return_lse_p=True, return_lse_d=True),
    "batch_pod": _batch_pod,
    "batch_pod_lse": _with(_batch_pod, return_lse=True),
}
"""By the name of the template: arguments of `run`, the planned wrapper among them."""


# ---- optional arguments ------------------------------------------------------------------------


def _results(operation: Operation, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(iter_tensors(operation.api(**clone_arguments(arguments))))


def _equal(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _becomes(value: Any) -> Case:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        changed = _results(operation, {**arguments, name: value})
        assert not _equal(_results(operation, arguments), changed)

    return case


def _is_refused(*values: Any) -> Case:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        for value in values:
            with pytest.raises((TypeError, ValueError), match=name):
                operation.api(**{**arguments, name: value})

    return case


def _only_as_planned(same: Any, *others: Any) -> Case:
    """What was planned may be said again."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        repeated = _results(operation, {**arguments, name: same})
        assert _equal(_results(operation, arguments), repeated)
        _is_refused(*others)(operation, name, arguments)

    return case


def _of_the_prefill(value: Any, wrong: Any, **beside: Any) -> Case:
    """An option that changes the prefill's results, and those alone."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        alone = {**arguments, "return_lse_p": True, "return_lse_d": True, **beside}
        usual, changed = (_results(operation, a) for a in (alone, {**alone, name: value}))
        assert not torch.equal(usual[0], changed[0]) and _equal(usual[2:], changed[2:])
        _is_refused(wrong)(operation, name, arguments)

    return case


def _is_a_flag(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """No bit of a result changes; what is no bool is refused."""
    usual = _results(operation, arguments)
    assert _equal(usual, _results(operation, {**arguments, name: True}))
    _is_refused("yes")(operation, name, arguments)


def _adds_results(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    without = _results(operation, {**arguments, name: False})
    added = _results(operation, {**arguments, name: True})
    assert len(added) > len(without)
    assert all(any(torch.equal(tensor, other) for other in added) for tensor in without)
    _is_refused("yes")(operation, name, arguments)


def _receives(index: int) -> Case:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        expected = _results(operation, arguments)[index]
        destination = torch.full_like(expected, float("nan"))
        assert operation.api(**{**arguments, name: destination})[index] is destination
        assert torch.equal(destination, expected)
        _is_refused(destination[:-1], destination.double())(operation, name, arguments)

    return case


def _masks(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    sizes = {"p": [5 * 11], "d": KV_LENS}[name[-1]]
    if "k_p" not in arguments:
        sizes = [3 * 8, 6 * 5]
    device = arguments["q_p"].device
    mask = torch.arange(sum(sizes), device=device) % 3 > 0
    chosen = mask
    if name.startswith("packed"):
        offsets = _indptr(*sizes).to(device)
        chosen, _ = flashinfer.segment_packbits(mask, offsets, bitorder="little")
    usual = _results(operation, arguments)
    assert not _equal(usual, _results(operation, {**arguments, name: chosen}))
    _is_refused(chosen[:-1], chosen.int())(operation, name, arguments)


def _heads_first(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    moved = {key: arguments[key].transpose(0, 1).contiguous() for key in ("k_p", "v_p")}
    hnd = _results(operation, {**arguments, **moved, name: "HND"})
    assert _equal(_results(operation, arguments), hnd)
    _is_refused("DNH")(operation, name, arguments)


_SCALES = {name: _becomes(2.0) for name in ("q_scale", "k_scale", "v_scale")}
_PART_SCALES = {**_SCALES, **{f"{name}_p": case for name, case in _SCALES.items()}}
_DEFAULT_SCALE = HEAD_DIM**-0.5
_ROTATED = {"pos_encoding_mode_p": "ROPE_LLAMA"}
_PREFILL_OPTIONS: dict[str, Case] = {
    "pos_encoding_mode_p": _of_the_prefill("ALIBI", "ROPE"),
    "sm_scale_p": _of_the_prefill(0.5, "1"),
    "window_left_p": _of_the_prefill(3, -2),
    "rope_scale_p": _of_the_prefill(2.0, -1.0, **_ROTATED),
    "rope_theta_p": _of_the_prefill(10.0, 0.0, **_ROTATED),
}
_DECODE_OPTIONS: dict[str, Case] = {
    "pos_encoding_mode_d": _only_as_planned("NONE", "ALIBI", "ROPE"),
    "sm_scale_d": _only_as_planned(_DEFAULT_SCALE, 0.5, "1"),
    "window_left_d": _only_as_planned(-1, 3, -2),
    "rope_scale_d": _only_as_planned(1.0, 2.0, -1.0),
    "rope_theta_d": _only_as_planned(1e4, 1e5, 0.0),
}

CASES: dict[str, dict[str, Case]] = {
    "BatchAttention.run": {
        "out": _receives(0),
        "lse": _receives(1),
        **_SCALES,
        "logits_soft_cap": _only_as_planned(0.0, 3.0),
        "profiler_buffer": _is_refused(torch.ones(2)),
        "kv_cache_sf": _is_refused(torch.ones(2)),
    },
    "MultiLevelCascadeAttentionWrapper.run": _SCALES,
    "PODWithPagedKVCacheWrapper.run": {
        **_PART_SCALES,
        **_PREFILL_OPTIONS,
        **_DECODE_OPTIONS,
        **{
            f"{kind}_{part}": _masks
            for kind in ("custom_mask", "packed_custom_mask")
            for part in "pd"
        },
        "causal_p": _becomes(False),
        "causal_d": _is_a_flag,
        "kv_layout_p": _heads_first,
        "kv_layout_d": _only_as_planned("NHD", "HND", "DNH"),
        "return_lse_p": _adds_results,
        "return_lse_d": _adds_results,
        "use_fp16_qk_reduction": _is_refused(True),
        "enable_pdl": _is_a_flag,
    },
    "BatchPODWithPagedKVCacheWrapper.run": {
        **_PART_SCALES,
        "custom_mask_p": _masks,
        "packed_custom_mask_p": _masks,
        "causal_p": _becomes(False),
        "return_lse": _adds_results,
        "use_fp16_qk_reduction": _is_refused(True),
        "enable_pdl": _is_a_flag,
    },
}
"""By method and argument."""
