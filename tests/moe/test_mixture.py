"""Mixtures of experts on a GPU, against loops over experts in float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer._moe.experts import Experts
from flashinfer._moe.maps import combine, map_rows, route
from flashinfer.jit.gemm import GATED
from flashinfer.quantization._kernels import quantize_rows

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = (1, 3, 40, 300)


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")
    return torch.device("cuda")


def choices(tokens: int, top_k: int, experts: int, device: torch.device) -> torch.Tensor:
    """Any experts, at times one twice, one that does not exist, or none (-1)."""
    chosen = torch.randint(0, experts, (tokens, top_k), device=device, dtype=torch.int32)
    unusual = torch.rand(tokens, top_k, device=device)
    chosen[unusual < 0.05] = -1
    chosen[unusual > 0.97] = experts + 3
    return chosen


def activate(x: torch.Tensor, kind: str, gate: tuple[float, float, float]) -> torch.Tensor:
    if kind == "relu2":
        return x.relu().square()
    if kind not in GATED:
        return x
    first, second = x.chunk(2, dim=-1)
    g, u = (first, second) if kind == "swiglu" else (second, first)
    if kind == "geglu_gate_last":
        return torch.nn.functional.gelu(g) * u
    alpha, beta, limit = gate
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale for each element of blocks of 128 by 128."""
    scale = scale.double().repeat_interleave(128, -1).repeat_interleave(128, -2)
    return scale[..., : shape[-2], : shape[-1]]


