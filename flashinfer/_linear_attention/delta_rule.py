"""The recurrent delta rule kernel, called with tensors in one form: [batch, tokens, heads, dim]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from .._common import checks
from ..jit.delta_rule import DeltaRuleConfig, gen_delta_rule_module

_BETA_IS_LOGIT, _NORMALIZE, _WRITE_EVERY_TOKEN = 1, 2, 4


class GateForm(IntEnum):
    """How a gate's input becomes a decay; see include/flashinfer/linear_attention."""

    LINEAR = 0
    LOG = 1
    SOFTPLUS = 2
    LOWER_BOUND = 3


@functools.cache
def get_delta_rule_kernel(config: DeltaRuleConfig) -> Callable[..., None]:
    """The kernel of a configuration, built at the first call."""
    return gen_delta_rule_module(config).build_and_load().delta_rule


@dataclass(frozen=True)
class Gates:
    """Decay and learning rate: tensors and how they are read.

    `gate` is [batch, tokens, heads] or, by key channel, [batch, tokens, heads, head_dim_k].
    """

    gate: torch.Tensor | None
    beta: torch.Tensor | None
    form: GateForm
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    lower_bound: float = 0.0
    beta_is_logit: bool = False
    by_channel: bool = False

    def packed(self) -> Gates:
        """All batches become one; the tensors need no copy for it."""

        def pack(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.flatten(0, 1)[None]

        return replace(self, gate=pack(self.gate), beta=pack(self.beta))


@dataclass(frozen=True)
class States:
    """Where states are read and written: pools [slots, heads, head_dim_v, head_dim_k].

    `initial` None: zeros; `final` None: not written. Slots are [batch] or, one per token,
    [batch, tokens].
    """

    initial: torch.Tensor | None
    final: torch.Tensor | None
    read_slots: torch.Tensor | None = None
    write_slots: torch.Tensor | None = None
    num_accepted: torch.Tensor | None = None
    write_every_token: bool = False
    snapshots: torch.Tensor | None = None
    snapshot_starts: torch.Tensor | None = None
    snapshots_per_batch: int = 0
    snapshot_every: int = 1
    key_major: bool = False  # pools are [slots, heads, head_dim_k, head_dim_v]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the pools; float32 where there is none."""
        for pool in (self.initial, self.final, self.snapshots):
            if pool is not None:
                return pool.dtype
        return torch.float32


def flags_of(gates: Gates, states: States, normalize_qk: bool) -> int:
    """The bits that csrc/delta_rule_binding.h lists."""
    return (
        _BETA_IS_LOGIT * bool(gates.beta_is_logit)
        + _NORMALIZE * bool(normalize_qk)
        + _WRITE_EVERY_TOKEN * states.write_every_token
    )


def run_delta_rule(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    states: States,
    *,
    scale: float,
    normalize_qk: bool,
    cu_seqlens: torch.Tensor | None = None,
    schedule: int = 0,
) -> None:
    """Run the recurrence over the tokens of each sequence; `out` and the pools are written."""
    checks.cuda_tensors(q=q, k=k, v=v)
    none = torch.float32
    config = DeltaRuleConfig(
        q.dtype,
        states.dtype,
        none if gates.gate is None else gates.gate.dtype,
        none if gates.beta is None else gates.beta.dtype,
        none if gates.dt_bias is None else gates.dt_bias.dtype,
        q.shape[-1],
        gates.by_channel,
        states.key_major,
    )
    flags = flags_of(gates, states, normalize_qk)
    get_delta_rule_kernel(config)(
        out, q, k, v,
        (int(gates.form), gates.gate, gates.beta, gates.a_log, gates.dt_bias, gates.lower_bound),
        (states.initial, states.final, states.read_slots, states.write_slots, states.num_accepted),
        (
            states.snapshots, states.snapshot_starts, states.snapshots_per_batch,
            states.snapshot_every,
        ),
        cu_seqlens, scale, flags, schedule,
    )  # fmt: skip
