"""Products under the tuner, on the CPU: kernels that compute nothing, and a clock that is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer import autotuner as at
from flashinfer.autotuner.context import autotune
from flashinfer.gemm import _choice, _launch, _tuning, dense
from flashinfer.gemm._choice import GemmProblem, choose_config, estimate, worth_measuring
from flashinfer.gemm._tuning import LIBRARY, tactic_of
from flashinfer.jit.gemm import GemmConfig

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DENSE = GemmProblem(BF16, BF16, BF16, rows=16, columns=256, k=512)
BLOCKS = GemmProblem(E4M3, E4M3, BF16, rows=16, columns=256, k=512, scale="block")
GROUPS = replace(BLOCKS, batches=4, groups="offsets")
KINDS = {
    "dense": DENSE,
    "batches": replace(DENSE, batches=3),
    "blocks": BLOCKS,
    "masked": replace(BLOCKS, groups="masked", batches=4),
    "indices": replace(BLOCKS, groups="indices", batches=4),
    "offsets": GROUPS,
    "first": replace(
        GROUPS, routed=True, dtype_out=E4M3, activation="swiglu_gate_last", gathers=True
    ),
    "second": replace(GROUPS, routed=True),
}


class Kernels:
    """Stands for all kernels and their clock: `preferred` is the tile that is the fastest."""

    def __init__(self) -> None:
        self.preferred: tuple[int, ...] | str | None = None
        self.launched: list[tuple[GemmConfig | str, tuple[Any, ...]]] = []

    def get(self, config: GemmConfig) -> Any:
        return lambda *arguments: self.launched.append((config, arguments))

    def library(self, *arguments: Any) -> None:
        self.launched.append((LIBRARY, arguments))

    def clock(self, call: Any, samples: int, replays: int) -> list[float]:
        call()
        config = self.launched[-1][0]
        tactic = config if isinstance(config, str) else tactic_of(config)
        return [1.0 if tactic == self.preferred else 2.0] * samples

    def rows(self) -> set[int]:
        """Rows of all launches."""
        return {arguments[1].shape[-2] for _, arguments in self.launched}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    kernels = Kernels()
    tuner = at.AutoTuner(warmup=0, repeat=2, timer=kernels.clock)
    monkeypatch.setattr(at.AutoTuner, "_instance", tuner)
    monkeypatch.setattr(_launch, "get_gemm_kernel", kernels.get)
    monkeypatch.setattr(_tuning, "get_compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(_launch.checks, "cuda_tensors", lambda **tensors: None)
    built: list[Any] = []
    monkeypatch.setattr("flashinfer.autotuner.candidates.build_jit_specs", built.append)
    _launch._kernels.clear()
    yield kernels
    _launch._kernels.clear()


def multiply(problem: GemmProblem, **more: Any) -> torch.Tensor:
    """A launch of a product with blocks' scales, or without."""
    leading = (problem.batches,) if problem.batches > 1 and problem.groups == "batch" else ()
    a = torch.zeros(*leading, problem.rows, problem.k).to(problem.dtype_a)
    b = torch.zeros(problem.batches, problem.columns, problem.k).to(problem.dtype_b)
    out = torch.full((*leading, problem.rows, problem.columns), 7.0).to(problem.dtype_out)
    scales = None
    if problem.scale == "block":
        scales = (torch.ones(problem.rows, problem.k // 128), torch.ones(1, 1))
        if problem.dtype_out == E4M3:
            scales += (torch.ones(problem.rows, problem.columns // 128),)
    return _launch.launch(problem, "a", out, a, b, scales, **more)


def odd_tile(problem: GemmProblem) -> GemmConfig:
    """The tile that the model likes least among those that are measured."""
    return worth_measuring(problem)[-1]


# ---- candidates --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "tile", "swap", "shared", "splits"),
    [
        ((16, 4096, 7168), E4M3, (16, 64), True, 1, 2),
        ((8, 5120, 4096), E4M3, (8, 128), True, 1, 2),
        ((64, 24576, 1536), E4M3, (64, 64), False, 2, 1),
        ((64, 6144, 7168), E4M3, (64, 128), False, 1, 2),
        ((64, 4096, 7168), E4M3, (64, 128), False, 1, 3),
        ((96, 3072, 14336), E4M3, (128, 64), False, 1, 2),
        ((128, 4096, 7168), E4M3, (64, 64), False, 2, 1),
        ((128, 24576, 4096), E4M3, (128, 64), False, 2, 1),
        ((1, 6144, 4096), BF16, (8, 64), True, 1, 1),
        ((1, 4096, 14336), BF16, (8, 64), True, 1, 2),
        ((64, 6144, 4096), BF16, (64, 64), True, 2, 1),
        ((64, 4096, 14336), BF16, (64, 128), True, 2, 2),
    ],
    ids=str,
)
def test_few_tokens_get_the_tile_that_was_measured_fastest(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tile: tuple[int, int],
    swap: bool,
    shared: int,
    splits: int,
) -> None:
    scale = "block" if dtype == E4M3 else "none"
    chosen = choose_config(GemmProblem(dtype, dtype, BF16, *shape, scale=scale))
    assert (chosen.tile_rows, chosen.tile_columns) == tile
    assert (chosen.swap, chosen.cluster_columns, chosen.splits) == (swap, shared, splits)


def test_rows_that_a_does_not_have_cost_time() -> None:
    problem = replace(BLOCKS, rows=96, columns=7168, k=2048)
    tile = GemmConfig(E4M3, E4M3, BF16, 128, 64, scale="block")
    shared = replace(tile, cluster_columns=2)  # boxes of 64 rows, of which the second has 32
    assert _choice._rows_outside(problem, shared) == 32
    assert _choice._rows_outside(problem, tile) == 0
    assert _choice._rows_outside(replace(problem, rows=128), shared) == 0
    assert _choice._rows_outside(replace(problem, rows=200), shared) == 0


@pytest.mark.parametrize("rows", [1, 7, 64, 130, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_begin_with_the_models_choice(kind: str, rows: int) -> None:
    problem = replace(KINDS[kind], rows=rows, columns=4096, k=7168)
    configs = worth_measuring(problem)
    assert configs[0] == choose_config(problem)
    times = [estimate(problem, config) for config in configs]
    assert times[1:] == sorted(times[1:]) and max(times) <= _choice._NEAR * times[0]
    assert len(set(map(tactic_of, configs))) == len(configs) <= _choice._MOST_MEASURED
    possible = _choice.all_configs(problem)
    assert set(configs) | set(_choice._candidates(problem)) <= set(possible)
    assert all(config.dtype_out == problem.dtype_out for config in possible)


def test_a_number_is_a_tile(kernels: Kernels) -> None:
    configs = worth_measuring(GROUPS)
    for number, config in enumerate(configs):
        multiply(GROUPS, tactic=number)
        assert kernels.launched[-1][0] == config
    for wrong in (-2, len(configs), "0", True, None):
        with pytest.raises(ValueError, match="`tactic` must be -1, or from 0 to"):
            multiply(GROUPS, tactic=wrong)


# ---- tuning and serving ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_fastest_tile_serves_later_calls(kind: str, kernels: Kernels) -> None:
    problem = KINDS[kind]
    odd = odd_tile(problem)
    kernels.preferred = tactic_of(odd)
    with autotune():
        out = multiply(problem)
        assert kernels.launched[-1][0] == odd and kernels.launched[-1][1][1] is out
        assert all(arguments[1] is not out for _, arguments in kernels.launched[:-1])
        assert not _launch._kernels
    assert not _launch._kernels
    kernels.launched.clear()
    multiply(problem)
    multiply(problem)
    assert [config for config, _ in kernels.launched] == [odd, odd]
    assert list(_launch._kernels) == [problem]
    multiply(replace(problem, k=1024))
    assert kernels.launched[-1][0] == choose_config(replace(problem, k=1024))


def test_smaller_buckets_of_a_call_are_measured_too(kernels: Kernels) -> None:
    kernels.preferred = tactic_of(choose_config(DENSE))
    with autotune():
        multiply(replace(DENSE, rows=5))
    assert kernels.rows() == {1, 2, 4, 5, 8}
    kernels.launched.clear()
    with autotune(tuning_buckets=(3, 24)):
        multiply(replace(DENSE, rows=5))
    assert kernels.rows() == {3, 5, 24}
    kernels.launched.clear()
    with autotune(tuning_buckets=(3, 24)):  # what groups have is not known for other sizes
        multiply(replace(GROUPS, rows=5))
    assert kernels.rows() == {5}


def test_named_buckets_are_not_rows_of_groups(kernels: Kernels) -> None:
    """They are tokens of a mixture, whose products have as many rows as there are choices."""
    with autotune(tuning_buckets=(1, 8)):
        multiply(replace(KINDS["second"], rows=8))
        multiply(replace(KINDS["second"], rows=64))
    keys = [key.split(" | ")[2] for key in at.AutoTuner.get()._results]
    assert keys == ["((8, 256, 512),)", "((64, 256, 512),)"]


def test_a_size_between_buckets_takes_the_larger_ones_tile(kernels: Kernels) -> None:
    problem = replace(BLOCKS, rows=64, columns=4096, k=7168)
    odd = odd_tile(problem)
    kernels.preferred = tactic_of(odd)
    with autotune(tuning_buckets=(64,), round_up=True):
        multiply(problem)
    for rows in (64, 63, 40, 33, 32, 65):
        fits = 32 < rows <= 64 and _choice.serves(replace(problem, rows=rows), odd)
        multiply(replace(problem, rows=rows))
        chosen = kernels.launched[-1][0]
        assert chosen == (odd if fits else choose_config(replace(problem, rows=rows))), rows
    assert not _choice.serves(replace(problem, rows=4096), odd)


def test_the_other_librarys_product_is_a_candidate(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, out = torch.zeros(16, 512, dtype=BF16), torch.zeros(16, 256, dtype=BF16)
    arguments = (0, out, a, a, None, None, 1.0, None, None, 1, 0, False)

    def choose(prefers_library: bool) -> Any:
        product = _tuning.choose_product(
            DENSE, arguments, kernels.get, kernels.library, prefers_library
        )
        product(*arguments)
        return kernels.launched[-1][0]

    assert choose(True) == LIBRARY and choose(False) == choose_config(DENSE)
    for best in (LIBRARY, tactic_of(odd_tile(DENSE))):
        at.AutoTuner.get().clear_cache()
        kernels.preferred = best
        with autotune():
            choose(True)
        expected = LIBRARY if best == LIBRARY else odd_tile(DENSE)
        assert choose(True) == choose(False) == expected
    multiply(DENSE)  # a call that the library cannot serve has results of its own
    assert kernels.launched[-1][0] == choose_config(DENSE)
    monkeypatch.setattr(_tuning, "get_compute_capability", lambda device: (8, 9))
    assert choose(False) == LIBRARY  # the kernels are Hopper's


def test_a_capture_is_served_and_not_measured(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashinfer.autotuner.autotuner._is_capturing", lambda: True)
    with autotune():
        multiply(DENSE)
    assert [config for config, _ in kernels.launched] == [choose_config(DENSE)]
    assert not at.AutoTuner.get()._results


def test_operations_can_be_left_alone(kernels: Kernels) -> None:
    names = {kind: _tuning.operation(problem) for kind, problem in KINDS.items()}
    assert names["dense"] == names["batches"] == "bf16_gemm" and names["blocks"] == "fp8_gemm"
    assert names["first"] == "trtllm::fused_moe::gemm1" and names["offsets"] == "grouped_fp8_gemm"
    assert names["second"] == "trtllm::fused_moe::gemm2"
    for problem in KINDS.values():
        kernels.launched.clear()
        with autotune(skip_ops=set(names.values())):
            multiply(problem)
        assert len(kernels.launched) == 1


def test_a_call_without_rows_measures_nothing(kernels: Kernels) -> None:
    with autotune():
        multiply(replace(DENSE, rows=0))
    assert len(kernels.launched) == 1


def test_a_product_that_the_binding_refuses(kernels: Kernels, caplog: Any) -> None:
    def refuse(config: GemmConfig) -> Any:
        def kernel(*arguments: Any) -> None:
            raise ValueError("`b` must")

        return kernel

    with autotune(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "get_gemm_kernel", refuse)
        with pytest.raises(ValueError, match="`b` must"):
            multiply(GROUPS)
    assert "stays untuned" in caplog.text and not at.AutoTuner.get()._results


def test_dense_products_keep_what_they_chose(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "cuda_tensors", lambda **tensors: None)
    monkeypatch.setattr(dense, "get_compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(dense, "get_gemm_kernel", kernels.get)
    monkeypatch.setattr(dense, "_cublas", kernels.library)
    a, b = torch.zeros(16, 512, dtype=BF16), torch.zeros(256, 512, dtype=BF16)
    kernels.preferred = LIBRARY

    def multiply_and_see(backend: str) -> Any:
        dense.mm_bf16(a, b.t(), backend=backend)
        return kernels.launched[-1][0]

    usual = choose_config(DENSE)
    assert multiply_and_see("auto") == usual and len(dense._products) == 1
    with autotune():
        assert not dense._products
        assert multiply_and_see("auto") == LIBRARY
        assert multiply_and_see("tinygemm") == usual and not dense._products
    assert multiply_and_see("auto") == LIBRARY and multiply_and_see("tinygemm") == usual
    assert len(dense._products) == 2
    at.AutoTuner.get().clear_cache()
    assert not dense._products and multiply_and_see("auto") == usual
    dense._products.clear()


# ---- files -------------------------------------------------------------------------------------


def test_results_in_a_file(kernels: Kernels, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    odd = odd_tile(GROUPS)
    kernels.preferred = tactic_of(odd)
    with autotune(cache=str(path)):
        multiply(GROUPS)
    tuner = at.AutoTuner.get()
    tuner.clear_cache()
    multiply(GROUPS)
    assert kernels.launched[-1][0] == choose_config(GROUPS) != odd
    assert tuner.load_configs(str(path)), "which also forgets what was chosen before"
    multiply(GROUPS)
    assert kernels.launched[-1][0] == odd
    entries = [key for key in json.loads(path.read_text()) if not key.startswith("_")]
    assert len(entries) == 1 and entries[0].startswith("grouped_fp8_gemm | TileRunner | ((16, ")


def test_a_stored_tile_that_no_longer_exists(kernels: Kernels, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "tuned.json"
    with autotune(cache=str(path)):
        multiply(GROUPS)
    content = json.loads(path.read_text())
    for entry in content.values():
        if "tactic" in entry:
            entry["tactic"] = [99, 1, 1, 1, 1, 1, 1]
    path.write_text(json.dumps(content))
    tuner = at.AutoTuner.get()
    tuner.clear_cache()
    assert tuner.load_configs(str(path))
    for _ in range(2):
        multiply(GROUPS)
        _launch._kernels.clear()
    assert kernels.launched[-1][0] == choose_config(GROUPS)
    assert caplog.text.count("(99, 1, 1, 1, 1, 1, 1) of grouped_fp8_gemm does not exist") == 1


# ---- arguments of other sizes ------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3, 130, 300])
@pytest.mark.parametrize("layout", [0, 2, 4, 6])
def test_scales_follow_the_rows(rows: int, layout: int) -> None:
    problem = replace(BLOCKS, rows=130)
    scale_rows = [2 if layout & 4 else 130, 4]
    shape = scale_rows[::-1] if layout & 2 else scale_rows
    a = torch.randn(130, 512).to(E4M3)
    scales = (torch.randn(shape), torch.ones(2, 4), None)
    arguments = (0, torch.zeros(130, 256), a, a, scales, None, 1.0, None, None, layout, 0, None)
    _, out, changed, b, (scale, *others), *_ = _tuning.with_rows(arguments, problem, rows)
    assert out.shape == (rows, 256) and changed.shape == (rows, 512) and b is a
    expected = [-(-rows // 128) if layout & 4 else rows, 4]
    assert list(scale.shape) == (expected[::-1] if layout & 2 else expected)
    assert others == list(scales[1:])
    assert torch.equal(changed.float(), a.float()[torch.arange(rows) % 130])
