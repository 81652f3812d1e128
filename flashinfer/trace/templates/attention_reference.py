"""Attention in float64, every option of the kernels included: what all attention functions compute.

For one request with queries q_i at positions P_i = kv_len - qo_len + i and keys k_j at positions j,

    x_ij = sm_scale * rope(q_i, P_i) . rope(k_j, j) + slope * (j - P_i)
    l_ij = c * tanh(x_ij / c)                               with a soft cap c, else x_ij
    o_i  = v_scale * sum_j exp(l_ij) v_j / (sum_j exp(l_ij) + exp(sink))
    lse_i = log2(sum_j exp(l_ij) + exp(sink))

where j runs over the keys that query i may see. A query that sees none has o_i = 0 and, without a
sink, lse_i = -inf. Query head h uses KV head h // (num_qo_heads / num_kv_heads). Scales of heads
multiply q, k and v beforehand.

Sources: A. Vaswani et al., "Attention Is All You Need", 2017; J. Su et al., "RoFormer", 2021;
O. Press et al., "Train Short, Test Long", 2021 (slopes of ALiBi); G. Xiao et al., "Efficient
Streaming Language Models with Attention Sinks", 2023; Gemma Team, "Gemma 2", 2024 (soft cap).

Functions here are printed into definitions, so they use torch and each other only.
"""

from __future__ import annotations

from typing import Any

import torch


