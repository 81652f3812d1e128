"""Every operation on a GPU that is not the current one, as one process of several GPUs calls it."""

from __future__ import annotations

import pytest
import torch

from tests.trace.calls import Operation, operations, results_of, runs_on

pytestmark = pytest.mark.gpu


def results_on(operation: Operation, device: str) -> list[torch.Tensor]:
    arguments = operation.arguments(device=device)
    torch.manual_seed(1)  # what an operation without a seed of its own draws from
    with torch.cuda.device(0):
        results = results_of(operation.template, arguments, operation.api(**arguments))
        assert torch.cuda.current_device() == 0
    assert all(result.device == torch.device(device) for result in results)
    return [torch.atleast_1d(result).contiguous().view(torch.uint8).cpu() for result in results]


@pytest.mark.parametrize(
    "operation", [o for o in operations() if runs_on(o, "cuda")], ids=lambda o: o.label
)
def test_the_second_gpu_computes_what_the_first_does(operation: Operation):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = (results_on(operation, device) for device in ("cuda:0", "cuda:1"))
    for on_first, on_second in zip(first, second, strict=True):
        assert torch.equal(on_first, on_second)
