"""The scores of `flashinfer.attn_scores` under the names and argument orders of DeepGEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ._common import checks
from ._compile.traced import graph_operator
from ._indexer.launch import paged_logits, schedule_of

_NAMES = {
    "keys": "kv_cache",
    "seq_lens": "context_lens",
    "block_tables": "block_table",
    "max_length": "max_context_len",
}


def _schedule_like(arguments: Mapping[str, Any]) -> torch.Tensor:
    lengths, out = arguments["context_lens"], arguments["out"]
    shape = (arguments["num_sms"] + 1, 2)
    return torch.empty(shape, dtype=torch.int32, device=lengths.device) if out is None else out


def _logits_like(arguments: Mapping[str, Any]) -> torch.Tensor:
    q = arguments["q"]
    shape = (q.shape[0] * q.shape[1], arguments["max_context_len"])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


@graph_operator("out", results=_schedule_like, in_graphs=True)
def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor,
    block_kv: int,
    num_sms: int,
    indices: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """How `num_sms` CTAs share the tokens of all requests.

    Parameters
    ----------
    context_lens : torch.Tensor
        ``[batch_size]`` int32 on the GPU: tokens of each request.
    block_kv : int
        Tokens of a page; the result does not depend on it.
    num_sms : int
        CTAs, usually one for each SM.
    indices : torch.Tensor, optional
        Not supported: None.
    out : torch.Tensor, optional
        Result, ``[num_sms + 1, 2]`` int32, contiguous.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    checks.count("block_kv", block_kv)
    if indices is not None:
        raise ValueError("`indices` must be None: not supported")
    return schedule_of(context_lens, checks.count("num_sms", num_sms), out)


@graph_operator(results=_logits_like, in_graphs=True)
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`flashinfer.fp8_paged_mqa_logits` in another order of arguments.

    Parameters
    ----------
    q, kv_cache, weights, context_lens, block_table, max_context_len
        As there `q`, `kv_fused`, `weights`, `seq_lens`, `block_tables` and `max_seq_len`.
    schedule_meta : torch.Tensor
        Result of `get_paged_mqa_logits_metadata` for `context_lens`.
    clean_logits : bool
        Give tokens that a query does not see minus infinity.
    indices : torch.Tensor, optional
        Not supported: None.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed there.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.
    """
    checks.tensor("q", q, 4)
    checks.flag("clean_logits", clean_logits)
    if indices is not None:
        raise ValueError("`indices` must be None: not supported")
    columns = checks.count("max_context_len", max_context_len, 0)
    shape = (q.shape[0] * q.shape[1], columns)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    if clean_logits:
        out.fill_(float("-inf"))
    sequences = (block_table, context_lens, columns, schedule_meta)
    paged_logits(q, kv_cache, weights, *sequences, out, _NAMES)
    return out
