"""Heads of queries, keys and values of a row that a norm makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer import gemm

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PAGE, PAGES, MAX_POSITION = 16, 12, 4096


@pytest.fixture(autouse=True)
def _on_hopper(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU: the kernel is built for it")


def make(
    device: torch.device,
    heads: tuple[int, int] = (4, 2),
    dim: int = 128,
    k: int = 256,
    cached: torch.dtype = BF16,
    layout: str = "NHD",
    position: int = 37,
) -> dict[str, Any]:
    """A call; the token is the second of three requests' next one."""
    queries, kv = heads
    inner = (PAGE, kv) if layout == "NHD" else (kv, PAGE)
    n = (queries + 2 * kv) * dim

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "input": torch.randn(1, k, device=device).to(BF16),
        "residual": torch.randn(1, k, device=device).to(BF16),
        "norm_weight": torch.rand(k, device=device).to(BF16),
        "b": (torch.randn(k, n + 8, device=device) / k**0.5).to(BF16)[:, :n],
        "cos_sin_cache": torch.randn(MAX_POSITION, dim, device=device),
        "pos_ids": ints(position + 5),
        "paged_kv_cache": tuple(
            torch.full((PAGES, *inner, dim), 7.0, device=device).to(cached) for _ in range(2)
        ),
        "kv_indices": torch.randperm(PAGES, device=device).int(),
        "kv_indptr": ints(0, 2, 8, PAGES),
        "batch_indices": ints(1),
        "positions": ints(position),
        "kv_layout": layout,
    }


def expected(call: dict[str, Any], heads: tuple[int, int]) -> list[torch.Tensor]:
    """Queries, keys and values, in float64."""
    total = call["input"].double() + call["residual"].double()
    factor = torch.rsqrt(total.square().mean() + call.get("eps", 1e-6))
    normed = (total * factor * call["norm_weight"].double()).to(BF16).double()
    dim = call["cos_sin_cache"].shape[1]
    product = normed @ call["b"].double()
    if (bias := call.get("bias")) is not None:
        product += bias.double()
    parts = list(product.view(-1, dim).split([heads[0], heads[1], heads[1]]))
    cos, sin = call["cos_sin_cache"][int(call["pos_ids"])].double().chunk(2)
    for number, name in enumerate(("q_weight", "k_weight")):
        x = parts[number]
        if (weight := call.get(name)) is not None:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + call["head_eps"])
            x = x * scale * weight.double()
        if call.get("is_neox", True):
            a, b = x.chunk(2, dim=-1)
            parts[number] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = x[:, ::2], x[:, 1::2]
            parts[number] = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(1)
    parts[1] *= call.get("quant_scale_k", 1.0)
    parts[2] *= call.get("quant_scale_v", 1.0)
    return parts


