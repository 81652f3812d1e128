"""What a function writes and returns, for functions that have no trace template.

A function that plans and runs in one call, or that meets other ranks, has no reference that one
process could compute. ``@graph_operator`` says what a graph has to know of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .outputs import tensors_in

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
Results = Callable[[Mapping[str, Any]], Any]


class Effects(NamedTuple):
    """What a call does to tensors that a graph can see.

    Attributes
    ----------
    written : frozenset of str
        Parameters whose tensors are written.
    results : callable
        ``results(arguments)`` is what the call returns: tensors among the arguments as they are,
        tensors like its new ones, None, and tuples of these.
    fixed : frozenset of str
        Parameters whose numbers decide what is returned: each value has a graph of its own.
    in_graphs : bool
        Whether a CUDA graph may replay the call.
    """

    written: frozenset[str]
    results: Results
    fixed: frozenset[str] = frozenset()
    in_graphs: bool = False

    @property
    def name_prefix(self) -> str:
        """First part of the names of overloads."""
        return "call"

    def written_ids(self, arguments: Mapping[str, Any]) -> set[int]:
        """Ids of the tensors that are written."""
        given = (value for name, value in arguments.items() if name in self.written)
        return {id(tensor) for tensor in tensors_in(given)}

    def outcome(self, arguments: Mapping[str, Any], leaves: Sequence[Any]) -> Outcome:
        """The results of a call with these leaves."""
        leaf_of = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        returned = self.results(arguments)
        tensors = list(tensors_in((returned,)))
        places = [i for i, tensor in enumerate(tensors) if id(tensor) not in leaf_of]
        number_of = {id(tensors[place]): number for number, place in enumerate(places)}

        def arrange(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(arrange(part) for part in value)
            if value is None:
                return None
            found = leaf_of.get(id(value))
            return number_of[id(value)] if found is None else -1 - found

        return Outcome([tensors[place] for place in places], places, arrange(returned))


class Outcome(NamedTuple):
    """Results of a call.

    Attributes
    ----------
    fresh : list of torch.Tensor
        The new tensors.
    places : list of int
        Which ones they are of all tensors that are returned.
    arrangement : int, tuple or None
        As that of `Operator`.
    """

    fresh: list[torch.Tensor]
    places: list[int]
    arrangement: Any

    def finish(self) -> Callable[..., Any] | None:
        """A function that picks the new tensors, contiguous, from those that a call returned."""
        places = self.places
        if not places:
            return None

        def finish(returned: Any, *leaves: Any) -> Any:
            tensors = list(tensors_in((returned,)))
            return as_returns([tensors[place].contiguous() for place in places])

        return finish


def as_returns(results: list[torch.Tensor]) -> Any:
    """Results as an operator returns them."""
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


def fixed_positions(function: Callable[..., Any], fixed: Iterable[str]) -> tuple[int | str, ...]:
    """Positions and names of parameters, by which a call may pass them."""
    names = list(inspect.signature(function).parameters)
    return (*sorted(fixed), *sorted(names.index(name) for name in fixed))
