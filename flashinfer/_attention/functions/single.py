"""Attention of one request: public as ``flashinfer.single_decode_with_kv_cache`` and its like."""

import functools
from typing import Any, Literal, overload

import torch

from ..._common.cache_layout import is_hnd
from ..._common.checks import flag as check_flag
from ..._common.checks import tensor as check_tensor
from ..._common.packbits import packbits
from ..._instrument.decorator import flashinfer_api
from ...jit.attention.config import PACKED_FLOAT4
from ...jit.attention.variant import AttentionVariant
from ...trace.templates.attention import (
    single_decode_with_kv_cache_trace,
    single_prefill_with_kv_cache_trace,
)
from ..checks import (
    check_backend,
    check_block_scales,
    check_pair_of_scales,
    check_pos_encoding,
    check_window,
    logits_scale,
    positive,
    resolve_dtypes,
    soft_cap,
    split_scales,
)
from ..plan.alibi import get_alibi_slopes
from ..plan.masks import as_bools, in_whole_words
from ..plan.requests import ArgumentNames, AttentionProblem, CustomMask, PlanTensors, Requests
from ..plan.spec import AttentionSpec
from .single_plans import run_single


@overload
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@flashinfer_api(trace=single_decode_with_kv_cache_trace)
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Attention of one query to all keys of a request.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_qo_heads, head_dim]``, float16 or bfloat16; last dimension contiguous, rows at
        multiples of 16 bytes.
    k, v : torch.Tensor
        ``[kv_len, num_kv_heads, head_dim]`` (``"NHD"``) or ``[num_kv_heads, kv_len, head_dim]``
        (``"HND"``), dtype of `q`, float8_e4m3fn or float8_e5m2; strides as for `q`.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    pos_encoding_mode : str
        ``"NONE"``; ``"ROPE_LLAMA"``: rotate queries and keys in the kernel; ``"ALIBI"``.
    use_tensor_cores : bool
        Accepted; there is one kernel, and it uses them.
    q_scale, k_scale, v_scale : float or torch.Tensor, optional
        As `scale_q`, `scale_k` and `scale_v` of :func:`single_prefill_with_kv_cache`.
    window_left : int
        How many keys before the last one are seen; -1: all.
    logits_soft_cap : float, optional
        c of ``c * tanh(logits / c)``; None and 0: none.
    sm_scale : float, optional
        Scale of the logits, ``1 / sqrt(head_dim)`` by default.
    rope_scale, rope_theta : float, optional
        For ``"ROPE_LLAMA"``: positions are divided by the first (1), frequencies are powers of the
        second (10,000).
    return_lse : bool
        Whether the log-sum-exps are returned.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Output, ``[num_qo_heads, head_dim]`` of the dtype of `q`, and, with `return_lse`, the base-2
        log-sum-exps, ``[num_qo_heads]`` float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    A call whose shapes and options were seen lately is not planned again; a CUDA graph can capture
    only such calls.

    Examples
    --------
    >>> q = torch.randn(32, 128, dtype=torch.float16, device="cuda")
    >>> k, v = torch.randn(2, 4096, 8, 128, dtype=torch.float16, device="cuda")
    >>> flashinfer.single_decode_with_kv_cache(q, k, v).shape
    torch.Size([32, 128])
    """
    check_flag("use_tensor_cores", use_tensor_cores)
    check_tensor("q", q, 2)
    if check_tensor("k", k, 3).dtype == PACKED_FLOAT4:
        raise ValueError(
            "`k` must have 8 or 16 bits, got uint8 (4 bits), whose scales "
            "single_prefill_with_kv_cache takes"
        )
    problem = single_problem(
        q[None],
        k,
        v,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    out = torch.empty((1, *q.shape[:1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = new_lse(q[None]) if check_flag("return_lse", return_lse) else None
    scale = logits_scale(sm_scale, q.shape[-1])
    heads = (q.shape[0], problem.spec.num_kv_heads)
    factor, v_factor, head_scales = split_scales(q.device, *heads, q_scale, k_scale, v_scale)
    run_single(problem, q[None], k, v, out, lse, scale * factor, v_factor, head_scales=head_scales)
    return out[0] if lse is None else (out[0], lse[0])


@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: float | torch.Tensor | None = None,
    scale_k: float | torch.Tensor | None = None,
    scale_v: float | torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> torch.Tensor: ...
@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: float | torch.Tensor | None = None,
    scale_k: float | torch.Tensor | None = None,
    scale_v: float | torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    *,
    return_lse: Literal[True],
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@flashinfer_api(trace=single_prefill_with_kv_cache_trace)
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: float | torch.Tensor | None = None,
    scale_k: float | torch.Tensor | None = None,
    scale_v: float | torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Attention of the queries of one request to its keys.

    Parameters
    ----------
    q : torch.Tensor
        ``[qo_len, num_qo_heads, head_dim_qk]``, float16 or bfloat16, on Hopper also float8_e4m3fn
        (backend ``"fa3"``); last dimension contiguous, rows at multiples of 16 bytes.
    k, v : torch.Tensor
        ``[kv_len, num_kv_heads, head_dim]`` (``"NHD"``) or ``[num_kv_heads, kv_len, head_dim]``
        (``"HND"``), dtype of `q`, with 16-bit queries also float8_e4m3fn or float8_e5m2; strides as
        for `q`. Values may have another head size than keys. With 16-bit queries also 4 bits
        (NVFP4): uint8, ``head_dim / 2`` elements in a row, for head sizes that are multiples of 64.
    scale_q, scale_k, scale_v : float or torch.Tensor, optional
        Scales of quantised `q`, `k` and `v`: the first two multiply the logits, the last the
        output. A number (also a tensor of one on the CPU), or float32 on the device of `q`, which
        the host does not wait for: ``[num_qo_heads]`` for `q`, ``[num_kv_heads]`` for `k` and `v`,
        or one value for all heads. Values on the device must be positive.
    o_dtype : torch.dtype, optional
        float16 or bfloat16; that of `q` by default, required with 8-bit queries.
    custom_mask : torch.Tensor, optional
        ``[qo_len, kv_len]`` bool, or uint8 with 0 for False: which keys each query sees. Takes
        the place of `causal`. Another shape of as many elements is read row by row.
    packed_custom_mask : torch.Tensor, optional
        The same row by row as bits, ``[ceil(qo_len * kv_len / 8)]`` uint8, as
        ``packbits(..., bitorder="little")`` packs them. Takes the place of `custom_mask`.
    causal : bool
        Query i sees keys up to ``i + kv_len - qo_len``.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    pos_encoding_mode : str
        ``"NONE"``; ``"ROPE_LLAMA"``: rotate queries and keys in the kernel; ``"ALIBI"``.
    use_fp16_qk_reduction : bool
        Must be False: logits are summed in float32.
    sm_scale : float, optional
        Scale of the logits, ``1 / sqrt(head_dim_qk)`` by default.
    window_left : int
        How many keys before its own position a query sees; -1: all.
    logits_soft_cap : float, optional
        c of ``c * tanh(logits / c)``; None and 0: none.
    rope_scale, rope_theta : float, optional
        For ``"ROPE_LLAMA"``: positions are divided by the first (1), frequencies are powers of the
        second (10,000).
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; see docs/attention.md.
    return_lse : bool
        Whether the log-sum-exps are returned.
    kv_cache_sf : tuple of torch.Tensor, optional
        Scales of 4-bit keys and of values, which need them: as `k` and `v`, with ``head_dim // 16``
        elements in a row, float8_e4m3fn or its bits as uint8, at multiples of 16, 8 or 4 bytes, the
        largest that divides a row. A value is ``code * scale * k_scale``, or ``v_scale``.
    k_scale, v_scale : float or torch.Tensor, optional
        Other names of `scale_k` and `scale_v`.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        Output, ``[qo_len, num_qo_heads, head_dim_vo]`` of `o_dtype`, and, with `return_lse`, the
        base-2 log-sum-exps, ``[qo_len, num_qo_heads]`` float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    A call whose shapes and options were seen lately is not planned again; a CUDA graph can capture
    only such calls.

    Examples
    --------
    >>> q = torch.randn(40, 32, 128, dtype=torch.float16, device="cuda")
    >>> k, v = torch.randn(2, 4096, 8, 128, dtype=torch.float16, device="cuda")
    >>> flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True).shape
    torch.Size([40, 32, 128])
    """
    check_backend(backend)
    check_pair_of_scales(kv_cache_sf)
    if check_flag("use_fp16_qk_reduction", use_fp16_qk_reduction):
        raise ValueError(
            "`use_fp16_qk_reduction` must be False, got True: logits are summed in float32"
        )
    check_tensor("q", q, 3)
    problem = single_problem(
        q,
        k,
        v,
        kv_layout=kv_layout,
        o_dtype=o_dtype,
        causal=check_flag("causal", causal),
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        backend=backend,
    )
    check_block_scales(problem.spec.kv_data_type, kv_cache_sf)
    if custom_mask is not None or packed_custom_mask is not None:
        kv_len = int(problem.requests.kv_indptr[1])
        mask = _single_mask(len(q), kv_len, custom_mask, packed_custom_mask, q.device)
        problem = problem.with_mask(mask)
    shape = (*q.shape[:-1], problem.spec.head_dim_vo)
    out = torch.empty(shape, dtype=problem.spec.o_data_type, device=q.device)
    lse = new_lse(q) if check_flag("return_lse", return_lse) else None
    scale = logits_scale(sm_scale, q.shape[-1])
    for name, named, other in (("k", k_scale, scale_k), ("v", v_scale, scale_v)):
        if named is not None and other is not None:
            raise ValueError(f"`scale_{name}` and `{name}_scale` are the same: give one of them")
    factor, v_factor, head_scales = split_scales(
        q.device,
        q.shape[1],
        problem.spec.num_kv_heads,
        scale_q,
        k_scale if scale_k is None else scale_k,
        v_scale if scale_v is None else scale_v,
        names=(
            "scale_q",
            "k_scale" if scale_k is None else "scale_k",
            "v_scale" if scale_v is None else "scale_v",
        ),
    )
    run_single(
        problem,
        q,
        k,
        v,
        out,
        lse,
        scale * factor,
        v_factor,
        head_scales=head_scales,
        block_scales=kv_cache_sf,
    )
    return out if lse is None else (out, lse)


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)


