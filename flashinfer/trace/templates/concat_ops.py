"""Template and reference of the concatenation of latent attention's keys."""

from __future__ import annotations

import torch

from ..specs import Const, Tensor, Var
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
