"""Which backend attention takes: questions that serving engines ask before they build wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_PORTABLE_CAPABILITY = 80


def determine_attention_backend(
    device: torch.device,
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    *,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
) -> str:
    """The backend that ``backend="auto"`` takes.

    Parameters
    ----------
    device : torch.device
        Where attention will run.
    pos_encoding_mode : int
        0: none, 1: rotation in the kernel, 2: ALiBi.
    use_fp16_qk_reductions, use_custom_mask : bool
        Options of the call.
    dtype_q, dtype_kv : torch.dtype
        Of queries, and of keys and values.
    head_dim_qk, head_dim_vo : int, optional
        Head sizes.

    Returns
    -------
    str
        ``"fa3"`` where `is_fa3_backend_supported` says so and the device is Hopper; else ``"fa2"``.
    """
    options = (pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask, dtype_q, dtype_kv)
    return "fa3" if is_fa3_backend_supported(*options) else "fa2"


def is_fa3_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """False: there are no kernels for Hopper alone yet."""
    return False


def is_fa3_prefill_head_dim_supported(head_dim_qk: int, head_dim_vo: int) -> bool:
    """False: there are no kernels for Hopper alone yet."""
    return False


def is_cutlass_backend_supported(
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
) -> bool:
    """False: there are no CUTLASS kernels."""
    return False


def is_backend_supported(backend: str, cc: int | tuple[int, int] | None = None) -> bool:
    """Whether attention has a backend, and whether it runs on a compute capability.

    Parameters
    ----------
    backend : str
        Such as ``"fa2"``.
    cc : int or tuple of int, optional
        Such as 90 or ``(9, 0)``.
    """
    if backend not in ("auto", "fa2"):
        return False
    if isinstance(cc, tuple):
        cc = 10 * cc[0] + cc[1]
    return cc is None or cc >= _PORTABLE_CAPABILITY


def check_lse_base(lse_base: str) -> None:
    """Refuse another base of log-sum-exps than 2 (``"log2"``) and e (``"ln"``)."""
    if lse_base not in ("log2", "ln"):
        raise ValueError(f"`lse_base` must be 'log2' or 'ln', got {lse_base!r}")


def check_lse_layout(lse_layout: str) -> None:
    """Refuse another layout of log-sum-exps than ``"NH"`` (tokens, heads) and ``"HN"``."""
    if lse_layout not in ("NH", "HN"):
        raise ValueError(f"`lse_layout` must be 'NH' or 'HN', got {lse_layout!r}")


def prepare_jit_additional_args(
    jit_additional_tensor_names: Sequence[str],
    known_bufs: dict[str, Any],
    user_args: tuple[Any, ...],
) -> list[Any]:
    """Values of a variant's additional tensors and scalars.

    Parameters
    ----------
    jit_additional_tensor_names : sequence of str
        Its tensors, in order.
    known_bufs : dict
        Those that the caller has already, by name.
    user_args : tuple
        The other tensors, then the scalars.

    Raises
    ------
    ValueError
        If `user_args` are fewer than the other tensors.
    """
    wanted = [name for name in jit_additional_tensor_names if name not in known_bufs]
    if len(user_args) < len(wanted):
        raise ValueError(f"`user_args` must begin with {wanted}, got {len(user_args)} values")
    given = iter(user_args)
    tensors = [
        known_bufs[name] if name in known_bufs else next(given)
        for name in jit_additional_tensor_names
    ]
    return [*tensors, *given]
