"""LoRA in mixtures of experts, and mixtures from their logits on."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import CheckOptions, ErrorBound, make_tensor

from .base import Arguments, Flag, Routine, positive, register

_BLOCK = 128

_SIZES = [
    Flag("batch_size", positive, 16, "tokens"),
    Flag("num_experts", positive, 128, "experts"),
    Flag("top_k", positive, 8, "experts of a token"),
    Flag("hidden_size", positive, 2048, "elements of a token"),
]
_ADAPTERS = [
    *_SIZES,
    Flag("num_adapters", positive, 8, "adapters, one for each token at random"),
    Flag("rank", positive, 16, "rank of the adapters"),
]
_MIXTURE = [
    *_SIZES,
    Flag("intermediate_size", positive, 512, "elements between the products"),
]


def _pairs(case: Namespace, device: str) -> Arguments:
    """Every token with experts of its own, and an adapter."""
    if case.top_k > case.num_experts:
        raise ValueError(f"--top_k must be at most --num_experts {case.num_experts}")
    chosen = torch.rand(case.batch_size, case.num_experts, device=device).topk(case.top_k).indices
    tokens = torch.arange(case.batch_size, device=device).repeat_interleave(case.top_k)
    own = torch.randint(0, case.num_adapters, (case.batch_size,), device=device)
    return {"sorted_token_ids": tokens, "expert_ids": chosen.flatten(), "lora_indices": own}


def _weights(case: Namespace, rows: int, k: int, device: str) -> list[torch.Tensor]:
    shape = case.num_adapters, case.num_experts, rows, k
    return [make_tensor(*shape, dtype=torch.bfloat16, device=device) / k**0.5]


def _build_shrink(case: Namespace, device: str) -> Arguments:
    pairs = case.batch_size * case.top_k
    return {
        "y": torch.zeros(1, pairs, case.rank, device=device),
        "x": make_tensor(case.batch_size, case.hidden_size, dtype=torch.bfloat16, device=device),
        "weights": _weights(case, case.rank, case.hidden_size, device),
        **_pairs(case, device),
    }


def _build_expand(case: Namespace, device: str) -> Arguments:
    pairs = case.batch_size * case.top_k
    return {
        "y": torch.zeros(case.batch_size, case.hidden_size, device=device),
        "x": torch.randn(1, pairs, case.rank, device=device),
        "weights": _weights(case, case.hidden_size, case.rank, device),
        **_pairs(case, device),
        "topk_weights": torch.rand(pairs, device=device),
        "slice_start_loc": torch.zeros(1, dtype=torch.int64, device=device),
    }


def _matrix_bytes(arguments: Arguments) -> int:
    """Bytes of the matrices that some pair has."""
    adapter = arguments["lora_indices"][arguments["sorted_token_ids"]]
    weight = arguments["weights"][0]
    matrices = (adapter * weight.shape[1] + arguments["expert_ids"]).unique()
    return int(matrices.numel()) * weight[0, 0].numel() * weight.element_size()


def _adapter_flops(case: Namespace) -> int:
    return int(2 * case.batch_size * case.top_k * case.rank * case.hidden_size)


def _build_mixture(case: Namespace, device: str) -> Arguments:
    if case.top_k > case.num_experts:
        raise ValueError(f"--top_k must be at most --num_experts {case.num_experts}")
    experts, hidden, intermediate = case.num_experts, case.hidden_size, case.intermediate_size
    arguments: Arguments = {"top_k": case.top_k}
    for name, rows, k in (("up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
        codes = make_tensor(experts, rows, k, dtype=torch.bfloat16, device=device)
        scales = torch.rand(experts, -(-rows // _BLOCK), k // _BLOCK, device=device) / k**0.5
        arguments[f"expert_weights_{name}"] = codes.to(torch.float8_e4m3fn)
        arguments[f"expert_scales_{name}"] = scales
    x = make_tensor(case.batch_size, hidden, dtype=torch.bfloat16, device=device)
    # Logits of which no two are as near as roundings of their scores.
    order = torch.rand(case.batch_size, experts, device=device).argsort(-1)
    logits = order.float() * (8 / experts)
    return {"activations_in": x, "router_logits": logits, **arguments, "out": torch.empty_like(x)}


def _mixture_bytes(arguments: Arguments) -> int:
    """Bytes of the experts that some token has, with their scales."""
    chosen = arguments["router_logits"].topk(arguments["top_k"]).indices.unique().numel()
    parts = [
        arguments[f"expert_{kind}_{name}"] for kind in ("weights", "scales") for name in _PARTS
    ]
    return int(chosen) * sum(part[0].numel() * part.element_size() for part in parts)


_PARTS = ("up", "down")


def _mixture_flops(case: Namespace) -> int:
    return int(6 * case.batch_size * case.top_k * case.hidden_size * case.intermediate_size)


def _loose(part: float) -> CheckOptions:
    """A rounding to fewer bits that goes the other way moves a sum by a part of its terms."""
    bound = ErrorBound(rounding=part, accumulation=part, smallest=1e-4)
    return CheckOptions(bound=bound, check_bias=False)


_PAIRS = ("sorted_token_ids", "expert_ids", "lora_indices")

for _name, _build in (("shrink_pairs", _build_shrink), ("expand_pairs", _build_expand)):
    _api = f"flashinfer.fused_moe.adapters:{_name}"
    register(
        Routine(
            name=_name,
            api=_api,
            flags=_ADAPTERS,
            build=_build,
            reads=["x", "y", *_PAIRS],
            writes=["y"],
            fresh=_matrix_bytes,
            flops=_adapter_flops,
            check_options=lambda template, arguments: _loose(0.02),
        )
    )
register(
    Routine(
        name="mono_moe",
        api="flashinfer.fused_moe:mono_moe",
        flags=_MIXTURE,
        build=_build_mixture,
        reads=["activations_in", "router_logits"],
        writes=["out"],
        fresh=_mixture_bytes,
        flops=_mixture_flops,
        check_options=lambda template, arguments: _loose(0.1),
    )
)
