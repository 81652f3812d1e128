"""Concatenation of the parts of multi-head latent attention's keys."""

from typing import Any, cast

import torch

from ._common import checks
from ._common.kernels import NOT_LOADED, Kernel, KernelTable
from ._common.overlap import check_disjoint
from ._instrument.decorator import flashinfer_api
from .jit.concat_ops import gen_concat_mla_module
from .trace.templates.concat_ops import concat_mla_k_trace, concat_mla_kv_quant_fp8_trace

__all__ = [
    "concat_mla_k",
    "concat_mla_kv_quant_fp8",
    "gen_concat_mla_module",
    "get_concat_mla_module",
]


def get_concat_mla_module() -> Any:
    """The loaded module of `concat_mla_k`, compiled if need be."""
    return gen_concat_mla_module().build_and_load()


def _get_kernel(dtype: torch.dtype) -> Kernel:
    return cast(Kernel, get_concat_mla_module().concat_mla_k)


_concat_mla_k = KernelTable(_get_kernel)


@flashinfer_api(trace=concat_mla_k_trace)
def concat_mla_k(
    k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default"
) -> None:
    """Write ``k[t, h] = concat(k_nope[t, h], k_rope[t, 0])``.

    Parameters
    ----------
    k : torch.Tensor
        Result, ``[num_tokens, num_heads, nope_dim + rope_dim]``, float16, bfloat16, float32,
        float8_e4m3fn or float8_e5m2, last dimension contiguous, other strides free.
    k_nope : torch.Tensor
        ``[num_tokens, num_heads, nope_dim]``, dtype of `k`, last dimension contiguous.
    k_rope : torch.Tensor
        ``[num_tokens, 1, rope_dim]``, dtype of `k`, last dimension contiguous; the same for all
        heads.
    backend : str
        ``"default"``, the only one there is.

    Raises
    ------
    TypeError
        If an argument is not a tensor.
    ValueError
        If a tensor is not on the GPU, shares memory with `k` or has a shape, dtype or stride not
        listed above; if `backend` is another one.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V2", 2024, equation (18): all heads share the rotary part of a key.

    Examples
    --------
    >>> nope = torch.randn(16, 128, 128, dtype=torch.bfloat16, device="cuda")
    >>> rope = torch.randn(16, 1, 64, dtype=torch.bfloat16, device="cuda")
    >>> k = torch.empty(16, 128, 192, dtype=torch.bfloat16, device="cuda")
    >>> flashinfer.concat_ops.concat_mla_k(k, nope, rope)
    """
    if backend != "default":
        raise ValueError(f"`backend` must be 'default', got {backend!r}")
    try:
        kernel = _concat_mla_k[k.dtype]
    except NOT_LOADED:
        kernel = _concat_mla_k.load(k=k)
    kernel(k, k_nope, k_rope)


@flashinfer_api(trace=concat_mla_kv_quant_fp8_trace)
def concat_mla_kv_quant_fp8(
    kv_nope: torch.Tensor,
    k_pe: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    *,
    nope_dim: int = 128,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split projected keys and values, join keys with their rotary part, all rounded to e4m3.

    ``key[t, h] = (kv_nope[t, h, :nope_dim], k_pe[t])`` and ``value[t, h] = kv_nope[t, h,
    nope_dim:]``, for a prefill with 8-bit operands. Magnitudes above 448 become 448.

    Parameters
    ----------
    kv_nope : torch.Tensor
        ``[num_tokens, num_heads, nope_dim + v_dim]``, bfloat16, float16 or float32.
    k_pe : torch.Tensor
        ``[num_tokens, rope_dim]`` or ``[num_tokens, 1, rope_dim]``, dtype of `kv_nope`; the same
        for all heads.
    key, value : torch.Tensor, optional
        Results, float8_e4m3fn, ``[num_tokens, num_heads, nope_dim + rope_dim]`` and ``[num_tokens,
        num_heads, v_dim]``. They may be column slices of one tensor.
    nope_dim : int
        Columns of `kv_nope` that belong to keys.
    backend : str
        ``"auto"``, the only one there is: operations of PyTorch.

    Returns
    -------
    tuple of torch.Tensor
        `key` and `value`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V2", 2024, equation (18).
    """
    checks.choice("backend", backend, ("auto",))
    checks.cuda_tensors(kv_nope=kv_nope, k_pe=k_pe)
    tokens, heads, width = checks.tensor("kv_nope", kv_nope, 3).shape
    checks.dtype("kv_nope", kv_nope.dtype, (torch.bfloat16, torch.float16, torch.float32))
    checks.count("nope_dim", nope_dim, 0, width)
    rope = checks.tensor("k_pe", k_pe, 2, 3)
    rope = rope[:, None] if rope.ndim == 2 else rope
    if rope.shape[:2] != (tokens, 1) or rope.dtype != kv_nope.dtype:
        raise ValueError(
            f"`k_pe` must be {kv_nope.dtype} [{tokens}, rope_dim] or [{tokens}, 1, rope_dim], as "
            f"`kv_nope` is, got {k_pe.dtype} {list(k_pe.shape)}"
        )
    is_given = key is not None or value is not None
    key = _codes("key", key, (tokens, heads, nope_dim + rope.shape[2]), kv_nope)
    value = _codes("value", value, (tokens, heads, width - nope_dim), kv_nope)
    if is_given:
        _check_results({"key": key, "value": value}, {"kv_nope": kv_nope, "k_pe": k_pe})
    key[..., :nope_dim] = _in_range(kv_nope[..., :nope_dim])
    key[..., nope_dim:] = _in_range(rope).to(key.dtype).expand(-1, heads, -1)
    value.copy_(_in_range(kv_nope[..., nope_dim:]))
    return key, value


def _in_range(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448.0, 448.0)


def _check_results(written: dict[str, torch.Tensor], read: dict[str, torch.Tensor]) -> None:
    """Refuse results with two indices for an element, or over each other or an operand."""
    for name, tensor in written.items():
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"`{name}` is written and must not be an expanded tensor, got strides "
                f"{list(tensor.stride())}"
            )
        others = {other: t for other, t in {**read, **written}.items() if other != name}
        check_disjoint(name, tensor, **others)


def _codes(
    name: str, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device=like.device)
    checks.tensor(name, out, 3)
    if tuple(out.shape) != shape or out.dtype != torch.float8_e4m3fn or out.device != like.device:
        raise ValueError(
            f"`{name}` must be float8_e4m3fn {list(shape)} on {like.device}, got {out.dtype} "
            f"{list(out.shape)} on {out.device}"
        )
    return out
