"""Optional arguments of scores and 8-bit keys; see test_argument_coverage.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trace.calls import Operation

OP_TYPES = ("mqa_logits",)


def _output_dtype(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    assert operation.api(**arguments).dtype == torch.float32
    assert operation.api(**{**arguments, name: torch.float16}).dtype == torch.float16
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: torch.int32})


def _refuses(other: Any) -> Callable[..., None]:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError), match=name):
            operation.api(**{**arguments, name: other})

    return case


def _keeps_the_result(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """How the work is shared out (all of it to one CTA), or what is so in any case."""
    value: Any = True
    if name == "schedule_meta":
        whole = [[0, 0], [arguments["q"].shape[0], 0]]
        value = torch.tensor(whole, dtype=torch.int32, device=arguments["q"].device)
    assert torch.equal(operation.api(**arguments), operation.api(**{**arguments, name: value}))


def _receives(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = operation.api(**arguments)
    destination = torch.empty_like(usual)
    assert operation.api(**{**arguments, name: destination}).data_ptr() == destination.data_ptr()
    assert torch.equal(usual, destination)


def _is_the_tensors(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = operation.api(**arguments)
    assert torch.equal(usual, operation.api(**{**arguments, name: arguments["seq_lens"].device}))
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: torch.device("meta")})


def _does_not_count(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The schedule is the same for several queries of a request; what is no number is refused."""
    assert torch.equal(operation.api(**arguments), operation.api(**{**arguments, name: 2}))
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: 0})


CASES: dict[str, Callable[..., None]] = {
    "device": _is_the_tensors,
    "next_n": _does_not_count,
    "use_gpu_kernel": _refuses(False),
    "variant": _refuses("fp4"),
    "output_dtype": _output_dtype,
    "epi_dtype": _refuses(torch.float16),
    "acc_dtype": _refuses(torch.float16),
    "schedule_meta": _keeps_the_result,
    "out": _receives,
    "clean_logits": _keeps_the_result,
    "max_seqlen_k": _refuses(64),
    "sm_count": _refuses(4),
}


def _receives_its_part(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    place = ("key", "value").index(name)
    usual = operation.api(**arguments)[place]
    destination = torch.empty_like(usual)
    assert operation.api(**{**arguments, name: destination})[place] is destination
    assert torch.equal(destination.float(), usual.float())
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: destination.float()})


def _divides(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    columns = arguments["kv_nope"].shape[2] - 3
    key, value = operation.api(**{**arguments, name: columns})
    assert key.shape[2] == columns + arguments["k_pe"].shape[-1] and value.shape[2] == 3


CONCAT_CASES: dict[str, Callable[..., None]] = {
    "key": _receives_its_part,
    "value": _receives_its_part,
    "nope_dim": _divides,
}
