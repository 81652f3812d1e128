"""Mixtures of experts whose tokens have been routed."""

from typing import Any

import torch

from .._common import checks
from .._instrument.decorator import flashinfer_api
from .._moe import arguments as moe_arguments
from .._moe.experts import Experts
from .._moe.workspace import MixtureShape, workspace_bytes
from ..compat.backends import backend_requirement, supported_compute_capability
from ..tllm_enums import ActivationType, normalize_activation_type
from ..trace.templates.moe import cutlass_fused_moe_trace

_BACKENDS = ("cutlass", "auto")


@supported_compute_capability([90])
def _check(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    output: torch.Tensor | None,
    input_sf: torch.Tensor | None,
    cluster_size: int,
    cluster_rank: int,
    enable_alltoall: bool,
    swizzled_input_sf: bool,
    use_fused_finalize: bool,
    tune_max_num_tokens: int,
    use_mxfp8_act_scaling: bool,
    min_latency_mode: bool,
    use_packed_weights: bool,
    use_wfp4afp8_humming: bool,
    profile_ids: list[int] | None,
    workspace_buffer: torch.Tensor | None,
    clamped_relu2_limit: torch.Tensor | None,
    situ_beta: torch.Tensor | None,
    situ_linear_beta: torch.Tensor | None,
    backend: str,
) -> bool:
    """What has no kernel here, and what needs no look at the weights' scheme."""
    checks.choice("backend", backend, _BACKENDS)
    moe_arguments.refuse(
        input_sf=(input_sf, None),
        cluster_size=(cluster_size, 1),
        cluster_rank=(cluster_rank, 0),
        use_mxfp8_act_scaling=(use_mxfp8_act_scaling, False),
        min_latency_mode=(min_latency_mode, False),
        use_packed_weights=(use_packed_weights, False),
        use_wfp4afp8_humming=(use_wfp4afp8_humming, False),
        profile_ids=(profile_ids, None),
        clamped_relu2_limit=(clamped_relu2_limit, None),
        situ_beta=(situ_beta, None),
        situ_linear_beta=(situ_linear_beta, None),
    )
    checks.tensor("input", input, 2)
    checks.tensors(fc1_expert_weights=fc1_expert_weights, fc2_expert_weights=fc2_expert_weights)
    moe_arguments.check_routing(input.shape[0], token_selected_experts, token_final_scales)
    moe_arguments.check_workspace("workspace_buffer", workspace_buffer, input.device)
    checks.flag("enable_alltoall", enable_alltoall)
    checks.flag("swizzled_input_sf", swizzled_input_sf)
    checks.flag("use_fused_finalize", use_fused_finalize)
    checks.count("tune_max_num_tokens", tune_max_num_tokens)
    checks.dtype("output_dtype", output_dtype, moe_arguments.HALF)
    if output is not None:
        checks.tensor("output", output, 2)
        checks.dtype("output", output.dtype, (output_dtype,))
        if output.shape != input.shape:
            raise ValueError(
                f"`output` must have shape {list(input.shape)}, got {list(output.shape)}"
            )
    return True


