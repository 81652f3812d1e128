"""Products of 16 and 8 bits, alone, in groups and in segments, against sums in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import gemm
from flashinfer.gemm import _launch
from flashinfer.gemm._choice import GemmProblem, all_configs, choose_config
from flashinfer.jit.gemm import GemmConfig

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16

SCALED = [
    (3, 72, 384),
    (40, 512, 512),
    (100, 264, 2304),
    (128, 136, 1024),
    (13, 264, 4608),  # scales of more blocks than are copied at a time
    (61, 136, 2560),
    (300, 640, 640),
]
LENGTHS = [[0, 5, 130, 1, 256, 0, 77], [4, 0, 3], [1], [0, 0, 0, 200]]
SHAPES = [(1, 8, 64), (5, 264, 1024), (17, 136, 200), (64, 512, 512), (130, 648, 384)]


@pytest.fixture(autouse=True)
def _on_hopper(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernels are built for it")


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: the operation has no reference backend")
    return torch.device("cuda")


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def assert_near(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within rounding to `out` and the bits in which the tensor cores sum.

    `magnitude` is the product of the absolute values; 14 bits for 8-bit operands cover the 16-bit
    ones too.
    """
    bound = torch.finfo(out.dtype).eps * expected.abs() + 2.0**-12 * magnitude
    assert out.shape == expected.shape
    assert bool(((out.double() - expected).abs() <= bound).all())


