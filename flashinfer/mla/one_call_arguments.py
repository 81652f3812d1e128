"""Reads the arguments of latent attention in one call: for its launch, and for its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._attention.checks import (
    BLACKWELL,
    backend_of_ours,
    check_backend,
    check_counters,
    refuse,
)
from .._common.checks import count as check_count
from .._common.checks import flag as check_flag
from .._common.checks import optional_flag as check_optional_flag
from .._common.checks import tensor as check_tensor
from .one_call_launch import OneCall, PageRows, read_one_call, read_table, read_top_k

Arguments = Mapping[str, Any]

# Arguments of kernels that there are not, and the value that each must have.
_FIXED: dict[str, Any] = {
    "skip_softmax_threshold_scale_factor": None,
    "cute_dsl_impl": "auto",
    "kv_scale_format": "auto",
    "uses_shared_paged_kv_idx": True,
    "enable_dcp": False,
    "cp_world": 1,
    "cp_rank": 0,
    "causal_seqlens_kv_global": None,
    "use_fp16_softmax": None,
}


def read_decode(call: Arguments) -> tuple[OneCall, PageRows]:
    """Tensors and requests of ``trtllm_batch_decode_with_kv_cache_mla``, by its arguments' names.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as that function says; what the kernel's binding checks is left to it.
    """
    values = {name: call[name] for name in _FIXED}
    refuse(BLACKWELL, **{n: _unless(v, _FIXED[n]) for n, v in values.items()})
    check_backend(backend_of_ours(call["backend"]))
    check_counters(call["multi_ctas_kv_counter_buffer"])
    check_flag("is_var_seq", call["is_var_seq"])
    check_flag("return_lse", call["return_lse"])
    check_optional_flag("enable_pdl", call["enable_pdl"])
    check_count("qk_nope_head_dim", call["qk_nope_head_dim"])
    check_count("max_seq_len", call["max_seq_len"], 0)
    base = call["return_lse_base"]
    if base not in (None, "base2", "basee"):
        raise ValueError(f"`return_lse_base` must be 'base2' or 'basee', got {base!r}")
    if not check_tensor("workspace_buffer", call["workspace_buffer"]).is_contiguous():
        raise ValueError("`workspace_buffer` must be contiguous")
    query, tables = call["query"], call["block_tables"]
    lengths, starts = call["seq_lens"], call["cum_seq_lens_q"]
    one = read_one_call(
        query,
        call["kv_cache"],
        (call["kv_lora_rank"], call["qk_rope_head_dim"]),
        call["bmm1_scale"],
        call["bmm2_scale"],
        call["sinks"],
        call["out"],
    )
    top_k, top_k_lens = call["sparse_mla_top_k"], call["sparse_mla_top_k_lens"]
    if check_count("sparse_mla_top_k", top_k, 0):
        one = one.with_single_tokens()
        return one, read_top_k(one, query, tables, lengths, starts, top_k, top_k_lens)
    refuse("`sparse_mla_top_k` is 0", sparse_mla_top_k_lens=top_k_lens)
    return one, read_table(query, tables, lengths, starts, call["max_q_len"])


def _unless(value: Any, expected: Any) -> Any:
    """None for the value that an argument must have, else what `refuse` refuses."""
    if type(value) is type(expected) and value == expected:
        return None
    return repr(value)


def gather_decode(call: Arguments) -> dict[str, Any]:
    """All arguments in the form of the template: pages and lengths as lists, a plain cache."""
    one, table = read_decode(call)
    if one.is_scaled:
        one = one.with_plain_cache()
    options, device = one.options(table.causal), one.query.device
    backend = backend_of_ours(call["backend"])
    options.config(backend, device, 1)  # there are kernels of these types and sizes
    first, lengths = table.host_lists()
    count, width = table.pages.shape
    query, at = call["query"], one.dims[0]
    latent, rotary = one.parts(one.kv_cache)
    return {
        "q_nope": query[..., :at],
        "q_pe": query[..., at:] if one.dims[1] else None,
        "ckv_cache": latent,
        "kpe_cache": rotary,
        "qo_indptr": first.to(device),
        "kv_indptr": torch.arange(count + 1, dtype=torch.int32, device=device) * width,
        "kv_indices": table.pages.reshape(-1).to(device),
        "kv_len_arr": lengths.clamp(0, width * options.page_size).to(device),
        "head_dim_kpe": options.head_dim_kpe,
        "sm_scale": one.scales[0],
        **({"o_scale": one.scales[1]} if one.scales[1] != 1.0 else {}),
        "causal": table.causal,
        "lse_base": "ln" if call["return_lse_base"] == "basee" else "log2",
        "sinks": one.sinks,
        "o_dtype": options.o_dtype,
        "out": call["out"],
        "lse": call["lse"],
    }
