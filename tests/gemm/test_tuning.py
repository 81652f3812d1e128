"""Tuned products on a GPU: every function launches the tile that won, and its result is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import autotuner as at
from flashinfer import gemm
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.gemm import _choice, _launch, batched, dense, fp8
from flashinfer.jit.gemm import GemmConfig

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
M, N, K, GROUPS = 24, 256, 512, 3

Case = tuple[Callable[[], torch.Tensor], torch.Tensor]
"""A call, and what it must give in float64."""


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")
    return torch.device("cuda")


class Launches:
    """What was launched, and a clock by which each candidate is faster than the one before it."""

    def __init__(self) -> None:
        self.configs: list[GemmConfig] = []
        self.now = 1.0
        self._get = _launch.get_gemm_kernel

    def get(self, config: GemmConfig) -> Callable[..., None]:
        kernel = self._get(config)

        def launch(*arguments: Any) -> None:
            self.configs.append(config)
            kernel(*arguments)

        return launch

    def clock(self, call: Callable[[], object], samples: int, replays: int) -> list[float]:
        call()
        self.now *= 0.95
        return [self.now] * samples


@pytest.fixture
def launches(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Three candidates for each product, and a tuner without results."""
    found = Launches()
    monkeypatch.setattr(_choice, "_MOST_MEASURED", 3)
    for module in (_launch, dense, fp8, batched):
        monkeypatch.setattr(module, "get_gemm_kernel", found.get)
    tuner = at.AutoTuner(warmup=0, repeat=1, timer=found.clock)
    monkeypatch.setattr(at.AutoTuner, "_instance", tuner)
    _choice.worth_measuring.cache_clear()
    tuner.clear_cache()  # also what was chosen before
    torch.manual_seed(0)
    yield found
    _choice.worth_measuring.cache_clear()
    tuner.clear_cache()