def halves(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def scaled(
    rows: int, k: int, per_row: bool, device: torch.device, dtype: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, their scales and their values in float64. Scales differ by powers of two."""
    codes = torch.randn(rows, k, device=device).to(dtype)
    height = rows if per_row else -(-rows // 128)
    scale = torch.exp2(torch.randint(-3, 4, (height, k // 128), device=device).float())
    spread = scale if per_row else scale.repeat_interleave(128, 0)[:rows]
    return codes, scale, codes.double() * spread.double().repeat_interleave(128, 1)


def weights(
    groups: int, n: int, k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = [scaled(n, k, False, device) for _ in range(groups)]
    codes, scale, values = (torch.stack(part) for part in zip(*parts, strict=True))
    return codes, scale, values


# ---- 16 bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "cudnn", "cublaslt", "tinygemm"])
def test_mm(shape: tuple[int, int, int], backend: str, device: torch.device) -> None:
    m, n, k = shape
    a, b = halves(m, k, device=device), halves(n, k, device=device).t()
    expected, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    out = poisoned(m, n, device=device)
    assert flashinfer.mm_bf16(a, b, out=out, backend=backend) is out
    assert_near(out, expected, magnitude)
    if backend == "tinygemm":
        bias = halves(n, device=device)
        with_bias = flashinfer.mm_bf16(a, b, bias, pdl=True, backend=backend)
        assert_near(with_bias, expected + bias.double(), magnitude + bias.double().abs())
        again = poisoned(m, n, device=device)
        gemm.tinygemm_bf16(a, b.t(), again, bias)
        assert torch.equal(again, with_bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_mm_of_other_results(dtype: torch.dtype, device: torch.device) -> None:
    a, b = halves(100, 256, device=device), halves(72, 256, device=device).t()
    out = flashinfer.mm_bf16(a, b, out_dtype=dtype)
    assert out.dtype == dtype
    assert_near(out, a.double() @ b.double(), a.double().abs() @ b.double().abs())


@pytest.mark.parametrize("backend", ["auto", "cublaslt", "tinygemm"])
@pytest.mark.parametrize("m", [1, 9, 100])
def test_sums_of_no_terms(m: int, backend: str, device: torch.device) -> None:
    a, b = halves(m, 0, device=device), halves(64, 0, device=device).t()
    bias = halves(64, device=device)
    for weight in (b, halves(0, 64, device=device)):
        out = flashinfer.mm_bf16(a, weight, out=poisoned(m, 64, device=device), backend=backend)
        assert not bool(out.any())
        assert torch.equal(flashinfer.mm_bf16(a, weight, bias, backend=backend), bias.expand(m, 64))


@pytest.mark.parametrize("backend", ["auto", "cublaslt", "tinygemm"])
def test_mm_over_its_arguments(backend: str, device: torch.device) -> None:
    """Refused also when the shape is known; a parameter is an operand as any other tensor is."""
    a, b, out = (halves(96, 96, device=device) for _ in range(3))
    weight, bias = torch.nn.Parameter(b.t()), halves(96, device=device)
    expected = flashinfer.mm_bf16(a, b.t(), bias, out=out, backend=backend).clone()
    again = flashinfer.mm_bf16(a, weight, bias, backend=backend)
    assert torch.equal(again, expected) and not again.requires_grad
    for name, change in {"a": {"a": out}, "b": {"b": out.t()}, "bias": {"bias": out[5]}}.items():
        call = {"a": a, "b": b.t(), "bias": bias, "out": out, "backend": backend, **change}
        with pytest.raises(ValueError, match=f"`out` must not share memory with `{name}`"):
            flashinfer.mm_bf16(**call)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("m", [3, 100])
def test_bmm(m: int, device: torch.device) -> None:
    A, B = halves(3, m, 192, device=device), halves(3, 40, 192, device=device).mT
    expected, magnitude = A.double() @ B.double(), A.double().abs() @ B.double().abs()
    assert_near(flashinfer.bmm_bf16(A, B), expected, magnitude)


def test_what_lies_beyond_is_not_read(gpu: torch.device) -> None:
    """Rows and columns around the operands are NaN, as is what the result does not cover."""
    for m, n in ((5, 72), (70, 200)):
        wide_a, wide_b = poisoned(m + 3, 320, device=gpu), poisoned(n + 3, 320, device=gpu)
        wide_out = poisoned(m + 3, n + 8, device=gpu)
        a, b, out = wide_a[1 : m + 1, 8:264], wide_b[1 : n + 1, 8:264], wide_out[1 : m + 1, :n]
        a.normal_(), b.normal_()
        flashinfer.mm_bf16(a, b.t(), out=out, backend="tinygemm")
        assert_near(out, a.double() @ b.double().t(), a.double().abs() @ b.double().t().abs())
        assert bool(wide_out[0].isnan().all()) and bool(wide_out[m + 1 :].isnan().all())
        assert bool(wide_out[:, n:].isnan().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.zeros(64, 24, dtype=BF16)}, "`b` must be contiguous along k"),
        ({"b": torch.zeros(24, 72, dtype=BF16).T}, "same k"),
        ({"out": torch.zeros(9, 25, dtype=BF16)}, "`out` must have shape"),
        ({"out": torch.zeros(9, 24)}, "`out` must have dtype"),
        ({"bias": torch.zeros(25, dtype=BF16)}, "`bias` must have shape"),
        ({"a": torch.zeros(9, 65, dtype=BF16)[:, 1:]}, "`a` must begin at a multiple of 16"),
        ({"backend": "cutlass"}, "`backend` must be"),
    ],
)
def test_mm_refusals(change: dict[str, Any], message: str, gpu: torch.device) -> None:
    # More rows than take weights whose rows are contiguous.
    good = {"a": torch.zeros(9, 64, dtype=BF16), "b": torch.zeros(24, 64, dtype=BF16).T}
    given = {
        name: value.to(gpu) if isinstance(value, torch.Tensor) else value
        for name, value in {**good, "backend": "tinygemm", **change}.items()
    }
    if "a" in change:
        given["a"] = torch.zeros(9, 65, dtype=BF16, device=gpu)[:, 1:]
    if "b" in change and change["b"].stride(0) == 1:
        given["b"] = torch.zeros(24, 72, dtype=BF16, device=gpu).T
    with pytest.raises((ValueError, TypeError), match=message):
        flashinfer.mm_bf16(**given)


# ---- 8 bits with scales of blocks --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["K", "MN"])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("shape", SCALED, ids=str)
def test_groupwise(
    shape: tuple[int, int, int], by_block: bool, mode: str, device: torch.device
) -> None:
    m, n, k = shape
    a, a_scale, left = scaled(m, k, not by_block, device)
    b, b_scale, right = scaled(n, k, False, device)
    if mode == "MN":
        a_scale, b_scale = a_scale.T.contiguous(), b_scale.T.contiguous()
    out = poisoned(m, n, device=device)
    granularity = (128 if by_block else 1, 128, 128)
    gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, mode, 1, granularity, out)
    assert_near(out, left @ right.T, left.abs() @ right.abs().T)
    if by_block:
        again = gemm.gemm_fp8_nt_blockscaled(a, b, a_scale, b_scale, mode)
        assert torch.equal(again, out)


def test_tiles_that_wait_for_their_store(device: torch.device) -> None:
    """CTAs with several large tiles, of which the last ones end outside the result."""
    m, n, k = 4000, 3080, 256
    problem = GemmProblem(E4M3, E4M3, BF16, rows=m, columns=n, k=k, scale="block")
    assert choose_config(problem).max_stages == 3
    a, a_scale, left = scaled(m, k, True, device)
    b, b_scale, right = scaled(n, k, False, device)
    outs = [poisoned(m, n, device=device) for _ in range(2)]
    for out in outs:
        gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K", out=out)
    assert torch.equal(outs[0], outs[1])
    assert_near(outs[0], left @ right.T, left.abs() @ right.abs().T)


def test_outliers(device: torch.device) -> None:
    """Sums of one large and many small products keep the small ones in float32."""
    a, a_scale, _ = scaled(16, 2048, True, device)
    b, b_scale, _ = scaled(128, 2048, False, device)
    a_scale[:, 3] = 512.0
    left = a.double() * a_scale.double().repeat_interleave(128, 1)
    right = b.double() * b_scale.double().repeat_interleave(128, 1)
    out = gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K")
    assert_near(out, left @ right.T, left.abs() @ right.abs().T)


# ---- groups ------------------------------------------------------------------------------------


def bounds_of(lengths: list[int]) -> list[int]:
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def by_group(left: torch.Tensor, right: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    parts = zip(bounds[:-1], bounds[1:], range(len(bounds) - 1), strict=True)
    return torch.cat([left[begin:end] @ right[g].T for begin, end, g in parts])


@pytest.mark.parametrize("mode", ["K", "MN"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_groups_by_offsets(lengths: list[int], mode: str, device: torch.device) -> None:
    bounds = bounds_of(lengths)
    a, a_scale, left = scaled(bounds[-1], 512, True, device)
    b, b_scale, right = weights(len(lengths), 264, 512, device)
    if mode == "MN":
        a_scale, b_scale = a_scale.T.contiguous(), b_scale.mT.contiguous()
    out = poisoned(bounds[-1], 264, device=device)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=device)
    gemm.group_gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, indptr, scale_major_mode=mode, out=out)
    assert_near(out, by_group(left, right, bounds), by_group(left.abs(), right.abs(), bounds))


def test_groups_by_indices(device: torch.device) -> None:
    numbers = [0, 2, 2, 1]
    a, a_scale, left = scaled(512, 512, True, device)
    b, b_scale, right = weights(3, 384, 512, device)
    indices = torch.tensor(numbers, device=device, dtype=torch.int32).repeat_interleave(128)
    out = poisoned(512, 384, device=device)
    gemm.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, indices, out=out)
    for i, g in enumerate(numbers):
        rows = slice(128 * i, 128 * i + 128)
        assert_near(out[rows], left[rows] @ right[g].T, left[rows].abs() @ right[g].abs().T)


@pytest.mark.parametrize("k", [256, 1152])
@pytest.mark.parametrize("n", [64, 384, 448, 640, 760, 1024])
def test_groups_of_tiles_in_thirds(
    n: int, k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last columns of a matrix get tiles of one or two thirds, or of all of them."""

    def in_thirds(problem: GemmProblem, *_: object) -> GemmConfig:
        (config,) = (c for c in all_configs(problem) if c.tile_columns == 192)
        return config

    monkeypatch.setattr(_launch, "choose_tiles", in_thirds)
    monkeypatch.setattr(_launch, "_kernels", {})
    numbers = [1, 0, 0, 2, 1]
    a, a_scale, left = scaled(640, k, True, device)
    b, b_scale, right = weights(3, n, k, device)
    indices = torch.tensor(numbers, device=device, dtype=torch.int32).repeat_interleave(128)
    out = poisoned(640, n, device=device)
    gemm.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, indices, out=out)
    for i, g in enumerate(numbers):
        rows = slice(128 * i, 128 * i + 128)
        assert_near(out[rows], left[rows] @ right[g].T, left[rows].abs() @ right[g].abs().T)


@pytest.mark.parametrize("expected_m", [4, 60, 200])
def test_masked_groups(expected_m: int, device: torch.device) -> None:
    counts = [0, 5, 130, 1, 256]
    a, a_scale, left = (x.view(5, 256, -1) for x in scaled(5 * 256, 384, True, device))
    b, b_scale, right = weights(5, 136, 384, device)
    out = poisoned(5, 256, 136, device=device)
    masked = torch.tensor(counts, dtype=torch.int32, device=device)
    gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, masked, expected_m, out=out)
    for g, count in enumerate(counts):
        part = left[g, :count]
        assert_near(out[g, :count], part @ right[g].T, part.abs() @ right[g].abs().T)
        assert bool(out[g, count:].isnan().all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_grouped_mm(lengths: list[int], dtype: torch.dtype, device: torch.device) -> None:
    bounds = bounds_of(lengths)
    a = halves(bounds[-1], 200, device=device, dtype=dtype)
    b = halves(len(lengths), 136, 200, device=device, dtype=dtype)
    out = flashinfer.grouped_mm_bf16(
        a, b, torch.tensor(bounds, device=device, dtype=torch.int32), out_dtype=dtype
    )
    left, right = a.double(), b.double()
    assert_near(out, by_group(left, right, bounds), by_group(left.abs(), right.abs(), bounds))


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("by", ["seg_lens", "seg_indptr"])
def test_segments(by: str, column_major: bool, gpu: torch.device) -> None:
    lengths, chosen = [3, 0, 70, 1], [1, 0, 1, 2]
    bounds = bounds_of(lengths)
    x, w = halves(bounds[-1], 128, device=gpu), halves(3, 72, 128, device=gpu)
    given = torch.tensor(lengths if by == "seg_lens" else bounds, device=gpu)
    wrapper = flashinfer.gemm.SegmentGEMMWrapper(torch.empty(16, dtype=torch.int8, device=gpu))
    form = w if column_major else w.mT.contiguous()
    index = torch.tensor(chosen, device=gpu)
    out = wrapper.run(x, form, 4, column_major, weight_indices=index, **{by: given})
    left, right = x.double(), w.double()[index]
    assert_near(out, by_group(left, right, bounds), by_group(left.abs(), right.abs(), bounds))


def test_repeats_bit_for_bit(gpu: torch.device) -> None:
    a, a_scale, _ = scaled(64, 7168, True, gpu)
    b, b_scale, _ = scaled(4096, 7168, False, gpu)
    first = gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K")
    for _ in range(5):
        assert torch.equal(gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K"), first)


def test_a_thread_without_calls_before(gpu: torch.device):
    """Maps of operands are encoded by the driver, which a thread's first call has not met."""
    a, b = halves(5, 256, device=gpu), halves(264, 256, device=gpu).T
    expected = flashinfer.mm_bf16(a, b)
    outs = [poisoned(5, 264, device=gpu) for _ in range(3)]
    torch.cuda.synchronize()
    for out in outs:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(flashinfer.mm_bf16, a, b, out=out).result()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)
