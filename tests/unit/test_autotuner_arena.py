"""Copies of inputs that measurements read: their addresses stay, their values change."""

from __future__ import annotations

import pytest
import torch

from flashinfer.autotuner import ValueProfileArena


def _inputs() -> list[object]:
    """Queries, lengths, a column-major table and a number: 24 bytes of lengths, 96 of table."""
    lengths = torch.randint(1, 900, (6,), dtype=torch.int32)
    return [torch.randn(4, 8), lengths, torch.randint(99, (4, 3)).t(), 0.5]


def _addresses(arena: ValueProfileArena, lanes: int) -> list[tuple[int, int]]:
    found = arena.iteration_inputs(lanes)
    return [(inputs[1].data_ptr(), inputs[2].data_ptr()) for inputs in found]


def test_lanes_are_copies_in_turn() -> None:
    inputs = _inputs()
    arena = ValueProfileArena(inputs, (1, 2), 3, 1 << 20)
    iterations = arena.iteration_inputs(7)
    for made in iterations:
        assert made[0] is inputs[0] and made[3] == 0.5
        for i in (1, 2):
            assert torch.equal(made[i], inputs[i]) and made[i].stride() == inputs[i].stride()
    addresses = _addresses(arena, 7)
    assert len({a for pair in addresses for a in pair} | {inputs[1].data_ptr()}) == 2 * 3 + 1
    assert addresses[3:6] == addresses[:3] and addresses[6] == addresses[0]
    assert arena.inputs_for_iteration(4)[1].data_ptr() == addresses[1][0]


@pytest.mark.parametrize(
    ("cache_bytes", "indices", "lanes"),
    [
        (0, (1, 2), 1),
        (119, (1, 2), 1),
        (120, (1, 2), 2),
        (300, (1, 2), 3),
        (10**9, (1,), 8),
        (9, (), 1),
    ],
)
def test_as_many_lanes_as_exceed_the_cache(cache_bytes, indices, lanes) -> None:
    inputs = _inputs()
    arena = ValueProfileArena(inputs, indices, 8, cache_bytes)
    found = arena.iteration_inputs(20)
    assert len({tuple(i[k].data_ptr() for k in (1, 2)) for i in found}) == lanes


def test_staged_values_reach_every_lane_at_its_address() -> None:
    first, second = _inputs(), _inputs()
    second[3] = 0.25
    arena = ValueProfileArena(first, (1, 2), 4, 1 << 20)
    addresses = _addresses(arena, 4)
    first[1].fill_(-1)  # the caller's own are not looked at again
    assert all((made[1] > 0).all() for made in arena.iteration_inputs(4))
    arena.stage(second)
    assert _addresses(arena, 4) == addresses
    for made in arena.iteration_inputs(4):
        assert torch.equal(made[1], second[1]) and torch.equal(made[2], second[2])
        assert made[0] is second[0] and made[3] == 0.25


def test_refusals() -> None:
    inputs = _inputs()
    for index, error in ((4, ValueError), (-1, ValueError), (3, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="arena_input_indices|inputs"):
            ValueProfileArena(inputs, (index,), 2, 0)
    with pytest.raises(ValueError, match="num_ring_lanes"):
        ValueProfileArena(inputs, (1,), 0, 0)
    with pytest.raises(ValueError, match="l2_cache_size_bytes"):
        ValueProfileArena(inputs, (1,), 2, -1)
    arena = ValueProfileArena(inputs, (1, 2), 2, 1 << 20)
    with pytest.raises(ValueError, match="`inputs` must be 4"):
        arena.stage(inputs[:3])
    for i, wrong in ((2, inputs[2][:2]), (2, inputs[2].int())):
        changed = [inputs[0], inputs[1] + 1, inputs[2], None]
        changed[i] = wrong
        with pytest.raises(ValueError, match=rf"`inputs\[{i}\]` must have shape"):
            arena.stage(changed)
        assert torch.equal(arena.inputs_for_iteration(0)[1], inputs[1])
    with pytest.raises(ValueError, match="iteration"):
        arena.inputs_for_iteration(-1)
