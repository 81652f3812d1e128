"""The experts of a mixture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .. import kernels
from .linear import is_hopper


@dataclass
class Experts:
    """Weights of all experts, and how `cutlass_fused_moe` reads them.

    Attributes
    ----------
    up : torch.Tensor
        ``[experts, 2 * inner, hidden]``: first the rows of the values, then those of the gates;
        without a gate ``[experts, inner, hidden]``.
    down : torch.Tensor
        ``[experts, hidden, inner]``.
    options : dict
        Arguments of `cutlass_fused_moe`: the format's, biases, the activation's.
    """

    up: torch.Tensor
    down: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def is_plain(self, x: torch.Tensor) -> bool:
        """Whether `RoutedLayer` takes them: bfloat16 on one Hopper, with a gate by SiLU."""
        types = {x.dtype, self.up.dtype, self.down.dtype}
        return (
            types == {torch.bfloat16}
            and not self.options
            and self.up.shape[1] == 2 * self.down.shape[2]
            and is_hopper(x.device)
            and hasattr(kernels.fused_moe, "CutlassBf16Config")
        )

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        options = {"quant_scales": None, **self.options}
        (out,) = kernels.fused_moe.cutlass_fused_moe(
            x.contiguous(), chosen, weights, self.up, self.down, x.dtype, **options
        )
        return out


class RoutedLayer:
    """`MoELayer` of experts that a softmax over logits chooses, with weights that sum to 1."""

    def __init__(self, experts: Experts, chosen: int) -> None:
        moe, method = kernels.fused_moe, kernels.fused_moe.RoutingMethodType.Renormalize
        count, hidden, inner = experts.down.shape
        routing = moe.RoutingConfig(count, chosen, method)
        config = moe.MoEConfig(routing, moe.QuantConfig(), moe.ExpertConfig(inner))
        self._layer = moe.MoELayer(config, experts.up.device)
        self._weights = moe.MoEWeightPack()
        view = moe.CutlassBf16Config.prepare_weights(
            experts.up,
            experts.down,
            num_local_experts=count,
            hidden_size=hidden,
            intermediate_size=inner,
        )
        self._weights.prepare_for("cutlass_bf16", view)

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        moe = kernels.fused_moe
        mode = moe.RoutingInputMode.FromLogits
        tokens = moe.MoEActivationPack(
            x.contiguous(), None, routing_input_mode=mode, routing_logits=logits
        )
        return self._layer(tokens, self._weights)
