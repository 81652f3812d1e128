"""Random calls of `cutlass_fused_moe`, and what they must give."""

from __future__ import annotations

import random
from typing import Any

import torch

from flashinfer.fused_moe import ActivationType, cutlass_fused_moe
from flashinfer.trace.template import resolve_template
from flashinfer.trace.templates.moe import cutlass_fused_moe_trace
from flashinfer.trace.templates.moe_four_bit import FOUR_BIT, four_bit_example

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
GATED = (ActivationType.Swiglu, ActivationType.SwigluBias, ActivationType.Geglu)
KEEPS_HALF = ("none", *FOUR_BIT)
ACTIVATIONS = (*GATED, ActivationType.Relu2, ActivationType.Identity)


def choose(
    draw: random.Random, tokens: int, top_k: int, experts: int, device: torch.device
) -> torch.Tensor:
    """Experts of tokens: even, skewed, all the same, or nothing that is here."""
    kind = draw.choice(("even", "even", "skewed", "same", "absent"))
    chosen = torch.randint(0, experts, (tokens, top_k), device=device)
    if kind == "skewed":
        chosen = (chosen.double() ** 2 / experts).long()
    elif kind == "same":
        chosen.fill_(draw.randrange(experts))
    elif kind == "absent":
        chosen.fill_(draw.choice((-1, experts + 5)))
    chosen[torch.rand(tokens, top_k, device=device) < 0.05] = -1
    return chosen.to(draw.choice((torch.int32, torch.int64)))


def scaled_weights(
    scheme: str, fc1: torch.Tensor, fc2: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Weights and their scales in the form of a scheme."""
    if scheme == "none":
        weights = {"fc1_expert_weights": fc1.to(dtype), "fc2_expert_weights": fc2.to(dtype)}
        return {**weights, "quant_scales": None}
    if scheme in FOUR_BIT:
        shapes = tuple(fc1.shape), tuple(fc2.shape)
        codes, scales = four_bit_example(scheme, shapes, dtype, torch.Generator().manual_seed(7))
        return {
            "fc1_expert_weights": codes[0].to(fc1.device),
            "fc2_expert_weights": codes[1].to(fc1.device),
            "quant_scales": [scale.to(fc1.device) for scale in scales],
            "use_w4_group_scaling": True,
        }
    count, device = fc1.shape[0], fc1.device

    def near_one(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device) + 0.5

    if scheme == "tensor":
        scales = [near_one(count) / 64, near_one(1) * 32, near_one(count) / 2048, near_one(1)]
    else:
        scales = [
            near_one(count, -(-w.shape[1] // 128), w.shape[2] // 128) / 64 for w in (fc1, fc2)
        ]
    return {
        "fc1_expert_weights": (fc1 * 64).to(E4M3),
        "fc2_expert_weights": (fc2 * 64).to(E4M3),
        "quant_scales": scales,
        "use_deepseek_fp8_block_scale": scheme == "block",
    }


def random_call(
    draw: random.Random,
    scheme: str,
    activation: ActivationType,
    tokens: int,
    device: torch.device,
    sizes: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The arguments of a call that the documentation allows; `sizes`: hidden and intermediate."""
    experts, ep_size = draw.choice(((8, 1), (4, 2), (2, 4)))
    hidden, intermediate = sizes or draw.choice(((256, 128), (384, 128), (512, 256)))
    is_half = scheme in KEEPS_HALF and activation == ActivationType.Swiglu and draw.random() < 0.3
    dtype = F16 if is_half else BF16
    gated = activation in GATED
    fc1 = torch.randn(experts, intermediate * (1 + gated), hidden, device=device) / hidden**0.5
    fc2 = torch.randn(experts, hidden, intermediate, device=device) / intermediate**0.5
    call: dict[str, Any] = {
        "input": torch.randn(tokens, hidden, device=device).to(
            E4M3 if scheme == "tensor" else dtype
        ),
        "output_dtype": dtype,
        "activation_type": activation,
        "ep_size": ep_size,
        "ep_rank": draw.randrange(ep_size),
        "tp_size": 2,
        "tp_rank": draw.randrange(2),
        **scaled_weights(scheme, fc1, fc2, dtype),
    }
    top_k = draw.choice((1, 2, 6))
    call["token_selected_experts"] = choose(draw, tokens, top_k, experts * ep_size, device)
    call["token_final_scales"] = torch.randn(tokens, top_k, device=device)
    if scheme in KEEPS_HALF and draw.random() < 0.5:
        call["fc1_expert_biases"] = torch.randn(fc1.shape[:2], device=device).to(dtype)
        call["fc2_expert_biases"] = torch.randn(fc2.shape[:2], device=device).to(dtype)
    if activation in (ActivationType.Swiglu, ActivationType.SwigluBias):
        for name, least in (("alpha", 1.0), ("beta", 0.0), ("limit", 0.5)):
            if draw.random() < 0.3:
                call[f"swiglu_{name}"] = torch.rand(experts, device=device) + least
    return call


def expected(call: dict[str, Any]) -> torch.Tensor:
    """The reference's result, float64."""
    defaults = {"quant_scales": None, "activation_type": ActivationType.Swiglu}
    template = resolve_template(cutlass_fused_moe_trace, {**defaults, **call})
    assert template is not None
    return template.compute({**defaults, **call})[0]


def assert_right(call: dict[str, Any], **more: Any) -> torch.Tensor:
    """Makes a call twice; results repeat and are near the reference's."""
    outputs = [
        torch.full(call["input"].shape, float("nan"), dtype=call["output_dtype"], device="cuda")
        for _ in range(2)
    ]
    for output in outputs:
        returned = cutlass_fused_moe(**call, **more, output=output)
        assert type(returned) is list and len(returned) == 1 and returned[0] is output
    assert torch.equal(*outputs)
    target = expected(call)
    # A code that is rounded the other way moves its element by up to 1/8.
    exact = call["quant_scales"] is None or call.get("use_w4_group_scaling", False)
    limit = 0.008 if exact else 0.05
    error = (outputs[0].double() - target).norm()
    assert float(error) <= limit * float(target.norm()) + 1e-6, f"{float(error / target.norm())}"
    return outputs[0]