def slot(call: dict[str, Any], cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token's rows of a cache, and all others."""
    position, first = int(call["positions"]), int(call["kv_indptr"][1])
    page = int(call["kv_indices"][first + position // PAGE])
    rows = cache.float() if call["kv_layout"] == "NHD" else cache.float().transpose(1, 2)
    mask = torch.ones(PAGES, PAGE, dtype=torch.bool, device=cache.device)
    mask[page, position % PAGE] = False
    return rows[page, position % PAGE], rows[mask]


def near(result: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> bool:
    bound = torch.finfo(dtype).eps * right.abs() + 0.03
    return bool(((result.double() - right).abs() <= bound).all())


CASES: dict[str, tuple[dict[str, Any], bool, bool, dict[str, Any]]] = {
    # sizes, norms of heads, bias, other arguments
    "qwen": ({"heads": (32, 4), "k": 2048}, True, False, {}),
    "plain": ({"heads": (32, 8), "k": 4096}, False, True, {"weight_ready": True}),
    "hnd": ({"layout": "HND", "k": 1000}, True, True, {"weight_ready": True, "eps": 1e-2}),
    "first": ({"heads": (1, 1), "k": 8, "position": 0}, False, False, {"enable_pdl": False}),
    "pairs": ({"dim": 64}, True, False, {"is_neox": False}),
    "wide pairs": ({"dim": 128}, True, False, {"is_neox": False, "weight_ready": True}),
    "narrow": ({"dim": 64, "heads": (8, 1), "k": 520}, True, True, {}),
    "e4m3": ({"cached": E4M3}, True, False, {"quant_scale_k": 0.5, "quant_scale_v": 2.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_heads(name: str, device: torch.device) -> None:
    sizes, normed, biased, others = CASES[name]
    heads = sizes.get("heads", (4, 2))
    call = make(device, **sizes) | others
    dim, n = call["cos_sin_cache"].shape[1], call["b"].shape[1]
    if normed:
        call |= {part: torch.rand(dim, device=device).to(BF16) for part in ("q_weight", "k_weight")}
        call["head_eps"] = 1e-3
    if biased:
        call["bias"] = torch.randn(n, device=device).to(BF16)
    outs = {
        "q_out": torch.full((1, heads[0], dim), float("nan"), dtype=BF16, device=device),
        "residual_out": torch.full_like(call["input"], float("nan")),
        "normed_out": torch.full_like(call["input"], float("nan")),
    }
    results = gemm.add_rmsnorm_mm_rope_append_bf16(**call, **outs)
    assert all(a is b for a, b in zip(results, outs.values(), strict=True))
    right = expected(call, heads)
    assert near(results[0][0], right[0], BF16)
    cached = call["paged_kv_cache"][0].dtype
    for cache, rows in zip(call["paged_kv_cache"], right[1:], strict=True):
        written, left = slot(call, cache)
        assert near(written, rows, cached)
        assert bool((left == 7.0).all())
    plain = {name: call[name] for name in ("input", "residual", "norm_weight", "b")}
    product = gemm.add_rmsnorm_mm_bf16(**plain, eps=call.get("eps", 1e-6))
    assert torch.equal(results[1], product[1]) and torch.equal(results[2], product[2])
    caches = [cache.clone() for cache in call["paged_kv_cache"]]
    again = gemm.add_rmsnorm_mm_rope_append_bf16(**call)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    for cache, before in zip(call["paged_kv_cache"], caches, strict=True):
        assert torch.equal(cache.float(), before.float())


def test_a_token_without_a_page_is_not_written(device: torch.device) -> None:
    call = make(device, position=6 * PAGE)  # its request has six pages
    q, _, _ = gemm.add_rmsnorm_mm_rope_append_bf16(**call)
    assert near(q[0], expected(call, (4, 2))[0], BF16)
    assert all(bool((cache.float() == 7.0).all()) for cache in call["paged_kv_cache"])


def test_layers_that_begin_early(device: torch.device) -> None:
    """Each kernel begins before the one before ends, and reads what that one writes."""
    call = make(device, heads=(12, 2), k=1536)  # as many columns of queries as of the row
    caches = [[cache.clone() for cache in call["paged_kv_cache"]] for _ in range(6)]
    x, residual = call.pop("input"), call.pop("residual")
    del call["paged_kv_cache"]

    def run(**options: Any) -> list[torch.Tensor]:
        row, total, rows = x, residual, []
        for pair in caches:
            q, total, _ = gemm.add_rmsnorm_mm_rope_append_bf16(
                row, total, **call, paged_kv_cache=tuple(pair), **options
            )
            row = q.view(1, -1)
            rows += [row, total]
        return rows

    run(weight_ready=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(weight_ready=True)
    for number in range(5):
        x.normal_()
        call["positions"].fill_(20 + number)
        call["pos_ids"].fill_(100 * number)
        right = run(enable_pdl=False)
        kept = [cache.clone() for pair in caches for cache in pair]
        for tensor in (*captured, *(cache for pair in caches for cache in pair)):
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, right, strict=True))
        for cache, before in zip((c for pair in caches for c in pair), kept, strict=True):
            assert torch.equal(slot_of(call, cache), slot_of(call, before))


def slot_of(call: dict[str, Any], cache: torch.Tensor) -> torch.Tensor:
    return slot(call, cache)[0]


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "input": lambda call: call["input"].repeat(2, 1),
    "residual": lambda call: call["residual"][:, :-8],
    "norm_weight": lambda call: call["norm_weight"].float(),
    "b": lambda call: call["b"][:, :-8],
    "bias": lambda call: call["norm_weight"],
    "cos_sin_cache": lambda call: call["cos_sin_cache"][:, :96],
    "pos_ids": lambda call: call["pos_ids"].float(),
    "paged_kv_cache": lambda call: call["paged_kv_cache"][0],
    "kv_indices": lambda call: call["kv_indices"].float(),
    "kv_indptr": lambda call: call["kv_indptr"][:0],
    "batch_indices": lambda call: call["batch_indices"].repeat(2),
    "positions": lambda call: call["positions"].repeat(2),
    "q_weight": lambda call: call["norm_weight"],
    "k_weight": lambda call: call["norm_weight"],
    "eps": lambda call: -1e-6,
    "head_eps": lambda call: -1.0,
    "is_neox": lambda call: 1,
    "quant_scale_k": lambda call: 0.0,
    "quant_scale_v": lambda call: float("inf"),
    "kv_layout": lambda call: "DNH",
    "q_out": lambda call: call["input"].view(1, -1, 128),
    "residual_out": lambda call: call["residual"],
    "normed_out": lambda call: call["input"],
    "enable_pdl": lambda call: 1,
    "weight_ready": lambda call: 1,
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_by_name(name: str, device: torch.device) -> None:
    call = make(device)
    call[name] = FAULTS[name](call)
    with pytest.raises((TypeError, ValueError), match=name):
        gemm.add_rmsnorm_mm_rope_append_bf16(**call)