@backend_requirement({}, common_check=_check)
@flashinfer_api(trace=cutlass_fused_moe_trace)
def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor] | None,
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None,
    workspace_buffer: torch.Tensor | None = None,
    *,
    clamped_relu2_limit: torch.Tensor | None = None,
    situ_beta: torch.Tensor | None = None,
    situ_linear_beta: torch.Tensor | None = None,
    backend: str = "cutlass",
) -> list[torch.Tensor]:
    """The experts' part of a mixture of experts, for tokens that have been routed.

    ``output[t] = sum_j token_final_scales[t, j] * fc2[e] @ act(fc1[e] @ input[t])`` with
    ``e = token_selected_experts[t, j]``. Products are summed in float32. A token's results are
    rounded to the output's dtype, weighted in float32 and summed in the order of its choices, so
    that equal calls give equal bits and other tokens of the batch change nothing but the choice of
    tiles. A single token with 16-bit weights, SwiGLU and neither biases nor constants has kernels
    of its own, which round the weighted sum alone.

    Parameters
    ----------
    input : torch.Tensor
        ``[tokens, hidden]``, rows contiguous, on a Hopper GPU: bfloat16 or float16, or
        float8_e4m3fn for 8-bit weights with one scale each.
    token_selected_experts : torch.Tensor
        ``[tokens, top_k]``, int32 or int64, contiguous. Experts that are not here count nothing,
        and neither do negative numbers; a token may name an expert twice.
    token_final_scales : torch.Tensor
        ``[tokens, top_k]``, float32, contiguous: the router's weights.
    fc1_expert_weights : torch.Tensor
        ``[experts, columns, hidden]``, of the experts that are here, at most 1024. Columns are the
        intermediate size; for a gated activation twice as many, first those of the values (up),
        then those of the gates.
    fc2_expert_weights : torch.Tensor
        ``[experts, hidden, intermediate]``. Both weights have the dtype of `input`, or
        float8_e4m3fn. With `use_w4_group_scaling` uint8, ``[experts, columns, hidden / 2]`` and
        ``[experts, hidden, intermediate / 2]``, the first of two codes in the lower four bits, as
        checkpoints have them: e2m1 for MXFP4 and NVFP4, two's complement for integers.
    output_dtype : torch.dtype
        bfloat16 or float16; that of a 16-bit `input` if the weights have 16 or 4 bits.
    quant_scales : list of torch.Tensor or None
        Empty or None for 16-bit weights. With `use_deepseek_fp8_block_scale`: float32 scales of
        128 by 128 elements of both weights, ``[experts, ceil(columns / 128), hidden / 128]`` and
        ``[experts, hidden / 128, intermediate / 128]``. For other 8-bit weights four float32
        tensors: factors of the first product's sums (scale of the input times scale of the weight),
        what is multiplied into the activation's result before it becomes 8 bits, factors of the
        second product's sums, each with one element or ``[experts]``, and the input's scale, which
        the first of them has in it. With `use_w4_group_scaling` the factors of groups along k,
        ``[experts, columns, hidden / group]`` and ``[experts, hidden, intermediate / group]``,
        whose dtype says the format: float8_e8m0fnu, the same bytes as uint8 or four of them in an
        int32 is MXFP4 (groups of 32), float8_e4m3fn is NVFP4 (of 16), the dtype of `input` or
        float32 is integers (of 32, 64 or 128). NVFP4 has two more: float32 factors of both weights,
        one element or ``[experts]``.
    fc1_expert_biases, fc2_expert_biases : torch.Tensor, optional
        ``[experts, columns]`` and ``[experts, hidden]``, dtype of the output, for weights of 16 or
        4 bits.
        The second one is added by tensor-parallel rank 0 alone.
    input_sf : None
        Scales of 4-bit or MXFP8 inputs, which have no kernel here.
    swiglu_alpha, swiglu_beta, swiglu_limit : torch.Tensor, optional
        ``[experts]``, float32: ``g sigmoid(alpha g) (u + beta)``, where limit bounds g from above
        and u on both sides. 1, 0 and no bound if None.
    tp_size, tp_rank : int
        Tensor parallelism: the weights are this rank's part of the intermediate size.
    ep_size, ep_rank : int
        Expert parallelism: experts ``ep_rank * experts`` to ``(ep_rank + 1) * experts - 1`` are
        here. The sum over all ranks is the whole result.
    cluster_size, cluster_rank : int
        1 and 0.
    output : torch.Tensor, optional
        ``[tokens, hidden]``, `output_dtype`, rows contiguous: receives the result. May not overlap
        `input`.
    enable_alltoall : bool
        Whether tokens were exchanged between ranks; experts elsewhere are skipped in any case.
    use_deepseek_fp8_block_scale : bool
        8-bit weights with scales of blocks, 16-bit input, which is quantised here by 128 elements
        of a row. hidden and intermediate are multiples of 128.
    use_w4_group_scaling : bool
        4-bit weights with scales of groups, 16-bit input. hidden and intermediate are multiples of
        32 and of the group.
    use_mxfp8_act_scaling, min_latency_mode, use_packed_weights
        False.
    use_wfp4afp8_humming : bool
        False.
    tune_max_num_tokens : int
        Largest batch that a call within ``autotune()`` tunes besides its own.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it. Changes no result.
    activation_type : ActivationType
        Swiglu, SwigluBias (the same), Geglu, Relu2 or Identity.
    swizzled_input_sf : bool
        Layout of `input_sf`.
    use_fused_finalize : bool
        Changes nothing: sums have a fixed order.
    profile_ids : None
        A tuner's choice, which this library does not take.
    workspace_buffer : torch.Tensor, optional
        Contiguous vector of at least `cutlass_fused_moe_workspace_size` bytes; new memory if None.
    clamped_relu2_limit, situ_beta, situ_linear_beta : None
        Constants of activations that have no kernel here.
    backend : {"cutlass", "auto"}
        Both mean this library's kernels.

    Returns
    -------
    list of torch.Tensor
        One tensor, ``[tokens, hidden]``: `output` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Shazeer et al., "Outrageously Large Neural Networks", 2017; Shazeer, "GLU Variants Improve
    Transformer", 2020; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    activation = normalize_activation_type(activation_type)
    name = moe_arguments.kernel_activation(activation)
    scheme = moe_arguments.find_scheme(
        fc1_expert_weights.dtype, use_deepseek_fp8_block_scale, use_w4_group_scaling
    )
    weights = moe_arguments.Weights(fc1_expert_weights, fc2_expert_weights, activation, scheme)
    weights.check(input)
    if scheme in ("none", "four_bit"):
        checks.dtype("output_dtype", output_dtype, (input.dtype,))
    _, tp_rank = moe_arguments.shard("tp_size", tp_size, "tp_rank", tp_rank)
    ep_size, ep_rank = moe_arguments.shard("ep_size", ep_size, "ep_rank", ep_rank)
    scales = weights.scales(quant_scales, input.dtype)
    gate = weights.gate(
        swiglu_alpha=swiglu_alpha, swiglu_beta=swiglu_beta, swiglu_limit=swiglu_limit
    )
    biases = weights.biases(fc1_expert_biases, fc2_expert_biases, output_dtype)
    if tp_rank != 0:
        biases = (biases[0], None)
    if output is None:
        output = input.new_empty(input.shape, dtype=output_dtype)
    if output.numel() == 0:
        return [output]
    checks.cuda_tensors(input=input, fc1_expert_weights=fc1_expert_weights)
    here = fc1_expert_weights.shape[0]
    experts = Experts(
        fc1_expert_weights,
        fc2_expert_weights,
        name,
        scheme,
        scales,
        biases,
        gate,
        first_expert=ep_rank * here,
        all_experts=ep_size * here,
    )
    experts.run(
        input,
        token_selected_experts,
        token_final_scales,
        output,
        workspace_buffer,
        enable_pdl,
        tune_max_num_tokens,
    )
    return [output]


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    activation_type: ActivationType = ActivationType.Swiglu,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool = True,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    device: torch.device | None = None,
    backend: str = "cutlass",
) -> int:
    """Bytes of a workspace that `cutlass_fused_moe` takes for at most `max_num_tokens` tokens.

    Parameters
    ----------
    max_num_tokens, top_k : int
        Tokens of the largest call, and choices of each.
    hidden_size, intermediate_size : int
        Sizes of the whole weights; the intermediate size is divided by `tp_size`.
    num_experts_total : int
        Experts of all ranks; a multiple of `ep_size`.
    x_dtype, weight_dtype, output_dtype : torch.dtype
        Types of input, weights and result.
    device : torch.device, optional
        Changes nothing: the size is the same on every GPU.
    activation_type, tp_size, tp_rank, ep_size, ep_rank, backend
        As for `cutlass_fused_moe`.
    min_latency_mode, use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling
        As for `cutlass_fused_moe`.
    use_fused_finalize, use_packed_weights, use_wfp4afp8_humming
        As for `cutlass_fused_moe`.

    Returns
    -------
    int
        Bytes, for a buffer of any alignment.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or `cutlass_fused_moe` would refuse it.
    """
    checks.choice("backend", backend, _BACKENDS)
    moe_arguments.refuse(
        min_latency_mode=(min_latency_mode, False),
        use_mxfp8_act_scaling=(use_mxfp8_act_scaling, False),
        use_packed_weights=(use_packed_weights, False),
        use_wfp4afp8_humming=(use_wfp4afp8_humming, False),
    )
    moe_arguments.kernel_activation(activation_type)
    tp_size, _ = moe_arguments.shard("tp_size", tp_size, "tp_rank", tp_rank)
    ep_size, _ = moe_arguments.shard("ep_size", ep_size, "ep_rank", ep_rank)
    checks.dtype("output_dtype", output_dtype, moe_arguments.HALF)
    scheme = moe_arguments.find_scheme(
        weight_dtype, use_deepseek_fp8_block_scale, use_w4_group_scaling
    )
    allowed = (*moe_arguments.HALF, moe_arguments.E4M3)
    checks.dtype("weight_dtype", weight_dtype, (torch.uint8,) if scheme == "four_bit" else allowed)
    checks.dtype("x_dtype", x_dtype, (*moe_arguments.HALF, moe_arguments.E4M3))
    sizes: dict[str, Any] = {"intermediate_size": intermediate_size}
    sizes["num_experts_total"] = num_experts_total
    for name, divisor in (("intermediate_size", tp_size), ("num_experts_total", ep_size)):
        if checks.count(name, sizes[name]) % divisor:
            raise ValueError(f"`{name}` must be a multiple of {divisor}, got {sizes[name]}")
    shape = MixtureShape(
        checks.count("max_num_tokens", max_num_tokens, 0),
        checks.count("top_k", top_k),
        num_experts_total // ep_size,
        checks.count("hidden_size", hidden_size),
        intermediate_size // tp_size,
        x_dtype,
        output_dtype,
        scheme,
    )
    return workspace_bytes(shape)
