"""Operation and byte counts of attention, and rates from a measured time.

One score costs ``head_dim_qk`` multiply-adds and one weighted sum ``head_dim_vo``, so a visible
(query, key) pair costs ``2 * (head_dim_qk + head_dim_vo)`` operations per head; softmax is not
counted. With ``causal`` the last query sees every key and each earlier one a key less, down to
none: pairs are counted exactly."""

from __future__ import annotations

import torch

__all__ = [
    "attention_flops",
    "attention_flops_with_actual_seq_lens",
    "attention_tb_per_sec",
    "attention_tb_per_sec_with_actual_seq_lens",
    "attention_tflops_per_sec",
    "attention_tflops_per_sec_with_actual_seq_lens",
]


def _visible_pairs(qo_len: int, kv_len: int, causal: bool) -> int:
    if not causal:
        return qo_len * kv_len
    seeing = min(qo_len, kv_len)  # with more queries than keys, the first ones see nothing
    return seeing * kv_len - seeing * (seeing - 1) // 2


def _lengths(q: torch.Tensor, kv: torch.Tensor) -> tuple[list[int], list[int]]:
    q_lens, kv_lens = q.flatten().tolist(), kv.flatten().tolist()
    if len(q_lens) != len(kv_lens):
        raise ValueError(
            "actual_seq_lens_q and actual_seq_lens_kv must have one entry per request, "
            f"got {len(q_lens)} and {len(kv_lens)}"
        )
    return q_lens, kv_lens


def attention_flops(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Operations of attention over requests of equal length; a multiply-add counts as two."""
    pairs = batch_size * _visible_pairs(qo_seqlen, kv_seqlen, causal)
    return 2 * pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_flops_with_actual_seq_lens(
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """:func:`attention_flops` for requests of the lengths in two ``(batch_size,)`` tensors."""
    q_lens, kv_lens = _lengths(actual_seq_lens_q, actual_seq_lens_kv)
    pairs = sum(_visible_pairs(q, kv, causal) for q, kv in zip(q_lens, kv_lens, strict=True))
    return 2 * pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_tflops_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    time: float,
) -> float:
    """TFLOP/s of attention that took ``time`` milliseconds; 0.0 if the time is infinite."""
    flops = attention_flops(
        batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal
    )
    return flops / time / 1e9


def attention_tflops_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    ms: float,
) -> float:
    """:func:`attention_tflops_per_sec` for requests of different lengths; takes milliseconds."""
    flops = attention_flops_with_actual_seq_lens(
        actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal
    )
    return flops / ms / 1e9


def _attention_bytes(
    q_tokens: int,
    kv_tokens: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
) -> int:
    """Each of q, k and v read once and o written once."""
    q, k, v, o = (dtype.itemsize for dtype in dtypes)
    query_side = q_tokens * num_qo_heads * (head_dim_qk * q + head_dim_vo * o)
    return query_side + kv_tokens * num_kv_heads * (head_dim_qk * k + head_dim_vo * v)


def attention_tb_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = torch.bfloat16,
    k_dtype: torch.dtype = torch.bfloat16,
    v_dtype: torch.dtype = torch.bfloat16,
    o_dtype: torch.dtype = torch.bfloat16,
) -> float:
    """TB/s (1e12 bytes) of attention that took ``time`` milliseconds, each operand moved once."""
    nbytes = _attention_bytes(
        batch_size * qo_seqlen,
        batch_size * kv_seqlen,
        head_dim_qk,
        head_dim_vo,
        num_qo_heads,
        num_kv_heads,
        (q_dtype, k_dtype, v_dtype, o_dtype),
    )
    return nbytes / time / 1e9


def attention_tb_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = torch.bfloat16,
    k_dtype: torch.dtype = torch.bfloat16,
    v_dtype: torch.dtype = torch.bfloat16,
    o_dtype: torch.dtype = torch.bfloat16,
) -> float:
    """:func:`attention_tb_per_sec` for requests of different lengths."""
    q_lens, kv_lens = _lengths(actual_seq_lens_q, actual_seq_lens_kv)
    nbytes = _attention_bytes(
        sum(q_lens),
        sum(kv_lens),
        head_dim_qk,
        head_dim_vo,
        num_qo_heads,
        num_kv_heads,
        (q_dtype, k_dtype, v_dtype, o_dtype),
    )
    return nbytes / time / 1e9
