"""Optional arguments of attention by block tables; see test_argument_coverage.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trace import attention_cases

if TYPE_CHECKING:
    from tests.trace.calls import Operation


def _is_required(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: None})
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: arguments[name].float()})


def _tells_the_pages(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Other pages give another result; a table that is seen to have too few is refused, and none at
    all unless each request has one page."""
    attention_cases.becomes(lambda call: call[name].flip(1))(operation, name, arguments)
    table = arguments[name]
    for wrong in (table[:1], table.float(), None, *([] if table.is_cuda else [table[:, :1]])):
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})


def _is_not_read(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = operation.api(**{**arguments, "return_lse": False})
    offsets = torch.zeros(4, dtype=torch.int64, device=usual.device)
    call = {**arguments, "return_lse": False, name: offsets}
    assert torch.equal(usual, operation.api(**call))


CASES: dict[str, dict[str, attention_cases.Case]] = {
    "cudnn_batch_decode_with_kv_cache": {
        **attention_cases.CASES,
        "actual_seq_lens_kv": _is_required,
        "block_tables": _tells_the_pages,
        "is_cuda_graph_compatible": attention_cases.has_no_effect,
        **{f"batch_offsets_{name}": _is_not_read for name in "qokv"},
    }
}
