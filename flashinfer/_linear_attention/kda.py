"""The gates and states of KDA's public functions, checked and in the kernel's form."""

from __future__ import annotations

import dataclasses
import math

import torch

from .._common.checks import tensor as check_tensor
from .._common.dtypes import FLOAT, check_dtype
from .by_channel import run_by_channel
from .checks import check_flags, check_slots
from .delta_rule import GateForm, Gates, States
from .pools import Checkpoints


def refuse_unsupported(**values: object) -> None:
    """Arguments that must be left out."""
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"`{name}` must be left out: not supported")


def check_gate_shapes(g: torch.Tensor, beta: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A gate per key channel and a learning rate per head, for the tokens and heads of `shape`."""
    check_tensor("beta", beta, 3)
    for name, tensor, expected in (("g", g, shape), ("beta", beta, shape[:3])):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"`{name}` must have shape {list(expected)}, got {list(tensor.shape)}")


def kda_gates(
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    use_gate_in_kernel: bool,
    beta_is_logit: bool,
) -> Gates:
    """Gates by key channel: logarithms of decays, or inputs of one of two forms."""
    check_flags(use_gate_in_kernel=use_gate_in_kernel, beta_is_logit=beta_is_logit)
    if not use_gate_in_kernel:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if value is not None:
                raise ValueError(f"`{name}` needs `use_gate_in_kernel=True`")
        return Gates(g, beta, GateForm.LOG, beta_is_logit=beta_is_logit, by_channel=True)
    if A_log is None:
        raise ValueError("`use_gate_in_kernel=True` needs `A_log`")
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, 1, 2)
        if dt_bias.numel() != g.shape[2] * g.shape[3] or not dt_bias.is_contiguous():
            raise ValueError(
                f"`dt_bias` must be contiguous with {g.shape[2]} x {g.shape[3]} elements, got "
                f"shape {list(dt_bias.shape)}"
            )
        dt_bias = dt_bias.view(g.shape[2], g.shape[3])
    form = GateForm.SOFTPLUS
    if lower_bound is not None:
        if isinstance(lower_bound, bool) or not isinstance(lower_bound, (int, float)):
            raise TypeError(
                f"`lower_bound` must be a float or None, got {type(lower_bound).__name__}"
            )
        if not (math.isfinite(lower_bound) and lower_bound < 0):
            raise ValueError(f"`lower_bound` must be negative and finite, got {lower_bound}")
        form = GateForm.LOWER_BOUND
    A_log = check_tensor("A_log", A_log).flatten()
    bound = float(lower_bound or 0.0)
    return Gates(g, beta, form, A_log, dt_bias, bound, beta_is_logit, by_channel=True)


def kda_states(
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    sequences: int,
    slots: torch.Tensor | None,
    num_spec_tokens: int | None,
    num_accepted: torch.Tensor | None,
    source: torch.Tensor | None,
    source_slots: torch.Tensor | None,
    frozen: bool,
) -> States:
    """Pools and slots of recurrent_kda, for one state per sequence or one per token."""
    check_flags(disable_state_update=frozen)
    if (source is None) != (source_slots is None):
        raise ValueError("`initial_state_source` and `initial_state_indices` belong together")
    if initial is None and (slots is not None or num_spec_tokens is not None):
        raise ValueError("`ssm_state_indices` and `num_spec_tokens` need `initial_state`")
    if initial is not None:
        check_dtype("initial_state", check_tensor("initial_state", initial, 4).dtype, FLOAT)
    by_token = num_spec_tokens is not None
    if by_token:
        slots = _slots_of_tokens(slots, num_spec_tokens, sequences, final)
    elif num_accepted is not None:
        raise ValueError("`num_accepted_tokens` needs `num_spec_tokens`")
    elif slots is not None:
        check_slots("ssm_state_indices", slots, 1)
    if source is not None:
        if num_accepted is not None:
            raise ValueError("`num_accepted_tokens` and `initial_state_source` exclude each other")
        check_tensor("initial_state_source", source, 4)
    return States(
        initial if source is None else source,
        None if frozen else final,
        read_slots=slots if source is None else source_slots,
        write_slots=slots,
        num_accepted=num_accepted,
        write_every_token=by_token and not frozen,
    )


def _slots_of_tokens(
    slots: torch.Tensor | None, num_spec_tokens: object, sequences: int, pool: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(num_spec_tokens, bool) or not isinstance(num_spec_tokens, int):
        raise TypeError(
            f"`num_spec_tokens` must be an int or None, got {type(num_spec_tokens).__name__}"
        )
    if num_spec_tokens < 1:
        raise ValueError(f"`num_spec_tokens` must be at least 1, got {num_spec_tokens}")
    shape = (sequences, 1 + num_spec_tokens)
    assert pool is not None
    if slots is None:
        if pool.shape[0] < shape[0] * shape[1]:
            raise ValueError(
                f"`initial_state` must have {shape[0] * shape[1]} slots, got shape "
                f"{list(pool.shape)}"
            )
        return torch.arange(shape[0] * shape[1], dtype=torch.int32, device=pool.device).view(shape)
    check_slots("ssm_state_indices", slots, 2)
    if tuple(slots.shape) != shape:
        raise ValueError(
            f"`ssm_state_indices` must have shape {list(shape)}, got {list(slots.shape)}"
        )
    return slots


def run_recurrence(
    out: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gates: Gates,
    states: States,
    checkpoints: Checkpoints | None,
    *,
    scale: float,
    normalize_qk: bool,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """The kernels over all tokens; `out`, the pools and the checkpoints are written."""
    buffer = None
    if checkpoints is not None:
        buffer = checkpoints.buffer()
        states = dataclasses.replace(
            states,
            snapshots=buffer,
            snapshot_starts=checkpoints.starts,
            snapshot_every=checkpoints.every,
        )
    run_by_channel(
        out, *qkv, gates, states, scale=scale, normalize_qk=normalize_qk, cu_seqlens=cu_seqlens
    )
    if checkpoints is not None and buffer is not None:
        checkpoints.keep(buffer)
