"""Calls that plan and run at once, in the form of their templates: the plan says what is computed.

The plan is made without a kernel and with lengths on the host, and read as that of a wrapper is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._common.cache_layout import split_cache
from ...jit.attention.config import FLOAT16, PACKED_FLOAT4
from ...trace.arguments import with_defaults
from ...trace.templates.attention_arguments import gather_paged
from ..checks import resolve_dtype
from ..plan.no_kernel import plans_without_kernels
from .plan_block_tables import PlannedCall

Arguments = Mapping[str, Any]


def gather_planned(
    plan: Callable[[dict[str, Any]], PlannedCall],
    function: Callable[..., Any],
    call: Arguments,
    read: Callable[[Arguments], dict[str, Any]] = gather_paged,
) -> dict[str, Any]:
    """The inputs of the template for a call of `function`, which `plan` plans.

    `read` reads the arguments of a planned wrapper's `run`.
    """
    with plans_without_kernels():
        planned = plan(with_defaults(function, call))
    return read({"self": planned.wrapper, **planned.run})


def predict_block_tables(call: Arguments) -> dict[str, Any]:
    """Queries, columns and dtype of the result of a call with block tables."""
    query, out, dtype = call["query"], call.get("out"), call.get("out_dtype")
    if out is not None:
        return {"q": query, "head_dim_vo": out.shape[-1], "o_dtype": out.dtype}
    k, v = split_cache(call["kv_cache"], "kv_cache")
    columns = (k if v is None else v).shape[-1] * (2 if k.dtype == PACKED_FLOAT4 else 1)
    o_dtype = query.dtype if dtype is None else resolve_dtype("out_dtype", dtype)
    return {"q": query, "head_dim_vo": columns, "o_dtype": o_dtype}


def predict_ragged(call: Arguments) -> dict[str, Any]:
    """Queries, columns and dtype of the result of a call with ragged keys and values."""
    query, out = call["query"], call.get("out")
    like = query if out is None else out
    o_dtype = like.dtype if like.dtype in FLOAT16 else torch.bfloat16
    return {"q": query, "head_dim_vo": call["value"].shape[-1], "o_dtype": o_dtype}
