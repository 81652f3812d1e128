"""``autotune_v2()`` and its store on the CPU, with a clock that says what each candidate takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer import autotune_cache
from flashinfer import autotuner as at
from flashinfer.autotune_cache import MeasurementPolicy, autotune_v2, autotune_v2_reload
from tests.unit.test_autotuner import Another, Clock, Runner

ROWS = at.TuningConfig(
    dynamic_tensor_specs=(at.DynamicTensorSpec((0,), (0,), (4, 16), lambda n: 16 if n > 4 else 4),)
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    another_process(monkeypatch)
    yield


def another_process(monkeypatch: pytest.MonkeyPatch) -> at.AutoTuner:
    tuner = at.AutoTuner(warmup=0, repeat=2, timer=Clock())
    monkeypatch.setattr(at.AutoTuner, "_instance", tuner)
    return tuner


def fastest(best: int) -> Runner:
    return Runner(lambda tactic, rows: 1.0 if tactic == best else 2.0, [0, 1, 2])


def choose(*runners: Runner, rows: int = 4) -> object:
    runner, tactic = at.AutoTuner.get().choose_one("op", [*runners], ROWS, [torch.empty(rows, 8)])
    return tactic if len(runners) == 1 else (type(runner).__name__, tactic)


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("v2/*/entries/*.json"))


def test_winners_serve_later_processes_without_a_block(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    with autotune_v2():
        assert choose(fastest(2)) == 2
        assert len(entries(cache)) == 2, "a file for each bucket, before the block ends"
    assert choose(fastest(2)) == 2, "outside the block"
    saved = json.loads(entries(cache)[0].read_text())
    assert saved.keys() == {"key", "runner", "tactic"} and saved["tactic"] == 2
    manifest = json.loads((entries(cache)[0].parents[1] / "manifest.json").read_text())
    assert manifest["flashinfer_version"] == flashinfer.__version__

    another_process(monkeypatch)
    idle = fastest(0)
    assert choose(idle) == -1, "nothing has taken up the store"
    with autotune_v2(mode="replay"):
        pass
    assert choose(idle) == 2 and choose(idle, rows=16) == 2 and not idle.calls
    with autotune_v2():
        assert choose(idle) == 2 and not idle.calls, "what has a result is not measured"


def test_the_winner_may_be_another_runner(monkeypatch: pytest.MonkeyPatch):
    slow, fast = fastest(1), Another(lambda tactic, rows: 0.5, [7])
    with autotune_v2():
        assert choose(slow, fast) == ("Another", 7)
    another_process(monkeypatch)
    with autotune_v2(mode="replay"):
        assert choose(slow, fast) == ("Another", 7)
        assert choose(slow) == -1, "a winner that is not offered is none"


def test_ways_of_measuring_do_not_mix(cache: Path):
    with autotune_v2(measurement_policy=MeasurementPolicy("eager")):
        assert choose(fastest(0)) == 0
    with autotune_v2(measurement_policy=MeasurementPolicy("cuda_graph")):
        assert choose(fastest(1)) == 1
    assert len(list(cache.glob("v2/*"))) == 2
    with autotune_v2("replay", measurement_policy=MeasurementPolicy("eager")):
        assert choose(fastest(2)) == 0


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"key": "of another", "runner": 1, "tactic": 2}']
)
def test_an_entry_that_cannot_be_used_is_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str
):
    with autotune_v2():
        choose(fastest(2))
    for file in entries(cache):
        file.write_text(content)
    another_process(monkeypatch)
    with autotune_v2(mode="replay"):
        assert choose(fastest(1)) == -1
    assert "is not used" in caplog.text
    with autotune_v2():
        assert choose(fastest(1)) == 1
    assert json.loads(entries(cache)[0].read_text())["tactic"] == 1


def test_without_the_disk_results_stay_in_memory(cache: Path):
    with autotune_v2(persistent_cache=False):
        assert choose(fastest(2)) == 2
    assert not cache.exists() and choose(fastest(2)) == 2
    autotune_v2_reload()
    assert choose(fastest(2)) == -1


def test_without_the_disk_the_store_is_not_read(monkeypatch: pytest.MonkeyPatch):
    with autotune_v2():
        choose(fastest(2))
    another_process(monkeypatch)
    with autotune_v2(mode="replay"):
        pass
    with autotune_v2(mode="replay", persistent_cache=False):
        assert choose(fastest(0)) == -1


def test_ranks_serve_the_last_winner_after_a_reload(cache: Path):
    with autotune_v2():
        assert choose(fastest(2)) == 2
        for file in entries(cache):  # another rank's
            file.write_text(json.dumps(json.loads(file.read_text()) | {"tactic": 0}))
        assert choose(fastest(2)) == 2
        autotune_v2_reload()
        assert choose(fastest(2)) == 0
    assert choose(fastest(2)) == 0


def test_results_of_files_stay_after_a_reload(tmp_path: Path):
    with at.autotune(cache=str(tmp_path / "file.json")):
        choose(fastest(1))
    at.AutoTuner.get().load_configs(str(tmp_path / "file.json"))
    autotune_v2_reload()
    assert choose(fastest(2)) == 1


def test_a_block_inside_another(cache: Path):
    with autotune_v2(skip_ops="op"):
        assert choose(fastest(1)) == -1 and not entries(cache)
        with at.autotune():
            assert choose(fastest(1)) == 1 and entries(cache)
        with pytest.raises(RuntimeError, match="inside another"), autotune_v2():
            pass
    with at.autotune(), autotune_v2(cache_root=cache / "here"):
        assert choose(fastest(2)) == 2 and entries(cache / "here")
    with autotune_v2():  # the refused block has changed nothing
        assert at.AutoTuner.get().is_tuning_mode
    assert not at.AutoTuner.get().is_tuning_mode


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    with autotune_v2(cache_root=tmp_path / "file"):
        assert choose(fastest(2)) == 2
    assert choose(fastest(2)) == 2
    assert caplog.text.count("are not kept") == 1


def test_the_root_says_where_the_store_lies(cache: Path, tmp_path: Path):
    assert autotune_cache.get_default_cache_root() == cache
    with flashinfer.autotune_v2(cache_root=str(tmp_path / "here")):
        choose(fastest(2))
    assert entries(tmp_path / "here") and not cache.exists()


def test_wrong_arguments_are_refused():
    for arguments, message in (
        ({"mode": "load"}, "`mode` must be one of"),
        ({"persistent_cache": "no"}, "`persistent_cache` must be a bool"),
        ({"cache_root": 3}, "`cache_root` must be a path"),
        ({"measurement_policy": "eager"}, "`measurement_policy` must be a MeasurementPolicy"),
    ):
        with pytest.raises((TypeError, ValueError), match=message), autotune_v2(**arguments):
            pass
        assert at.AutoTuner.get().is_idle
