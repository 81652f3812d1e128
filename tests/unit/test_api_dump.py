"""Level 10 of ``@flashinfer_api``: what is dumped, and that a dump replays. CPU tensors.

The functions under test stand at module level, where a replay can import them; they are decorated
once, at level 10, whatever the environment says.
"""

from __future__ import annotations

import itertools
import json
import os
import sys

import pytest
import torch

from flashinfer._instrument import call as api_call
from flashinfer._instrument import dump as api_dump
from flashinfer._instrument import text as api_log_text
from flashinfer.api_logging import flashinfer_api, replay_from_dump, replay_sequence


def dumped(func):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_LOGLEVEL", "10")
        return flashinfer_api(func)


FACTOR = 1.0  # a test changes it: the code is then no longer the one that was recorded


@dumped
def scale(input, factor, out=None):
    result = torch.mul(input, factor * FACTOR, out=out)
    return result if out is None else out


@dumped
def add_in_place(x, residual):
    residual += x


@dumped
def look(*args, **kwargs):
    return args, kwargs


@dumped
def fails(x):
    raise ValueError(f"x must be even, got {x}")


@dumped
def outer(x):
    return scale(x, 2.0) + 1


class Wrapper:
    """A wrapper with state, in the style of plan and run."""

    @dumped
    def __init__(self, workspace, causal=False):
        self.workspace, self.causal = workspace, causal

    @dumped
    def plan(self, lengths):
        self.total = int(lengths.sum())

    @dumped
    def run(self, q):
        return q * self.total + self.workspace[0] + self.causal


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setenv("FLASHINFER_LOGDEST", str(tmp_path / "log"))
    monkeypatch.setattr(api_dump, "_budget", api_dump._Budget())
    monkeypatch.setattr(api_log_text, "_warned", set())
    return tmp_path / "dumps"


@pytest.fixture(params=[False, True], ids=["pt", "safetensors"])
def file_format(request, monkeypatch):
    if request.param:
        pytest.importorskip("safetensors")
        monkeypatch.setenv("FLASHINFER_DUMP_SAFETENSORS", "1")
    return "safetensors" if request.param else "pt"


def dumps(folder):
    return sorted(path.parent for path in folder.glob("*/metadata.json"))


def metadata(dump):
    return json.loads((dump / "metadata.json").read_text())


def replay_only(folder, **options):
    (dump,) = dumps(folder)
    return replay_from_dump(str(dump), device="cpu", **options)


def test_round_trip(folder, file_format):
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    scale(x, 0.5)
    (dump,) = dumps(folder)
    files = {path.name for path in dump.iterdir()}
    assert files == {"metadata.json", f"inputs.{file_format}", f"outputs.{file_format}"}
    assert metadata(dump)["status"] == "returned" and metadata(dump)["api"] == "scale"
    replay = replay_from_dump(str(dump), compare_outputs=True, device="cpu")
    assert replay["comparison_match"] and replay["differences"] == []
    assert torch.equal(replay["execution_result"], x * 0.5) and replay["error"] is None


def test_files_are_readable_by_other_tools(folder, file_format):
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    scale(x, 0.5)
    (dump,) = dumps(folder)
    if file_format == "pt":
        saved = torch.load(dump / "inputs.pt", weights_only=True)
    else:
        from safetensors.torch import load_file

        saved = load_file(dump / "inputs.safetensors")
    assert list(saved) == ["input"] and torch.equal(saved["input"], x)


def test_load_does_not_run(folder):
    x = torch.randn(3)
    scale(x, factor=2.0)
    replay = replay_only(folder)
    assert "execution_result" not in replay and "comparison_match" not in replay
    assert torch.equal(replay["args"][0], x) and replay["kwargs"] == {"factor": 2.0}
    assert torch.equal(replay["tensors"]["input"], x)


def test_a_different_result_is_found(folder, monkeypatch):
    scale(torch.arange(6.0).reshape(2, 3), 1.0)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    replay = replay_only(folder, compare_outputs=True)
    assert not replay["comparison_match"]
    (line,) = replay["differences"]
    assert line == (
        "result: 5 of 6 elements differ beyond tolerance, worst at (1, 2): got 10, recorded 5"
    )


