"""TensorRT-LLM's names of the all-reduce of expert outputs, fused with residual and norm."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .._common import checks
from .._compile.traced import graph_operator
from .._instrument.decorator import flashinfer_api
from ..compat.backends import BackendSupportedError
from . import patterns
from .fusion_names import QuantizationSFLayout
from .graph_results import FUSION_OUTPUTS
from .trtllm_ar import opened, rows_of


def _check_backend(backend: Any) -> None:
    if checks.choice("backend", backend, ("trtllm", "cake")) == "cake":
        raise BackendSupportedError("`backend` 'cake' is for Blackwell: take 'trtllm'")


@graph_operator("moe_allreduce_out", *FUSION_OUTPUTS)
@flashinfer_api
def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    scale_factor: float,
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: torch.Tensor,
    moe_reduction_active_experts_token_input: torch.Tensor,
    moe_reduction_token_input: torch.Tensor,
    layout_code: QuantizationSFLayout | None,
    moe_allreduce_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    weight_bias: float | None = None,
    *,
    backend: Literal["trtllm", "cake"] = "trtllm",
) -> None:
    """Sum the outputs of a rank's experts, then over the ranks; residual, RMS norm, NVFP4.

    Collective. What a rank adds is ``sum over e of scale_input[e] * active_experts[e] +
    token_input``, rounded.

    Parameters
    ----------
    world_size, world_rank : int
        The workspace's own.
    token_num, hidden_dim : int
        The tensors' sizes.
    workspace_ptrs : torch.Tensor
        Made by `trtllm_create_ipc_workspace_for_all_reduce_fusion`.
    launch_with_pdl : bool
        Programmatic dependent launch.
    residual_in, rms_gamma : torch.Tensor
        ``[token_num, hidden_dim]`` and ``[hidden_dim]``, float16, bfloat16, or without codes
        float32.
    rms_eps : float
        Added to the mean square.
    scale_factor : float
        NVFP4's global scale, which multiplies.
    moe_reduction_device_num_experts : int
        Experts of this rank.
    moe_reduction_scale_input : torch.Tensor
        ``[experts, token_num]``, float32.
    moe_reduction_active_experts_token_input : torch.Tensor
        ``[experts, token_num, hidden_dim]``, dtype of `residual_in`; it may be flat.
    moe_reduction_token_input : torch.Tensor
        ``[token_num, hidden_dim]``, added to the experts' weighted sum.
    layout_code : QuantizationSFLayout, optional
        Order of the scales in `scale_out`; None: SWIZZLED_128x4.
    moe_allreduce_out, residual_out, norm_out : torch.Tensor, optional
        ``[token_num, hidden_dim]``: the sum, the sum with the residual, and the norm; written if
        given.
    quant_out, scale_out : torch.Tensor, optional
        NVFP4 of the norm: two codes in a byte, and e4m3 scales of 16 elements.
    weight_bias : float, optional
        Added to `rms_gamma`.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.

    Raises
    ------
    BackendSupportedError
        If `backend` is of other GPUs.
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.
    """
    _check_backend(backend)
    peers = opened(workspace_ptrs, world_size, world_rank)
    experts = checks.count("moe_reduction_device_num_experts", moe_reduction_device_num_experts)
    active = rows_of(
        "moe_reduction_active_experts_token_input",
        checks.tensor(
            "moe_reduction_active_experts_token_input", moe_reduction_active_experts_token_input
        ),
        experts * token_num,
        hidden_dim,
    )
    scales = rows_of("moe_reduction_scale_input", moe_reduction_scale_input, experts, token_num)
    token_input = rows_of(
        "moe_reduction_token_input", moe_reduction_token_input, token_num, hidden_dim
    )
    checks.tensors(moe_reduction_scale_input=scales, moe_reduction_token_input=token_input)
    names = {
        "input": "moe_reduction_active_experts_token_input",
        "output": "moe_allreduce_out",
        "workspace": "workspace_ptrs",
    }
    active = active.view(experts, token_num, hidden_dim)
    source = patterns.Source(active, "moe_reduction", (scales, token_input), names)
    outputs = patterns.Outputs(
        rows_of("moe_allreduce_out", moe_allreduce_out, token_num, hidden_dim),
        rows_of("residual_out", residual_out, token_num, hidden_dim),
        rows_of("norm_out", norm_out, token_num, hidden_dim),
        quant_out,
        scale_out,
    )
    norm = patterns.Norm(
        rows_of("residual_in", checks.tensor("residual_in", residual_in), token_num, hidden_dim),
        checks.tensor("rms_gamma", rms_gamma, 1),
        rms_eps,
        0.0 if weight_bias is None else weight_bias,
        scale_factor,
    )
    result = "norm"
    if quant_out is not None:
        result = patterns.fp4_result(patterns.layout_of(layout_code))
    launch = patterns.Launch(None, launch_with_pdl, True)
    patterns.run_norm(peers, source, result, outputs, norm, launch)


@graph_operator(*FUSION_OUTPUTS)
@flashinfer_api
def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: torch.Tensor,
    residual_in: torch.Tensor,
    norm_weight: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    norm_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: torch.Tensor | None,
    expert_scale_factor: torch.Tensor | None,
    routed_scaling_factor: float | None,
    weight_bias: float | None = None,
    *,
    backend: Literal["trtllm", "cake"] = "trtllm",
) -> None:
    """Gather tokens' rows from permuted expert outputs, sum over the ranks; residual, RMS norm.

    What a rank adds is ``routed_scaling_factor * (sum over k of expert_scale_factor[:, k] *
    allreduce_in[expanded_idx_to_permuted_idx[:, k]]) + shared_expert_output``, rounded. Collective.

    Parameters
    ----------
    allreduce_in : torch.Tensor
        ``[permuted rows, hidden]``, float16, bfloat16 or float32.
    residual_in, norm_weight : torch.Tensor
        ``[tokens, hidden]`` and ``[hidden]``.
    expanded_idx_to_permuted_idx : torch.Tensor
        ``[tokens, top_k]``, int32: rows of `allreduce_in`; other numbers, as -1, for experts of
        other ranks.
    norm_out, residual_out : torch.Tensor, optional
        ``[tokens, hidden]``, written if given.
    quant_out, scale_out : torch.Tensor, optional
        Codes of the norm. float8_e4m3fn with float32 scales ``[tokens]``, or with the scale 1 where
        `scale_out` is None; uint8: NVFP4 with the global scale 1 and e4m3 scales, SWIZZLED_128x4.
    workspace_ptrs : torch.Tensor
        Made by `trtllm_create_ipc_workspace_for_all_reduce_fusion`.
    launch_with_pdl : bool
        Programmatic dependent launch.
    world_rank, world_size : int
        The workspace's own.
    eps : float
        Added to the mean square.
    shared_expert_output : torch.Tensor, optional
        ``[tokens, hidden]``, added by this rank.
    expert_scale_factor : torch.Tensor, optional
        ``[tokens, top_k]``, dtype of `allreduce_in`; None: ones.
    routed_scaling_factor : float, optional
        None: 1.
    weight_bias : float, optional
        Added to `norm_weight`.
    backend : str
        ``"trtllm"``; ``"cake"`` is refused.

    Raises
    ------
    BackendSupportedError
        If `backend` is of other GPUs.
    TypeError, ValueError
        If an argument is not allowed, before anything is sent.
    CommError
        If an earlier call on the workspace has timed out.
    """
    _check_backend(backend)
    peers = opened(workspace_ptrs, world_size, world_rank)
    checks.tensor("expanded_idx_to_permuted_idx", expanded_idx_to_permuted_idx, 2)
    factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    source = patterns.Source(
        checks.tensor("allreduce_in", allreduce_in, 2),
        "moe_finalize",
        (expert_scale_factor, expanded_idx_to_permuted_idx, shared_expert_output, factor),
        {"input": "allreduce_in", "rms_gamma": "norm_weight", "workspace": "workspace_ptrs"},
    )
    norm = patterns.Norm(
        checks.tensor("residual_in", residual_in, 2),
        checks.tensor("norm_weight", norm_weight, 1),
        eps,
        0.0 if weight_bias is None else weight_bias,
    )
    result = "norm"
    if quant_out is not None:
        if quant_out.dtype == torch.float8_e4m3fn:
            result = "static_e4m3" if scale_out is None else "row_e4m3"
        else:
            result = patterns.fp4_result(QuantizationSFLayout.SWIZZLED_128x4)
    outputs = patterns.Outputs(None, residual_out, norm_out, quant_out, scale_out)
    launch = patterns.Launch(None, launch_with_pdl, True)
    patterns.run_norm(peers, source, result, outputs, norm, launch)