def _rotate(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """Turn (x_i, x_{i + d/2}) of x[tokens, heads, d] by position * theta^(-2i/d) / scale."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angle = positions.double()[:, None] * theta**-exponent / scale
    cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)


def _alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """2^(-8 i / n) for n = the largest power of two in num_heads; what is left takes the odd steps
    of 2n."""
    n = 1 << (num_heads.bit_length() - 1)
    steps = [8 * (i + 1) / n for i in range(n)]
    steps += [4 * (2 * i + 1) / n for i in range(num_heads - n)]
    return torch.exp2(-torch.tensor(steps, dtype=torch.float64, device=device))


def _visible(
    qo_len: int,
    kv_len: int,
    causal: bool,
    window_left: int,
    custom_mask: torch.Tensor | None,
    prefix_len: int | None,
    token_pos_in_items: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """[qo_len, kv_len]: which keys of a request a query sees. A custom mask replaces `causal`.

    With items after a prefix, a query of an item sees the prefix and its own item up to itself,
    the delimiter (position 0) in front of the item left out.
    """
    position = torch.arange(qo_len, device=device)[:, None] + (kv_len - qo_len)
    key = torch.arange(kv_len, device=device)[None]
    seen = (key >= 0).expand(qo_len, kv_len).clone()
    if custom_mask is not None:
        seen &= custom_mask.view(qo_len, kv_len).bool()
    elif causal or prefix_len is not None:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    if prefix_len is not None and token_pos_in_items is not None:
        in_items = position - prefix_len
        place = torch.zeros_like(in_items)  # 0 also beyond the table
        listed = (in_items >= 0) & (in_items < len(token_pos_in_items))
        place[listed] = token_pos_in_items.long()[in_items[listed]]
        seen &= (in_items < 0) | (key < prefix_len) | (key > position - place)
    return seen


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    sm_scale: float,
    v_scale: float,
    logits_soft_cap: float,
    pos_encoding_mode: str,
    rope_scale: float,
    rope_theta: float,
    sinks: torch.Tensor | None,
    q_head_scale: torch.Tensor | None = None,
    k_head_scale: torch.Tensor | None = None,
    v_head_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: q[qo_len, heads, d], k and v[kv_len, kv_heads, d], seen[qo_len, kv_len]."""
    qo_len, kv_len = seen.shape
    q, k, v = q.double(), k.double(), v.double()
    q = q if q_head_scale is None else q * q_head_scale[:, None]
    k = k if k_head_scale is None else k * k_head_scale[:, None]
    v = v if v_head_scale is None else v * v_head_scale[:, None]
    position = torch.arange(qo_len, device=q.device) + (kv_len - qo_len)
    key = torch.arange(kv_len, device=q.device)
    if pos_encoding_mode == "ROPE_LLAMA":
        q = _rotate(q, position, rope_scale, rope_theta)
        k = _rotate(k, key, rope_scale, rope_theta)
    groups = (k.shape[1], q.shape[1] // k.shape[1])  # query heads that share keys and values
    # A key that nobody sees is not read: what is there may be anything.
    v = v.masked_fill(~seen.any(0)[:, None, None], 0.0)
    extra = q.new_full((q.shape[1],), float("-inf")) if sinks is None else sinks.double()
    outputs, lses = [], []
    # Some queries at a time: 2^27 logits of 8 bytes, and what is made of them, fit any GPU.
    step = max(2**27 // max(kv_len * q.shape[1], 1), 1)
    for rows in torch.arange(qo_len, device=q.device).split(step):
        logits = torch.einsum("qhgd,khd->hgqk", q[rows].unflatten(1, groups), k)
        logits = logits.flatten(0, 1) * sm_scale
        if pos_encoding_mode == "ALIBI":
            distance = (key[None] - position[rows, None]).double()
            logits = logits + _alibi_slopes(q.shape[1], q.device)[:, None, None] * distance
        if logits_soft_cap > 0:
            logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
        logits = logits.masked_fill(~seen[rows], float("-inf"))
        beside = extra[:, None, None].expand(-1, len(rows), 1)
        lse = torch.logsumexp(torch.cat([logits, beside], -1), -1)
        weight = torch.exp(logits - lse.where(~lse.isneginf(), 0.0)[..., None])
        output = torch.einsum("hgqk,khd->qhgd", weight.unflatten(0, groups), v)
        outputs.append(output.flatten(1, 2) * v_scale)
        lses.append(lse.T / 0.6931471805599453)
    return torch.cat(outputs), torch.cat(lses)


def _attend_batch(
    q: torch.Tensor,
    keys_and_values: list[tuple[torch.Tensor, torch.Tensor]],
    qo_indptr: list[int],
    head_dim_vo: int,
    *,
    causal: bool,
    window_left: int,
    custom_mask: torch.Tensor | None,
    prefix_len_ptr: torch.Tensor | None = None,
    token_pos_in_items_ptr: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All requests: q[tokens, heads, d]; custom_mask is that of each request after the other."""
    o = torch.zeros((*q.shape[:2], head_dim_vo), dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    mask_begin = 0
    for request, (k, v) in enumerate(keys_and_values):
        begin, end = qo_indptr[request], qo_indptr[request + 1]
        qo_len, kv_len = end - begin, len(k)
        mask = prefix_len = items = None
        if custom_mask is not None:
            mask = custom_mask[mask_begin : mask_begin + qo_len * kv_len]
            mask_begin += qo_len * kv_len
        if prefix_len_ptr is not None and token_pos_in_items_ptr is not None:
            prefix_len = int(prefix_len_ptr[request])
            items = token_pos_in_items_ptr.reshape(len(prefix_len_ptr), -1)[request]
        seen = _visible(qo_len, kv_len, causal, window_left, mask, prefix_len, items, q.device)
        o[begin:end], lse[begin:end] = _attend(q[begin:end], k, v, seen, **options)
    return o, lse


def _lse_as(
    o: torch.Tensor, lse: torch.Tensor, lse_base: str, lse_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The LSE [tokens, heads] base 2 in another base or order."""
    lse = lse * 0.6931471805599453 if lse_base == "ln" else lse
    return o, lse.T if lse_layout == "HN" else lse


def _rows_of(
    cache: torch.Tensor, kv_indptr: list[int], kv_indices: torch.Tensor, last_page_len: list[int]
) -> list[torch.Tensor]:
    """Tokens of each request in cache[pages, page_size, heads, d]."""
    rows = []
    for request, last in enumerate(last_page_len):
        begin, end = kv_indptr[request], kv_indptr[request + 1]
        pages = cache[kv_indices[begin:end].long()].flatten(0, 1)
        rows.append(pages[: max(end - begin - 1, 0) * cache.shape[1] + last if end > begin else 0])
    return rows


def _single_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    v_scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    custom_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_head_scale: torch.Tensor | None = None,
    k_head_scale: torch.Tensor | None = None,
    v_head_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(sm_scale q k^T + mask) v of one request: q[qo_len, heads, d] (or one query
    [heads, d]), k and v[kv_len, kv_heads, d].

    Source: as attention_reference.py states.
    """
    one = q.ndim == 2
    rows = q[None] if one else q
    o, lse = _attend_batch(
        rows,
        [(k, v)],
        [0, len(rows)],
        v.shape[-1],
        sm_scale=sm_scale,
        v_scale=v_scale,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        custom_mask=None if custom_mask is None else custom_mask.reshape(-1),
        sinks=sinks,
        q_head_scale=q_head_scale,
        k_head_scale=k_head_scale,
        v_head_scale=v_head_scale,
    )
    return (o[0], lse[0]) if one else (o, lse)


def _ragged_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
    v_scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    custom_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    prefix_len_ptr: torch.Tensor | None = None,
    token_pos_in_items_ptr: torch.Tensor | None = None,
    q_head_scale: torch.Tensor | None = None,
    k_head_scale: torch.Tensor | None = None,
    v_head_scale: torch.Tensor | None = None,
    lse_base: str = "log2",
    lse_layout: str = "NH",
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(sm_scale q k^T + mask) v of each request: rows qo_indptr[b] ... of q against rows
    kv_indptr[b] ... of k and v.

    Source: as attention_reference.py states.
    """
    bounds = kv_indptr.tolist()
    ranges = [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    o, lse = _attend_batch(
        q,
        [(k[r], v[r]) for r in ranges],
        qo_indptr.tolist(),
        v.shape[-1],
        sm_scale=sm_scale,
        v_scale=v_scale,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        custom_mask=custom_mask,
        sinks=sinks,
        q_head_scale=q_head_scale,
        k_head_scale=k_head_scale,
        v_head_scale=v_head_scale,
        prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr,
    )
    return _lse_as(o, lse, lse_base, lse_layout)


def _paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
    qo_indptr: torch.Tensor | None = None,
    v_scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    custom_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    prefix_len_ptr: torch.Tensor | None = None,
    token_pos_in_items_ptr: torch.Tensor | None = None,
    q_head_scale: torch.Tensor | None = None,
    k_head_scale: torch.Tensor | None = None,
    v_head_scale: torch.Tensor | None = None,
    lse_base: str = "log2",
    lse_layout: str = "NH",
) -> tuple[torch.Tensor, torch.Tensor]:
    """o = softmax(sm_scale q k^T + mask) v of each request, whose keys are in pages
    kv_indices[kv_indptr[b] : kv_indptr[b + 1]] of k_cache[pages, page_size, kv_heads, d]; one query
    per request unless qo_indptr says otherwise.

    Source: as attention_reference.py states; W. Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", 2023.
    """
    table = kv_indptr.tolist(), kv_indices, kv_last_page_len.tolist()
    k_rows, v_rows = _rows_of(k_cache, *table), _rows_of(v_cache, *table)
    bounds = list(range(len(k_rows) + 1)) if qo_indptr is None else qo_indptr.tolist()
    o, lse = _attend_batch(
        q,
        list(zip(k_rows, v_rows, strict=True)),
        bounds,
        v_cache.shape[-1],
        sm_scale=sm_scale,
        v_scale=v_scale,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        custom_mask=custom_mask,
        sinks=sinks,
        q_head_scale=q_head_scale,
        k_head_scale=k_head_scale,
        v_head_scale=v_head_scale,
        prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr,
    )
    return _lse_as(o, lse, lse_base, lse_layout)


def _paged_codes_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
    qo_indptr: torch.Tensor | None = None,
    v_scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    sinks: torch.Tensor | None = None,
    q_head_scale: torch.Tensor | None = None,
    k_head_scale: torch.Tensor | None = None,
    v_head_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The o of _paged_attention_reference as codes of 8 bits times a scale for each token's head:
    scale = max |o| / 448, at least 1e-10 / 448; code = o / scale in e4m3.

    Source: as there; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.
    """
    o, lse = _paged_attention_reference(
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        sm_scale,
        qo_indptr,
        v_scale,
        causal,
        window_left,
        logits_soft_cap,
        pos_encoding_mode,
        rope_scale,
        rope_theta,
        sinks=sinks,
        q_head_scale=q_head_scale,
        k_head_scale=k_head_scale,
        v_head_scale=v_head_scale,
    )
    scale = o.float().abs().amax(-1).clamp(min=1e-10) / 448
    codes = (o.float() / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale, lse
