"""Template and reference of the concatenation of latent attention's keys."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate


def _concat_mla_k_reference(
    k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
) -> torch.Tensor:
    """k[t, h] = (k_nope[t, h], k_rope[t, 0]).

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, equation (18).
    """
    return torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1)], -1)


_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")

concat_mla_k_trace = TraceTemplate(
    op_type="concat",
    name_prefix="concat_mla_k",
    description="Keys of multi-head latent attention: each head's own part and the shared one.",
    axes={
        "num_tokens": Var("Tokens."),
        "num_heads": Const("Heads.", abbrev="h"),
        "nope_dim": Const("Elements of a head's own part.", abbrev="n"),
        "rope_dim": Const("Elements of the part that all heads share.", abbrev="r"),
        "one": Const("Heads of the shared part.", abbrev="", value=1),
        "head_dim": Const(
            "nope_dim + rope_dim.", abbrev="", derive=lambda v: v["nope_dim"] + v["rope_dim"]
        ),
    },
    inputs={
        "k_nope": Tensor(["num_tokens", "num_heads", "nope_dim"], dtypes=_DTYPES, layout="rows"),
        "k_rope": Tensor(["num_tokens", "one", "rope_dim"], dtype_from="k_nope", layout="rows"),
    },
    outputs={
        "k": Tensor(
            ["num_tokens", "num_heads", "head_dim"],
            param="k",
            dtype_from="k_nope",
            layout="rows",
        )
    },
    constraints=["one == 1"],
    options={"backend": ("default",)},
    tags=["status:verified"],
    reference=_concat_mla_k_reference,
    init=lambda arguments: {
        **arguments,
        "k_rope": arguments["k_rope"][:, :1].contiguous(),
        "k": arguments["k"].new_empty(
            *arguments["k_nope"].shape[:2],
            arguments["k_nope"].shape[2] + arguments["k_rope"].shape[2],
        ),
    },
)


def _quant_reference(
    kv_nope: torch.Tensor, k_pe: torch.Tensor, nope_dim: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """key[t, h] = (kv_nope[t, h, :nope_dim], k_pe[t]); value[t, h] = kv_nope[t, h, nope_dim:].

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, equation (18).
    """
    tokens, heads = kv_nope.shape[:2]
    rope = k_pe.reshape(tokens, 1, -1).expand(-1, heads, -1)
    key = torch.cat([kv_nope[..., :nope_dim], rope], -1)
    return key.clamp(-448, 448), kv_nope[..., nope_dim:].clamp(-448, 448)


def _quant_init(arguments: dict[str, Any]) -> dict[str, Any]:
    """Heads of 128 and 128 columns."""
    wide = arguments["kv_nope"]
    generator = torch.Generator().manual_seed(0)
    kv_nope = torch.randn(*wide.shape[:2], 256, generator=generator).to(wide.device, wide.dtype)
    return {**arguments, "kv_nope": kv_nope, "nope_dim": 128}


concat_mla_kv_quant_fp8_trace = TraceTemplate(
    op_type="concat",
    name_prefix="concat_mla_kv_quant_fp8",
    description="Keys and values of multi-head latent attention, rounded to e4m3.",
    axes={
        "num_tokens": Var("Tokens."),
        "num_heads": Const("Heads.", abbrev="h"),
        "kv_dim": Const("Elements of a head's own part of a key and of its value.", abbrev="kv"),
        "rope_dim": Const("Elements of the part that all heads share.", abbrev="r"),
        "key_dim": Var("nope_dim + rope_dim.", from_values=True),
        "v_dim": Var("kv_dim - nope_dim.", from_values=True),
    },
    inputs={
        "kv_nope": Tensor(["num_tokens", "num_heads", "kv_dim"], dtypes=_DTYPES[:3]),
        "k_pe": Tensor(["num_tokens", "rope_dim"], ranks=(2, 3), dtype_from="kv_nope"),
        "nope_dim": Scalar("int32", minimum=0, description="Columns that belong to keys."),
    },
    outputs={
        "key": Tensor(["num_tokens", "num_heads", "key_dim"], param="key", dtype="float8_e4m3fn"),
        "value": Tensor(["num_tokens", "num_heads", "v_dim"], param="value", dtype="float8_e4m3fn"),
    },
    options={"backend": ("auto",)},
    tags=["status:verified"],
    reference=_quant_reference,
    init=_quant_init,
)
