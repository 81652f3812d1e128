"""Drafts of the gated delta rule whose inputs are kept in place of a state for each token.

A slot of the windows has the inputs of a draft, as they were given, ``[heads, tokens, dim]``: keys
and values, logarithms of the decay and learning rates. When it is known how many of its tokens
count, they are walked once more, and the state after the last of them is written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .checks import check_shapes, check_slots
from .delta_rule import GateForm, Gates, States, run_delta_rule
from .pools import write_rows

_MOST_SEQUENCES = 65535
"""Of a launch."""


class Windows(NamedTuple):
    """Inputs of drafts by slot; with a leading dimension of layers, or without."""

    rawv: torch.Tensor  # [slots, v_heads, tokens, head_dim_v]
    rawk: torch.Tensor  # [slots, heads, tokens, head_dim_k]
    g: torch.Tensor  # [slots, v_heads, tokens] float32
    beta: torch.Tensor  # the same

    def check(self, names: str, like: torch.dtype) -> None:
        """Refuse windows that do not belong together; `names` with a place for the field's."""
        heads, tokens = self.rawv.shape[-3:-1]
        before = tuple(self.rawv.shape[:-3])
        columns = self.rawk.shape[-1] if isinstance(self.rawk, torch.Tensor) else None
        if like not in (torch.float16, torch.bfloat16):
            raise ValueError(f"`{names.format('rawv')}` must be float16 or bfloat16, got {like}")
        expected = {
            "rawv": (*before, heads, tokens, None),
            "rawk": (*before, None, tokens, columns),
            "g": (*before, heads, tokens),
            "beta": (*before, heads, tokens),
        }
        for field, shape in expected.items():
            name = names.format(field)
            check_shapes(**{name: (getattr(self, field), shape)})
            dtype = like if field.startswith("raw") else torch.float32
            if getattr(self, field).dtype != dtype:
                raise ValueError(
                    f"`{name}` must have dtype {dtype}, got {getattr(self, field).dtype}"
                )

    def keep(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> None:
        """Write the inputs of a draft, ``[batch, tokens, heads, dim]``; A_log, a, dt_bias, b."""
        A_log, a, dt_bias, b = gates
        log = -A_log.exp() * F.softplus(a.float() + dt_bias.float())
        tokens = v.shape[1]
        for window, given in zip(self, (v, k, log, torch.sigmoid(b.float())), strict=True):
            write_rows(window[:, :, :tokens], slots, given.transpose(1, 2), slots >= 0)

    def of_slots(self, slots: torch.Tensor) -> Windows:
        """``[batch, tokens, heads, dim]`` for slots of all layers."""
        return Windows(*(window.flatten(0, 1)[slots].transpose(1, 2) for window in self))


def commit_accepted(
    pool: torch.Tensor,
    windows: Windows,
    slots: torch.Tensor,
    counts: torch.Tensor,
    targets: torch.Tensor,
    normalize_k: bool,
) -> None:
    """Walk the first `counts` tokens from the states in `slots`, and write the last to `targets`.

    `pool` is ``[layers, slots, heads, head_dim_v, head_dim_k]``; the other three have an entry for
    each sequence. One with a negative slot or target, or with
    count 0, writes nothing.
    """
    layers, num_slots = pool.shape[:2]
    most = max(_MOST_SEQUENCES // max(len(slots), 1), 1)
    if layers > most:
        for i in range(0, layers, most):
            part = Windows(*(window[i : i + most] for window in windows))
            commit_accepted(pool[i : i + most], part, slots, counts, targets, normalize_k)
        return
    first = torch.arange(layers, device=slots.device)[:, None] * num_slots
    live = (slots >= 0) & (targets >= 0)
    read = (first + slots.clamp(min=0)).flatten()
    v, k, g, beta = windows.of_slots(read)
    last = torch.arange(v.shape[1], device=slots.device) == counts[:, None] - 1
    wanted = (live[:, None] & last).repeat(layers, 1)
    target = (first + targets.clamp(min=0)).flatten()[:, None]
    states = pool.view(-1, *pool.shape[2:])
    run_delta_rule(
        torch.empty_like(v, memory_format=torch.contiguous_format),
        k,
        k,
        v,
        Gates(g, beta, GateForm.LOG),
        States(
            states,
            states,
            read_slots=read,
            write_slots=torch.where(wanted, target, -1),
            write_every_token=True,
        ),
        scale=1.0,
        normalize_qk=normalize_k,
    )


def present_slots(slots: torch.Tensor, null: int, count: int) -> torch.Tensor:
    """`slots`, with -1 for `null` and for what is none of `count` slots."""
    return torch.where((slots == null) | (slots >= count), -1, slots)


def check_sequences(name: str, values: torch.Tensor, count: int) -> torch.Tensor:
    """Integers for each of `count` sequences, as int64."""
    found = check_slots(name, values, 1)
    if len(found) != count:
        raise ValueError(f"`{name}` must have shape {[count]}, got {list(found.shape)}")
    return found.long()
