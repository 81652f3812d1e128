"""Runners of layers of experts: a class for each pair of formats that Hopper has kernels for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .._common import checks
from .._common.arch import get_compute_capability
from ..autotuner.runner import TunableRunner
from ..compat.backends import BackendSupportedError
from ..tllm_enums import RoutingInputMode, RoutingMethodType
from .api import (
    FLOAT32_MAX,
    ActivationConfig,
    GeGLU,
    Identity,
    MoEActivationPack,
    MoEConfig,
    MoEWeightPack,
    QuantConfig,
    QuantFormat,
    ReLU2,
    SwiGLU,
)
from .cutlass import cutlass_fused_moe
from .selection import check_method, find_experts

_ACTIVATIONS = (SwiGLU, GeGLU, ReLU2, Identity)
_NAMES = {
    "input": "hidden_states_q",
    "token_selected_experts": "topk_ids",
    "token_final_scales": "topk_weights",
}
"""What packs call the arguments of `cutlass_fused_moe`."""


class MoERunner(TunableRunner):
    """One way to compute a layer.

    Attributes
    ----------
    backend_key : str
        The name under which a pack of weights holds its tensors.
    supported_quant_variants : tuple of (QuantFormat, QuantFormat)
        Formats of weights and activations.
    config : MoEConfig
        The layer.
    """

    backend_key: ClassVar[str] = ""
    supported_routing_modes: tuple[RoutingInputMode, ...] = tuple(RoutingInputMode)
    supported_quant_variants: ClassVar[tuple[tuple[QuantFormat, QuantFormat], ...]] = ()
    supported_output_formats: ClassVar[tuple[QuantFormat, ...]] = (QuantFormat.BF16,)
    supported_activation_classes: ClassVar[tuple[type[ActivationConfig], ...]] = _ACTIVATIONS
    supports_fused_shared_experts: ClassVar[bool] = False
    supports_per_token_scale: ClassVar[bool] = False
    supports_expert_parallelism: ClassVar[bool] = True

    def __init__(self, config: MoEConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.check_support()
        self.build()

    @classmethod
    def supports_quant(cls, quant: QuantConfig) -> bool:
        """Whether there are kernels for a layer's formats."""
        return (
            quant.pair in cls.supported_quant_variants
            and quant.output in cls.supported_output_formats
            and not quant.swizzled_scale_factors
            and not quant.per_token_scale
            and quant.nvfp4_4over6 is None
        )

    def check_support(self) -> None:
        """Refuse a layer that this runner cannot compute.

        Raises
        ------
        ValueError
            If the configuration has no kernel; `BackendSupportedError` for another GPU.
        """
        config, experts = self.config, self.config.experts
        if self.device.type == "cuda" and get_compute_capability(self.device) != (9, 0):
            raise BackendSupportedError(f"`{type(self).__name__}` needs a Hopper GPU")
        if not self.supports_quant(config.quant):
            raise ValueError(f"`quant` has no kernel in {type(self).__name__}: {config.quant}")
        if not isinstance(config.activation, self.supported_activation_classes):
            allowed = ", ".join(kind.__name__ for kind in self.supported_activation_classes)
            raise ValueError(f"`activation` must be one of {allowed}, got {config.activation}")
        if experts.num_fused_shared_experts != 0:
            raise ValueError("`num_fused_shared_experts` must be 0")
        if config.finalize.do_finalize is not True:
            raise ValueError("`do_finalize` must be True")
        here = self.num_local_experts
        if config.routing.num_experts % here or experts.local_expert_offset % here:
            raise ValueError(
                f"`local_num_experts` must divide num_experts {config.routing.num_experts} and "
                f"local_expert_offset {experts.local_expert_offset}, got {here}"
            )
        if experts.local_expert_offset >= config.routing.num_experts:
            raise ValueError("`local_expert_offset` must be less than num_experts")

    @property
    def num_local_experts(self) -> int:
        """Experts that are here."""
        here = self.config.experts.local_num_experts
        return self.config.routing.num_experts if here is None else checks.count("here", here, 1)

    def build(self) -> None:
        """Make what every call needs: the constants of the activation, one for each expert."""
        self.gate: dict[str, torch.Tensor] = {}
        activation = self.config.activation
        if not isinstance(activation, SwiGLU):
            return
        for name, absent in (("alpha", 1.0), ("beta", 0.0), ("limit", FLOAT32_MAX)):
            value = getattr(activation, name)
            if value != absent:
                self.gate[name] = torch.full(
                    (self.num_local_experts,), value, dtype=torch.float32, device=self.device
                )

    def accepts(self, act: MoEActivationPack, weights: MoEWeightPack) -> bool:
        """Whether there are weights for this runner, and no scales of activations."""
        return (
            self.backend_key in weights.native_views
            and act.hidden_states_scale is None
            and act.per_token_scale is None
        )

    def pack_inputs(self, act: MoEActivationPack, weights: MoEWeightPack) -> list[torch.Tensor]:
        """Activations, experts, their weights, and the weights of both products with their scales.

        Llama4 multiplies a token by its expert's weight before the experts, not after them.
        """
        routing = self.config.routing
        hidden = checks.tensor("hidden_states_q", act.hidden_states_q, 2)
        ids, scales = find_experts(act, routing, self.config.execution.enable_pdl)
        if routing.method == RoutingMethodType.Llama4:
            check_method(routing)
            checks.dtype("hidden_states_q", hidden.dtype, (torch.bfloat16,))
            hidden = (hidden.float() * scales).to(hidden.dtype)
            scales = torch.ones_like(scales)
        view = weights.get_view(self.backend_key)
        return [hidden, ids, scales, *(view[name] for name in sorted(view))]

    def get_valid_tactics(self, inputs: list[torch.Tensor], _profile: Any) -> list[Any]:
        """The kernels' own choice alone."""
        return [-1]

    def forward(
        self,
        inputs: list[torch.Tensor],
        tactic: Any = -1,
        do_preparation: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The layer's result, ``[tokens, hidden]``, bfloat16, for what `pack_inputs` gave."""
        hidden, ids, scales, fc1, fc2, *quant_scales = inputs
        config, here = self.config, self.num_local_experts
        if fc1.shape[0] != here:
            raise ValueError(f"`weights` must be of {here} experts, got {fc1.shape[0]}")
        try:
            (out,) = cutlass_fused_moe(
                hidden,
                ids,
                scales,
                fc1,
                fc2,
                torch.bfloat16,
                quant_scales,
                swiglu_alpha=self.gate.get("alpha"),
                swiglu_beta=self.gate.get("beta"),
                swiglu_limit=self.gate.get("limit"),
                ep_size=config.routing.num_experts // here,
                ep_rank=config.experts.local_expert_offset // here,
                tune_max_num_tokens=config.execution.tune_max_num_tokens,
                enable_pdl=config.execution.enable_pdl,
                activation_type=config.activation.type,
                use_deepseek_fp8_block_scale=config.quant.weight == QuantFormat.DeepSeekFp8,
                use_w4_group_scaling=config.quant.weight == QuantFormat.MXFP4,
            )
        except (TypeError, ValueError) as error:
            with checks.named(**_NAMES):
                raise error
        return out


class CutlassBf16Runner(MoERunner):
    """bfloat16 weights and activations."""

    backend_key: ClassVar[str] = "cutlass_bf16"
    supported_quant_variants: ClassVar[tuple[tuple[QuantFormat, QuantFormat], ...]] = (
        (QuantFormat.BF16, QuantFormat.BF16),
    )


class CutlassFp8BlockRunner(MoERunner):
    """8-bit weights with factors of blocks; bfloat16 activations, which become 8 bits here."""

    backend_key: ClassVar[str] = "cutlass_fp8_block"
    supported_quant_variants: ClassVar[tuple[tuple[QuantFormat, QuantFormat], ...]] = (
        (QuantFormat.DeepSeekFp8, QuantFormat.DeepSeekFp8),
        (QuantFormat.DeepSeekFp8, QuantFormat.BF16),
    )


class CutlassFp8PerTensorRunner(MoERunner):
    """8-bit weights and activations with a factor for each tensor."""

    backend_key: ClassVar[str] = "cutlass_fp8_per_tensor"
    supported_quant_variants: ClassVar[tuple[tuple[QuantFormat, QuantFormat], ...]] = (
        (QuantFormat.FP8PerTensor, QuantFormat.FP8PerTensor),
    )


class CutlassW4A16Runner(MoERunner):
    """MXFP4 weights, bfloat16 activations."""

    backend_key: ClassVar[str] = "cutlass_w4a16"
    supported_quant_variants: ClassVar[tuple[tuple[QuantFormat, QuantFormat], ...]] = (
        (QuantFormat.MXFP4, QuantFormat.BF16),
    )
