"""Names of the all-reduce over NVLink multicast: each refuses and says what to take."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

import torch

from ..compat.backends import BackendSupportedError
from .fusion_names import QuantizationSFLayout
from .mapping import Mapping


class MNNVLAllreduceFusionStrategy(Enum):
    """Protocols over multicast."""

    ONESHOT = 0
    TWOSHOT = 1
    AUTO = 99


def _refuse(name: str) -> NoReturn:
    raise BackendSupportedError(
        f"{name} needs NVLink multicast, for which there are no kernels here: take "
        "create_allreduce_fusion_workspace(backend='trtllm') and allreduce_fusion"
    )


class MNNVLAllReduceFusionWorkspace:
    """Memory with a multicast address: refused with a BackendSupportedError."""

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int | None = None,
        hidden_dim: int | None = None,
        dtype: torch.dtype | None = None,
        buffer_size_in_bytes: int | None = None,
        comm_backend: Any | None = None,
    ) -> None:
        _refuse("MNNVLAllReduceFusionWorkspace")


def is_mnnvl_cutedsl_supported(
    tp_size: int,
    hidden_dim: int,
    dtype: torch.dtype,
    *,
    max_token_num: int,
    top_k: int = 10,
    apply_rms_norm: bool = True,
    write_residual_output: bool = True,
    output_dtype: torch.dtype = torch.bfloat16,
    dynamic_fp8: bool = False,
    write_norm_output: bool = False,
    config: Any | None = None,
    device: torch.device | int | str | None = None,
) -> bool:
    """False: that workspace is of Blackwell."""
    return False


def trtllm_mnnvl_allreduce(
    input: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    launch_with_pdl: bool,
    output: torch.Tensor | None = None,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
) -> torch.Tensor:
    """Refused with a BackendSupportedError: take `allreduce_fusion`."""
    _refuse("trtllm_mnnvl_allreduce")


def trtllm_mnnvl_fused_allreduce_add_rmsnorm(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Refused with a BackendSupportedError: take `allreduce_fusion` with kARResidualRMSNorm."""
    _refuse("trtllm_mnnvl_fused_allreduce_add_rmsnorm")


def trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    output_scale: torch.Tensor | float | None = None,
    layout_code: int = QuantizationSFLayout.SWIZZLED_128x4,
    quant_type: int = 0,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Refused with a BackendSupportedError: take `allreduce_fusion` with a pattern of codes."""
    _refuse("trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant")
