"""The tuner on the CPU, with a clock that says what each candidate takes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer import autotuner as at
from flashinfer.autotuner import store
from flashinfer.jit.errors import JitError


class Runner(at.TunableRunner):
    """Tactics are ints; `cost` says the milliseconds of each at a number of rows."""

    def __init__(self, cost: Callable[[int, int], float], tactics: list[int]) -> None:
        self.cost, self.tactics = cost, tactics
        self.calls: list[tuple[Any, tuple[int, ...], bool]] = []

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[int]:
        return self.tactics

    def forward(self, inputs: Any, tactic: Any = -1, do_preparation: bool = False, **kw: Any):
        shape = tuple(inputs[0].shape)
        self.calls.append((tactic, shape, do_preparation))
        Clock.now = self.cost(tactic, shape[0])
        return tactic


class Another(Runner):
    """A runner of another class."""


class Clock:
    """Reads what the candidate that ran last says it takes."""

    now = 0.0

    def __call__(self, call: Callable[[], object], samples: int, replays: int) -> list[float]:
        assert at.is_in_profile_measurement()
        taken = []
        for _ in range(samples):
            call()
            taken.append(Clock.now)
        return taken


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[at.AutoTuner]:
    tuner = at.AutoTuner(warmup=0, repeat=2, timer=Clock())
    monkeypatch.setattr(at.AutoTuner, "_instance", tuner)
    yield tuner
    at.set_autotune_process_group(None)


ROWS = at.DynamicTensorSpec((0,), (0,), (1, 8, 64), at.make_bucket_mapper((1, 8, 64)))
CONFIG = at.TuningConfig(dynamic_tensor_specs=(ROWS,))


def prefers(best: int) -> Callable[[int, int], float]:
    return lambda tactic, rows: 1.0 if tactic == best else 2.0


def choose(tuner: at.AutoTuner, runner: Runner, rows: int, *others: Runner) -> tuple[Any, Any]:
    return tuner.choose_one("op", [runner, *others], CONFIG, [torch.zeros(rows, 4)])


def test_without_tuning_the_first_runners_heuristic_serves(tuner: at.AutoTuner) -> None:
    runner = Runner(prefers(2), [0, 1, 2])
    assert choose(tuner, runner, 5) == (runner, -1)
    assert tuner.stats.cache_misses == 1 and not runner.calls


def test_the_fastest_tactic_of_each_bucket_is_kept(tuner: at.AutoTuner) -> None:
    runner = Runner(lambda t, rows: abs(t - {1: 0, 8: 1, 64: 2}[rows]) + 1.0, [0, 1, 2])
    with at.autotune():
        assert tuner.is_tuning_mode
        assert choose(tuner, runner, 9) == (runner, 1)
    assert not tuner.is_tuning_mode and not at.is_in_profile_measurement()
    assert [choose(tuner, runner, n)[1] for n in (1, 7, 8, 63, 64, 1000)] == [0, 0, 1, 1, 2, 2]
    assert {shape for _, shape, _ in runner.calls} == {(1, 4), (8, 4), (64, 4)}
    assert {prepared for tactic, _, prepared in runner.calls if tactic == -1} == {True}


def test_other_runners_win_and_are_found_again(tuner: at.AutoTuner) -> None:
    slow, fast = Runner(prefers(9), [0, 1]), Another(prefers(1), [0, 1])
    with at.autotune():
        choose(tuner, slow, 8, fast)
    assert choose(tuner, slow, 8, fast) == (fast, 1)
    assert choose(tuner, slow, 8) == (slow, -1), "a result of a runner that is not offered"


def test_a_tie_goes_to_the_earlier_candidate(tuner: at.AutoTuner) -> None:
    runner = Runner(lambda tactic, rows: 1.0 - 0.004 * tactic, [0, 1, 2])
    with at.autotune():
        assert choose(tuner, runner, 8)[1] == 0


def test_candidates_that_fail_are_left_out(tuner: at.AutoTuner, caplog: Any) -> None:
    def cost(tactic: int, rows: int) -> float:
        if tactic in (0, 2) or rows == 64:
            raise RuntimeError("no such tile")
        return 1.0 + (tactic == 3)

    runner = Runner(cost, [0, 1, 2, 3])
    runner.forward([torch.zeros(1, 1)], tactic=1)  # the heuristic itself must run
    with at.autotune():
        assert choose(tuner, runner, 8) == (runner, 1)
    assert tuner.stats.failed_tactics["op"] == {0, 1, 2, 3}
    assert tuner.stats.tuned_op_total_configs["op"] == 3
    assert tuner.stats.tuned_op_successful_configs["op"] == 2
    assert "stays untuned for shapes ((64, 4),)" in caplog.text
    assert choose(tuner, runner, 64) == (runner, -1)


def test_a_tactic_that_a_size_of_the_bucket_does_not_have(tuner: at.AutoTuner) -> None:
    class Aligned(Runner):
        def get_valid_tactics(self, inputs: Any, profile: at.OptimizationProfile) -> list[int]:
            return [0, 1] if profile.get_opt_shapes()[0][0] % 8 == 0 else [0]

    runner = Aligned(prefers(1), [])
    with at.autotune():
        choose(tuner, runner, 8)
    assert [choose(tuner, runner, rows)[1] for rows in (8, 9, 16)] == [1, -1, 1]


def test_constraints_and_extras_belong_to_the_key(tuner: at.AutoTuner) -> None:
    config = at.TuningConfig(
        dynamic_tensor_specs=(ROWS,),
        constraint_specs=(at.ConstraintSpec(1, 0, lambda shapes: 2 * shapes[0][0]),),
        tensor_initializers=((0, at.autotuner_initializer_ones),),
        value_aware_input_indices=(1,),
    )
    seen: list[list[torch.Tensor]] = []

    class Recording(Runner):
        def forward(self, inputs: Any, tactic: Any = -1, **kw: Any):
            seen.append(inputs)
            return super().forward(inputs, tactic)

    runner = Recording(prefers(1), [0, 1])
    lengths = torch.tensor([3, 4, 5, 6, 7, 8])
    with at.autotune(skip_ops="another"):
        tuner.choose_one("op", [runner], config, [torch.zeros(3, 4), lengths])
    assert tuner.choose_one("op", [runner], config, [torch.zeros(2, 4), lengths])[1] == 1
    assert tuner.choose_one("op", [runner], config, [torch.zeros(3, 4).half(), lengths])[1] == -1
    made = {tuple(x.shape): (x, y) for x, y in seen}
    assert set(made) == {(1, 4), (8, 4), (64, 4)}
    assert bool((made[8, 4][0] == 1).all())
    assert made[8, 4][1].tolist() == [3, 4, 5, 6, 7, 8] * 2 + [3, 4, 5, 6]


def test_what_autotune_asks_for(tuner: at.AutoTuner) -> None:
    runner = Runner(prefers(1), [0, 1])
    with at.autotune(tuning_buckets=(16, 4), round_up=True, skip_ops={"op"}):
        assert choose(tuner, runner, 5)[1] == -1
        assert tuner.get_effective_map_to_tuning_buckets(CONFIG)(5) == 16
    assert not runner.calls
    with at.autotune(tuning_buckets=(16, 4), round_up=True):
        assert choose(tuner, runner, 5)[1] == 1
        with at.autotune(tune_mode=False):
            assert not tuner.is_tuning_mode
        assert tuner.is_tuning_mode
    assert {shape for _, shape, _ in runner.calls} == {(4, 4), (16, 4)}
    with at.autotune(round_up=True):
        assert tuner.get_effective_map_to_tuning_buckets(CONFIG)(9) == 64


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "tune_mode": ("no", 1, None),
        "tuning_buckets": ((), 8, "8", ("a",), (1.5,), (-1,), (0,), (True,)),
        "round_up": ("no", 1),
        "skip_ops": (3, {3}, ("op", None)),
        "cuda_graph_profile_replays": (0, 1.5, True),
        "measurement": ("cuda_graph",),
    }.items(),
)
def test_what_autotune_refuses(tuner: at.AutoTuner, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=f"`{name}` must"):
            with at.autotune(**{name: value}):
                pass
    assert not tuner.is_tuning_mode


def test_modules_of_all_candidates_are_built_at_once(
    tuner: at.AutoTuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[list[str]] = []
    monkeypatch.setattr(
        "flashinfer.autotuner.candidates.build_jit_specs",
        lambda specs: built.append([s.name for s in specs]),
    )

    class Spec:
        def __init__(self, name: str) -> None:
            self.name = name

    class Compiled(Runner):
        def jit_specs(self, inputs: Any, tactics: list[Any]) -> list[Any]:
            return [Spec(f"rows{min(inputs[0].shape[0], 8)}_tactic{t}") for t in tactics]

    with at.autotune():
        choose(tuner, Compiled(prefers(1), [0, 1]), 8)
    assert built == [["rows1_tactic0", "rows1_tactic1", "rows8_tactic0", "rows8_tactic1"]]


def test_a_candidate_that_does_not_compile_is_left_out(
    tuner: at.AutoTuner, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def build(specs: list[Any]) -> None:
        raise JitError("no compiler")

    monkeypatch.setattr("flashinfer.autotuner.candidates.build_jit_specs", build)

    class Compiled(Runner):
        def jit_specs(self, inputs: Any, tactics: list[Any]) -> list[Any]:
            return [SimpleNamespace(name="module")]

    with at.autotune():
        assert choose(tuner, Compiled(prefers(1), [0, 1]), 8)[1] == 1
    assert "no compiler" in caplog.text


# ---- files -------------------------------------------------------------------------------------


def test_results_survive_in_a_file(tuner: at.AutoTuner, tmp_path: Path) -> None:
    path, runner = tmp_path / "tuned.json", Runner(prefers((1, "a")), [(0, "a"), (1, "a")])  # type: ignore[arg-type,list-item]
    with at.autotune(cache=str(path)):
        choose(tuner, runner, 8)
    assert not tuner._dirty
    tuner.publish_namespaced_records("mine", {"chunk": 128})
    tuner.save_configs(str(path))
    fresh = at.AutoTuner()
    assert fresh.load_configs(str(path)) and not fresh._dirty
    assert choose(fresh, runner, 8)[1] == (1, "a")
    assert fresh.get_namespaced_records("mine") == {"chunk": 128}
    calls = len(runner.calls)
    with at.autotune(cache=str(path)):
        choose(tuner, runner, 9)
    assert len(runner.calls) == calls, "what the file has is not measured again"
    fresh.clear_cache()
    assert choose(fresh, runner, 8)[1] == -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "another GPU"}, r"gpu: 'another GPU', here '"),
        ({"flashinfer_version": "0.0.1"}, r"flashinfer_version: '0.0.1', here '"),
    ],
)
def test_a_file_from_elsewhere_is_refused_by_name(
    tuner: at.AutoTuner, tmp_path: Path, caplog: Any, change: dict[str, str], message: str
) -> None:
    path, runner = tmp_path / "tuned.json", Runner(prefers(1), [0, 1])
    with at.autotune(cache=str(path)):
        choose(tuner, runner, 8)
    content = json.loads(path.read_text())
    content["_metadata"] |= change
    path.write_text(json.dumps(content))
    fresh = at.AutoTuner()
    assert not fresh.load_configs(str(path))
    assert str(path) in caplog.text
    assert re.search(message, caplog.text)
    assert choose(fresh, runner, 8)[1] == -1
    tuner.save_configs(str(path))  # gives the foreign content up
    assert fresh.load_configs(str(path))
    hard, soft = store._classify_metadata_mismatches(
        {**store._collect_metadata(), **change, "torch_version": "1"}, store._collect_metadata()
    )
    assert hard.keys() == change.keys() and soft.keys() == {"torch_version"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"_metadata": 1}'])
def test_what_is_no_file_of_results(
    tuner: at.AutoTuner, tmp_path: Path, caplog: Any, text: str
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    assert not tuner.load_configs(str(path))
    assert not tuner.load_configs(str(tmp_path / "absent.json"))
    assert str(path) in caplog.text and "absent.json does not exist" in caplog.text


def test_processes_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"

    def save(number: int) -> None:
        mine = at.AutoTuner()
        mine._results[f"op{number}"] = {"runner": "R", "tactic": number}
        mine.save_configs(str(path))

    threads = [threading.Thread(target=save, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results, _ = store.read_file(path)
    assert {name: entry["tactic"] for name, entry in results.items()} == {
        f"op{n}": n for n in range(12)
    }
    assert {p.name for p in tmp_path.iterdir()} == {"tuned.json", ".tuned.json.lock"}


def test_the_variable_keeps_results_in_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "autotuner" / "none.json"
    monkeypatch.setattr("flashinfer.autotuner.store.default_cache_path", lambda: path)
    monkeypatch.setenv("FLASHINFER_AUTOTUNER_LOAD_FROM_FILE", "1")
    runner = Runner(prefers(1), [0, 1])
    for expected_calls in (True, False):
        monkeypatch.setattr(at.AutoTuner, "_instance", None)
        runner.calls.clear()
        at.AutoTuner.get()._given_timer = Clock()
        at.AutoTuner.get().warmup = 0
        with at.autotune():
            assert choose(at.AutoTuner.get(), runner, 8)[1] == 1
        assert bool(runner.calls) == expected_calls
    assert path.is_file()


# ---- several processes -------------------------------------------------------------------------


def _rank(rank: int, path: str, found: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    tuner = at.AutoTuner(warmup=0, repeat=2, timer=Clock())
    at.AutoTuner._instance = tuner
    # Alone, rank 0 would take tactic 0 and rank 1 tactic 1; on average tactic 2 is the fastest.
    costs = {0: (1.0, 9.0), 1: (9.0, 1.0), 2: (2.0, 2.0)}
    runner = Runner(lambda tactic, rows: costs[tactic][rank] if tactic >= 0 else 1.0, [0, 1, 2])
    if rank == 0:  # only one of them has a result already
        with at.autotune(tuning_buckets=(8,)):
            choose(tuner, runner, 8)
    at.set_autotune_process_group(torch.distributed.group.WORLD)
    with at.autotune():
        found[rank] = choose(tuner, runner, 8)[1]
    assert at.get_autotune_process_group() is not None
    torch.distributed.destroy_process_group()


def test_processes_of_a_group_choose_the_same(tmp_path: Path) -> None:
    with torch.multiprocessing.Manager() as manager:
        found = manager.dict()
        torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"), found), nprocs=2)
        assert dict(found) == {0: 2, 1: 2}


# ---- small parts -------------------------------------------------------------------------------


def test_buckets() -> None:
    down, up = (at.make_bucket_mapper((64, 1, 8), round_map=r) for r in (False, True))
    assert [down(x) for x in (0, 1, 7, 8, 65)] == [1, 1, 1, 8, 64]
    assert [up(x) for x in (0, 1, 7, 8, 9, 65)] == [1, 1, 8, 8, 64, 64]
    with pytest.raises(ValueError, match="`buckets`"):
        at.make_bucket_mapper(())
    with pytest.raises(ValueError, match="`dim_idx`"):
        at.DynamicTensorSpec((0, 1), (0,), (1,), down)


def test_tactics_in_json() -> None:
    tactic = (128, (64, "a"), None, True)
    assert at._json_to_tactic(json.loads(json.dumps(at._tactic_to_json(tactic)))) == tactic
    assert hash(at._tactic_to_json_hashable([1, [2, 3]])) == hash((1, (2, 3)))
    with pytest.raises(TypeError, match="a tactic must be"):
        at._tactic_to_json({1, 2})


def test_measurement_policies() -> None:
    assert at.MeasurementPolicy().manifest_fields()["cold_l2"] == "True"
    for wrong in ({"execution_mode": "x"}, {"cold_l2": 2}, {"_timer": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            at.MeasurementPolicy(**wrong)  # type: ignore[arg-type]


def test_initializers() -> None:
    cpu = torch.device("cpu")
    for name in ("empty", "zeros", "ones", "rand", "rand_scaled", "randn"):
        made = getattr(at, f"autotuner_initializer_{name}")((2, 3), torch.float8_e4m3fn, cpu)
        assert made.shape == (2, 3) and made.dtype == torch.float8_e4m3fn
