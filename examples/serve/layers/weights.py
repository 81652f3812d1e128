"""Takes tensors out of a checkpoint, until none is left."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from .division import Ranks, taken
from .experts import Experts
from .formats import read_matrix
from .linear import Joined, Product
from .norm import Norm
from .stored import BLOCK, Fp8PerBlock, Int4, Stored


class Weights:
    """Tensors of a checkpoint, by name; each is taken once, and its shape checked.

    Shapes are those of the checkpoint, even where ranks divide it; `matrix`, `product`, `experts`,
    `mxfp4` and `part` then give this rank's part, by the model's table.

    Parameters
    ----------
    tensors : mutable mapping
        Emptied, so that memory is freed while layers are fused.
    device : torch.device
        Where they are.
    dtype : torch.dtype
        Type of activations.
    quantization : mapping
        ``quantization_config`` of the checkpoint; empty: it has none.

    Attributes
    ----------
    ranks : Ranks
        Who divides the model; one rank, if it is not set.
    """

    def __init__(
        self,
        tensors: MutableMapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        quantization: Mapping[str, Any],
    ) -> None:
        self._tensors, self.device = tensors, device
        self.dtype, self._quantization = dtype, quantization
        self.ranks = Ranks()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def optional(self, name: str, *shape: int) -> torch.Tensor | None:
        tensor = self._tensors.pop(name, None)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name!r} must have shape {shape}, got {tuple(tensor.shape)}")
        return tensor

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.optional(name, *shape)
        if tensor is None:
            raise ValueError(f"the checkpoint must have {name!r}, it has not")
        return tensor

    def any_shape(self, name: str) -> torch.Tensor:
        """A tensor whose shape the caller checks."""
        if name not in self._tensors:
            raise ValueError(f"the checkpoint must have {name!r}, it has not")
        return self._tensors.pop(name)

    def part(self, name: str, *shape: int) -> torch.Tensor:
        """This rank's part of a tensor."""
        tensor, cut = self(name, *shape), self.ranks.cut(name)
        if cut is None:
            return tensor
        return taken(tensor, cut.axis, self.ranks.ranges(name, cut, shape[cut.axis]))

    def number(self, *names: str) -> float | None:
        """The one element of the first of these tensors that is there, or None."""
        for name in names:
            if name in self._tensors:
                return float(self.any_shape(name).float().item())
        return None

    def norm(self, name: str, columns: int, eps: float, plus_one: bool = False) -> Norm:
        return Norm(self(f"{name}.weight", columns), eps, plus_one)

    def stored(self, name: str, rows: int, columns: int) -> Stored:
        """A matrix as it is stored."""
        matrix = read_matrix(self, name, rows, columns, self._quantization)
        cut = self.ranks.cut(name)
        if cut is None:
            return matrix
        ranges = self.ranks.ranges(name, cut, columns if cut.axis else rows)
        with self.ranks.dividing(name):
            return matrix.columns(ranges) if cut.axis else matrix.rows(ranges)

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """``[rows, columns]`` in 16 bits."""
        return self.stored(name, rows, columns).dense(self.dtype)

    def product(self, at: str, parts: Sequence[tuple[str, int]], columns: int) -> Product:
        """One product of several matrices, names and rows, that have the same input."""
        stored = [self.stored(f"{at}{name}", rows, columns) for name, rows in parts]
        biases = [self._bias(f"{at}{name}", rows) for name, rows in parts]
        have = [bias for bias in biases if bias is not None]
        if have and len(have) != len(parts):
            raise ValueError(f"{at}: all or none of {[n for n, _ in parts]} must have a bias")
        if (whole := _joined(stored)) is not None:
            return whole.product(torch.cat(have) if have else None, self.dtype)
        return Joined(
            [part.product(bias, self.dtype) for part, bias in zip(stored, biases, strict=True)]
        )

    def _bias(self, name: str, rows: int) -> torch.Tensor | None:
        bias, cut = self.optional(f"{name}.bias", rows), self.ranks.cut(name)
        if bias is None or cut is None:
            return bias
        if cut.axis == 0:
            return taken(bias, 0, self.ranks.ranges(name, cut, rows))
        return bias if self.ranks.rank == 0 else None  # the sum over the ranks has it once

    def experts(
        self, names: Sequence[tuple[str | None, str, str]], hidden: int, inner: int
    ) -> Experts:
        """Of each expert that is here the gate, if it has one, the values and the way back."""
        here = self.ranks.experts(len(names))
        self._leave_out([*names[: here.start], *names[here.stop :]])
        names = names[here.start : here.stop]
        up = [
            [self.stored(n, inner, hidden) for n in (values, gate) if n is not None]
            for gate, values, _ in names
        ]
        down = [self.stored(name, hidden, inner) for *_, name in names]
        whole = [_joined(parts) for parts in up]
        experts = _blocks(whole, down, self.dtype) or _groups(whole, down, self.dtype)
        if experts is None:
            # Other formats become 16 bits: the mixture has no kernel for them.
            dense = [torch.cat([part.dense(self.dtype) for part in parts]) for parts in up]
            back = torch.stack([part.dense(self.dtype) for part in down])
            experts = Experts(torch.stack(dense), back)
        experts.options |= self.ranks.expert_options
        return experts

    def _leave_out(self, experts: Sequence[tuple[str | None, ...]]) -> None:
        """Experts that other ranks have."""
        names = {name for expert in experts for name in expert}
        for name in [n for n in self._tensors if n.rpartition(".")[0] in names]:
            del self._tensors[name]

    def mxfp4(
        self, name: str, count: int, rows: int, columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes ``[count, rows, columns / 2]`` and scales ``[.., columns / 32]``, uint8."""
        groups = columns // 32
        codes = self.part(f"{name}_blocks", count, rows, groups, 16).flatten(2)
        return codes, self.part(f"{name}_scales", count, rows, groups)

    def drop(self, prefix: str) -> None:
        """Leave out what belongs to no forward pass, such as layers that guess tokens."""
        for name in [name for name in self._tensors if name.startswith(prefix)]:
            del self._tensors[name]

    def finish(self) -> None:
        """Raise ValueError if something is left: it would change the result."""
        # Frequencies that old checkpoints carry along; they follow from the configuration.
        left = sorted(name for name in self._tensors if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(f"the checkpoint has tensors that nothing here uses: {left[:5]}")


def _joined(parts: Sequence[Any]) -> Any:
    """Matrices on top of each other, or None if no kernel reads them at once."""
    kinds = {type(part) for part in parts}
    return kinds.pop().joined(parts) if len(kinds) == 1 else None


def _blocks(up: Sequence[Any], down: Sequence[Any], dtype: torch.dtype) -> Experts | None:
    """Experts of 8 bits with scales of blocks, which whole matrices must consist of."""
    if not all(isinstance(part, Fp8PerBlock) for part in (*up, *down)):
        return None
    if any(size % BLOCK for part in (*up, *down) for size in part.weight.shape):
        return None
    scales = [torch.stack([part.scale for part in parts]).contiguous() for parts in (up, down)]
    return Experts(
        *(torch.stack([part.weight for part in parts]) for parts in (up, down)),
        {"use_deepseek_fp8_block_scale": True, "quant_scales": scales},
    )


def _groups(up: Sequence[Any], down: Sequence[Any], dtype: torch.dtype) -> Experts | None:
    """Experts of 4-bit integers around zero."""
    parts = (*up, *down)
    if not all(isinstance(part, Int4) and part.is_symmetric for part in parts):
        return None
    if any(part.order is not None or part.group not in (32, 64, 128) for part in parts):
        return None
    scales = [torch.stack([part.scales.to(dtype) for part in side]) for side in (up, down)]
    return Experts(
        *(torch.stack([part.packed() for part in side]) for side in (up, down)),
        {"use_w4_group_scaling": True, "quant_scales": scales},
    )
