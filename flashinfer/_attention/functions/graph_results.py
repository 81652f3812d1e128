"""What attention functions that plan and run in one call return, for ``torch.compile``.

Each takes the arguments by name, whose tensors may have no values, and gives tensors like results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...jit.attention.config import FLOAT16
from ..checks import resolve_dtype

Arguments = Mapping[str, Any]


def _new(like: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


def _dtype(arguments: Arguments, default: torch.dtype, name: str = "out_dtype") -> torch.dtype:
    given = arguments.get(name)
    return default if given is None else resolve_dtype(name, given)


def fmha_results(arguments: Arguments) -> torch.Tensor:
    """The result of ``trtllm_fmha_v2_prefill``."""
    if arguments["out"] is not None:
        return arguments["out"]
    qkv = arguments["qkv"]
    tensors = (qkv,) if isinstance(qkv, torch.Tensor) else tuple(qkv)
    query, last = tensors[0], tensors[-1]
    rows, heads = query.shape[0], query.shape[-2]
    default = query.dtype if query.dtype in FLOAT16 else torch.bfloat16
    return _new(query, (rows, heads, last.shape[-1]), _dtype(arguments, default))


def cudnn_prefill_results(arguments: Arguments) -> Any:
    """Results of ``cudnn_batch_prefill_with_kv_cache``."""
    q, out, lse = arguments["q"], arguments["out"], arguments["lse"]
    if out is None:
        dtype = _dtype(arguments, q.dtype, "o_data_type")
        out = _new(q, (*q.shape[:-1], arguments["v_cache"].shape[-1]), dtype)
    if not arguments["return_lse"]:
        return out, None
    if lse is None:
        rows: tuple[Any, ...] = (q.shape[0],)
        if arguments["batch_offsets_stats"] is None:
            rows = (_requests(arguments), arguments["max_token_per_sequence"])
        lse = _new(q, (*rows, q.shape[1]), torch.float32)
    return out, lse


def _requests(arguments: Arguments) -> Any:
    lengths = arguments["actual_seq_lens_q"]
    return len(arguments["batch_offsets_q"]) - 1 if lengths is None else lengths.numel()


def jit_module_results(arguments: Arguments) -> Any:
    """Results of ``single_*_with_kv_cache_with_jit_module``."""
    q, config = arguments["q"], arguments["jit_module"].config
    out = _new(q, (*q.shape[:-1], arguments["v"].shape[-1]), config.dtype_o)
    return (out, _new(q, q.shape[:-1], torch.float32)) if arguments["return_lse"] else out
