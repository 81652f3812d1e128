"""How the tensors of a model divide among ranks: tables of names, which stand beside the layers.

Heads, and the columns between two products, are divided: the first product's rows and the second
one's columns. The sum of the ranks' results is then the whole result. Where ranks divide experts,
each has whole ones; what a token's other experts give, other ranks have.

Source: M. Shoeybi et al., "Megatron-LM", 2019; for experts D. Lepikhin et al., "GShard", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch


@dataclass(frozen=True)
class Cut:
    """An equal part for each rank, along an axis.

    Attributes
    ----------
    axis : int
        Which one: of a matrix 0 for rows (outputs), 1 for columns (inputs).
    sections : tuple of int
        Sizes of what lies one after the other along it and is divided on its own; empty: one.
    units : int or None
        How many equal units it consists of. Where ranks are more, several have the same one.
    """

    axis: int
    sections: tuple[int, ...] = ()
    units: int | None = None

    def ranges(self, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Begin and end of a rank's part of each section; ValueError if there is no equal one."""
        found, begin = [], 0
        for section in self.sections or (size,):
            units = section if self.units is None else self.units
            parts = ranks if self.units is None else min(ranks, units)
            if section % units or units % parts or ranks % parts:
                raise ValueError(f"{section} along axis {self.axis} have no equal parts")
            width = section // parts
            first = begin + rank * parts // ranks * width
            found.append((first, first + width))
            begin += section
        return found


@dataclass(frozen=True)
class OfExperts:
    """A tensor of one expert, or of all in a stack.

    Attributes
    ----------
    each : Cut or None
        A rank's part of it where ranks divide each expert.
    stacked : Cut or None
        The part of a stack where ranks have whole experts; None: all of one expert's tensor.
    """

    each: Cut | None
    stacked: Cut | None = None


ROWS, COLUMNS, WHOLE = Cut(0), Cut(1), None
EXPERT_ROWS, EXPERT_COLUMNS = OfExperts(ROWS), OfExperts(COLUMNS)

Cuts = dict[str, Cut | OfExperts | None]
"""Parts by the name of a matrix or a tensor, or by its end; the longest that fits counts."""


def rows(*sections: int) -> Cut:
    """Rows of several sections."""
    return Cut(0, sections)


@dataclass(frozen=True)
class Ranks:
    """One of the ranks that divide a model, by the model's table.

    Attributes
    ----------
    rank, count : int
        Which one, of how many.
    divides_experts : bool
        Whether a rank has whole experts, rather than a part of each.
    cuts : dict
        The model's table.
    """

    rank: int = 0
    count: int = 1
    divides_experts: bool = False
    cuts: Mapping[str, Cut | OfExperts | None] = field(default_factory=dict)

    def cut(self, name: str) -> Cut | None:
        """Which part of a matrix or a tensor this rank has; None: all of it."""
        if self.count == 1:
            return None
        found = [key for key in self.cuts if fnmatchcase(f".{name}", f"*.{key}")]
        if not found:
            raise ValueError(f"the model does not say how ranks divide {name!r}")
        cut = self.cuts[max(found, key=len)]
        if isinstance(cut, OfExperts):
            return cut.stacked if self.divides_experts else cut.each
        return cut

    def ranges(self, name: str, cut: Cut, size: int) -> list[tuple[int, int]]:
        """Begin and end of this rank's part of each section of an axis."""
        with self.dividing(name):
            return cut.ranges(size, self.rank, self.count)

    @contextmanager
    def dividing(self, name: str) -> Iterator[None]:
        """A ValueError names what could not be divided."""
        try:
            yield
        except ValueError as error:
            message = f"{name!r} cannot be divided among {self.count} ranks: {error}"
            raise ValueError(message) from error

    def share(self, name: str, count: int, shared: bool = False) -> int:
        """How many of so many heads, or groups of heads, a rank has.

        With `shared` several ranks may have the same one.
        """
        if count % self.count == 0:
            return count // self.count
        if shared and self.count % count == 0:
            return 1
        either = "a multiple or a divisor" if shared else "a multiple"
        raise ValueError(f"`{name}` must be {either} of {self.count} ranks, got {count}")

    def experts(self, count: int) -> range:
        """Numbers of the experts that are here."""
        if not self.divides_experts:
            return range(count)
        here = self.share("experts", count)
        return range(self.rank * here, (self.rank + 1) * here)

    @property
    def expert_options(self) -> dict[str, Any]:
        """Arguments of `cutlass_fused_moe`."""
        if self.count == 1:
            return {}
        kind = "ep" if self.divides_experts else "tp"
        return {f"{kind}_size": self.count, f"{kind}_rank": self.rank}


def taken(x: torch.Tensor, axis: int, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """A copy of these parts of an axis, one after the other: the whole can be freed."""
    return torch.cat([x.narrow(axis, begin, end - begin) for begin, end in ranges], axis)
