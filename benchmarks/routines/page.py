"""Appends to paged caches, and the index tensors that they take."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import make_tensor

from .base import Arguments, Backend, Flag, Routine, dtype_name, positive, register, torch_dtype

_TABLE = [
    Flag("batch_size", positive, 8, "requests"),
    Flag("tokens_per_request", positive, 1024, "tokens that each request appends"),
    Flag("kv_len", positive, 1024, "tokens of each request after the append"),
    Flag("page_size", positive, 16, "slots of a page"),
]
_DTYPE = Flag("input_dtype", dtype_name, "bfloat16", "dtype of the cache and of what is appended")
_HEADS = [
    Flag("num_kv_heads", positive, 8, "heads of keys and values"),
    Flag("head_dim", positive, 128, "elements of a head"),
    Flag("hnd", bool, False, "heads before slots in the cache"),
]
_LATENT = [
    Flag("ckv_dim", positive, 512, "elements of compressed KV"),
    Flag("kpe_dim", positive, 64, "elements of the rotary part of K"),
]


def _page_table(case: Namespace, device: str) -> tuple[Arguments, int, int]:
    """Index arguments, appended tokens and pages of the cache."""
    if case.tokens_per_request > case.kv_len:
        raise ValueError(
            f"--tokens_per_request must be at most --kv_len {case.kv_len}, "
            f"got {case.tokens_per_request}"
        )
    per_request = -(-case.kv_len // case.page_size)
    pages = case.batch_size * per_request
    requests = torch.arange(case.batch_size, dtype=torch.int32)
    positions = torch.arange(case.kv_len - case.tokens_per_request, case.kv_len, dtype=torch.int32)
    table = {
        "batch_indices": requests.repeat_interleave(case.tokens_per_request),
        "positions": positions.repeat(case.batch_size),
        "kv_indices": torch.randperm(pages).int(),
        "kv_indptr": torch.arange(case.batch_size + 1, dtype=torch.int32) * per_request,
        "kv_last_page_len": torch.full_like(requests, (case.kv_len - 1) % case.page_size + 1),
    }
    arguments = {name: tensor.to(device) for name, tensor in table.items()}
    return arguments, case.batch_size * case.tokens_per_request, pages


def _build_kv(case: Namespace, device: str) -> Arguments:
    table, tokens, pages = _page_table(case, device)
    dtype = torch_dtype(case.input_dtype)
    inner = (case.page_size, case.num_kv_heads)
    shape = (pages, 2, *(inner[::-1] if case.hnd else inner), case.head_dim)
    key, value = (
        make_tensor(tokens, case.num_kv_heads, case.head_dim, dtype=dtype, device=device)
        for _ in range(2)
    )
    return {
        "append_key": key,
        "append_value": value,
        "paged_kv_cache": torch.zeros(shape, dtype=dtype, device=device),
        "kv_layout": "HND" if case.hnd else "NHD",
        **table,
    }


def _build_float4(case: Namespace, device: str) -> Arguments:
    arguments = _build_kv(case, device)
    pages = arguments.pop("paged_kv_cache")[:, 0]

    def caches(row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(pages.new_zeros(*pages.shape[:-1], row, dtype=torch.uint8) for _ in range(2))

    return {
        **arguments,
        "paged_kv_cache": caches(case.head_dim // 2),
        "kv_cache_sf": caches(case.head_dim // 16),
        "k_scale": 0.5,
        "v_scale": 0.5,
    }


def _build_float4_slots(case: Namespace, device: str) -> Arguments:
    arguments = _build_float4(case, device)
    tokens = arguments["positions"].numel()
    for name in [*_INDICES, "kv_indices", "kv_indptr", "kv_last_page_len"]:
        del arguments[name]
    slots = arguments["paged_kv_cache"][0].shape[0] * case.page_size
    return {**arguments, "slot_mapping": torch.randperm(slots, device=device)[:tokens].int()}


def _float4_bytes(arguments: Arguments) -> int:
    """Codes of half a byte, and a scale of a byte for 16 of them."""
    return 2 * arguments["append_key"].numel() * 9 // 16


def _build_latent(case: Namespace, device: str) -> Arguments:
    table, tokens, pages = _page_table(case, device)
    dtype = torch_dtype(case.input_dtype)
    dims = {"ckv": case.ckv_dim, "kpe": case.kpe_dim}
    rows = {
        f"append_{name}": make_tensor(tokens, dim, dtype=dtype, device=device)
        for name, dim in dims.items()
    }
    caches = {
        f"{name}_cache": torch.zeros(pages, case.page_size, dim, dtype=dtype, device=device)
        for name, dim in dims.items()
    }
    return {**rows, **caches, **table}


def _written(*names: str):
    """Bytes that are written: as many as are appended, not the whole cache."""
    return lambda arguments: sum(arguments[name].nbytes for name in names)


_INDICES = ["batch_indices", "positions"]
register(
    Routine(
        name="append_paged_kv_cache",
        api="flashinfer.page:append_paged_kv_cache",
        flags=[*_TABLE, *_HEADS, _DTYPE],
        build=_build_kv,
        reads=["append_key", "append_value", *_INDICES],
        writes=[],
        fresh=_written("append_key", "append_value"),
    )
)
for _name, _build, _places in (
    ("", _build_float4, _INDICES),
    ("_with_slot_mapping", _build_float4_slots, ["slot_mapping"]),
):
    register(
        Routine(
            name=f"nvfp4_quantize_append_paged_kv_cache{_name}",
            api=f"flashinfer.page:nvfp4_quantize_append_paged_kv_cache{_name}",
            flags=[*_TABLE, *_HEADS, _DTYPE],
            build=_build,
            reads=["append_key", "append_value", *_places],
            writes=[],
            fresh=_float4_bytes,
            backends={
                "cuda": Backend(f"flashinfer.page:nvfp4_quantize_append_paged_kv_cache{_name}")
            },
        )
    )
register(
    Routine(
        name="append_paged_mla_kv_cache",
        api="flashinfer.page:append_paged_mla_kv_cache",
        flags=[*_TABLE, *_LATENT, _DTYPE],
        build=_build_latent,
        reads=["append_ckv", "append_kpe", *_INDICES],
        writes=[],
        fresh=_written("append_ckv", "append_kpe"),
    )
)


def _build_indices(case: Namespace, device: str) -> Arguments:
    requests = torch.arange(case.batch_size + 1, dtype=torch.int32, device=device)
    lengths = torch.full_like(requests[1:], case.tokens_per_request + 100)
    return {
        "append_indptr": requests * case.tokens_per_request,
        "seq_lens": lengths,
        "nnz": case.batch_size * case.tokens_per_request,
    }


register(
    Routine(
        name="get_batch_indices_positions",
        api="flashinfer.page:get_batch_indices_positions",
        flags=_TABLE[:2],
        build=_build_indices,
        reads=["append_indptr", "seq_lens"],
        writes=[],
        fresh=lambda arguments: 8 * arguments["nnz"],
    )
)


def _build_lengths(case: Namespace, device: str) -> Arguments:
    requests = torch.arange(case.batch_size + 1, dtype=torch.int32, device=device)
    return {
        "kv_indptr": requests * -(-case.kv_len // case.page_size),
        "kv_last_page_len": torch.full_like(requests[1:], (case.kv_len - 1) % case.page_size + 1),
        "page_size": case.page_size,
    }


register(
    Routine(
        name="get_seq_lens",
        api="flashinfer.page:get_seq_lens",
        flags=[_TABLE[0], *_TABLE[2:]],
        build=_build_lengths,
        reads=["kv_indptr", "kv_last_page_len"],
        writes=[],
        fresh=lambda arguments: arguments["kv_last_page_len"].nbytes,
    )
)
