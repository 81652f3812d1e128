"""Latent attention over paged caches: decode, and decode of several tokens."""

from __future__ import annotations

from argparse import Namespace

import torch

from flashinfer.testing import make_tensor
from flashinfer.testing.mla import mla_check_options

from .attention_inputs import indptr_of, int32, make_wrapper, planned, workspace_on
from .base import Arguments, Backend, Flag, Routine, dtype_name, positive, register, torch_dtype

_FLAGS = [
    Flag("batch_size", positive, 64, "requests"),
    Flag("qo_len", positive, 1, "query tokens of each request"),
    Flag("kv_len", positive, 4096, "tokens of each request"),
    Flag("num_heads", positive, 128, "query heads"),
    Flag("page_size", positive, 64, "tokens of a page"),
    Flag("dtype", dtype_name, "bfloat16", "dtype of queries and results"),
    Flag("kv_dtype", dtype_name, "bfloat16", "dtype of caches"),
]
_CKV, _KPE = 512, 64


def _build(case: Namespace, device: str) -> Arguments:
    if case.qo_len > case.kv_len:
        raise ValueError(f"--qo_len must be at most --kv_len {case.kv_len}, got {case.qo_len}")
    dtype, kv_dtype = torch_dtype(case.dtype), torch_dtype(case.kv_dtype)
    pages = -(-case.kv_len // case.page_size)
    requests, total = case.batch_size, case.batch_size * pages
    wrapper = planned(
        make_wrapper(
            "mla",
            "BatchMLAPagedAttentionWrapper",
            float_workspace_buffer=workspace_on(device),
        ),
        device,
        qo_indptr=indptr_of(int32([case.qo_len] * requests)),
        kv_indptr=indptr_of(int32([pages] * requests)),
        kv_indices=torch.randperm(total).int().to(device),
        kv_len_arr=int32([case.kv_len] * requests),
        num_heads=case.num_heads,
        head_dim_ckv=_CKV,
        head_dim_kpe=_KPE,
        page_size=case.page_size,
        causal=case.qo_len > 1,
        sm_scale=192**-0.5,
        q_data_type=dtype,
        kv_data_type=kv_dtype,
    )
    rows = (requests * case.qo_len, case.num_heads)
    arguments: Arguments = {"self": wrapper}
    for name, dim in (("q_nope", _CKV), ("q_pe", _KPE)):
        arguments[name] = make_tensor(*rows, dim, dtype=dtype, device=device)
    for name, dim in (("ckv_cache", _CKV), ("kpe_cache", _KPE)):
        arguments[name] = make_tensor(total, case.page_size, dim, dtype=kv_dtype, device=device)
    return {**arguments, "out": torch.empty_like(arguments["q_nope"])}


def _flops(case: Namespace) -> int:
    """Operations for logits and weighted values; a query token sees the tokens up to its own."""
    seen = case.qo_len * case.kv_len - case.qo_len * (case.qo_len - 1) // 2
    return 2 * case.batch_size * case.num_heads * seen * (2 * _CKV + _KPE)


register(
    Routine(
        name="BatchMLAPagedAttentionWrapper",
        api="flashinfer.mla:BatchMLAPagedAttentionWrapper.run",
        flags=_FLAGS,
        build=_build,
        reads=["q_nope", "q_pe", "ckv_cache", "kpe_cache"],
        writes=["out"],
        flops=_flops,
        check_options=mla_check_options,
        backends={"fa3": Backend("flashinfer.mla:BatchMLAPagedAttentionWrapper.run")},
    )
)
