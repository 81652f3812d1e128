"""Finds out how a matrix of a checkpoint is stored, by the tensors that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .stored import BLOCK, Fp8PerBlock, Fp8PerRow, Int4, Plain, Stored

METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
# The column of each four bits of a word, from the lowest on.
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def check_quantization(values: Mapping[str, Any]) -> None:
    """Refuse what is not implemented of ``quantization_config``; ValueError names the key."""
    given = values.get("quantization_config") or {}
    if not given:
        return
    method = given.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"`quantization_config` must have a `quant_method` of {', '.join(METHODS)}, "
            f"got {method!r}"
        )
    block = given.get("weight_block_size")
    if block is not None and list(block) != [BLOCK, BLOCK]:
        raise ValueError(f"`weight_block_size` must be [{BLOCK}, {BLOCK}], got {block}")
    if method in ("gptq", "awq") and given.get("bits", 4) != 4:
        raise ValueError(f"`bits` of {method} must be 4, got {given['bits']}")
    if method == "awq" and given.get("version", "gemm").lower() != "gemm":
        raise ValueError(f"`version` of awq must be 'gemm', got {given['version']!r}")
    if method == "compressed-tensors" and given.get("format") not in ("float-quantized", None):
        raise ValueError(
            f"`format` of compressed-tensors must be 'float-quantized', got {given['format']!r}"
        )


def read_matrix(
    take: Any, name: str, rows: int, columns: int, quantization: Mapping[str, Any]
) -> Stored:
    """The matrix ``[rows, columns]`` of this name, in the format that it has.

    `take` is `Weights`, `quantization` the checkpoint's ``quantization_config``.
    """
    if take.has(f"{name}.qweight"):
        if quantization.get("quant_method") == "awq":
            return _read_awq(take, name, rows, columns)
        return _read_gptq(take, name, rows, columns, quantization)
    weight = take(f"{name}.weight", rows, columns)
    if weight.dtype != torch.float8_e4m3fn:
        return Plain(weight)
    if take.has(f"{name}.weight_scale_inv"):
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        return Fp8PerBlock(weight, take(f"{name}.weight_scale_inv", *blocks).float())
    scale = take.any_shape(f"{name}.weight_scale").float().flatten()
    if len(scale) not in (1, rows):
        raise ValueError(f"'{name}.weight_scale' must have 1 or {rows} numbers, got {len(scale)}")
    given = take.any_shape(f"{name}.input_scale") if take.has(f"{name}.input_scale") else None
    given = None if given is None else given.float().flatten()
    return Fp8PerRow(weight, scale.expand(rows).contiguous(), given)


def _read_gptq(
    take: Any, name: str, rows: int, columns: int, quantization: Mapping[str, Any]
) -> Stored:
    """Eight codes of a row in a word; zeros are stored less 1, except in the second version.

    Source: E. Frantar et al., "GPTQ", 2022, and the files of AutoGPTQ.
    """
    group = quantization.get("group_size", -1)
    groups = 1 if group == -1 else -(-columns // group)
    codes = _unpacked(take(f"{name}.qweight", columns // 8, rows).t(), _IN_ORDER)
    zeros = _unpacked(take(f"{name}.qzeros", groups, rows // 8), _IN_ORDER).t()
    if quantization.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) & 15
    scales = take(f"{name}.scales", groups, rows).t().contiguous()
    order = None
    group_of = take.optional(f"{name}.g_idx", columns)
    if group_of is not None:
        by_group = group_of.long().argsort(stable=True)
        if not torch.equal(by_group.cpu(), torch.arange(columns)):
            order, codes = by_group, codes[:, by_group]
    return Int4(codes, zeros, scales, order)


def _read_awq(take: Any, name: str, rows: int, columns: int) -> Stored:
    """Eight codes of a column in a word, even columns first.

    Source: J. Lin et al., "AWQ", 2023, and the files of AutoAWQ.
    """
    codes = _unpacked(take(f"{name}.qweight", columns, rows // 8), _AWQ_ORDER).t()
    scales = take.any_shape(f"{name}.scales").t().contiguous()
    zeros = _unpacked(take(f"{name}.qzeros", scales.shape[1], rows // 8), _AWQ_ORDER).t()
    return Int4(codes.contiguous(), zeros, scales)


def _unpacked(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """``[n, 8 m]`` uint8 codes of ``[n, m]`` int32 words."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    nibbles = ((words[..., None] >> shifts) & 15).to(torch.uint8)
    codes = torch.empty_like(nibbles)
    codes[..., list(order)] = nibbles
    return codes.flatten(1)
