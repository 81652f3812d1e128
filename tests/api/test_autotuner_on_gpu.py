"""The tuner's own clock: real candidates, a graph, a cold cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer import autotuner as at
from flashinfer.autotuner.measure import cuda_timer

pytestmark = pytest.mark.gpu


class Repeated(at.TunableRunner):
    """Tactic n does the work n times; tactic 0 cannot be recorded, and tactic 9 fails.

    The tests of other processes take the GPU for milliseconds, so the work differs by more.
    """

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[int]:
        return [9, 80, 0, 1, 40]

    def forward(self, inputs: Any, tactic: Any = -1, do_preparation: bool = False, **kw: Any):
        if tactic == 9:
            raise RuntimeError("no such tactic")
        if tactic == 0:
            float(inputs[0].sum())  # waits for the GPU
        for _ in range(max(tactic, 1) + 40 * (tactic == 0)):
            torch.neg(inputs[0], out=inputs[1])


def test_the_fastest_of_real_candidates(device: torch.device, tmp_path: Path) -> None:
    spec = at.DynamicTensorSpec((0, 1), (0, 0), (256, 4096), at.make_bucket_mapper((256, 4096)))
    config = at.TuningConfig(dynamic_tensor_specs=(spec,))
    inputs = [torch.randn(4096, 8192, device=device), torch.empty(4096, 8192, device=device)]
    tuner = at.AutoTuner.get()
    tuner.clear_cache()
    path = str(tmp_path / "tuned.json")
    with at.autotune(cache=path):
        assert tuner.choose_one("repeated", [Repeated()], config, inputs)[1] == 1
    tuner.clear_cache()
    assert tuner.load_configs(path)
    small = [x[:300] for x in inputs]
    assert tuner.choose_one("repeated", [Repeated()], config, small)[1] == 1
    tuner.clear_cache()


@pytest.mark.parametrize("mode", ["cuda_graph", "eager"])
def test_a_cold_cache_costs_time(mode: Any, device: torch.device) -> None:
    x = torch.randn(1 << 20, device=device)  # 4 MiB: from L2 or from memory
    y = torch.empty_like(x)
    times = {
        cold: sorted(
            cuda_timer(at.MeasurementPolicy(mode, cold_l2=cold))(lambda: torch.neg(x, out=y), 21, 1)
        )[10]
        for cold in (True, False)
    }
    assert times[True] > times[False] > 0


def test_a_capture_is_not_disturbed(device: torch.device) -> None:
    config = at.TuningConfig()
    inputs = [torch.randn(64, 64, device=device), torch.empty(64, 64, device=device)]
    graph = torch.cuda.CUDAGraph()
    with at.autotune(), torch.cuda.graph(graph):
        runner, tactic = at.AutoTuner.get().choose_one("captured", [Repeated()], config, inputs)
        runner(inputs, tactic=tactic)
    assert tactic == -1
    graph.replay()
    assert torch.equal(inputs[1], -inputs[0])
