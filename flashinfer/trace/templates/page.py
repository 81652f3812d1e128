"""Templates and references of appends to paged caches.

A reference returns the whole cache. A token whose batch index or position leads to no page of the
cache is not written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._common.cache_layout import of_pages
from ..._common.checks import choice
from ..specs import Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate


def _slots(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_pages: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that have a slot, and the page and the slot of each."""
    request, position = batch_indices.long(), positions.long()
    known = (request >= 0) & (request < len(kv_indptr) - 1) & (position >= 0)
    tokens = torch.arange(len(request), device=request.device)[known]
    request, position = request[known], position[known]
    entry = kv_indptr.long()[request] + position // page_size
    has_page = (entry < kv_indptr.long()[request + 1]) & (entry >= 0) & (entry < len(kv_indices))
    tokens, position, entry = tokens[has_page], position[has_page], entry[has_page]
    page = kv_indices.long()[entry]
    exists = (page >= 0) & (page < num_pages)
    return tokens[exists], page[exists], position[exists] % page_size


def _append_paged_kv_cache_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_layout: str = "NHD",
) -> Any:
    """cache[page, position % page_size] = row, page = kv_indices[kv_indptr[b] + position //
    page_size], of keys and of values.

    Source: W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023.
    """
    fused = isinstance(paged_kv_cache, torch.Tensor)
    caches = (
        paged_kv_cache.unbind(1) if isinstance(paged_kv_cache, torch.Tensor) else paged_kv_cache
    )
    results = []
    for cache, rows in zip(caches, (append_key, append_value), strict=True):
        result = cache.clone()
        by_slot = result if kv_layout == "NHD" else result.transpose(1, 2)
        sizes = by_slot.shape[:2]
        tokens, page, slot = _slots(batch_indices, positions, kv_indices, kv_indptr, *sizes)
        by_slot[page, slot] = rows[tokens]
        results.append(result)
    return torch.stack(results, 1) if fused else tuple(results)


