"""The gated delta rule: a matrix per head in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from .. import kernels
from ..batch import Batch
from .body import Body
from .convolution import causal_convolution
from .division import COLUMNS, ROWS, Cuts, rows
from .linear import Product


@dataclass
class GatedDelta(Body):
    """Convolution, the recurrence, and a gated norm of each head.

    Attributes
    ----------
    inputs, gates : Product
        Queries, keys, values and the norm's gate of each group of heads; the inputs of learning
        rate and decay.
    output : Product
        The last product.
    convolution : torch.Tensor
        ``[columns, width]``.
    decay, decay_bias : torch.Tensor
        ``[value heads]`` float32: logarithm of the rate, and what is added to its input.
    norm : torch.Tensor
        ``[value columns]``.
    key_heads, value_heads, key_dim, value_dim : int
        Shapes; value heads share key heads.
    eps : float
        Number under the norm's root.
    """

    inputs: Product
    gates: Product
    output: Product
    convolution: torch.Tensor
    decay: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float

    @staticmethod
    def cuts(keys: int, values: int) -> Cuts:
        """Key heads are divided, with their value heads; `keys`, `values`: columns of all."""
        return {
            "in_proj_qkvz": ROWS,  # one key head after the other
            "in_proj_ba": ROWS,
            "conv1d.weight": rows(keys, keys, values),
            "A_log": ROWS,
            "dt_bias": ROWS,
            "out_proj": COLUMNS,
        }

    def new_state(self, slots: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Last tokens of the convolution, and the matrices, ``[slots, heads, value, key]``."""
        columns, width = self.convolution.shape
        matrices = (slots, self.value_heads, self.value_dim, self.key_dim)
        return (
            torch.zeros(slots, width - 1, columns, dtype=self.norm.dtype, device=device),
            torch.zeros(matrices, device=device),
        )

    def __call__(
        self, x: torch.Tensor, batch: Batch, cache: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        last, states = cache
        group = self.value_heads // self.key_heads
        sizes = [self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim]
        grouped = self.inputs(x).unflatten(1, (self.key_heads, -1))
        mixed = [part.flatten(1) for part in grouped.split(sizes, -1)]
        gate = mixed.pop().unflatten(1, (self.value_heads, -1))
        b, a = (
            part.reshape(len(x), -1)
            for part in self.gates(x).unflatten(1, (self.key_heads, -1)).split(group, -1)
        )
        mixed = causal_convolution(torch.cat(mixed, 1), self.convolution, None, last, batch)
        keys = self.key_heads * self.key_dim
        q, k, v = (
            part.unflatten(1, (-1, dim)).contiguous()
            for part, dim in zip(
                mixed.split([keys, keys, mixed.shape[1] - 2 * keys], 1),
                (self.key_dim, self.key_dim, self.value_dim),
                strict=True,
            )
        )
        out = (self._decode if batch.decodes else self._prompts)(q, k, v, a, b, states, batch)
        scale = (out.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        normed = (out.float() * scale * self.norm.float()).to(x.dtype)
        return self.output((normed * silu(gate.float())).to(x.dtype).flatten(1))

    def _decode(self, q, k, v, a, b, states, batch: Batch) -> torch.Tensor:
        """One token of each request; the operation computes the gates."""
        out, _ = kernels.gdn_decode.gated_delta_rule_mtp(
            q[:, None],
            k[:, None],
            v[:, None],
            states,
            batch.slots,
            self.decay,
            a[:, None],
            self.decay_bias,
            b[:, None],
            disable_state_update=False,
            use_qk_l2norm=True,
        )
        return out[:, 0]

    def _prompts(self, q, k, v, a, b, states, batch: Batch) -> torch.Tensor:
        rate = softplus(a.float() + self.decay_bias) * self.decay.exp()
        slots = batch.slots.long()
        out, final = kernels.gdn_prefill.chunk_gated_delta_rule(
            q,
            k,
            v,
            (-rate).exp(),
            b.float().sigmoid(),
            initial_state=states[slots],
            output_final_state=True,
            cu_seqlens=batch.qo_indptr.long(),
            use_qk_l2norm_in_kernel=True,
        )
        states[slots] = final.to(states.dtype)
        return out
