"""``xqa_batch_decode_with_kv_cache``: decode with block tables, as vLLM calls it on Hopper."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..._instrument.decorator import flashinfer_api
from ...trace.templates.block_tables import block_table_template
from .gather import gather_planned, predict_block_tables
from .plan_block_tables import Cache, Scale, plan_xqa_decode


def _gathered(call: Mapping[str, Any]) -> dict[str, Any]:
    return gather_planned(
        partial(plan_xqa_decode, on_host=True), xqa_batch_decode_with_kv_cache, call
    )


@flashinfer_api(
    trace=block_table_template(
        name="xqa_decode", gather=_gathered, predict=predict_block_tables, lse=False
    )
)
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
    mask : torch.Tensor, optional
        ``[batch_size, q_len_per_req, words]`` or ``[tokens, words]`` uint16, bits in place of the
        order of a request's queries, as for trees of drafts: query i sees query j where bit ``j %
        16`` of its word ``j // 16`` is set, and all keys before them. `words` is ``2 *
        ceil(q_len_per_req / 32)``, and `q_len_per_req` is above 1.
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
    return plan_xqa_decode(locals())()
