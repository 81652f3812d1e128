"""`mono_moe`: routing and experts in one call, against loops over tokens in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.fused_moe import (
    alloc_scratchpad,
    get_scratchpad_size_bytes,
    has_monomoe,
    interleave_for_tma_wgmma_up,
    mono_moe,
)

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
USUAL = (256, 2048, 512)  # the layer that a scratchpad is for
SMALL = (12, 256, 128)


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: the products are built for it")


def random_call(
    device: torch.device, tokens: int, top_k: int, sizes: tuple[int, int, int] = SMALL
) -> dict[str, Any]:
    """Random experts, and logits of which no two are as near as roundings."""
    experts, hidden, intermediate = sizes

    def weight(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = (torch.randn(experts, rows, k) * 16).to(device, E4M3)
        scales = (torch.rand(experts, rows // 128, k // 128) + 0.5) / (16 * k**0.5)
        return codes, scales.to(device)

    up, down = weight(2 * intermediate, hidden), weight(hidden, intermediate)
    logits = [torch.randperm(experts) / 8 - experts / 16 for _ in range(tokens)]
    rows = torch.stack(logits) if logits else torch.empty(0, experts)
    return {
        "activations_in": torch.randn(tokens, hidden).to(device, BF16),
        "router_logits": rows.to(device, BF16),
        "expert_weights_up": up[0],
        "expert_scales_up": up[1],
        "expert_weights_down": down[0],
        "expert_scales_down": down[1],
        "top_k": top_k,
    }


def quantised(row: torch.Tensor) -> torch.Tensor:
    """The values of 8-bit codes with a scale for 128 elements, float64."""
    blocks = row.float().view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
    return ((blocks / scale).to(E4M3).double() * scale.double()).flatten()


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    spread = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.double() * spread


def expected(call: dict[str, Any], score: str, renormalize: bool) -> torch.Tensor:
    x, logits = call["activations_in"], call["router_logits"].double()
    scores = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(x.shape[0]):
        best = scores[t].topk(call["top_k"])
        factors = best.values / best.values.sum() if renormalize else best.values
        row = quantised(x[t])
        for e, factor in zip(best.indices.tolist(), factors, strict=True):
            both = values(call["expert_weights_up"][e], call["expert_scales_up"][e]) @ row
            gate, up = both.chunk(2)
            hidden = quantised(gate * torch.sigmoid(gate) * up)
            down = values(call["expert_weights_down"][e], call["expert_scales_down"][e])
            out[t] += factor * (down @ hidden)
    return out


def assert_right(call: dict[str, Any], score: str = "softmax", renormalize: bool = True) -> None:
    target = expected(call, score, renormalize)
    outs = [torch.full_like(call["activations_in"], float("nan")) for _ in range(2)]
    for out in outs:
        options = {"scoring_func": score, "renormalize": renormalize, "out": out}
        assert mono_moe(**call, **options) is out
    assert torch.equal(*outs)
    # A code that is rounded the other way moves its element by up to 1/8.
    assert float((outs[0].double() - target).norm()) <= 0.05 * float(target.norm()) + 1e-6


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5, 16])
def test_a_mixture(device: torch.device, score: str, renormalize: bool, tokens: int) -> None:
    for top_k in (1, 4):
        assert_right(random_call(device, tokens, top_k), score, renormalize)


def test_the_usual_layer(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("half a GiB of weights")
    call = random_call(device, 16, 8, USUAL)
    call["scratchpad"] = alloc_scratchpad(device)
    assert_right(call)


def test_a_scratchpad_holds_nothing(device: torch.device) -> None:
    call, memory = random_call(device, 6, 3), alloc_scratchpad(device)
    assert memory.dtype == torch.uint8 and memory.shape == (get_scratchpad_size_bytes(),)
    assert not bool(memory.any())
    usual = mono_moe(**call)
    for filler in (0, 255):
        memory.fill_(filler)
        assert torch.equal(mono_moe(**call, scratchpad=memory), usual)


def test_a_small_scratchpad_is_refused(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the reference backend needs no memory")
    call = random_call(device, 6, 3)
    with pytest.raises(ValueError, match="`scratchpad` must have"):
        mono_moe(**call, scratchpad=alloc_scratchpad(device)[:1000])


def test_weights_need_no_other_order(device: torch.device) -> None:
    call = random_call(device, 5, 3)
    usual, weight = mono_moe(**call), call["expert_weights_up"]
    prepared = interleave_for_tma_wgmma_up(weight)
    assert prepared is weight
    again = mono_moe(**{**call, "expert_weights_up": prepared}, interleave_up=False)
    assert torch.equal(again, usual)
    gap = torch.empty(12, 256, 512, dtype=E4M3, device=device)[..., :256]
    assert interleave_for_tma_wgmma_up(gap).is_contiguous()
    for wrong in (weight.float(), weight[0], weight[:, :-64]):
        with pytest.raises(ValueError, match="`w_fp8`"):
            interleave_for_tma_wgmma_up(wrong)


def test_whether_there_are_kernels(device: torch.device) -> None:
    assert has_monomoe() is (device.type == "cuda")


FAULTS: dict[str, Any] = {
    "activations_in": lambda call: call["activations_in"].half(),
    "router_logits": lambda call: call["router_logits"][:, :-1],
    "expert_weights_up": lambda call: call["expert_weights_up"][:, :-128],
    "expert_scales_up": lambda call: call["expert_scales_up"].double(),
    "expert_weights_down": lambda call: call["expert_weights_down"][0],
    "expert_scales_down": lambda call: call["expert_scales_down"][:, :1],
    "top_k": lambda call: 13,
    "scoring_func": lambda call: "relu",
    "renormalize": lambda call: 1,
    "interleave_up": lambda call: None,
    "out": lambda call: call["activations_in"][1:],
    "scratchpad": lambda call: torch.zeros(9, 9, dtype=torch.uint8, device=call["out"].device),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_refused_by_name(device: torch.device, name: str) -> None:
    call = random_call(device, 4, 3)
    call["out"] = torch.empty_like(call["activations_in"])
    with pytest.raises((TypeError, ValueError), match=f"`{name}`|{name}"):
        mono_moe(**{**call, name: FAULTS[name](call)})
