"""``TraceTemplate.init``: arguments of a call by the sizes of its axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.trace import Const, Tensor, TraceTemplate, Var
from tests.trace.calls import Operation, operations

# A method of an object that plans takes what was planned.
drawn = [o for o in operations() if o.template.gather is None or o.template.complete is not None]


@pytest.mark.parametrize("operation", drawn, ids=lambda o: o.label)
def test_what_it_draws_is_a_call(operation: Operation):
    arguments = operation.template.init(device="cpu", seed=3)
    again = operation.template.init(device="cpu", seed=3)
    assert operation.api.fi_trace(**arguments) == operation.api.fi_trace(**again)


def test_sizes_and_seed_are_those_asked_for():
    init = flashinfer.trace.templates.norm.rmsnorm_trace.init
    arguments = init(batch_size=3, hidden_size=32, device="cpu", seed=1)
    assert arguments["input"].shape == (3, 32) and arguments["weight"].shape == (32,)
    other = init(batch_size=3, hidden_size=32, device="cpu", seed=2)
    assert not torch.equal(arguments["input"], other["input"])
    assert init(batch_size=2, device="cpu", dtype=torch.float16)["input"].dtype == torch.float16


def test_sizes_that_cannot_be_drawn_are_refused():
    templates = flashinfer.trace.templates
    with pytest.raises(ValueError, match="m = 5, got 7"):
        templates.gemm.mm_bf16_trace.init(m=7, device="cpu")
    with pytest.raises(ValueError, match="'rows'"):
        templates.norm.rmsnorm_trace.init(rows=7, device="cpu")
    planned = templates.attention.paged_prefill_run_trace.templates[0]
    with pytest.raises(NotImplementedError, match="plan one"):
        planned.init(device="cpu")


def test_a_templates_own_init_is_kept():
    def init(*, rows: int, columns: int = 8, device: str = "cuda", seed: int = 0) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.rand(rows, columns, generator=generator).to(device)}

    template = TraceTemplate(
        "double",
        axes={"rows": Var(), "columns": Const(abbrev="c")},
        inputs={"x": Tensor(["rows", "columns"])},
        outputs={"y": Tensor(["rows", "columns"], dtype_from="x")},
        reference=lambda x: 2 * x,
        init=init,
    )
    assert template.init is init
    assert template.init(rows=2, device="cpu")["x"].shape == (2, 8)
