"""Memory that a mixture's launches hand to each other: what it needs, from where it comes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quantization._kernels import SCALE_BLOCK

_ALIGNMENT = 256
Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class MixtureShape:
    """Sizes and types that decide how much memory a mixture needs.

    Attributes
    ----------
    tokens, top_k, experts : int
        Tokens, choices of each and experts that are here.
    hidden, intermediate : int
        Elements of a token, and of a row between the two products.
    dtype, dtype_out : torch.dtype
        Types of the input and of the result.
    scheme : {"none", "tensor", "block", "four_bit"}
        How weights and activations are quantised; see `Experts`.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    dtype_out: torch.dtype
    scheme: str

    def buffers(self) -> Buffers:
        """Shape and dtype of each buffer."""
        rows, codes = self.tokens * self.top_k, torch.float8_e4m3fn
        result: Buffers = {
            "offsets": ((self.experts + 1,), torch.int32),
            "row_token": ((rows,), torch.int32),
            "entry_row": ((self.tokens, self.top_k), torch.int32),
            "rows": ((rows, self.hidden), self.dtype_out),
            "hidden": (
                (rows, self.intermediate),
                codes if self.scheme in ("tensor", "block") else self.dtype,
            ),
        }
        if self.scheme == "block":
            result["input"] = ((self.tokens, self.hidden), codes)
            blocks = (self.tokens, self.hidden // SCALE_BLOCK)
            result["input_scale"] = (blocks, torch.float32)
            blocks = (rows, self.intermediate // SCALE_BLOCK)
            result["hidden_scale"] = (blocks, torch.float32)
        return result


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def workspace_bytes(shape: MixtureShape) -> int:
    """Bytes of a workspace for `shape`, wherever it begins."""
    return sum(_num_bytes(*buffer) for buffer in shape.buffers().values()) + _ALIGNMENT


def allocate(
    shape: MixtureShape, workspace: torch.Tensor | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """The buffers of a mixture, new or in `workspace` (one dimension, contiguous).

    Raises
    ------
    ValueError
        If the workspace is too small.
    """
    buffers = shape.buffers()
    if workspace is None:
        return {
            name: torch.empty(lengths, dtype=dtype, device=device)
            for name, (lengths, dtype) in buffers.items()
        }
    memory = workspace.view(torch.uint8)
    offset, needed = -memory.data_ptr() % _ALIGNMENT, workspace_bytes(shape)
    if memory.numel() < needed:
        raise ValueError(
            f"`workspace_buffer` must have {needed} bytes for this call, got {memory.numel()}"
        )
    result = {}
    for name, (lengths, dtype) in buffers.items():
        size = _num_bytes(lengths, dtype)
        used = size if 0 not in lengths else 0
        part = memory[offset : offset + used].view(dtype)
        count = 1
        for length in lengths:
            count *= length
        result[name] = part[:count].view(lengths)
        offset += size
    return result
