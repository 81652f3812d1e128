"""The kernel's module under FlashInfer's name."""

from __future__ import annotations

from typing import Any

import torch

from ..jit.attention.mla import get_mla_module_of, mla_config

__all__ = ["get_batch_mla_module"]


def get_batch_mla_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> Any:
    """The loaded module with ``mla_run``, compiled if need be.

    Parameters
    ----------
    backend, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv, head_dim_kpe, use_profiler
        As for ``flashinfer.jit.gen_batch_mla_module``.

    Raises
    ------
    ValueError
        If there is no kernel for them.
    """
    types = (dtype_q, dtype_kv, dtype_o, dtype_idx)
    config = mla_config(backend, *types, head_dim_ckv, head_dim_kpe, use_profiler)
    return get_mla_module_of(config)
