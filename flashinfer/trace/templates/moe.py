"""Templates and references of mixtures of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...tllm_enums import ActivationType
from ..check import default_check
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .gemm import _with_scales_of_rows
from .groupwise import _scaled
from .moe_four_bit import (
    FOUR_BIT,
    format_of,
    four_bit_axes,
    four_bit_constraints,
    four_bit_example,
    four_bit_scales,
    four_bit_weights,
    values_of,
    with_bytes_of_scales,
)

_HALF = ("bfloat16", "float16")


def _activate(
    sums: torch.Tensor, activation_type: int, gate: tuple[float, float, float]
) -> torch.Tensor:
    """The activation of a row of sums; the values of a gated one come first, its gates last."""
    if activation_type == 9:
        return sums
    if activation_type == 6:
        return sums.relu().square()
    u, g = sums.chunk(2, dim=-1)
    if activation_type == 4:
        return torch.nn.functional.gelu(g) * u
    alpha, beta, limit = gate
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


def _mixture(
    x: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor, int],
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    activation_type: int,
    between: Callable[[torch.Tensor, int], torch.Tensor],
    rounds_to: torch.dtype,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    gate: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> torch.Tensor:
    """The sum over chosen experts; `between` is what happens to a row of the first product."""
    chosen, weights, first = routing
    out = x.new_zeros(x.shape[0], fc2.shape[1])
    for e in range(fc1.shape[0]):
        token, choice = torch.where(chosen == first + e)
        sums = x[token] @ fc1[e].double().T
        if biases[0] is not None:
            sums = sums + biases[0][e].double()
        own = [
            default if constant is None else float(constant[e])
            for constant, default in zip(gate, (1.0, 0.0, math.inf), strict=True)
        ]
        hidden = between(_activate(sums, activation_type, (own[0], own[1], own[2])), e)
        result = hidden.double() @ fc2[e].double().T
        if biases[1] is not None:
            result = result + biases[1][e].double()
        result = result.to(rounds_to).double()
        out.index_add_(0, token, weights[token, choice].double()[:, None] * result)
    return out


def _cutlass_fused_moe_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
) -> torch.Tensor:
    """output[t] = sum_j weight[t, j] fc2[e] act(fc1[e] input[t]), where e is token t's expert j.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
    """
    first = ep_rank * fc1_expert_weights.shape[0]
    second_bias = fc2_expert_biases if tp_rank == 0 else None
    return _mixture(
        input.double(),
        (token_selected_experts, token_final_scales, first),
        fc1_expert_weights,
        fc2_expert_weights,
        int(activation_type),
        lambda hidden, e: hidden.to(input.dtype),
        output_dtype,
        (fc1_expert_biases, second_bias),
        (swiglu_alpha, swiglu_beta, swiglu_limit),
    )


def _cutlass_fused_moe_block_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    ep_rank: int = 0,
    activation_type: int = 3,
) -> torch.Tensor:
    """As cutlass_fused_moe, with operands in 8 bits and scales of blocks.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    return _mixture(
        _with_scales_of_rows(input, None),
        (
            token_selected_experts,
            token_final_scales,
            ep_rank * fc1_expert_weights.shape[0],
        ),
        _scaled(fc1_expert_weights, quant_scales[0], False),
        _scaled(fc2_expert_weights, quant_scales[1], False),
        int(activation_type),
        lambda hidden, e: _with_scales_of_rows(hidden, None),
        output_dtype,
        gate=(swiglu_alpha, swiglu_beta, swiglu_limit),
    )


