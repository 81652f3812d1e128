"""The experts of a mixture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .. import kernels


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

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        options = {"quant_scales": None, **self.options}
        return kernels.fused_moe.cutlass_fused_moe(
            x.contiguous(), chosen, weights, self.up, self.down, x.dtype, **options
        )