# --- Details ----------------------------------------------------------------------------------


_spec = functools.lru_cache(maxsize=256)(AttentionSpec)  # a repeated call costs a look-up


def single_problem(
    q: torch.Tensor,
    k: Any,
    v: Any,
    *,
    kv_layout: str,
    o_dtype: Any = None,
    causal: bool = False,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    variant: AttentionVariant | None = None,
    backend: str = "auto",
) -> AttentionProblem:
    """One ragged request, from the tensors of the call."""
    hnd = is_hnd(kv_layout)
    check_tensor("k", k, 3)
    check_tensor("v", v, 3)
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"`v` must have the tokens and heads of `k`, {list(k.shape)}, got {list(v.shape)}"
        )
    codes = 2 if k.dtype == PACKED_FLOAT4 else 1
    if k.shape[2] * codes != q.shape[2]:
        raise ValueError(
            f"`k` must have the head size of `q`, {q.shape[2]}, got shape {list(k.shape)}"
        )
    if v.dtype != k.dtype:
        raise ValueError(f"`v` must have the dtype of `k`, {k.dtype}, got {v.dtype}")
    q_dtype, kv_dtype, o_dtype = resolve_dtypes(q.dtype, k.dtype, o_dtype)
    kv_heads, kv_len = k.shape[:2] if hnd else (k.shape[1], k.shape[0])
    spec = _spec(
        num_qo_heads=q.shape[1],
        num_kv_heads=kv_heads,
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[2] * codes,
        q_data_type=q_dtype,
        kv_data_type=kv_dtype,
        o_data_type=o_dtype,
        sm_scale=1.0,
        causal=causal,
        window_left=check_window(window_left),
        logits_soft_cap=soft_cap(logits_soft_cap),
        pos_encoding_mode=check_pos_encoding(pos_encoding_mode),
        rope_scale=positive("rope_scale", rope_scale, 1.0),
        rope_theta=positive("rope_theta", rope_theta, 1e4),
        kv_layout=kv_layout,
        variant=variant,
        backend=backend,
    )
    requests = Requests(
        ArgumentNames.RAGGED,
        torch.tensor([0, q.shape[0]], dtype=torch.int32),
        torch.tensor([0, kv_len], dtype=torch.int32),
        causal=causal,
        window_left=spec.window_left,
    )
    slopes = _slopes(q.shape[1], q.device) if pos_encoding_mode == "ALIBI" else None
    return AttentionProblem(spec, requests, PlanTensors(alibi_slopes=slopes))


