"""Copies of inputs, at addresses that stay, for measurements that replay CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .._common import checks


class ValueProfileArena:
    """Copies of the inputs whose values a measurement depends on, such as routing or lengths.

    A graph that is recorded with the copies reads them at each replay: `stage` changes the values
    under it. There are several copies, the lanes, so that a replay does not find in the L2 cache
    what the last one read; iterations take them in turn.

    Parameters
    ----------
    inputs : list
        Inputs of a call.
    arena_input_indices : tuple of int
        Which of them are copied: tensors. The others are used as they are.
    num_ring_lanes : int
        The most lanes, at least 1. There are only as many as it takes to exceed the cache.
    l2_cache_size_bytes : int
        Size of the L2 cache; 0: one lane.

    Raises
    ------
    TypeError, ValueError
        If an index is not one of a tensor in `inputs`, or a number is too small.

    Examples
    --------
    >>> q, lengths = torch.randn(3, 8, device="cuda"), torch.tensor([7, 300, 12], device="cuda")
    >>> arena = ValueProfileArena([q, lengths], (1,), 4, l2_cache_size_bytes=50 << 20)
    >>> arena.stage([q, lengths + 1])  # other lengths at the same addresses
    >>> [inputs[1].tolist() for inputs in arena.iteration_inputs(2)]
    [[8, 301, 13], [8, 301, 13]]
    """

    def __init__(
        self,
        inputs: list[Any],
        arena_input_indices: tuple[int, ...],
        num_ring_lanes: int,
        l2_cache_size_bytes: int,
    ) -> None:
        num_ring_lanes = checks.count("num_ring_lanes", num_ring_lanes)
        cache = checks.count("l2_cache_size_bytes", l2_cache_size_bytes, 0, 2**63 - 1)
        self._inputs = list(inputs)
        for index in arena_input_indices:
            _check_tensor(inputs, index)
        self._indices = tuple(arena_input_indices)
        lane_bytes = sum(inputs[i].numel() * inputs[i].element_size() for i in self._indices)
        # One lane more than the cache holds: when its turn comes again, it has been evicted.
        needed = cache // max(lane_bytes, 1) + 1
        num_lanes = min(num_ring_lanes, needed) if lane_bytes else 1
        self._lanes = [self._copies() for _ in range(num_lanes)]

    def _copies(self) -> dict[int, torch.Tensor]:
        """A lane: by index a tensor with the strides, and the values, of the input."""
        copies = {}
        for i in self._indices:
            copies[i] = torch.empty_like(self._inputs[i], memory_format=torch.preserve_format)
            copies[i].copy_(self._inputs[i])
        return copies

    def stage(self, inputs: list[Any]) -> None:
        """Copy other values into every lane; the other inputs are taken as they are.

        Parameters
        ----------
        inputs : list
            As many as before. Tensors that are copied have the shape and dtype of the first ones.

        Raises
        ------
        TypeError, ValueError
            If they have not; nothing is copied then.
        """
        if len(inputs) != len(self._inputs):
            raise ValueError(f"`inputs` must be {len(self._inputs)} inputs, got {len(inputs)}")
        for i in self._indices:
            _check_tensor(inputs, i)
            new, old = inputs[i], self._inputs[i]
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ValueError(
                    f"`inputs[{i}]` must have shape {list(old.shape)} and dtype {old.dtype}, got "
                    f"{list(new.shape)} and {new.dtype}"
                )
        for lane, i in itertools.product(self._lanes, self._indices):
            lane[i].copy_(inputs[i])
        self._inputs = list(inputs)

    def inputs_for_iteration(self, iteration: int) -> list[Any]:
        """The inputs of an iteration, counted from 0: those of its lane in the copies' places."""
        checks.count("iteration", iteration, 0)
        lane = self._lanes[iteration % len(self._lanes)]
        return [lane.get(i, value) for i, value in enumerate(self._inputs)]

    def iteration_inputs(self, num_iterations: int) -> list[list[Any]]:
        """The inputs of the first iterations, in order."""
        checks.count("num_iterations", num_iterations, 0)
        return [self.inputs_for_iteration(i) for i in range(num_iterations)]


def _check_tensor(inputs: Sequence[Any], index: Any) -> None:
    checks.count("arena_input_indices", index, 0, len(inputs) - 1)
    checks.tensor(f"inputs[{index}]", inputs[index])
