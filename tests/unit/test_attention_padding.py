"""Rows of a CUDA graph beyond its plan, in the reference: as the kernels, it leaves the rest right.

The wrappers' documentation lets `q` have more rows than were planned.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _wrapper(kind: str, graph: bool) -> Any:
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    buffers = (_ints(*[0] * 7), _ints(*[0] * 16), _ints(*[0] * 6))
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", graph, False, *(buffers if graph else ())
        )
    else:
        first = (_ints(*[0] * 7), *buffers) if graph else ()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", graph, *first)
    table = _ints(0, 2, 3), _ints(1, 3, 0), _ints(2, 4)
    if kind == "prefill":
        wrapper.plan(_ints(0, 3, 4), *table, 4, 2, 16, 4, causal=True)
    else:
        wrapper.plan(*table, 4, 2, 16, 4)
    return wrapper


@pytest.mark.parametrize("kind, planned", [("decode", 2), ("prefill", 4)])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_more_rows_than_planned(kind: str, planned: int, rows: int):
    q = torch.randn(planned + rows, 4, 16).half()
    cache = torch.randn(5, 2, 4, 2, 16).half()
    with flashinfer.reference_backend():
        expected = _wrapper(kind, False).run(q[:planned], cache)
        padded, lse = _wrapper(kind, True).run(q, cache, return_lse=True)
    assert padded.shape == q.shape and lse.shape == q.shape[:2]
    assert torch.equal(padded[:planned], expected)


@pytest.mark.parametrize("kind, planned", [("decode", 2), ("prefill", 4)])
def test_other_rows_than_planned_are_refused(kind: str, planned: int):
    cache = torch.randn(5, 2, 4, 2, 16).half()
    with flashinfer.reference_backend():
        with pytest.raises(ValueError, match="`q` must"):
            _wrapper(kind, False).run(torch.randn(planned + 1, 4, 16).half(), cache)
        with pytest.raises(ValueError, match="`q` must"):
            _wrapper(kind, True).run(torch.randn(planned - 1, 4, 16).half(), cache)
