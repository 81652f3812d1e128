"""Templates and references of the mixture of experts in 8 bits, written in CuTe-DSL."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate

_HALF = ("bfloat16", "float16")
_FLOATS = (*_HALF, "float32")


def _moe_activation_reference(
    input: torch.Tensor, masked_m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = silu(gate) up; per 128 values scale = max(max |y|, 1e-10) / 448 and out = y / scale.

    Gate is the first half of a row. NaN for the rows of a group beyond its count.
    Source: N. Shazeer, "GLU Variants Improve Transformer", 2020; scales of blocks as in
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    gate, up = input.double().chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    groups, rows, width = y.shape
    blocks = y.view(groups, rows, width // 128, 128)
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-10) / 448
    codes = (blocks / scale[..., None]).view(groups, rows, width)
    beyond = torch.arange(rows, device=y.device) >= masked_m[:, None]
    codes[beyond], scale[beyond] = float("nan"), float("nan")
    return codes, scale.permute(2, 0, 1).reshape(width // 128, groups * rows).contiguous()


def _moe_finalize_reference(
    rows: torch.Tensor, entry_row: torch.Tensor, token_final_scales: torch.Tensor
) -> torch.Tensor:
    """out[t] = sum over j of token_final_scales[t, j] rows[entry_row[t, j]], of rows that exist.

    Source: N. Shazeer et al., "Outrageously Large Neural Networks: the Sparsely-Gated
    Mixture-of-Experts Layer", 2017.
    """
    there = (entry_row >= 0) & (entry_row < rows.shape[0])
    chosen = rows.double()[torch.where(there, entry_row, 0).long()]
    weights = torch.where(there, token_final_scales.double(), 0.0)
    return torch.where(there[..., None], chosen * weights[..., None], 0.0).sum(dim=1)


def _moe_grouped_gemm_cutedsl_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
) -> torch.Tensor:
    """out[g] = a[g] b[g]^T with scales of blocks of 128; NaN for rows beyond the count.

    Source: the scaling of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    groups, rows, k = a.shape
    n = b.shape[1]
    left_scale = a_scale.double().view(k // 128, groups, rows).permute(1, 2, 0)
    left = a.double() * left_scale.repeat_interleave(128, dim=2)
    right_scale = b_scale.double().repeat_interleave(128, dim=1)[:, :n]
    right = b.double() * right_scale.repeat_interleave(128, dim=2)
    result = left @ right.transpose(1, 2)
    beyond = torch.arange(rows, device=a.device) >= masked_m[:, None]
    result[beyond] = float("nan")
    return result


_GROUPS = Const("Experts.", abbrev="e")
_ALL_ROWS = Var("Rows of all experts together, valid or not.")


def _activation_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device, generator = arguments["input"].device, torch.Generator().manual_seed(0)
    rows = torch.randn(3, 5, 512, generator=generator).bfloat16().to(device)
    counts = torch.full((3,), 5, dtype=torch.int32, device=device)
    return {"input": rows, "masked_m": counts}


moe_activation_trace = TraceTemplate(
    op_type="moe_activation",
    name_prefix="moe_activation",
    description="SwiGLU of the valid rows of each expert, quantised to e4m3 in blocks of 128.",
    axes={
        "groups": _GROUPS,
        "m": Var("Rows that an expert has room for."),
        "columns": Const("Gates, then values.", abbrev="c"),
        "width": Const("Values of a result row.", abbrev="", derive=lambda s: s["columns"] // 2),
        "blocks": Const("Scales of a row.", abbrev="", derive=lambda s: s["columns"] // 256),
        "rows": Var("Rows of all experts.", from_values=True),
    },
    inputs={
        "input": Tensor(["groups", "m", "columns"], dtypes=_HALF),
        "masked_m": Tensor(["groups"], dtype="int32", description="Valid rows of each expert."),
    },
    outputs={
        "out": Tensor(["groups", "m", "width"], dtype="float8_e4m3fn", param="out"),
        "out_scale": Tensor(["blocks", "rows"], dtype="float32", param="out_scale"),
    },
    reference=_moe_activation_reference,
    init=_activation_init,
    hints=["enable_pdl"],
)


def _finalize_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device, generator = arguments["rows"].device, torch.Generator().manual_seed(0)
    rows = torch.randn(12, 256, generator=generator).bfloat16().to(device)
    entries = torch.randperm(12, generator=generator).int().view(6, 2).to(device)
    entries[0, 1], entries[1, 0] = -1, 12
    weights = torch.rand(6, 2, generator=generator).to(device)
    return {"rows": rows, "entry_row": entries, "token_final_scales": weights}


moe_finalize_trace = TraceTemplate(
    op_type="moe_finalize",
    name_prefix="moe_finalize",
    description="Weighted sum of each token's rows from its experts.",
    axes={
        "entries": Var("Rows of experts."),
        "hidden": Const("Elements of a row.", abbrev="h"),
        "tokens": Var("Tokens."),
        "top_k": Const("Experts of a token.", abbrev="k"),
    },
    inputs={
        "rows": Tensor(["entries", "hidden"], dtypes=_HALF),
        "entry_row": Tensor(["tokens", "top_k"], dtype="int32", description="Rows; others: none."),
        "token_final_scales": Tensor(["tokens", "top_k"], dtype="float32"),
    },
    outputs={"out": Tensor(["tokens", "hidden"], dtype_from="rows", dtypes=_FLOATS, param="out")},
    reference=_moe_finalize_reference,
    init=_finalize_init,
    hints=["enable_pdl"],
)


def _gemm_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device, generator = arguments["a"].device, torch.Generator().manual_seed(0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn).to(device)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).add(0.5).to(device)

    counts = torch.full((3,), 130, dtype=torch.int32, device=device)
    return {
        "a": codes(3, 130, 256),
        "b": codes(3, 128, 256),
        "a_scale": scales(2, 390),
        "b_scale": scales(3, 1, 2),
        "masked_m": counts,
    }


moe_grouped_gemm_cutedsl_trace = TraceTemplate(
    op_type="gemm_fp8",
    name_prefix="moe_grouped_gemm_cutedsl",
    description="Products of the valid rows of each expert with its weights, 8 bits.",
    axes={
        "groups": _GROUPS,
        "m": Var("Rows that an expert has room for."),
        "n": Const("Columns of the result.", abbrev="n"),
        "k": Const("Terms of each sum.", abbrev="k"),
        "k_blocks": Const("Scales along k.", abbrev=""),
        "n_blocks": Const("Scales along n.", abbrev=""),
        "rows": _ALL_ROWS,
    },
    inputs={
        "a": Tensor(["groups", "m", "k"], dtype="float8_e4m3fn"),
        "b": Tensor(["groups", "n", "k"], dtype="float8_e4m3fn"),
        "a_scale": Tensor(["k_blocks", "rows"], dtype="float32"),
        "b_scale": Tensor(["groups", "n_blocks", "k_blocks"], dtype="float32"),
        "masked_m": Tensor(["groups"], dtype="int32", description="Valid rows of each expert."),
        "expected_m": Scalar(
            "int32", optional=True, description="Rows that an expert typically has: a hint."
        ),
    },
    outputs={
        "out": Tensor(["groups", "m", "n"], dtype="bfloat16", dtypes=_FLOATS, param="out"),
    },
    reference=_moe_grouped_gemm_cutedsl_reference,
    init=_gemm_init,
    hints=["enable_pdl"],
)