def expected(
    experts: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The mixture, with the roundings of its documented steps."""
    fc1, fc2 = experts.fc1.double(), experts.fc2.double()
    scheme, scales = experts.scheme, experts.scales
    if scheme == "block":
        fc1, fc2 = fc1 * spread(scales[0], fc1.shape), fc2 * spread(scales[1], fc2.shape)
    elif scheme == "tensor":
        factors = [s.double().expand(fc1.shape[0])[:, None, None] for s in scales]
        fc1, fc2 = fc1 * factors[0], fc2 * factors[2]

    def operand(rows: torch.Tensor, expert: int) -> torch.Tensor:
        if rows.dtype == E4M3 or scheme == "none":
            return rows.double()
        if scheme == "tensor":
            factor = factors[1][expert]
            return (rows.double() * factor).clamp(-448, 448).float().to(E4M3).double()
        codes, scale = quantize_rows(rows.float())
        return codes.double() * scale.double().repeat_interleave(128, -1)

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    dtype = x.dtype if scheme == "none" else torch.float32
    for expert in range(fc1.shape[0]):
        token, choice = torch.where(chosen == experts.first_expert + expert)
        if token.numel() == 0:
            continue
        sums = operand(x[token], expert) @ fc1[expert].T
        if experts.biases[0] is not None:
            sums = sums + experts.biases[0][expert].double()
        gate = experts.gate or (1.0, 0.0, float("inf"))
        own = tuple(float(g[expert]) if isinstance(g, torch.Tensor) else g for g in gate)
        hidden = activate(sums, experts.activation, own).to(dtype)
        result = operand(hidden, expert) @ fc2[expert].T
        if experts.biases[1] is not None:
            result = result + experts.biases[1][expert].double()
        out.index_add_(0, token, weights[token, choice].double()[:, None] * result)
    return out


def out_dtype(x: torch.Tensor) -> torch.dtype:
    return BF16 if x.dtype == E4M3 else x.dtype


def assert_near(out: torch.Tensor, target: torch.Tensor) -> None:
    error = (out.double() - target).norm() / target.norm().clamp(min=1e-30)
    assert not bool(out.isnan().any())
    assert float(error) < 0.012, f"relative error {float(error)}"


def make(
    dtype: torch.dtype,
    activation: str,
    device: torch.device,
    biases: bool = False,
    scheme: str = "none",
) -> Experts:
    count, hidden, inter = 9, 512, 384
    columns = inter * (2 if activation in GATED else 1)
    fc1 = torch.randn(count, columns, hidden, device=device) / hidden**0.5
    fc2 = torch.randn(count, hidden, inter, device=device) / inter**0.5
    both = None
    if biases:
        both = (torch.randn(count, columns, device=device).to(dtype), None)
        both = (both[0], torch.randn(count, hidden, device=device).to(dtype))
    gate = None
    if activation.startswith("swiglu") and biases:
        gate = (torch.full((count,), 1.7, device=device), 1.0, torch.rand(count, device=device) + 2)
    if scheme == "none":
        fc1, fc2 = fc1.to(dtype), fc2.to(dtype)
        return Experts(fc1, fc2, activation, biases=both or (None, None), gate=gate)
    if scheme == "tensor":
        factors = [torch.rand(count, device=device) + 0.5 for _ in range(3)]
        scales = (factors[0] / 64, factors[1][:1] * 32, factors[2] / 64)
    else:
        shapes = [(count, w.shape[1] // 128, w.shape[2] // 128) for w in (fc1, fc2)]
        scales = tuple((torch.rand(s, device=device) + 0.5) / 64 for s in shapes)
    codes = [(w * 64).to(E4M3) for w in (fc1, fc2)]
    return Experts(codes[0], codes[1], activation, scheme, scales)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("dtype", "activation", "biases", "scheme"),
    [
        (BF16, "swiglu_gate_last", False, "none"),
        (BF16, "swiglu_gate_last", True, "none"),
        (torch.float16, "swiglu", True, "none"),
        (BF16, "geglu_gate_last", True, "none"),
        (BF16, "relu2", False, "none"),
        (BF16, "identity", True, "none"),
        (BF16, "swiglu_gate_last", False, "block"),
        (BF16, "relu2", False, "block"),
        (E4M3, "swiglu_gate_last", False, "tensor"),
        (E4M3, "relu2", False, "tensor"),
    ],
)
def test_a_mixture(
    gpu: torch.device,
    dtype: torch.dtype,
    activation: str,
    biases: bool,
    scheme: str,
    tokens: int,
) -> None:
    experts = make(dtype, activation, gpu, biases, scheme)
    x = torch.randn(tokens, 512, device=gpu).to(dtype)
    chosen, weights = choices(tokens, 4, 9, gpu), torch.rand(tokens, 4, device=gpu)
    outs = [torch.full(x.shape, float("nan"), device=gpu, dtype=out_dtype(x)) for _ in range(2)]
    for out in outs:
        experts.run(x, chosen, weights, out)
    assert torch.equal(*outs)
    assert_near(outs[0], expected(experts, x, chosen, weights))


def test_shards_sum_to_the_whole(gpu: torch.device) -> None:
    whole = make(BF16, "swiglu_gate_last", gpu)
    x = torch.randn(50, 512, device=gpu).to(BF16)
    chosen, weights = choices(50, 4, 9, gpu), torch.rand(50, 4, device=gpu)
    total = torch.zeros(50, 512, device=gpu, dtype=torch.float64)
    for first in (0, 3, 6):
        part = slice(first, first + 3)
        shard = Experts(whole.fc1[part], whole.fc2[part], whole.activation, first_expert=first)
        total += shard.run(x, chosen, weights, torch.full_like(x, float("nan"))).double()
    assert_near(total, expected(whole, x, chosen, weights))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 17, 4096])
def test_a_map_is_a_stable_sort(gpu: torch.device, tokens: int, index: torch.dtype) -> None:
    chosen = choices(tokens, 8, 128, gpu).to(index)
    rows = map_rows(chosen, 32, 64)
    flat = chosen.flatten().long() - 32
    here = (flat >= 0) & (flat < 64)
    order = torch.argsort(torch.where(here, flat, 64), stable=True)
    count = int(here.sum())
    assert rows.offsets.tolist() == [int((here & (flat < e)).sum()) for e in range(65)]
    assert torch.equal(rows.row_token[:count].long(), order[:count] // 8)
    entry_row = torch.full_like(flat, -1)
    entry_row[order[:count]] = torch.arange(count, device=gpu)
    assert torch.equal(rows.entry_row.flatten().long(), entry_row)


def test_rows_are_combined(gpu: torch.device) -> None:
    rows = torch.randn(30, 1032, device=gpu).to(BF16)
    entry_row = torch.randint(-1, 30, (7, 6), device=gpu, dtype=torch.int32)
    weights = torch.randn(7, 6, device=gpu)
    out = torch.full((7, 1032), float("nan"), device=gpu)
    combine(out, rows, entry_row, weights)
    padded = torch.cat([rows, torch.zeros_like(rows[:1])]).double()  # row -1
    target = (padded[entry_row.long()] * weights.double()[..., None]).sum(1)
    assert torch.allclose(out.double(), target, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("score", "groups"), [("softmax", (1, 1)), ("sigmoid", (8, 4))])
def test_a_router(gpu: torch.device, score: str, groups: tuple[int, int], dtype: torch.dtype):
    logits = torch.randn(65, 256, device=gpu).to(dtype)
    bias = torch.randn(256, device=gpu) * 0.1
    values = torch.full((65, 8), float("nan"), device=gpu)
    indices = torch.full((65, 8), -7, device=gpu, dtype=torch.int32)
    route(logits, bias, values, indices, score=score, groups=groups, scale=2.5)
    scores = logits.float().softmax(-1) if score == "softmax" else logits.float().sigmoid()
    compared = scores + bias
    by_group = compared.view(65, groups[0], -1)
    best = by_group.topk(2, -1).values.sum(-1).topk(groups[1], -1).indices
    allowed = torch.zeros(65, groups[0], device=gpu).scatter_(1, best, 1.0).bool()
    masked = by_group.masked_fill(~allowed[..., None], float("-inf")).view(65, 256)
    target = masked.topk(8, -1).indices
    assert torch.equal(indices.long().sort(-1).values, target.sort(-1).values)
    taken = scores.gather(1, indices.long())
    assert torch.allclose(values, 2.5 * taken / taken.sum(-1, keepdim=True), rtol=1e-5)
