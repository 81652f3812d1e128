"""The parts of a KDA layer's decode step around the recurrence, and checks of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._common.checks import tensor as check_tensor
from .checks import check_shapes
from .short_convolution import History, convolve

WIDTH = 4
"""Taps of the convolution."""


class Layer(NamedTuple):
    """Tensors of a call: activations of packed tokens, weights and caches."""

    x: torch.Tensor  # [tokens, 3 * heads * head_dim]
    weight: torch.Tensor  # [3, WIDTH, heads * head_dim]
    conv_state: torch.Tensor  # [slots, 3 * heads * head_dim, length]
    raw_gate: torch.Tensor  # [1, tokens, heads, head_dim]
    raw_beta: torch.Tensor  # [1, tokens, heads]
    state: torch.Tensor  # [slots, heads, head_dim, head_dim]
    output_gate: torch.Tensor  # [tokens, heads, head_dim]
    norm_weight: torch.Tensor  # [head_dim]

    def check(self, length: int) -> None:
        """Refuse shapes that do not belong together; `length`: inputs that a slot must hold."""
        heads, dim = check_tensor("state", self.state, 4).shape[1:3]
        tokens = check_tensor("x", self.x, 2).shape[0]
        check_shapes(
            x=(self.x, (tokens, 3 * heads * dim)),
            weight=(self.weight, (3, WIDTH, heads * dim)),
            conv_state=(self.conv_state, (None, 3 * heads * dim, length)),
            raw_gate=(self.raw_gate, (1, tokens, heads, dim)),
            raw_beta=(self.raw_beta, (1, tokens, heads)),
            state=(self.state, (None, heads, dim, dim)),
            output_gate=(self.output_gate, (tokens, heads, dim)),
            norm_weight=(self.norm_weight, (dim,)),
        )
        for name in ("x", "conv_state"):
            tensor = getattr(self, name)
            if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != self.x.dtype:
                raise ValueError(
                    f"`{name}` must be float16 or bfloat16, as `x` is, got {tensor.dtype}"
                )

    def convolved(self, history: History) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Queries, keys and values, ``[1, tokens, heads, head_dim]`` each; as `convolve`."""
        heads, dim = self.state.shape[1:3]
        taps = self.weight.transpose(1, 2).reshape(-1, WIDTH)
        mixed, move_on = convolve(self.x, taps, history)
        return list(mixed.to(self.x.dtype).view(1, -1, 3, heads, dim).unbind(2)), move_on

    def normed(self, core: torch.Tensor, eps: float) -> torch.Tensor:
        """The recurrence's result, divided by its root mean square and gated, in float32."""
        core = core.float()
        scale = torch.rsqrt(core.square().mean(-1, keepdim=True) + eps)
        return core * scale * self.norm_weight.float() * torch.sigmoid(self.output_gate.float())
