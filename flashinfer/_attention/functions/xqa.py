"""``xqa_batch_decode_with_kv_cache``: decode with block tables, as vLLM calls it on Hopper."""

from typing import Any

import torch

from ..._compile.traced import graph_operator
from ..._instrument.decorator import flashinfer_api
from ..checks import refuse
from .block_tables import Cache, Scale, attend_block_tables
from .graph_results import block_table_results


@graph_operator("workspace_buffer", "out", results=block_table_results)
@flashinfer_api
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Decode attention of a batch whose lengths are on the GPU.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, \
bmm2_scale, window_left, out, sinks, kv_layout, enable_pdl
        As for ``trtllm_batch_decode_with_kv_cache``; the layout is ``"NHD"`` by default.
    q_len_per_req : int, optional
        Query tokens of each request, with `q_cu_seq_lens` the most of any; each sees the keys up to
        its own, the last of them all.
    q_cu_seq_lens : torch.Tensor, optional
        ``[batch_size + 1]`` int32 or int64: rows of `query` of each request.
    o_scale
        Must be 1.
    mask
        Must be left out: trees of drafts are not served.
    kv_cache_sf : torch.Tensor or tuple of torch.Tensor, optional
        Scales of a 4-bit `kv_cache` (uint8), as for ``BatchPrefillWithPagedKVCacheWrapper.run``.

    Returns
    -------
    torch.Tensor
        ``[tokens, num_qo_heads, head_dim]`` with the dtype of `out`, else of `query`.

    Raises
    ------
    TypeError, ValueError
        As ``trtllm_batch_decode_with_kv_cache`` does.
    """
    refuse(
        "there is no kernel for it",
        o_scale=None if o_scale == 1.0 else o_scale,
        mask=mask,
    )
    tokens = 1 if q_len_per_req is None else q_len_per_req
    is_even = q_cu_seq_lens is None
    return attend_block_tables(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        q_cu_seq_lens,
        qo_len=("q_len_per_req", None if is_even else tokens, tokens if is_even else None),
        kv_len=("max_seq_len", max_seq_len),
        scales=(bmm1_scale, bmm2_scale),
        window_left=window_left,
        causal=True,
        out=out,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        kv_cache_sf=kv_cache_sf,
    )