def _append_paged_mla_kv_cache_reference(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As append_paged_kv_cache, with one row of compressed KV and one of the rotary part.

    Source: as append_paged_kv_cache.
    """
    results = []
    for cache, rows in ((ckv_cache, append_ckv), (kpe_cache, append_kpe)):
        result, sizes = cache.clone(), cache.shape[:2]
        tokens, page, slot = _slots(batch_indices, positions, kv_indices, kv_indptr, *sizes)
        result[page, slot] = rows[tokens]
        results.append(result)
    return results[0], results[1]


def _get_batch_indices_positions_reference(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token i of request b, append_indptr[b] <= i < append_indptr[b + 1]: its batch index = b, its
    position = seq_lens[b] - append_indptr[b + 1] + i. Tokens of no request: -1 and 0.

    Source: as append_paged_kv_cache.
    """
    tokens = torch.arange(nnz, device=append_indptr.device)
    bound = torch.searchsorted(append_indptr.long(), tokens, right=True)
    valid = (bound > 0) & (bound <= len(seq_lens))
    request = (bound - 1).where(valid, -1)
    if not valid.any():
        return request.int(), torch.zeros_like(request).int()
    inside = request.clamp(min=0)
    position = seq_lens.long()[inside] - append_indptr.long()[inside + 1] + tokens
    return request.int(), position.where(valid, 0).int()


def _get_seq_lens_reference(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """seq_len = max(pages - 1, 0) * page_size + last_page_len.

    Source: as append_paged_kv_cache.
    """
    full = (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0)
    return full * page_size + kv_last_page_len


_STORED = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
_LENGTH = "len_indptr == batch_size + 1"


def _indices(axis: str, description: str, **properties: Any) -> Tensor:
    return Tensor(
        [axis],
        dtype="int32",
        layout="rows",
        description=description,
        converts=True,
        **properties,
    )


_TABLE: dict[str, Value] = {
    "batch_indices": _indices("num_tokens", "Request of each token; negative: not written."),
    "positions": _indices("num_tokens", "Position of each token in its request."),
    "kv_indices": _indices("num_indices", "Page numbers of all requests."),
    "kv_indptr": _indices("len_indptr", "First entry of each request in kv_indices."),
    "kv_last_page_len": _indices("batch_size", "Tokens in each request's last page."),
}
_TABLE_AXES: dict[str, Axis] = {
    "num_indices": Var("Pages of all requests."),
    "len_indptr": Var("batch_size + 1."),
    "batch_size": Var("Requests."),
}

_EXAMPLE_TABLE = {
    "batch_indices": [0, 0, 1, 2, 2, 2, -1],
    "positions": [4, 5, 0, 6, 7, 8, 0],
    "kv_indices": [5, 2, 0, 3, 6, 1],
    "kv_indptr": [0, 2, 3, 6],
    "kv_last_page_len": [2, 1, 1],
}


def example_table(device: torch.device) -> dict[str, torch.Tensor]:
    """A valid page table of 7 tokens, 3 requests and pages of 4 slots, of which there are 7."""
    return {
        name: torch.tensor(values, dtype=torch.int32, device=device)
        for name, values in _EXAMPLE_TABLE.items()
    }


def _kv_init(fused: bool, kv_layout: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values of an example call: 3 heads of 32 elements, 7 pages of 4 slots."""
    key = arguments["append_key"]
    generator = torch.Generator().manual_seed(key.numel())

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(key.device, key.dtype)

    page = (4, 3, 32) if kv_layout == "NHD" else (3, 4, 32)
    both = values(7, 2, *page) if fused else (values(7, *page), values(7, *page))
    return {
        "append_key": values(7, 3, 32),
        "append_value": values(7, 3, 32),
        "paged_kv_cache": both,
        "kv_layout": kv_layout,
        **example_table(key.device),
    }


def _kv_template(suffix: str, *, fused: bool, kv_layout: str) -> TraceTemplate:
    inner = ["page_size", "num_kv_heads"] if kv_layout == "NHD" else ["num_kv_heads", "page_size"]
    dims = ["num_pages", *(["two"] if fused else []), *inner, "head_dim"]
    axes: dict[str, Axis] = {
        "num_tokens": Var("Tokens that are appended."),
        "num_pages": Var("Pages of the cache."),
        "page_size": Const("Slots of a page.", abbrev="ps"),
        "num_kv_heads": Const("Heads of keys and values.", abbrev="kv"),
        "head_dim": Const("Elements of a head.", abbrev="d"),
        **_TABLE_AXES,
    }
    if fused:
        axes["two"] = Const("Keys, then values.", abbrev="", value=2)

    def cache(key: str, index: int | None) -> Value:
        return Tensor(
            dims, param="paged_kv_cache", tuple_idx=index, dtype_from="append_key", layout="rows"
        )

    caches = (
        {"kv_cache": cache("kv_cache", None)}
        if fused
        else {"k_cache": cache("k_cache", 0), "v_cache": cache("v_cache", 1)}
    )
    rows = ["num_tokens", "num_kv_heads", "head_dim"]
    return TraceTemplate(
        op_type="append_paged_kv_cache",
        name_prefix=f"append_paged_kv_cache{suffix}",
        description="Keys and values of new tokens written to their slots of a paged cache.",
        axes=axes,
        inputs={
            "append_key": Tensor(rows, dtypes=_STORED, layout="rows"),
            "append_value": Tensor(rows, dtype_from="append_key", layout="rows"),
            **caches,
            **_TABLE,
        },
        outputs=caches,
        constraints=[_LENGTH, *(["two == 2"] if fused else [])],
        options={"kv_layout": (kv_layout,)},
        tags=["status:verified"],
        reference=_append_paged_kv_cache_reference,
        gather=_with_pages,
        init=functools.partial(_kv_init, fused, kv_layout),
    )


def _with_pages(arguments: Mapping[str, Any]) -> dict[str, Any]:
    cache = of_pages(arguments.get("paged_kv_cache"), arguments.get("kv_layout", "NHD"))
    return {name: arguments[name] for name in arguments} | {"paged_kv_cache": cache}


def _append_paged_kv_cache_trace(**arguments: Any) -> TraceTemplate:
    cache = arguments.get("paged_kv_cache")
    fused = isinstance(cache, torch.Tensor)
    if not fused and (not isinstance(cache, (tuple, list)) or len(cache) != 2):
        raise TypeError(
            f"`paged_kv_cache` must be a torch.Tensor or a pair of them, got {type(cache).__name__}"
        )
    kv_layout = arguments.get("kv_layout", "NHD")
    choice("kv_layout", kv_layout, ("NHD", "HND"))
    return _KV_TEMPLATES[fused, kv_layout]


_KV_TEMPLATES = {
    (False, "NHD"): _kv_template("", fused=False, kv_layout="NHD"),
    (False, "HND"): _kv_template("_hnd", fused=False, kv_layout="HND"),
    (True, "NHD"): _kv_template("_fused", fused=True, kv_layout="NHD"),
    (True, "HND"): _kv_template("_fused_hnd", fused=True, kv_layout="HND"),
}
append_paged_kv_cache_trace: Callable[..., TraceTemplate] = _append_paged_kv_cache_trace
append_paged_kv_cache_trace.templates = list(_KV_TEMPLATES.values())  # type: ignore[attr-defined]


def _mla_init(arguments: dict[str, Any]) -> dict[str, Any]:
    ckv = arguments["append_ckv"]
    table = example_table(ckv.device)
    generator = torch.Generator().manual_seed(ckv.numel())
    shapes = {
        "append_ckv": (7, 64),
        "append_kpe": (7, 16),
        "ckv_cache": (7, 4, 64),
        "kpe_cache": (7, 4, 16),
    }
    values = {
        name: torch.randn(shape, generator=generator).to(ckv.device, ckv.dtype)
        for name, shape in shapes.items()
    }
    return {**values, **table}


def _mla_cache(key: str) -> Tensor:
    return Tensor(
        ["num_pages", "page_size", f"{key}_dim"],
        param=f"{key}_cache",
        dtype_from=f"append_{key}",
        layout="rows",
    )


append_paged_mla_kv_cache_trace = TraceTemplate(
    op_type="append_paged_mla_kv_cache",
    name_prefix="append_paged_mla_kv_cache",
    description="Compressed KV and rotary keys of new tokens written to their slots.",
    axes={
        "num_tokens": Var("Tokens that are appended."),
        "num_pages": Var("Pages of the caches."),
        "page_size": Const("Slots of a page.", abbrev="ps"),
        "ckv_dim": Const("Elements of compressed KV.", abbrev="ckv"),
        "kpe_dim": Const("Elements of the rotary part of K.", abbrev="kpe"),
        **_TABLE_AXES,
    },
    inputs={
        "append_ckv": Tensor(["num_tokens", "ckv_dim"], dtypes=_STORED, layout="rows"),
        "append_kpe": Tensor(["num_tokens", "kpe_dim"], dtypes=_STORED, layout="rows"),
        "ckv_cache": _mla_cache("ckv"),
        "kpe_cache": _mla_cache("kpe"),
        **_TABLE,
    },
    outputs={"ckv_cache": _mla_cache("ckv"), "kpe_cache": _mla_cache("kpe")},
    constraints=[_LENGTH],
    tags=["status:verified"],
    reference=_append_paged_mla_kv_cache_reference,
    init=_mla_init,
)


def _batch_indices_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["append_indptr"].device
    return {
        "append_indptr": torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([9, 5, 4], dtype=torch.int32, device=device),
        "nnz": 8,
    }


get_batch_indices_positions_trace = TraceTemplate(
    op_type="page_table",
    name_prefix="get_batch_indices_positions",
    description="Request and position of each appended token.",
    axes={
        "len_indptr": Var("batch_size + 1."),
        "batch_size": Var("Requests."),
        "nnz": Const("Tokens, padding included.", abbrev="n"),
    },
    inputs={
        "append_indptr": _indices("len_indptr", "First token of each request."),
        "seq_lens": _indices("batch_size", "Length of each request, new tokens included."),
    },
    outputs={
        "batch_indices": _indices("nnz", "-1 for tokens of no request.", param="batch_indices"),
        "positions": _indices("nnz", "0 for tokens of no request.", param="positions"),
    },
    constraints=[_LENGTH, "nnz >= 0"],
    tags=["status:verified"],
    reference=_get_batch_indices_positions_reference,
    init=_batch_indices_init,
)


def _seq_lens_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["kv_indptr"].device
    return {
        "kv_indptr": torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=device),
        "kv_last_page_len": torch.tensor([3, 0, 16], dtype=torch.int32, device=device),
        "page_size": 16,
    }


get_seq_lens_trace = TraceTemplate(
    op_type="page_table",
    name_prefix="get_seq_lens",
    description="Tokens of each request in a paged cache.",
    axes={
        "len_indptr": Var("batch_size + 1."),
        "batch_size": Var("Requests."),
        "page_size": Const("Slots of a page.", abbrev="ps"),
    },
    inputs={
        "kv_indptr": _indices("len_indptr", "First page of each request."),
        "kv_last_page_len": _indices("batch_size", "Tokens in each request's last page."),
    },
    outputs={"seq_lens": _indices("batch_size", "Tokens of each request.")},
    constraints=[_LENGTH, "page_size >= 1"],
    tags=["status:verified"],
    reference=_get_seq_lens_reference,
    init=_seq_lens_init,
)