def _cutlass_fused_moe_tensor_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    ep_rank: int = 0,
    activation_type: int = 3,
) -> torch.Tensor:
    """As cutlass_fused_moe, with operands in 8 bits and factors of whole tensors.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    experts = fc1_expert_weights.shape[0]
    factors = [factor.reshape(-1).expand(experts).double() for factor in quant_scales[:3]]

    def between(hidden: torch.Tensor, e: int) -> torch.Tensor:
        scaled = (hidden * factors[1][e]).float().clamp(-448.0, 448.0)
        return scaled.to(torch.float8_e4m3fn)

    return _mixture(
        input.double(),
        (token_selected_experts, token_final_scales, ep_rank * experts),
        fc1_expert_weights.double() * factors[0][:, None, None],
        fc2_expert_weights.double() * factors[2][:, None, None],
        int(activation_type),
        between,
        output_dtype,
        gate=(swiglu_alpha, swiglu_beta, swiglu_limit),
    )


def _cutlass_fused_moe_four_bit_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
) -> torch.Tensor:
    """As cutlass_fused_moe, with weights that are codes of 4 bits times factors of groups.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification 1.0", 2023.
    """
    return _cutlass_fused_moe_reference(
        input,
        token_selected_experts,
        token_final_scales,
        values_of(fc1_expert_weights, quant_scales, 0),
        values_of(fc2_expert_weights, quant_scales, 1),
        output_dtype,
        fc1_expert_biases,
        fc2_expert_biases,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        tp_rank,
        ep_rank,
        activation_type,
    )


_REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "none": _cutlass_fused_moe_reference,
    "block": _cutlass_fused_moe_block_reference,
    "tensor": _cutlass_fused_moe_tensor_reference,
    **dict.fromkeys(FOUR_BIT, _cutlass_fused_moe_four_bit_reference),
}
_KEEPS_HALF = ("none", *FOUR_BIT)  # weights alone have codes, if any
_FACTORS = ("fc1_factor", "hidden_factor", "fc2_factor", "input_factor")
_PLAIN = (ActivationType.Relu2, ActivationType.Identity)
_GATED = (ActivationType.Swiglu, ActivationType.SwigluBias, ActivationType.Geglu)


def _scale_inputs(scheme: str) -> dict[str, Value]:
    """The elements of `quant_scales`."""
    if scheme == "none":
        return {}
    if scheme in FOUR_BIT:
        return four_bit_scales(scheme)
    if scheme == "tensor":
        texts = (
            "sums of the first product",
            "what becomes 8 bits",
            "sums of the second product",
            "the input, which the first one has in it",
        )
        return {
            name: Tensor(
                [f"{name}s"],
                param="quant_scales",
                tuple_idx=i,
                dtype="float32",
                ranks=(0, 1),
                description=f"Factors of {text}.",
            )
            for i, (name, text) in enumerate(zip(_FACTORS, texts, strict=True))
        }
    shapes = ("column_blocks", "hidden_blocks"), ("hidden_blocks", "blocks")
    return {
        f"fc{i + 1}_scale": Tensor(
            ["experts", rows, columns],
            param="quant_scales",
            tuple_idx=i,
            dtype="float32",
            description="Factors of 128 by 128 elements.",
        )
        for i, (rows, columns) in enumerate(shapes)
    }


def _axes(scheme: str) -> dict[str, Axis]:
    axes: dict[str, Axis] = {
        "tokens": Var("Tokens."),
        "top_k": Const("Choices of a token.", abbrev="k"),
        "experts": Const("Experts that are here.", abbrev="e"),
        "hidden": Const("Elements of a token.", abbrev="h"),
        "intermediate": Const("Elements of a row between the products.", abbrev="i"),
        "columns": Const("Columns of the first product.", abbrev=""),
    }
    axes["bytes"] = Var("Elements of the workspace.")
    if scheme == "block":
        for name, text in (
            ("column_blocks", "columns"),
            ("hidden_blocks", "a token"),
            ("blocks", "a row between the products"),
        ):
            axes[name] = Const(f"Blocks of 128 elements of {text}.", abbrev="")
    if scheme == "tensor":
        for name in _FACTORS:
            axes[f"{name}s"] = Const("1, or a factor for each expert.", abbrev="")
    if scheme in FOUR_BIT:
        axes |= four_bit_axes(scheme)
    return axes


def _inputs(scheme: str, gated: bool) -> dict[str, Value]:
    code = "float8_e4m3fn"
    half: dict[str, Any] = {"dtypes": _HALF} if scheme != "tensor" else {"dtype": code}
    weight: dict[str, Any] = {"dtype_from": "input"} if scheme == "none" else {"dtype": code}
    weights: dict[str, Value] = {
        "fc1_expert_weights": Tensor(["experts", "columns", "hidden"], **weight),
        "fc2_expert_weights": Tensor(["experts", "hidden", "intermediate"], **weight),
    }
    inputs: dict[str, Value] = {
        "input": Tensor(["tokens", "hidden"], layout="rows", description="Tokens.", **half),
        "token_selected_experts": Tensor(
            ["tokens", "top_k"],
            dtypes=("int32", "int64"),
            layout="contiguous",
            description="Experts of each token.",
        ),
        "token_final_scales": Tensor(
            ["tokens", "top_k"],
            dtype="float32",
            layout="contiguous",
            description="Their weights.",
        ),
        **(four_bit_weights() if scheme in FOUR_BIT else weights),
        **_scale_inputs(scheme),
    }
    if scheme in _KEEPS_HALF:
        for name, axis in (("fc1_expert_biases", "columns"), ("fc2_expert_biases", "hidden")):
            inputs[name] = Tensor(["experts", axis], dtype_from="input", optional=True)
    if gated:
        for name in ("alpha", "beta", "limit"):
            inputs[f"swiglu_{name}"] = Tensor(
                ["experts"],
                dtype="float32",
                optional=True,
                description="Constant of the gated activation.",
            )
    inputs["workspace_buffer"] = Tensor(["bytes"], optional=True, description="Memory.")
    for name, least, text in (
        ("tp_size", 1, "Parts of the intermediate size."),
        ("tp_rank", 0, "Number of the part that is here; 0 adds the second bias."),
        ("ep_size", 1, "Parts of the experts."),
        ("ep_rank", 0, "Number of the part that is here."),
        ("tune_max_num_tokens", 1, "Tokens of a tuner's largest batch."),
    ):
        inputs[name] = Scalar("int32", minimum=least, description=text)
    return inputs


def _init(arguments: dict[str, Any], scheme: str, gated: bool) -> dict[str, Any]:
    """Weights of three experts of six, which are chosen at random."""
    device = arguments["input"].device
    generator = torch.Generator().manual_seed(5)
    experts, hidden, intermediate, tokens, top_k = 3, 256, 128, 9, 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(device)

    dtype = arguments["input"].dtype
    if dtype == torch.float32:  # which no kernel takes
        dtype = torch.bfloat16
    weight = dtype if scheme == "none" else torch.float8_e4m3fn
    columns = intermediate * (2 if gated else 1)
    shapes = (experts, columns, hidden), (experts, hidden, intermediate)
    chosen = torch.randint(0, 6, (tokens, top_k), generator=generator, dtype=torch.int32)
    factor = 1.0 if scheme == "none" else 16.0
    scales: dict[str, list[torch.Tensor]] = {
        "none": [],
        "block": [
            uniform(experts, columns // 128, hidden // 128) / 16,
            uniform(experts, hidden // 128, intermediate // 128) / 16,
        ],
        "tensor": [uniform(experts) / 16, uniform(1) * 32, uniform(experts) / 512, uniform(1)],
    }
    if scheme in FOUR_BIT:
        weights, scales[scheme] = four_bit_example(scheme, shapes, dtype, generator)
        scales[scheme] = [scale.to(device) for scale in scales[scheme]]
    else:
        weights = [(normal(*shape) * factor / shape[2] ** 0.5).to(weight) for shape in shapes]
    return {
        **arguments,
        "input": normal(tokens, hidden).to(device, dtype),
        "token_selected_experts": chosen.to(device),
        "token_final_scales": uniform(tokens, top_k),
        "fc1_expert_weights": weights[0].to(device),
        "fc2_expert_weights": weights[1].to(device),
        "fc1_expert_biases": None,
        "fc2_expert_biases": None,
        **{f"swiglu_{name}": None for name in ("alpha", "beta", "limit")},
        "output_dtype": dtype if scheme in _KEEPS_HALF else torch.bfloat16,
        "quant_scales": scales[scheme],
        "activation_type": (_GATED if gated else _PLAIN)[0],
        "use_deepseek_fp8_block_scale": scheme == "block",
        "use_w4_group_scaling": scheme in FOUR_BIT,
        "ep_rank": 1,
        "ep_size": 2,
        "tp_size": 1,
        "tp_rank": 0,
        "tune_max_num_tokens": 8192,
        "workspace_buffer": None,
    }


def _check(reference_outputs: Any, actual_outputs: Any) -> bool:
    """A code that is rounded the other way moves a token's results by more than their rounding.

    With one token a few such codes, which noise of 1e-3 makes, move up to a tenth of the results.
    """
    tolerances = {"rtol": 0.05, "atol": 0.05, "max_mismatch_pct": 10.0, "min_cos_sim": 0.98}
    return default_check(reference_outputs, actual_outputs, **tolerances)


@functools.cache
def _template(scheme: str, gated: bool) -> TraceTemplate:
    activations = _GATED if gated else _PLAIN
    suffix = {"none": "", "block": "_fp8_block", "tensor": "_fp8"}.get(scheme, f"_{scheme}")
    constraints = ["columns == 2 * intermediate" if gated else "columns == intermediate"]
    constraints += ["tp_rank < tp_size", "ep_rank < ep_size"]
    if scheme == "block":
        constraints += ["hidden_blocks * 128 == hidden", "blocks * 128 == intermediate"]
    if scheme in FOUR_BIT:
        constraints += four_bit_constraints(scheme)
    return TraceTemplate(
        "moe",
        axes=_axes(scheme),
        inputs=_inputs(scheme, gated),
        outputs={
            "output": Tensor(
                ["tokens", "hidden"], dtype_from_scalar="output_dtype", dtypes=_HALF, param="output"
            )
        },
        name_prefix=f"cutlass_fused_moe{suffix}" + ("" if gated else "_plain"),
        reference=_REFERENCES[scheme],
        check=default_check if scheme in _KEEPS_HALF else _check,
        init=functools.partial(_init, scheme=scheme, gated=gated),
        constraints=constraints,
        hints=("enable_pdl", "enable_alltoall", "swizzled_input_sf", "use_fused_finalize"),
        options={
            "activation_type": (*activations, *map(int, activations)),
            "use_deepseek_fp8_block_scale": (scheme == "block",),
            "use_w4_group_scaling": (scheme in FOUR_BIT,),
            "backend": ("cutlass", "auto"),
            "cluster_size": (1,),
            "cluster_rank": (0,),
            **({"quant_scales": (None,)} if scheme == "none" else {}),
            **{name: (False,) for name in _FALSE},
            **{name: (None,) for name in _absent(scheme, gated)},
        },
        gather={"none": _without_empty_scales, "mxfp4": with_bytes_of_scales}.get(scheme),
        nest=list,  # the public function returns a list of one tensor
        description="Two products with the experts of each token, an activation between them, and "
        "the weighted sum of a token's results.",
    )


def _without_empty_scales(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments; no list of scales is the same as an empty one."""
    result = {name: arguments.get(name) for name in arguments}
    return {**result, "quant_scales": result.get("quant_scales") or None}


