"""Attention in one call: what it plans and runs is what its reference computes."""

from __future__ import annotations

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments, iter_tensors
from flashinfer.trace.template import TraceTemplate, resolve_template
from tests.bodies import body_of
from tests.trace import one_call

DESCRIBED = [
    name
    for name, (function, _) in one_call.calls("cpu").items()
    if getattr(function, "__flashinfer_trace__", None) is not None
]


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_wrapper_agrees_with_the_template(name: str, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the call runs the body there")
    function, arguments = one_call.calls("cpu")[name]
    first, second = clone_arguments(arguments), clone_arguments(arguments)
    wanted = [*iter_tensors(function(**first))]
    found = [*iter_tensors(body_of(function)(**second))]
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", DESCRIBED)
def test_templates_name_their_scratch(name: str) -> None:
    """A graph that captures a call has to know what it writes."""
    function, arguments = one_call.calls("cpu")[name]
    template = resolve_template(function.__flashinfer_trace__, arguments)
    assert isinstance(template, TraceTemplate) and template.scratch == ("workspace_buffer",)


def test_most_are_described() -> None:
    assert len(DESCRIBED) >= 9
