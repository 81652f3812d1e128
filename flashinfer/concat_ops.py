"""Concatenation of the parts of multi-head latent attention's keys."""

from typing import Any, cast

import torch

from ._common.kernels import NOT_LOADED, Kernel, KernelTable
from ._instrument.decorator import flashinfer_api
from .jit.concat_ops import gen_concat_mla_module
from .trace.templates.concat_ops import concat_mla_k_trace

__all__ = ["concat_mla_k", "gen_concat_mla_module", "get_concat_mla_module"]


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