def _absent(scheme: str, gated: bool) -> tuple[str, ...]:
    """Arguments that have no kernel, or no meaning, with these weights."""
    names: tuple[str, ...] = ("input_sf", "profile_ids", "clamped_relu2_limit")
    names += ("situ_beta", "situ_linear_beta")
    if scheme not in _KEEPS_HALF:
        names += ("fc1_expert_biases", "fc2_expert_biases")
    if not gated:
        names += ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
    return names


_FALSE = (
    "use_mxfp8_act_scaling",
    "min_latency_mode",
    "use_packed_weights",
    "use_wfp4afp8_humming",
)


def cutlass_fused_moe_trace(**arguments: Any) -> TraceTemplate:
    """The template of a call's quantisation and activation."""
    scheme = "none"
    if arguments.get("use_w4_group_scaling") is True:
        scheme = format_of(with_bytes_of_scales(arguments).get("quant_scales"))
    elif arguments.get("use_deepseek_fp8_block_scale"):
        scheme = "block"
    elif getattr(arguments.get("fc1_expert_weights"), "dtype", None) == torch.float8_e4m3fn:
        scheme = "tensor"
    return _template(scheme, arguments.get("activation_type", 3) not in map(int, _PLAIN))


cutlass_fused_moe_trace.templates = [  # type: ignore[attr-defined]
    _template(scheme, gated) for scheme in _REFERENCES for gated in (True, False)
]