def test_rounding_is_within_tolerance_and_reported(folder, monkeypatch):
    scale(torch.tensor([1.0, 3.0]), 1.0)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.0 + 2e-7)
    replay = replay_only(folder, compare_outputs=True)
    assert replay["comparison_match"] and replay["differences"][0].endswith("within tolerance")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_integers_must_be_equal(folder, monkeypatch, dtype):
    flag = torch.tensor([1, 0, 1]).to(dtype)
    returns(flag)
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", torch.tensor([1, 1, 1]).to(dtype))
    replay = replay_only(folder, compare_outputs=True)
    assert not replay["comparison_match"] and "1 of" in replay["differences"][0]


RETURNED = None


@dumped
def returns(x):
    return x.clone() if RETURNED is None else RETURNED


@pytest.mark.parametrize(
    "now",
    [torch.zeros(3), torch.zeros(2, dtype=torch.float64), 5, (torch.zeros(2), torch.ones(2))],
    ids=["shape", "dtype", "type", "structure"],
)
def test_other_shape_dtype_or_type_is_a_difference(folder, monkeypatch, now):
    returns(torch.zeros(2))
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", now)
    replay = replay_only(folder, compare_outputs=True)
    assert not replay["comparison_match"] and "recorded tensor" in replay["differences"][0]


def test_a_list_of_another_length_is_a_difference(folder, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", (torch.zeros(2), torch.ones(2)))
    returns(None)
    assert replay_only(folder, compare_outputs=True)["comparison_match"]
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", (torch.zeros(2),))
    replay = replay_only(folder, compare_outputs=True)
    assert not replay["comparison_match"] and "result: got (" in replay["differences"][0]


def test_float8_is_compared_as_numbers(folder, monkeypatch):
    values = torch.tensor([1.0, -2.0, 0.5])
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", values.to(torch.float8_e4m3fn))
    returns(None)
    for factor, match in ((1.125, True), (2.0, False)):
        now = (values * factor).to(torch.float8_e4m3fn)
        monkeypatch.setattr(sys.modules[__name__], "RETURNED", now)
        assert replay_only(folder, compare_outputs=True)["comparison_match"] is match


def test_runs_with_one_process_id_do_not_mix(folder, monkeypatch):
    for run in ("2026-01-02", "2026-01-01"):
        monkeypatch.setattr(api_dump, "_STARTED", run)
        monkeypatch.setattr(api_call, "_numbers", itertools.count(1))
        wrapper = Wrapper(torch.zeros(1))
        wrapper.plan(torch.tensor([len(run)]))
    replays = replay_sequence(str(folder), device="cpu")
    runs = [r["metadata"]["run"][:10] for r in replays]
    assert runs == ["2026-01-01"] * 2 + ["2026-01-02"] * 2
    assert all(r["comparison_match"] for r in replays)


def test_nan_and_inf_compare_by_place(folder, monkeypatch):
    values = torch.tensor([float("nan"), float("inf"), 1.0])
    returns(values)
    assert replay_only(folder, compare_outputs=True)["comparison_match"]
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", values.roll(1))
    replay = replay_only(folder, compare_outputs=True)
    assert not replay["comparison_match"] and "3 of 3 elements" in replay["differences"][0]


def test_in_place_outputs(folder, file_format):
    x, residual = torch.ones(4), torch.arange(4.0)
    add_in_place(x, residual)
    (dump,) = dumps(folder)
    assert list(metadata(dump)["changed"]) == ["1"]
    replay = replay_from_dump(str(dump), compare_outputs=True, device="cpu")
    assert replay["comparison_match"] and torch.equal(replay["args"][1], residual)


def test_an_argument_changed_by_mistake_is_a_difference(folder, monkeypatch):
    returns(torch.zeros(3))
    (dump,) = dumps(folder)
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "returns", lambda x: x.clone().add_(x.fill_(7.0) * 0))
    replay = replay_from_dump(str(dump), compare_outputs=True, device="cpu")
    assert replay["differences"][0].startswith("x: 3 of 3 elements differ")


def test_destination_passing_keeps_the_alias(folder):
    x, out = torch.ones(4), torch.empty(4)
    scale(x, 3.0, out=out)
    replay = replay_only(folder, compare_outputs=True)
    assert replay["comparison_match"] and replay["execution_result"] is replay["kwargs"]["out"]
    assert torch.equal(replay["execution_result"], torch.full((4,), 3.0))


