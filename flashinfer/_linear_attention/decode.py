"""One or several tokens of the gated delta rule, with the checks that its public forms share."""

from __future__ import annotations

import torch

from .._common.checks import tensor as check_tensor
from .checks import check_operands, destination, resolve_scale
from .delta_rule import GateForm, Gates, States, run_delta_rule


def run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float | None,
    output: torch.Tensor | None,
    *,
    normalize_qk: bool,
    frozen: bool,
    read_slots: torch.Tensor | None = None,
    write_slots: torch.Tensor | None = None,
    token_slots: torch.Tensor | None = None,
    intermediate: torch.Tensor | None = None,
    key_major: bool = False,
) -> torch.Tensor:
    """The output; `gates` are A_log, a, dt_bias and b, the rest is as for the public functions."""
    check_operands(4, q=q, k=k, v=v)
    batch, tokens = v.shape[:2]
    out = destination("output", output, tuple(v.shape), v)
    per_batch = _check_intermediate(intermediate, batch, tokens)
    slots = read_slots if write_slots is None else write_slots
    if token_slots is not None:
        slots = _check_slots_of_tokens(token_slots, intermediate, batch, tokens)
    A_log, a, dt_bias, b = gates
    states = States(
        pool,
        pool if token_slots is not None or not frozen else None,
        read_slots=read_slots,
        write_slots=slots,
        write_every_token=token_slots is not None,
        snapshots=None if intermediate is None else intermediate.flatten(0, 1),
        snapshots_per_batch=per_batch,
        key_major=key_major,
    )
    run_delta_rule(
        out,
        q,
        k,
        v,
        Gates(a, b, GateForm.SOFTPLUS, A_log, dt_bias, beta_is_logit=True),
        states,
        scale=resolve_scale(scale, q.shape[-1]),
        normalize_qk=normalize_qk,
    )
    return out


def _check_intermediate(buffer: torch.Tensor | None, batch: int, tokens: int) -> int:
    """States per sequence of the buffer."""
    if buffer is None:
        return 0
    check_tensor("intermediate_states_buffer", buffer, 5)
    if buffer.shape[0] < batch or buffer.shape[1] < tokens:
        raise ValueError(
            f"`intermediate_states_buffer` must have at least {batch} sequences of {tokens} "
            f"states, got shape {list(buffer.shape)}"
        )
    if buffer.stride(0) != buffer.shape[1] * buffer.stride(1):
        raise ValueError(
            "`intermediate_states_buffer` must be contiguous in its first two dimensions, got "
            f"strides {list(buffer.stride())}"
        )
    return int(buffer.shape[1])


def _check_slots_of_tokens(
    slots: torch.Tensor, buffer: torch.Tensor | None, batch: int, tokens: int
) -> torch.Tensor:
    check_tensor("ssm_state_indices", slots, 2)
    if buffer is not None:
        raise ValueError("`ssm_state_indices` and `intermediate_states_buffer` exclude each other")
    if slots.shape[0] < batch or slots.shape[1] < tokens:
        raise ValueError(
            f"`ssm_state_indices` must have at least shape {[batch, tokens]}, got "
            f"{list(slots.shape)}"
        )
    return slots
