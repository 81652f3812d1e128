"""Mixtures of experts: 16-bit weights, 8-bit blocks, 4-bit weights, experts chosen at random."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import CheckOptions, error_bound, make_tensor

from .base import Arguments, Flag, Routine, positive, register

_BLOCK = 128
_GROUPS = {"int4": 128, "mxfp4": 32, "nvfp4": 16}
_FORMATS = ("bf16", "fp8_block", *_GROUPS)


def _format(text: str) -> str:
    """Format of the weights."""
    if text not in _FORMATS:
        raise ValueError(f"{text!r} is no format; use one of {', '.join(_FORMATS)}")
    return text


_FLAGS = [
    Flag("batch_size", positive, 16, "tokens"),
    Flag("num_experts", positive, 128, "experts"),
    Flag("top_k", positive, 8, "experts of a token"),
    Flag("hidden_size", positive, 2048, "elements of a token"),
    Flag("intermediate_size", positive, 768, "elements between the products"),
    Flag("weight_format", _format, "bf16", "weights: bf16, fp8_block, int4, mxfp4 or nvfp4"),
]


def _shapes(case: Namespace) -> list[tuple[int, int, int]]:
    experts, hidden, intermediate = case.num_experts, case.hidden_size, case.intermediate_size
    return [(experts, 2 * intermediate, hidden), (experts, hidden, intermediate)]


def _blocks(shape: tuple[int, int, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, k = shape
    codes = make_tensor(*shape, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    return codes, torch.rand(experts, -(-rows // _BLOCK), k // _BLOCK, device=device) / k**0.5


def _codes(
    shape: tuple[int, int, int], weight_format: str, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, k = shape
    codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(experts, rows, k // _GROUPS[weight_format], device=device) + 0.5) / 4
    if weight_format == "mxfp4":
        return codes, (scale * 8 + 118).to(torch.uint8)
    if weight_format == "nvfp4":
        return codes, scale.to(torch.float8_e4m3fn)
    return codes, (scale / k**0.5).bfloat16()


def _build(case: Namespace, device: str) -> Arguments:
    if case.top_k > case.num_experts:
        raise ValueError(f"--top_k must be at most --num_experts {case.num_experts}")
    weights: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    for shape in _shapes(case):
        if case.weight_format == "bf16":
            weight = make_tensor(*shape, dtype=torch.bfloat16, device=device)
            weights.append(weight / shape[2] ** 0.5)
            continue
        is_block = case.weight_format == "fp8_block"
        weight, scale = (
            _blocks(shape, device) if is_block else _codes(shape, case.weight_format, device)
        )
        weights.append(weight)
        scales.append(scale)
    if case.weight_format == "nvfp4":
        scales += [
            torch.full((experts,), k**-0.5, device=device) for experts, _, k in _shapes(case)
        ]
    choices = torch.rand(case.batch_size, case.num_experts, device=device).topk(case.top_k)
    x = make_tensor(case.batch_size, case.hidden_size, dtype=torch.bfloat16, device=device)
    return {
        "input": x,
        "token_selected_experts": choices.indices.int(),
        "token_final_scales": choices.values / case.top_k,
        "fc1_expert_weights": weights[0],
        "fc2_expert_weights": weights[1],
        "output_dtype": torch.bfloat16,
        "quant_scales": scales,
        "output": torch.empty_like(x),
        "use_deepseek_fp8_block_scale": case.weight_format == "fp8_block",
        "use_w4_group_scaling": case.weight_format in _GROUPS,
    }


def _weight_bytes(arguments: Arguments) -> int:
    """Bytes of the experts that some token has, with their scales."""
    weights = [arguments[f"fc{i}_expert_weights"] for i in (1, 2)]
    each = sum(t[0].numel() * t.element_size() for t in (*weights, *arguments["quant_scales"]))
    return each * int(arguments["token_selected_experts"].unique().numel())


def _flops(case: Namespace) -> int:
    rows = case.batch_size * case.top_k
    return int(6 * rows * case.hidden_size * case.intermediate_size)


def _options(template: object, arguments: Arguments) -> CheckOptions:
    """Rounded hidden rows and sums lose what the size of their terms says; codes lose more."""
    operations = 8192 if arguments["use_deepseek_fp8_block_scale"] else 256
    largest = float(arguments["input"].shape[1]) ** 0.5
    bound = error_bound(torch.bfloat16, operations=operations, magnitude=largest)
    return CheckOptions(bound=bound)


register(
    Routine(
        name="cutlass_fused_moe",
        api="flashinfer.fused_moe:cutlass_fused_moe",
        flags=_FLAGS,
        build=_build,
        reads=["input", "token_selected_experts", "token_final_scales"],
        writes=["output"],
        fresh=_weight_bytes,
        flops=_flops,
        check_options=_options,
    )
)
