"""4-bit caches (NVFP4) of random codes and scales, in the shapes of a batch."""

from __future__ import annotations

from typing import Any

import torch

from tests.attention.batches import Batch, indptr

PACKED = torch.uint8
_NAN = 0x7F  # as a scale


def _bytes(shape: tuple[int, ...], low: int, high: int, seed: int, device: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(low, high + 1, shape, generator=generator)
    return values.to(torch.uint8).to(device)


def _rows(
    shape: tuple[int, ...], head_dim: int, seed: int, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, all of them, and scales, mostly of 0.06 to 0.3 and a few of any other up to 4."""
    codes = _bytes((*shape, head_dim // 2), 0, 255, seed, device)
    scales = _bytes((*shape, head_dim // 16), 24, 42, seed + 1, device)
    others = _bytes((*shape, head_dim // 16), 0, 72, seed + 2, device)
    chosen = _bytes((*shape, head_dim // 16), 0, 19, seed + 3, device) == 0
    return codes, torch.where(chosen, others, scales)


def packed_rows(batch: Batch, device: torch.device) -> dict[str, Any]:
    """`k`, `v` and `kv_cache_sf` of a ragged run."""
    shape = (sum(batch.kv_lens), batch.num_kv_heads)
    k, k_sf = _rows(shape, batch.head_dim_qk, batch.seed + 7, device)
    v, v_sf = _rows(shape, batch.head_dim_vo, batch.seed + 17, device)
    tensors = [k, v, k_sf, v_sf]
    if batch.kv_layout == "HND":
        tensors = [x.transpose(0, 1).contiguous() for x in tensors]
    return {"k": tensors[0], "v": tensors[1], "kv_cache_sf": (tensors[2], tensors[3])}


def packed_cache(batch: Batch, device: torch.device) -> tuple[Any, Any]:
    """Codes and scales in pages; slots that belong to no request have NaN for a scale.

    The form ``"strided"`` is engines': a page has its codes first, then its scales.
    """
    starts, indices, last, num_pages = batch.table()
    free = torch.ones(num_pages, batch.page_size, dtype=torch.bool)
    for b in range(len(batch.kv_lens)):
        pages = indices[starts[b] : starts[b + 1]].long()
        free[pages] = False
        if len(pages):
            free[pages[-1], int(last[b]) :] = True
    parts = []
    for i, head_dim in enumerate((batch.head_dim_qk, batch.head_dim_vo)):
        shape = (num_pages, batch.page_size, batch.num_kv_heads)
        codes, scales = _rows(shape, head_dim, batch.seed + 7 + 10 * i, device)
        scales[free.to(device)] = _NAN
        if batch.kv_layout == "HND":
            codes, scales = (x.transpose(1, 2).contiguous() for x in (codes, scales))
        if batch.form == "strided":
            pages = torch.cat([codes.flatten(1), scales.flatten(1)], 1)
            split, end = codes[0].numel(), pages.shape[1]
            pages = torch.nn.functional.pad(pages, (0, -end % 16))  # where rows must begin
            codes = pages[:, :split].unflatten(1, codes.shape[1:])
            scales = pages[:, split:end].unflatten(1, scales.shape[1:])
        parts.append((codes, scales))
    if batch.form == "fused":
        return tuple(torch.stack([k, v], 1) for k, v in zip(*parts, strict=True))
    (k, k_sf), (v, v_sf) = parts
    return (k, v), (k_sf, v_sf)


def packed_pages(batch: Batch, device: torch.device) -> dict[str, Any]:
    """`q`, `paged_kv_cache` and `kv_cache_sf` of a run over pages."""
    cache, scales = packed_cache(batch, device)
    return {"q": batch.query(device), "paged_kv_cache": cache, "kv_cache_sf": scales}


def block_tables(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """`block_tables` and `seq_lens` of the functions that take these."""
    starts, indices, _, _ = batch.table()
    counts = starts.diff()
    table = torch.zeros(len(batch.kv_lens), max(int(counts.max()), 1), dtype=torch.int32)
    for b, count in enumerate(counts.tolist()):
        table[b, :count] = indices[starts[b] : starts[b] + count]
    lengths = torch.tensor(batch.kv_lens, dtype=torch.int32)
    return {"block_tables": table.to(device), "seq_lens": lengths.to(device)}


__all__ = ["PACKED", "block_tables", "indptr", "packed_cache", "packed_pages", "packed_rows"]
