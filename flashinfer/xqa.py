"""Decode attention under the name and with the arguments of XQA, by our own kernels."""

from __future__ import annotations

from typing import Any

import torch

from ._attention.checks import refuse
from ._attention.functions.plan_block_tables import attend_block_tables
from ._common import checks
from ._compile.traced import graph_operator
from ._instrument.decorator import flashinfer_api

__all__ = ["xqa"]

_NO_KERNEL = "there is no kernel for it"


@graph_operator("workspace_buffer", "output")
@flashinfer_api
def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
) -> None:
    r"""Decode attention through a page table, with lengths on the GPU, into `output`.

    ``xqa_batch_decode_with_kv_cache`` with other arguments: the logits are ``q . k * q_scale *
    kv_scale / sqrt(head_dim)``, the output is multiplied by ``kv_scale * rcp_out_scale``.

    Parameters
    ----------
    q : torch.Tensor
        ``[batch_size, 1, num_q_heads, head_dim]``, or ``[batch_size, 1, q_seq_len, num_q_heads,
        head_dim]``; with `q_cu_seq_lens` ``[tokens, num_q_heads, head_dim]``. float16 or bfloat16.
    k_cache, v_cache : torch.Tensor
        ``[num_pages, page_size, num_kv_heads, head_dim]`` (``"NHD"``) or ``[num_pages,
        num_kv_heads, page_size, head_dim]`` (``"HND"``), of the dtype of `q` or float8_e4m3fn.
    page_table : torch.Tensor
        ``[batch_size, max_pages]`` int32: page numbers of each request.
    seq_lens : torch.Tensor
        ``[batch_size]`` or ``[batch_size, 1]``, int32 or uint32: tokens of keys, the queries' own
        included.
    output : torch.Tensor
        Shape of `q`, float16 or bfloat16. Written.
    workspace_buffer : torch.Tensor
        For partial results of requests that are split; contiguous, any dtype.
    semaphores : torch.Tensor
        Not used: the kernels need none.
    num_kv_heads, page_size : int
        As the caches' shapes say.
    sinks : torch.Tensor, optional
        ``[num_q_heads]`` float32: a logit per head without a value.
    q_scale, kv_scale : float or torch.Tensor
        Factors; a tensor is one float32 on the device.
    sliding_win_size : int
        How many keys a query sees, its own position included; 0: all.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it.
    rcp_out_scale : float
        Factor of the output.
    q_seq_len : int
        Query tokens of each request, with `q_cu_seq_lens` the most of any; each sees the keys up to
        its own, the last of them all.
    q_cu_seq_lens : torch.Tensor, optional
        ``[batch_size + 1]`` int32: rows of `q` of each request.
    mask : torch.Tensor, optional
        As for ``xqa_batch_decode_with_kv_cache``.
    sm_count, k_sf_cache, v_sf_cache
        Must be left out: 4-bit caches are not served.

    Raises
    ------
    TypeError, ValueError
        As ``xqa_batch_decode_with_kv_cache`` does; or if a number does not agree with a shape.
    """
    refuse(_NO_KERNEL, sm_count=sm_count, k_sf_cache=k_sf_cache, v_sf_cache=v_sf_cache)
    checks.tensor("semaphores", semaphores)
    tokens = checks.count("q_seq_len", q_seq_len)
    window = checks.count("sliding_win_size", sliding_win_size, 0)
    queries, out = _folded(q, output, tokens, q_cu_seq_lens)
    _check_cache(k_cache, num_kv_heads, page_size, kv_layout)
    checks.tensor("page_table", page_table, 2)
    lengths = checks.tensor("seq_lens", seq_lens, 1, 2)
    is_even = q_cu_seq_lens is None
    attend_block_tables(
        queries,
        (k_cache, v_cache),
        workspace_buffer,
        page_table,
        lengths.view(-1) if lengths.ndim == 2 else lengths,
        q_cu_seq_lens,
        qo_len=("q_seq_len", None if is_even else tokens, tokens if is_even else None),
        kv_len=("max_pages", page_table.shape[1] * page_size),
        scales=(
            _product(queries.shape[-1] ** -0.5, q_scale, kv_scale),
            _product(checks.number("rcp_out_scale", rcp_out_scale), kv_scale),
        ),
        window_left=window - 1,
        causal=True,
        out=out,
        out_dtype=None,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        backend="auto",
        lse=None,
        return_lse=False,
        mask=mask,
    )


def _folded(
    q: torch.Tensor, output: torch.Tensor, tokens: int, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and output as ``[tokens, num_q_heads, head_dim]`` views."""
    checks.tensor("q", q, *((3,) if rows is not None else (4, 5)))
    checks.tensor("output", output)
    if output.shape != q.shape:
        raise ValueError(
            f"`output` must have the shape of `q`, {list(q.shape)}, got {list(output.shape)}"
        )
    if rows is not None:
        return q, output
    leading = (1, tokens) if q.ndim == 5 else (1,)
    if q.shape[1:-2] != leading or (q.ndim == 4 and tokens != 1):
        raise ValueError(
            "`q` must be [batch_size, 1, num_q_heads, head_dim], or [batch_size, 1, q_seq_len, "
            f"num_q_heads, head_dim] with `q_seq_len` {tokens}, got shape {list(q.shape)}"
        )
    shape = (q.shape[0] * tokens, *q.shape[-2:])
    try:
        return q.view(shape), output.view(shape)
    except RuntimeError:
        raise ValueError(
            "`q` and `output` must have leading dimensions that fold into one, got strides "
            f"{q.stride()} and {output.stride()}"
        ) from None


def _check_cache(cache: torch.Tensor, num_kv_heads: int, page_size: int, layout: str) -> None:
    checks.tensor("k_cache", cache, 4)
    checks.choice("kv_layout", layout, ("NHD", "HND"))
    expected = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    if tuple(cache.shape[1:3]) != expected:
        raise ValueError(
            f"`k_cache` must have {list(expected)} in dimensions 1 and 2 by `num_kv_heads`, "
            f"`page_size` and `kv_layout`, got shape {list(cache.shape)}"
        )


def _product(factor: float, *scales: Any) -> Any:
    """The product of numbers, or on the device if one of them is there."""
    result: Any = factor
    for scale in scales:
        result = result * scale
    return result
