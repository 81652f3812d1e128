"""``trtllm_fmha_v2_prefill``: prefill attention on packed, separate or paged keys and values.

The kernels are those of the prefill wrappers, planned in the call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._common.checks import choice
from ..._common.checks import tensor as check_tensor
from ..._compile.traced import graph_operator
from ..._instrument.decorator import flashinfer_api
from ..checks import refuse, resolve_dtype
from .graph_results import fmha_results
from .plan_block_tables import attend_block_tables
from .ragged import trtllm_ragged_attention_deepseek

_PAGED = {"Q_PAGED_KV_NHD": "NHD", "Q_PAGED_KV_HND": "HND"}
_TENSORS = {
    "PACKED_QKV": 1,
    "CONTIGUOUS_Q_KV": 2,
    "SEPARATE_Q_K_V": 3,
    "Q_PAGED_KV_NHD": 2,
    "Q_PAGED_KV_HND": 2,
}
_MASKS = ("causal", "padding", "sliding_window")


@graph_operator("workspace_buffer", "out", results=fmha_results)
@flashinfer_api
def trtllm_fmha_v2_prefill(
    qkv: torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    sinks: list[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> torch.Tensor:
    r"""Prefill attention of a batch, planned and run in one call.

    Parameters
    ----------
    qkv : torch.Tensor or tuple of torch.Tensor
        The tensors that `input_layout` names, with T query tokens and S tokens of keys in all:

        - ``"PACKED_QKV"``: ``[T, 3, num_heads, head_dim]``;
        - ``"CONTIGUOUS_Q_KV"``: queries ``[T, num_heads, head_dim]`` and ``[S, 2, num_kv_heads,
          head_dim]``;
        - ``"SEPARATE_Q_K_V"``: queries, ``[S, num_kv_heads, head_dim]`` keys, and values;
        - ``"Q_PAGED_KV_NHD"``: queries and ``[num_pages, 2, page_size, num_kv_heads, head_dim]``;
        - ``"Q_PAGED_KV_HND"``: queries and ``[num_pages, 2, num_kv_heads, page_size, head_dim]``.

        Dtypes are those of the prefill wrappers.
    input_layout : str
        One of these five.
    workspace_buffer : torch.Tensor
        For the plan and partial results, as the wrappers'.
    seq_lens : torch.Tensor
        ``[batch_size]`` int32: tokens of keys of each request.
    max_q_len, max_kv_len : int
        At least the largest numbers of query tokens and of tokens of keys.
    bmm1_scale, bmm2_scale : float
        Factors of the logits and of the output.
    batch_size : int
        Requests.
    cum_seq_lens_q, cum_seq_lens_kv : torch.Tensor
        ``[batch_size + 1]`` int32: rows of each request. Pages are found by `seq_lens`.
    block_tables : torch.Tensor, optional
        ``[batch_size, max_pages]`` int32: page numbers, for paged layouts.
    out, out_dtype : optional
        Where the output goes, ``[T, num_heads, head_dim]``, and its dtype: by default that of
        `out`, else of the queries (bfloat16 for 8-bit ones).
    sinks : list of torch.Tensor, optional
        One ``[num_heads]`` float32, for paged layouts: a logit per head without a value.
    mask_mode : str
        ``"causal"``; ``"padding"``, where a query sees all keys of its request; or
        ``"sliding_window"``, causal with `window_left`.
    window_left : int
        How many keys before its own position a query sees; -1: all.
    pos_encoding_mode, logits_soft_cap_scale, chunked_attention_size, save_softmax_stats, \
skip_softmax_threshold_scale_factor
        Must be left out: there is no kernel for them.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or lengths are on the GPU while a graph is captured.
    """
    refuse(
        "there is no kernel for it",
        pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode,
        logits_soft_cap_scale=logits_soft_cap_scale or None,
        chunked_attention_size=chunked_attention_size or None,
        save_softmax_stats=save_softmax_stats,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor or None,
    )
    choice("input_layout", input_layout, tuple(_TENSORS))
    choice("mask_mode", mask_mode, _MASKS)
    if (window_left >= 0) != (mask_mode == "sliding_window"):
        raise ValueError(
            "`window_left` must be 0 or more with `mask_mode` 'sliding_window' and -1 with others, "
            f"got {window_left} with {mask_mode!r}"
        )
    tensors = _tensors_of(qkv, input_layout)
    dtype = None if out_dtype is None else resolve_dtype("out_dtype", out_dtype)
    if out is not None and dtype not in (None, check_tensor("out", out).dtype):
        raise ValueError(f"`out_dtype` must be that of `out`, {out.dtype}, got {out_dtype}")
    shared = (workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale)
    is_causal = mask_mode != "padding"
    if input_layout in _PAGED:
        return _attend_pages(
            tensors,
            *shared,
            block_tables,
            cum_seq_lens_q,
            is_causal,
            window_left,
            out,
            dtype,
            sinks,
            _PAGED[input_layout],
        )
    refuse("the keys and values are not in pages", block_tables=block_tables)
    refuse("attention on keys and values that are not in pages has no sinks", sinks=sinks)
    q, k, v = _separate(tensors)
    if out is None and dtype is not None:
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=dtype, device=q.device)
    return trtllm_ragged_attention_deepseek(  # type: ignore[return-value]
        q,
        k,
        v,
        *shared,
        1.0,
        batch_size,
        window_left,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        None,
        is_causal,
        False,
        out=out,
        backend="auto",
    )


def _attend_pages(
    tensors: tuple[torch.Tensor, ...],
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    block_tables: torch.Tensor | None,
    cum_seq_lens_q: torch.Tensor,
    is_causal: bool,
    window_left: int,
    out: torch.Tensor | None,
    out_dtype: Any,
    sinks: Any,
    kv_layout: str,
) -> torch.Tensor:
    if block_tables is None:
        raise ValueError("`block_tables` must be given for keys and values in pages, got None")
    result: torch.Tensor = attend_block_tables(
        tensors[0],
        tensors[1],
        workspace_buffer,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        qo_len=("max_q_len", max_q_len, None),
        kv_len=("max_kv_len", max_kv_len),
        scales=(bmm1_scale, bmm2_scale),
        window_left=window_left,
        causal=is_causal,
        out=out,
        out_dtype=out_dtype,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=None,
        backend="auto",
        lse=None,
        return_lse=False,
    )
    return result


def _tensors_of(qkv: Any, layout: str) -> tuple[torch.Tensor, ...]:
    """The tensors of a layout, of which there are as many as it says."""
    parts = (qkv,) if isinstance(qkv, torch.Tensor) else qkv
    if not isinstance(parts, (tuple, list)):
        raise TypeError(f"`qkv` must be a torch.Tensor or a tuple, got {type(qkv).__name__}")
    if len(parts) != _TENSORS[layout]:
        raise ValueError(
            f"`qkv` must be {_TENSORS[layout]} tensors for {layout!r}, got {len(parts)}"
        )
    return tuple(check_tensor("qkv", part) for part in parts)


def _separate(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as views."""
    parts = 4 - len(tensors)
    if parts == 1:
        return tensors
    last = check_tensor("qkv", tensors[-1], 4)
    if last.shape[1] != parts:
        raise ValueError(
            f"`qkv` must have {parts} in dimension 1 of its last tensor, got shape "
            f"{list(last.shape)}"
        )
    return (*tensors[:-1], *last.unbind(1))