def test_strides_and_shared_memory_come_back(folder, file_format):
    qkv = torch.arange(48.0).reshape(4, 12)
    q, k = qkv[:, :4], qkv[:, 4:8]
    look(q, k.t(), whole=qkv, again=q)
    (dump,) = dumps(folder)
    replay = replay_from_dump(str(dump), device="cpu")
    (q2, k2), kwargs = replay["args"], replay["kwargs"]
    assert q2.stride() == q.stride() and torch.equal(q2, q)
    assert k2.stride() == (1, 12) and torch.equal(k2, k.t())
    assert kwargs["again"] is q2
    kwargs["whole"].fill_(7)
    assert (q2 == 7).all() and (k2 == 7).all()
    assert sum(f.stat().st_size for f in dump.glob("inputs.*")) < 4000  # one copy of the memory


def test_objects_are_found_in_the_registry(folder):
    thing = object()
    look(thing)
    with pytest.raises(ValueError, match="uses object .* of builtins:object.*object_registry"):
        replay_only(folder)
    key = (os.getpid(), id(thing))
    replay = replay_only(folder, object_registry={key: "stand-in"})
    assert replay["args"] == ["stand-in"]


def test_wrapper_is_replayed_in_order(folder):
    wrapper = Wrapper(torch.full((2,), 10.0), causal=True)
    wrapper.plan(torch.tensor([1, 2]))
    first = wrapper.run(torch.ones(2))
    wrapper.plan(torch.tensor([4]))
    second = wrapper.run(torch.ones(2))
    replays = replay_sequence(str(folder), device="cpu")
    assert [r["api"] for r in replays] == [
        "Wrapper.__init__",
        "Wrapper.plan",
        "Wrapper.run",
        "Wrapper.plan",
        "Wrapper.run",
    ]
    assert all(r["comparison_match"] for r in replays)
    assert torch.equal(replays[2]["execution_result"], first)
    assert torch.equal(replays[4]["execution_result"], second)


def test_method_alone_needs_its_object(folder):
    wrapper = Wrapper(torch.zeros(1))
    wrapper.plan(torch.tensor([3]))
    wrapper.run(torch.ones(2))
    run = dumps(folder)[-1]
    with pytest.raises(ValueError, match="replay the folder with the call that created it"):
        replay_from_dump(str(run), run=True, device="cpu")
    registry = {(os.getpid(), id(wrapper)): wrapper}
    replay = replay_from_dump(str(run), True, "cpu", object_registry=registry)
    assert replay["comparison_match"]


def test_sequence_goes_on_after_a_call_that_cannot_be_set_up(folder):
    look(object())
    scale(torch.ones(2), 2.0)
    first, second = replay_sequence(str(folder), device="cpu")
    assert not first["comparison_match"] and isinstance(first["error"], ValueError)
    assert second["comparison_match"]


def test_inner_calls_are_replayed_with_the_outer_one(folder):
    outer(torch.ones(2))
    assert [metadata(dump)["api"] for dump in dumps(folder)] == ["outer", "scale"]
    (replay,) = replay_sequence(str(folder), device="cpu")
    assert replay["api"] == "outer" and replay["comparison_match"]


def test_inner_calls_count_where_the_outer_one_was_not_dumped(folder, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DUMP_EXCLUDE", "outer")
    outer(torch.ones(2))
    (replay,) = replay_sequence(str(folder), device="cpu")
    assert replay["api"] == "scale" and replay["comparison_match"]


def test_replay_does_not_dump_itself(folder):
    scale(torch.ones(2), 2.0)
    replay_sequence(str(folder), device="cpu")
    assert len(dumps(folder)) == 1


def test_call_that_raised_is_expected_to_raise_again(folder, monkeypatch):
    with pytest.raises(ValueError, match="got 3"):
        fails(3)
    assert metadata(*dumps(folder))["error"] == "ValueError: x must be even, got 3"
    replay = replay_only(folder, compare_outputs=True)
    assert replay["comparison_match"] and isinstance(replay["error"], ValueError)
    monkeypatch.setattr(sys.modules[__name__], "fails", lambda x: x)
    replay = replay_only(folder, compare_outputs=True)
    assert not replay["comparison_match"] and "now: returned" in replay["differences"][0]
