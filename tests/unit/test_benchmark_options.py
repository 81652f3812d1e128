"""The table of what options of attention cost: every call of it runs, and the command prints it."""

from __future__ import annotations

import itertools

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
    row = option_table.OPTIONS[name]
    for option in (row.option, row.plain):
        make = {**option.make, **SMALL}
        if "queries" in make:
            make["queries"] = 16
        with reference_backend():
            result = option_table.MAKERS[option.kind]("cpu", option.plan, **make)()
        out = result[0] if make.get("return_lse") else result
        shapes.add(out.shape[:1] if row.work != 1.0 else out.shape)
        assert torch.isfinite(out).all()
    assert len(shapes) == 1


def test_the_table_compares_with_the_plain_call(capsys: pytest.CaptureFixture[str]) -> None:
    times = itertools.count(1)
    makers = {kind: lambda device, plan, **make: plan for kind in option_table.MAKERS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(option_table, "MAKERS", makers)
        option_table.print_options("cpu", lambda call: float(next(times)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(option_table.OPTIONS)
    assert lines[2].split()[-4:] == ["2.0", "1.0", "0.50", "1.20"]
    (per_byte,) = (line for line in lines if line.startswith("heads of 512, decode"))
    plain, with_it, ratio, most = map(float, per_byte.split()[-4:])
    assert ratio == pytest.approx(with_it / plain / 4, abs=0.01) and most == 1.25


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert cli.main(["--options"]) == cli.NO_GPU
    assert "GPU" in capsys.readouterr().err
