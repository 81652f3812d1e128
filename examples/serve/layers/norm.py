"""RMS norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import kernels
from .linear import BLOCK, Codes, Sum


@dataclass
class Norm:
    """``x / rms(x) * weight``.

    Attributes
    ----------
    weight : torch.Tensor
        ``[columns]``.
    eps : float
        Under the root.
    plus_one : bool
        Multiply by ``1 + weight``, as Gemma does.
    """

    weight: torch.Tensor
    eps: float
    plus_one: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = kernels.gemma_rmsnorm if self.plus_one else kernels.rmsnorm
        return norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """In place: ``residual += x``, and ``x = norm(residual)``."""
        if self.plus_one:
            kernels.gemma_fused_add_rmsnorm(x, residual, self.weight, self.eps)
        else:
            kernels.fused_add_rmsnorm(x, residual, self.weight, self.eps)

    def later(self, x: torch.Tensor, residual: torch.Tensor) -> Sum:
        """What `add` gives, for a product to compute."""
        return Sum(x, residual, self.weight, self.eps)

    @property
    def rounds(self) -> bool:
        """Whether its result may have 8 bits."""
        return not self.plus_one and len(self.weight) % BLOCK == 0

    def add_rounded(self, x: torch.Tensor, residual: torch.Tensor) -> Codes:
        """As `add`, with the result in 8 bits, too."""
        codes, scales = Codes.empty(*x.shape, x.device)
        kernels.fused_add_rmsnorm_fp8_block_quant(
            codes.numbers, scales, x, x, residual, self.weight, self.eps
        )
        return codes

    def rounded(self, x: torch.Tensor) -> Codes:
        """The norm of `x` in 8 bits."""
        codes, scales = Codes.empty(*x.shape, x.device)
        kernels.norm.rmsnorm_fp8_block_quant(codes.numbers, scales, x, self.weight, self.eps)
        return codes


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int = 1
) -> torch.Tensor:
    """``norm(x * silu(gate))`` over each of the groups of a row's columns, in float32."""
    gated = x.float() * torch.nn.functional.silu(gate.float())
    grouped = gated.unflatten(-1, (groups, -1))
    scale = (grouped.square().mean(-1, keepdim=True) + eps).rsqrt()
    return ((grouped * scale).flatten(-2) * weight.float()).to(x.dtype)
