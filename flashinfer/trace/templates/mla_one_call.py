"""Templates of latent attention that is planned and run in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..template import TraceTemplate
from .attention import by_lse
from .mla import mla_template

Arguments = Mapping[str, Any]
_FLOAT16 = (torch.float16, torch.bfloat16)


Gather = Callable[[Arguments], dict[str, Any]]


def mla_one_call_template(name: str, gather: Gather, *, lse: bool) -> TraceTemplate:
    """The template of a function; `gather` reads its arguments as the function does."""
    return mla_template(
        lse=lse,
        name=name,
        ranks=(3, 4),
        gather=gather,
        predict=_predict,
        init=lambda arguments: {**_draw(arguments), **({"return_lse": True} if lse else {})},
        scratch=("workspace_buffer",),
    )


def mla_one_call_trace(name: str, gather: Gather) -> Callable[..., TraceTemplate]:
    """The templates of a function that may return log-sum-exps."""
    return by_lse(mla_one_call_template, name=name, gather=gather)


def _predict(call: Arguments) -> dict[str, Any]:
    """A tensor of the shape of the result, and its dtype."""
    query, out = call["query"], call["out"]
    result = query.new_empty((*query.shape[:-1], call["kv_lora_rank"]))
    dtype = query.dtype if query.dtype in _FLOAT16 else torch.bfloat16
    return {"q_nope": result, "o_dtype": dtype if out is None else out.dtype}


def _draw(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three requests over pages of four tokens, two queries each."""
    generator = torch.Generator().manual_seed(7)
    device, dtype = arguments["q_nope"].device, arguments["q_nope"].dtype
    half = dtype if dtype in _FLOAT16 else torch.float16

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, half)

    table = torch.tensor([[5, 2], [3, 0], [6, 1]], dtype=torch.int32, device=device)
    return {
        "query": values(3, 2, 6, 320),
        "kv_cache": values(7, 4, 320),
        "workspace_buffer": torch.empty(64 << 20, dtype=torch.uint8, device=device),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,
        "block_tables": table,
        "seq_lens": torch.tensor([7, 4, 8], dtype=torch.int32, device=device),
        "max_seq_len": 8,
        "bmm1_scale": 0.1,
    }
