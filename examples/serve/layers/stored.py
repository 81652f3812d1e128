"""Matrices as checkpoints store them: 16 bits, 8 bits with scales, 4 bits of GPTQ, AWQ and MXFP4.

Each kind gives its numbers in 16 bits, and a product that reads the weights as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .division import taken
from .linear import BLOCK, Fp8Blocks, Fp8Rows, Int4Groups, Linear, Product

Ranges = list[tuple[int, int]]
"""Begin and end of what is taken of rows or columns."""


class Stored(Protocol):
    """``[rows, columns]`` of a product's weights."""

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers it stands for."""

    def product(self, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
        """``x @ W.T + bias`` for rows of a type."""

    def rows(self, ranges: Ranges) -> Stored:
        """A copy of these rows; ValueError if scales forbid it, as in `columns`."""

    def columns(self, ranges: Ranges) -> Stored:
        """A copy of these columns."""


@dataclass
class Plain:
    """16 bits."""

    weight: torch.Tensor

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight

    def product(self, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
        return Linear(self.weight.t().contiguous(), bias)

    def rows(self, ranges: Ranges) -> Plain:
        return Plain(taken(self.weight, 0, ranges))

    def columns(self, ranges: Ranges) -> Plain:
        return Plain(taken(self.weight, 1, ranges))

    @staticmethod
    def joined(parts: Sequence[Plain]) -> Plain:
        return Plain(torch.cat([part.weight for part in parts]))


@dataclass
class Fp8PerRow:
    """e4m3 with a scale for each row, or for the tensor.

    Attributes
    ----------
    weight : torch.Tensor
        ``[rows, columns]`` float8_e4m3fn.
    scale : torch.Tensor
        ``[rows]`` float32.
    input_scale : torch.Tensor or None
        Scale of all activations, if it was calibrated; one element.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.weight.float() * self.scale[:, None]).to(dtype)

    def product(self, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
        return Fp8Rows(self.weight, self.scale, self.input_scale, bias)

    def rows(self, ranges: Ranges) -> Fp8PerRow:
        parts = (taken(part, 0, ranges) for part in (self.weight, self.scale))
        return Fp8PerRow(*parts, self.input_scale)

    def columns(self, ranges: Ranges) -> Fp8PerRow:
        return Fp8PerRow(taken(self.weight, 1, ranges), self.scale, self.input_scale)

    @staticmethod
    def joined(parts: Sequence[Fp8PerRow]) -> Fp8PerRow | None:
        scales = [part.input_scale for part in parts]
        given = [scale for scale in scales if scale is not None]
        if given and (len(given) < len(parts) or len({float(scale) for scale in given}) > 1):
            return None
        return Fp8PerRow(
            torch.cat([part.weight for part in parts]),
            torch.cat([part.scale for part in parts]),
            given[0] if given else None,
        )


@dataclass
class Fp8PerBlock:
    """e4m3 with a scale for each 128 by 128 elements.

    Attributes
    ----------
    weight : torch.Tensor
        ``[rows, columns]`` float8_e4m3fn.
    scale : torch.Tensor
        ``[ceil(rows / 128), ceil(columns / 128)]`` float32.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = self.weight.shape
        each = self._of_rows().repeat_interleave(BLOCK, 1)[:, :columns]
        return (self.weight.float() * each).to(dtype)

    def product(self, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
        rows, columns = self.weight.shape
        if columns % BLOCK or rows % 16 or dtype != torch.bfloat16:
            # No kernel reads these: few and small in the models there are.
            return Plain(self.dense(dtype)).product(bias, dtype)
        return Fp8Blocks(self.weight, self.scale, bias)

    def rows(self, ranges: Ranges) -> Fp8PerBlock:
        return self._part(0, ranges)

    def columns(self, ranges: Ranges) -> Fp8PerBlock:
        return self._part(1, ranges)

    def _part(self, axis: int, ranges: Ranges) -> Fp8PerBlock:
        blocks = in_groups(ranges, BLOCK, self.weight.shape[axis])
        return Fp8PerBlock(taken(self.weight, axis, ranges), taken(self.scale, axis, blocks))

    def _of_rows(self) -> torch.Tensor:
        """``[rows, ceil(columns / 128)]``."""
        return self.scale.repeat_interleave(BLOCK, 0)[: len(self.weight)]

    @staticmethod
    def joined(parts: Sequence[Fp8PerBlock]) -> Fp8PerBlock | None:
        if any(len(part.weight) % BLOCK for part in parts[:-1]):
            return None
        return Fp8PerBlock(
            torch.cat([part.weight for part in parts]), torch.cat([part.scale for part in parts])
        )


@dataclass
class Int4:
    """``scale * (code - zero)`` with a scale and a zero for each group of columns of a row.

    Attributes
    ----------
    codes : torch.Tensor
        ``[rows, columns]`` uint8, 0 to 15.
    zeros : torch.Tensor
        ``[rows, groups]`` uint8.
    scales : torch.Tensor
        ``[rows, groups]`` in 16 bits.
    order : torch.Tensor or None
        ``[columns]`` int64: which column of the input each column here multiplies; None: its own.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    order: torch.Tensor | None = None

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        return bool((self.zeros == 8).all())

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        centred = self.codes.float() - self.zeros.float().repeat_interleave(self.group, 1)
        numbers = centred * self.scales.float().repeat_interleave(self.group, 1)
        if self.order is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, self.order, numbers)
        return numbers.to(dtype)

    def packed(self) -> torch.Tensor:
        """``[rows, columns / 2]`` uint8: ``code - 8`` in two's complement, the first one low."""
        low, high = (self.codes ^ 8).unflatten(1, (-1, 2)).unbind(2)
        return low | (high << 4)

    def product(self, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
        if self.group not in (32, 64, 128) and self.scales.shape[1] > 1:
            return Plain(self.dense(dtype)).product(bias, dtype)
        offset = None
        if not self.is_symmetric:
            # The products with `code - 8` lack a number for each group.
            offset = ((8 - self.zeros.float()) * self.scales.float()).t().to(dtype).contiguous()
        return Int4Groups(self.packed(), self.scales.to(dtype), offset, bias, self.order)

    def rows(self, ranges: Ranges) -> Int4:
        parts = (taken(part, 0, ranges) for part in (self.codes, self.zeros, self.scales))
        return Int4(*parts, self.order)

    def columns(self, ranges: Ranges) -> Int4:
        if self.order is not None:
            raise ValueError("`g_idx` has columns of a group in several parts")
        codes = taken(self.codes, 1, ranges)
        if self.scales.shape[1] == 1:
            return Int4(codes, self.zeros, self.scales)
        groups = in_groups(ranges, self.group, self.codes.shape[1])
        return Int4(codes, taken(self.zeros, 1, groups), taken(self.scales, 1, groups))

    @staticmethod
    def joined(parts: Sequence[Int4]) -> Int4 | None:
        orders = [part.order for part in parts]
        if any((a is None) != (orders[0] is None) for a in orders):
            return None
        if orders[0] is not None and any(not torch.equal(orders[0], a) for a in orders[1:]):
            return None
        fields = ("codes", "zeros", "scales")
        return Int4(
            *(torch.cat([getattr(part, name) for part in parts]) for name in fields), orders[0]
        )


def in_groups(ranges: Ranges, group: int, size: int) -> Ranges:
    """Ranges of groups of elements that share a scale; ValueError if one would be cut."""
    for border in (border for pair in ranges for border in pair):
        if border % group and border != size:
            raise ValueError(f"{border} is not the border of a group of {group} that share a scale")
    return [(begin // group, -(-end // group)) for begin, end in ranges]
