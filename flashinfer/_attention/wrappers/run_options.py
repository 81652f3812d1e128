"""Keywords of ``run`` as type checkers see them; overloads share them by ``Unpack``."""

from __future__ import annotations

from typing import Any, TypedDict

import torch


class RunOptions(TypedDict, total=False):
    """Keywords of decode and prefill over pages."""

    q_scale: float | torch.Tensor | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    enable_pdl: bool | None
    window_left: int | None
    sinks: torch.Tensor | None
    skip_softmax_threshold_scale_factor: float | None
    kv_cache_sf: Any


class DecodeRunOptions(RunOptions, total=False):
    """Keywords of decode."""

    q_len_per_req: int | None
    out_scale: torch.Tensor | None


class PrefillRunOptions(RunOptions, total=False):
    """Keywords of prefill over pages."""

    lse_base: str
    lse_layout: str
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None


class MLARunOptions(TypedDict, total=False):
    """Keywords of latent attention that have no position."""

    query: Any
    kv_cache: Any
    ckv_scale: float | None
    kpe_scale: float | None
    sinks: torch.Tensor | None
    skip_softmax_threshold_scale_factor: float | None
    bmm1_scale: float | torch.Tensor | None
    bmm2_scale: float | torch.Tensor | None