@functools.cache
def _slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    return get_alibi_slopes(num_heads, device)


@functools.cache
def _no_offset(device: torch.device) -> torch.Tensor:
    """Where the mask of the only request begins."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _single_mask(
    qo_len: int, kv_len: int, mask: Any, packed: Any, device: torch.device
) -> CustomMask:
    if packed is None:
        mask = as_bools(mask)
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"`custom_mask` must be a torch.Tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool or mask.numel() != qo_len * kv_len:
            raise ValueError(
                f"`custom_mask` must be bool of the elements of [{qo_len}, {kv_len}], got "
                f"{str(mask.dtype).removeprefix('torch.')} of shape {list(mask.shape)}"
            )
        packed = packbits(mask.reshape(-1), "little")
    check_tensor("packed_custom_mask", packed, 1)
    if packed.dtype != torch.uint8 or packed.numel() != -(-qo_len * kv_len // 8):
        raise ValueError(
            f"`packed_custom_mask` must be uint8 of shape [{-(-qo_len * kv_len // 8)}], got "
            f"{str(packed.dtype).removeprefix('torch.')} of shape {list(packed.shape)}"
        )
    if packed.device != device:
        raise ValueError(f"`packed_custom_mask` must be on {device}, got {packed.device}")
    return CustomMask(in_whole_words(packed.contiguous()), _no_offset(device))


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """Room for the log-sum-exps of `q`."""
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
