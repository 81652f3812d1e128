"""Calls of latent attention's wrapper, and what their optional arguments do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flashinfer.mla import BatchMLAPagedAttentionWrapper
from tests.trace.attention_wrapper_cases import Case, _adds_results, _equal, _is_refused, _results

if TYPE_CHECKING:
    from tests.trace.calls import Operation

HEADS, PAGE = 6, 16
QO_LENS, KV_LENS = (2, 3, 1), (27, 14, 39)


def _run(values: Any) -> dict[str, Any]:
    wrapper = BatchMLAPagedAttentionWrapper(values.workspace())
    lengths = torch.tensor(KV_LENS, dtype=torch.int32)
    starts = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    pages = torch.tensor([5, 2, 0, 3, 6, 1], dtype=torch.int32, device=values.device)
    first = torch.tensor([0, *QO_LENS]).cumsum(0).to(torch.int32)
    sizes = (HEADS, 256, 64, PAGE, True, 0.1, values.dtype, values.dtype)
    wrapper.plan(first, starts, pages, lengths, *sizes)
    query, cache = values(sum(QO_LENS), HEADS, 320), values(7, PAGE, 320)
    return {
        **{"self": wrapper, "q_nope": query[..., :256], "q_pe": query[..., 256:]},
        **{"ckv_cache": cache[..., :256], "kpe_cache": cache[..., 256:]},
    }


CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mla_paged": _run,
    "mla_paged_lse": lambda values: {**_run(values), "return_lse": True},
}
"""By the name of the template: arguments of `run`, the planned wrapper among them."""


def _receives(index: int) -> Case:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        arguments = {**arguments, "return_lse": True}
        expected = _results(operation, arguments)[index]
        destination = torch.full_like(expected, float("nan"))
        assert operation.api(**{**arguments, name: destination})[index] is destination
        assert torch.equal(destination, expected)
        _is_refused(destination[:-1], destination.double())(operation, name, arguments)

    return case


def _packs(*parts: str) -> Case:
    """One tensor, or a pair, in place of two arguments."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        usual = _results(operation, arguments)
        others = {key: value for key, value in arguments.items() if key not in parts}
        pair = tuple(arguments[part] for part in parts)
        for form in (pair, torch.cat(pair, -1)):
            assert _equal(usual, _results(operation, {**others, name: form}))
        for wrong in (pair[0], pair[:1], 5):
            with pytest.raises((TypeError, ValueError), match=name):
                operation.api(**{**others, name: wrong})

    return case


def _scale(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Both parts of the cache have one scale."""
    usual = _results(operation, arguments)
    both = {"ckv_scale": 2.0, "kpe_scale": 2.0}
    assert not _equal(usual, _results(operation, {**arguments, **both}))
    with pytest.raises(ValueError, match="kpe_scale"):
        operation.api(**{**arguments, name: 2.0})
    _is_refused(-1.0, "2")(operation, name, arguments)


def _bmm_scale(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    _is_refused(2.0)(operation, name, arguments)  # as plan() was not told
    usual = _results(operation, arguments)
    wrapper = arguments["self"]
    modes = wrapper._modes
    wrapper._modes = dataclasses.replace(modes, scale_mode="bmm-scalar")
    try:
        assert not _equal(usual, _results(operation, {**arguments, name: 2.0}))
        _is_refused("2")(operation, name, arguments)
    finally:
        wrapper._modes = modes


def _natural(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    arguments = {**arguments, "return_lse": True}
    base_2, natural = (_results(operation, {**arguments, name: flag})[1] for flag in (False, True))
    torch.testing.assert_close(natural, base_2 * 0.6931471805599453)
    _is_refused("yes")(operation, name, arguments)


def _sinks(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    sinks = torch.ones(HEADS, device=arguments["q_nope"].device)
    changed = _results(operation, {**arguments, name: sinks})
    assert not _equal(_results(operation, arguments), changed)
    _is_refused(sinks[:-1], sinks.double())(operation, name, arguments)


CASES: dict[str, dict[str, Case]] = {
    "BatchMLAPagedAttentionWrapper.run": {
        **{n: _is_refused(None) for n in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")},
        "out": _receives(0),
        "lse": _receives(1),
        "return_lse": _adds_results,
        "profiler_buffer": _is_refused(torch.ones(2)),
        "kv_len": _is_refused(torch.ones(2)),
        "page_table": _is_refused(torch.ones(2)),
        "return_lse_base_on_e": _natural,
        "o_scale": _is_refused(2.0),
        "query": _packs("q_nope", "q_pe"),
        "kv_cache": _packs("ckv_cache", "kpe_cache"),
        "ckv_scale": _scale,
        "kpe_scale": _scale,
        "sinks": _sinks,
        "skip_softmax_threshold_scale_factor": _is_refused(1.0),
        "bmm1_scale": _bmm_scale,
        "bmm2_scale": _bmm_scale,
    },
}
"""By method and argument."""