def codes(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(E4M3)


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def scaled(*shape: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of `rows` by 128 elements, and their values."""
    x = codes(*shape)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // rows), shape[-1] // 128, device="cuda") + 0.5
    wide = scale.repeat_interleave(rows, -2)[..., : shape[-2], :].repeat_interleave(128, -1)
    return x, scale, x.double() * wide.double()


def in_groups(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Rows up to the first end by the first matrix, and so on."""
    parts = zip([0, *ends], ends, b, strict=False)
    return torch.cat([a[first:last].double() @ w.double().T for first, last, w in parts])


def mm_bf16() -> Case:
    a, b = halves(M, K), halves(N, K)
    return lambda: flashinfer.mm_bf16(a, b.t(), backend="tinygemm"), a.double() @ b.double().T


def mm_bf16_of_many_rows() -> Case:
    a, b = halves(5 * M, K), halves(N, K)
    return lambda: flashinfer.mm_bf16(a, b.t()), a.double() @ b.double().T


def bmm_bf16() -> Case:
    a, b = halves(GROUPS, M, K), halves(GROUPS, N, K)
    return lambda: flashinfer.bmm_bf16(a, b.mT), a.double() @ b.double().mT


def mm_fp8() -> Case:
    a, b, alpha = codes(M, K), codes(N, K), torch.full((1,), 0.25, device="cuda")
    expected = 0.25 * (a.double() @ b.double().T)
    return lambda: flashinfer.mm_fp8(a, b.t(), alpha, backend="cudnn"), expected


def bmm_fp8() -> Case:
    a, b, scale = codes(GROUPS, M, K), codes(GROUPS, N, K), torch.full((1,), 0.5, device="cuda")
    call = lambda: flashinfer.bmm_fp8(a, b.mT, scale, scale, BF16, backend="auto")  # noqa: E731
    return call, 0.25 * (a.double() @ b.double().mT)


def mm_fp8_of_any_backend() -> Case:
    a, b = codes(5 * M, K), codes(N, K)
    return lambda: flashinfer.mm_fp8(a, b.t(), backend="auto"), a.double() @ b.double().T


def fp8_linear() -> Case:
    a, b = codes(M, K), codes(N, K)
    scales = torch.rand(M, device="cuda"), torch.rand(N, device="cuda")
    expected = scales[0].double()[:, None] * scales[1].double() * (a.double() @ b.double().T)
    return lambda: gemm.fp8_linear(a, b, *scales), expected


def fp8_blockscale_gemm_sm90() -> Case:
    (a, a_scale, x), (b, b_scale, w) = scaled(M, K), scaled(N, K, rows=128)
    call = lambda: gemm.fp8_blockscale_gemm_sm90(a, b, a_scale, b_scale)  # noqa: E731
    return call, x @ w.T


def gemm_fp8_nt_groupwise() -> Case:
    (a, a_scale, x), (b, b_scale, w) = scaled(M, K), scaled(N, K, rows=128)
    scales = a_scale.T.contiguous(), b_scale.T.contiguous()
    return lambda: gemm.gemm_fp8_nt_groupwise(a, b, *scales, scale_major_mode="MN"), x @ w.T


def gemm_fp8_nt_blockscaled() -> Case:
    (a, a_scale, x), (b, b_scale, w) = scaled(M, K, rows=128), scaled(N, K, rows=128)
    call = lambda: gemm.gemm_fp8_nt_blockscaled(  # noqa: E731
        a, b, a_scale, b_scale, scale_major_mode="K"
    )
    return call, x @ w.T


def group_gemm_fp8_nt_groupwise() -> Case:
    (a, a_scale, x), (b, b_scale, w) = scaled(M, K), scaled(GROUPS, N, K, rows=128)
    ends = torch.tensor([0, 4, 20, M], dtype=torch.int32, device="cuda")
    call = lambda: gemm.group_gemm_fp8_nt_groupwise(  # noqa: E731
        a, b, a_scale, b_scale, ends, scale_major_mode="K"
    )
    return call, in_groups(x, w, [4, 20, M])


def group_deepgemm_fp8_nt_groupwise() -> Case:
    (a, a_scale, x), (b, b_scale, w) = scaled(256, K), scaled(GROUPS, N, K, rows=128)
    numbers = torch.arange(2, dtype=torch.int32, device="cuda").repeat_interleave(128)
    call = lambda: gemm.group_deepgemm_fp8_nt_groupwise(  # noqa: E731
        a, b, a_scale, b_scale, numbers
    )
    return call, in_groups(x, w, [128, 256])


def batch_deepgemm_fp8_nt_groupwise() -> Case:
    (a, a_scale, x), (b, b_scale, w) = scaled(GROUPS, M, K), scaled(GROUPS, N, K, rows=128)
    counts = torch.full((GROUPS,), M, dtype=torch.int32, device="cuda")
    call = lambda: gemm.batch_deepgemm_fp8_nt_groupwise(  # noqa: E731
        a, b, a_scale, b_scale, counts, M
    )
    return call, x @ w.mT


def grouped_mm_bf16() -> Case:
    a, b = halves(M, K), halves(GROUPS, N, K)
    ends = torch.tensor([0, 4, 20, M], dtype=torch.int32, device="cuda")
    return lambda: flashinfer.grouped_mm_bf16(a, b, ends), in_groups(a, b, [4, 20, M])


def grouped_mm_fp8() -> Case:
    a, b = codes(M, K), codes(GROUPS, N, K)
    ends = torch.tensor([0, 4, 20, M], dtype=torch.int32, device="cuda")
    return lambda: flashinfer.grouped_mm_fp8(a, b, ends), in_groups(a, b, [4, 20, M])


def segments() -> Case:
    a, b = halves(M, K), halves(GROUPS, N, K)
    lengths = torch.tensor([4, 16, 4], dtype=torch.int64, device="cuda")
    wrapper = gemm.SegmentGEMMWrapper(torch.empty(1, dtype=torch.uint8, device="cuda"))
    call = lambda: wrapper.run(a, b, GROUPS, True, seg_lens=lengths)  # noqa: E731
    return call, in_groups(a, b, [4, 20, M])


CASES = [
    mm_bf16,
    mm_bf16_of_many_rows,
    bmm_bf16,
    mm_fp8,
    mm_fp8_of_any_backend,
    bmm_fp8,
    fp8_linear,
    fp8_blockscale_gemm_sm90,
    gemm_fp8_nt_groupwise,
    gemm_fp8_nt_blockscaled,
    group_gemm_fp8_nt_groupwise,
    group_deepgemm_fp8_nt_groupwise,
    batch_deepgemm_fp8_nt_groupwise,
    grouped_mm_bf16,
    grouped_mm_fp8,
    segments,
]


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounding of the result, and the bits that the tensor cores keep of sums of 8-bit products."""
    error = (out.double() - expected).norm() / expected.norm()
    assert bool(out.isfinite().all()) and float(error) < 2.0**-8, float(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_winner_is_launched(case: Callable[[], Case], launches: Launches) -> None:
    call, expected = case()
    assert_near(call(), expected)
    usual = launches.configs[-1:]  # none where cuBLAS serves
    others = {
        mm_bf16_of_many_rows: 128,
        mm_fp8_of_any_backend: 128,
        group_deepgemm_fp8_nt_groupwise: 256,
    }
    rows = others.get(case, 32)
    with at.autotune(tuning_buckets=(rows,)):
        assert_near(call(), expected)
        won = launches.configs[-1]
        launches.configs.clear()
        assert_near(call(), expected)
        assert launches.configs == [won], "a second call measures nothing"
    launches.configs.clear()
    assert_near(call(), expected)
    assert_near(call(), expected)
    assert launches.configs == [won, won] and [won] != usual


def test_numbers_of_tiles(launches: Launches) -> None:
    a, b = halves(M, K), halves(GROUPS, N, K)
    ends = torch.tensor([0, 4, 20, M], dtype=torch.int32, device="cuda")
    for tactic in range(3):
        out = flashinfer.grouped_mm_bf16(a, b, ends, tactic=tactic)
        assert_near(out, in_groups(a, b, [4, 20, M]))
    assert len(set(launches.configs)) == 3
    with pytest.raises(ValueError, match="`tactic` must be -1, or from 0 to 2"):
        flashinfer.grouped_mm_bf16(a, b, ends, tactic=3)


def test_results_reach_a_graph(launches: Launches, tmp_path: Path) -> None:
    """What a file says is recorded; a graph that is recorded while calls are tuned is not."""
    call, expected = fp8_blockscale_gemm_sm90()
    path = str(tmp_path / "tuned.json")
    call()
    usual = launches.configs[-1]
    graph = torch.cuda.CUDAGraph()
    with at.autotune(cache=path):
        with torch.cuda.graph(graph):
            call()
        assert launches.configs[-1] == usual
        call()
    won = launches.configs[-1]
    at.AutoTuner.get().clear_cache()
    call()
    assert launches.configs[-1] == usual != won
    assert at.AutoTuner.get().load_configs(path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    assert launches.configs[-1] == won
    graph.replay()
    assert_near(out, expected)


def test_both_products_of_a_mixture(launches: Launches) -> None:
    experts, top_k, hidden, inter, tokens = 8, 2, 256, 128, 5
    x = halves(tokens, hidden)
    fc1 = halves(experts, 2 * inter, hidden) / hidden**0.5
    fc2 = halves(experts, hidden, inter) / inter**0.5
    chosen = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    chosen[:, 1] = 3
    weights = torch.rand(tokens, top_k, device="cuda")

    def call() -> torch.Tensor:
        return cutlass_fused_moe(x, chosen, weights, fc1, fc2, BF16, None)[0]

    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    for place, expert in enumerate((0, 3)):
        up, gate = (x.double() @ fc1[expert].double().T).chunk(2, dim=1)
        part = (torch.nn.functional.silu(gate) * up) @ fc2[expert].double().T
        expected += weights[:, place, None].double() * part
    assert_near(call(), expected)
    usual = launches.configs[-2:]
    with at.autotune():
        assert_near(call(), expected)
    won = launches.configs[-2:]
    assert won[0] != usual[0] and won[1] != usual[1]
    names = {key.split(" | ")[0] for key in at.AutoTuner.get()._results}
    assert names == {"trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"}
    rows = {key.split(" | ")[2].split(",")[0] for key in at.AutoTuner.get()._results}
    assert rows == {"((4", "((8", "((16"}, "batches of 2, 4 and 8 tokens: one has no tiles"
    launches.configs.clear()
    assert_near(call(), expected)
    assert launches.configs == won


def test_a_real_clock(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at.AutoTuner, "_instance", at.AutoTuner())
    monkeypatch.setattr(_choice, "_MOST_MEASURED", 3)
    _choice.worth_measuring.cache_clear()
    call, expected = fp8_blockscale_gemm_sm90()
    with at.autotune():
        assert_near(call(), expected)
    results = at.AutoTuner.get()._results
    assert len(results) == 6  # 1 to 32 rows
    assert_near(call(), expected)
    at.AutoTuner.get().clear_cache()
    _choice.worth_measuring.cache_clear()
