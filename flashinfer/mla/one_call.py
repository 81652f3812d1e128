"""Latent attention planned and run in one call, with lengths and block tables on the device."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from .._attention.checks import backend_of_ours
from .._instrument.decorator import flashinfer_api
from ..trace.arguments import with_defaults
from ..trace.templates.mla_one_call import mla_one_call_template, mla_one_call_trace
from .one_call_arguments import gather_decode, read_decode

__all__ = ["trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"]


def _gathered(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call of either function in the form of its template."""
    return gather_decode(with_defaults(trtllm_batch_decode_with_kv_cache_mla, call))


@flashinfer_api(trace=mla_one_call_trace("mla_decode", _gathered))
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: Literal["basee", "base2"] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Absorbed latent attention of a batch, planned on the device and run in one call.

    Nothing waits for the GPU if lengths are on it, so that a CUDA graph may capture the call and
    replay it for other lengths and pages. A wrapper that is planned once a step saves the plan in
    each layer. Calls that share `workspace_buffer` must follow one another.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch_size, q_len, num_heads, kv_lora_rank + qk_rope_head_dim]``, or with
        `cum_seq_lens_q` ``[tokens, num_heads, kv_lora_rank + qk_rope_head_dim]``; float16 or
        bfloat16, the first columns multiplied by the up-projection of keys. The last query token
        of a request is at its last KV token, and a token sees those up to its own.
    kv_cache : torch.Tensor
        ``[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]``, or with a dimension of 1 before
        or after `page_size`; the dtype of `query`, or on Hopper float8_e4m3fn; rows at multiples of
        16 bytes. On Hopper, beside bfloat16 queries, it may be uint8 with 656 bytes a token: 512
        float8_e4m3fn columns, a float32 scale for each 128 of them, and 64 bfloat16 columns.
    workspace_buffer : torch.Tensor
        For the work list and partial results; contiguous, any dtype. 32 MiB are enough for most
        batches; the error says how many bytes are needed.
    qk_nope_head_dim : int
        Columns of a key before the absorption; no kernel depends on it.
    kv_lora_rank, qk_rope_head_dim : int
        512 or 256, and 64 or 0.
    block_tables : torch.Tensor
        ``[batch_size, max_pages]`` int32: page numbers of each request. With `sparse_mla_top_k`,
        ``[batch_size, q_len, sparse_mla_top_k]`` or ``[tokens, sparse_mla_top_k]``: for each query
        token the numbers ``page * page_size + slot`` of the tokens that it sees.
    seq_lens : torch.Tensor
        ``[batch_size]`` int32: KV tokens of each request. Lengths on the host are planned there.
    max_seq_len : int
        A bound of `seq_lens`; the pages of `block_tables` bound them, too.
    sparse_mla_top_k : int
        How many tokens a query sees at most; 0: all. The first
        ``min(sparse_mla_top_k, what the query token could see)`` entries are used.
    out : torch.Tensor, optional
        Where the output goes: shape of `query` with `kv_lora_rank` columns, float16 or bfloat16.
    bmm1_scale, bmm2_scale : float or torch.Tensor
        Factors of the logits, positive, and of the output; a tensor is one number on the host.
    sinks : torch.Tensor or list of one, optional
        ``[num_heads]`` float32: a logit per head that takes part without a value.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; ``"xqa"`` and ``"trtllm-gen"`` are the
        first.
    is_var_seq : bool
        Whether lengths differ; both are planned alike.
    lse, return_lse, return_lse_base : optional
        Where log-sum-exps go, ``[tokens, num_heads]`` float32, whether they are returned, and their
        base: ``"base2"``, or None, and ``"basee"``.
    cum_seq_lens_q, max_q_len : optional
        ``[batch_size + 1]`` int32 on the device: first token of each request in `query`, and a
        bound of their tokens; rows beyond it are not computed.
    sparse_mla_top_k_lens : torch.Tensor, optional
        With `sparse_mla_top_k`: ``[tokens]`` int32, how many entries each query token uses, in
        place of `seq_lens`.
    multi_ctas_kv_counter_buffer : torch.Tensor, optional
        Not used: the kernels need none.
    skip_softmax_threshold_scale_factor, cute_dsl_impl, kv_scale_format, \
enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, use_fp16_softmax
        Must be left out, and `uses_shared_paged_kv_idx` True: of kernels that there are not.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Output and, with `return_lse`, log-sum-exps.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; sparse: "DeepSeek-V3.2-Exp", 2025, section 2.
    """
    call, table = read_decode(locals())
    backend = backend_of_ours(backend)
    outputs = call.run(
        table, workspace_buffer, backend, enable_pdl, lse, return_lse, return_lse_base
    )
    if not return_lse:
        return outputs[0]
    assert outputs[1] is not None
    return outputs[0], outputs[1]


@flashinfer_api(trace=mla_one_call_template("mla_decode_xqa", _gathered, lse=False))
def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``trtllm_batch_decode_with_kv_cache_mla`` with fewer arguments, each as there.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, \
block_tables, seq_lens, max_seq_len, out, bmm1_scale, bmm2_scale, sinks, enable_pdl
        As for ``trtllm_batch_decode_with_kv_cache_mla``.

    Returns
    -------
    torch.Tensor
        Output, of the shape of `query` with `kv_lora_rank` columns.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    """
    result = trtllm_batch_decode_with_kv_cache_mla(
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        enable_pdl=enable_pdl,
    )
    assert isinstance(result, torch.Tensor)
    return result
