"""The table of what options of attention cost: every call of it runs, and the command prints it."""

from __future__ import annotations

import pytest
import torch
from simulated_benchmark import BENCHMARKS, cli

from flashinfer.reference_backend import reference_backend

assert BENCHMARKS  # puts the scripts on the path
import option_table  # noqa: E402

SMALL = {"batch_size": 1, "length": 64}


@pytest.mark.parametrize("name", option_table.OPTIONS)
def test_calls_compute_attention(name: str) -> None:
    shapes = set()
    for option in option_table.OPTIONS[name]:
        make = {**option.make, **SMALL}
        with reference_backend():
            result = option_table.MAKERS[option.kind]("cpu", option.plan, **make)()
        shapes.add(tuple(result.shape))
        assert torch.isfinite(result).all()
    assert len(shapes) == 1


def test_the_table_compares_with_the_plain_call(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter(range(1, 100))
    makers = {kind: lambda device, plan, **make: plan for kind in option_table.MAKERS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(option_table, "MAKERS", makers)
        option_table.print_options("cpu", lambda call: float(next(times)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(option_table.OPTIONS)
    assert lines[2].split()[-3:] == ["2", "1", "0.50"]


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert cli.main(["--options"]) == cli.NO_GPU
    assert "GPU" in capsys.readouterr().err
