"""Mamba-2: a matrix per head in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import kernels
from ..batch import Batch
from .body import Body
from .convolution import causal_convolution
from .division import COLUMNS, ROWS, Cuts, rows
from .linear import Product
from .norm import gated_norm


@dataclass
class Mamba2(Body):
    """Convolution, the recurrence, and a gated norm of groups of columns.

    Attributes
    ----------
    inputs : Product
        The norm's gate, what is convolved (values, and for each group B and C), time steps.
    output : Product
        The last product.
    convolution, convolution_bias : torch.Tensor
        ``[columns, width]``, and ``[columns]`` or None.
    decay, skip, step_bias : torch.Tensor
        ``[heads]`` float32: A, D and what is added to a time step.
    norm : torch.Tensor
        ``[heads * dim]``.
    heads, dim, groups, state : int
        Shapes; heads share the B and C of a group.
    eps : float
        Number under the norm's root.
    """

    inputs: Product
    output: Product
    convolution: torch.Tensor
    convolution_bias: torch.Tensor | None
    decay: torch.Tensor
    skip: torch.Tensor
    step_bias: torch.Tensor
    norm: torch.Tensor
    heads: int
    dim: int
    groups: int
    state: int
    eps: float

    @staticmethod
    def cuts(heads: int, dim: int, groups: int, state: int) -> Cuts:
        """Groups are divided, with the heads that share them."""
        wide, narrow = heads * dim, groups * state
        return {
            "in_proj": rows(wide, wide, narrow, narrow, heads),
            "conv1d.weight": rows(wide, narrow, narrow),
            "conv1d.bias": rows(wide, narrow, narrow),
            "A_log": ROWS,
            "D": ROWS,
            "dt_bias": ROWS,
            "mixer.norm.weight": ROWS,
            "out_proj": COLUMNS,
        }

    def new_state(self, slots: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Last tokens of the convolution, and the matrices, ``[slots, heads, dim, state]``."""
        columns, width = self.convolution.shape
        return (
            torch.zeros(slots, width - 1, columns, dtype=self.norm.dtype, device=device),
            torch.zeros(slots, self.heads, self.dim, self.state, device=device),
        )

    def __call__(
        self, x: torch.Tensor, batch: Batch, cache: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        last, states = cache
        wide, narrow = self.heads * self.dim, self.groups * self.state
        gate, mixed, step = self.inputs(x).split([wide, wide + 2 * narrow, self.heads], 1)
        mixed = causal_convolution(mixed, self.convolution, self.convolution_bias, last, batch)
        values, b, c = (
            part.unflatten(1, (-1, width)).contiguous()
            for part, width in zip(
                mixed.split([wide, narrow, narrow], 1),
                (self.dim, self.state, self.state),
                strict=True,
            )
        )
        inputs = values, step.contiguous(), b, c
        if batch.decodes:
            out = self._decode(*inputs, states, batch.slots)
        else:
            out = torch.empty_like(values)
            if len(batch.singles):
                rows = batch.qo_indptr[:-1][batch.singles].long()
                one = (part[rows] for part in inputs)
                out[rows] = self._decode(*one, states, batch.slots[batch.singles])
            for start, end, slot in batch.prompts:
                whole = (part[None, start:end] for part in inputs)
                out[start:end] = self._prompt(*whole, states[slot, None])
        return self.output(gated_norm(out.flatten(1), gate, self.norm, self.eps, self.groups))

    def _decode(self, values, step, b, c, states, slots) -> torch.Tensor:
        """One token of each request."""

        def each(head: torch.Tensor, *shape: int) -> torch.Tensor:
            """A number of each head, as the operation wants it: expanded, not copied."""
            return head.reshape(*head.shape, *(1 for _ in shape)).expand(*head.shape, *shape)

        return kernels.mamba.selective_state_update(
            states,
            values,
            each(step, self.dim),
            each(self.decay, self.dim, self.state),
            b,
            c,
            each(self.skip, self.dim),
            dt_bias=each(self.step_bias, self.dim),
            dt_softplus=True,
            state_batch_indices=slots,
        )

    def _prompt(self, values, step, b, c, state) -> torch.Tensor:
        """All new tokens of a request, in chunks."""
        out, final = kernels.mamba.ssd_combined_fwd(
            values,
            step,
            self.decay,
            b,
            c,
            D=self.skip,
            dt_bias=self.step_bias,
            dt_softplus=True,
            initial_states=state,
        )
        state.copy_(final)
        return out[0]
