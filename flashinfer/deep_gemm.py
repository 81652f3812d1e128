"""Grouped 8-bit products under the names and argument orders of DeepGEMM."""

from __future__ import annotations

import torch

from .gemm import groupwise as _groupwise

_RECIPE = (1, 128, 128)
_M_ALIGNMENT = 128
_COPY_BYTES = 16  # multiples of which the copy engine wants rows to begin at

Scaled = tuple[torch.Tensor, torch.Tensor]


def _check(recipe: tuple[int, int, int] | None, compiled_dims: str) -> None:
    if recipe is not None and tuple(recipe) != _RECIPE:
        raise ValueError(f"`recipe` must be None or {_RECIPE}, got {recipe!r}")
    if not isinstance(compiled_dims, str) or set(compiled_dims) - set("mnk"):
        raise ValueError(
            f"`compiled_dims` must consist of the letters m, n and k, got {compiled_dims!r}"
        )


def _parts(name: str, operand: object) -> Scaled:
    if not isinstance(operand, (tuple, list)) or len(operand) != 2:
        raise TypeError(
            f"`{name}` must be a pair of codes and scales, got {type(operand).__name__}"
        )
    return operand[0], operand[1]


def m_grouped_fp8_gemm_nt_contiguous(
    a_fp8: Scaled,
    b_fp8: Scaled,
    d: torch.Tensor,
    m_indices: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
) -> None:
    """``d[r] = a[r] @ b[m_indices[r]].T`` in 8 bits, with scales of 1x128 and 128x128.

    Parameters
    ----------
    a_fp8 : (torch.Tensor, torch.Tensor)
        Codes ``[m, k]``, float8, on a Hopper GPU, and scales ``[m, k / 128]``, float32, of any
        strides.
    b_fp8 : (torch.Tensor, torch.Tensor)
        Codes ``[groups, n, k]`` and scales ``[groups, ceil(n / 128), k / 128]``.
    d : torch.Tensor
        ``[m, n]``, bfloat16 or float16: receives the result.
    m_indices : torch.Tensor
        ``[m]``, int32: group of each row, as for `gemm.group_deepgemm_fp8_nt_groupwise`.
    recipe : tuple of int, optional
        ``(1, 128, 128)``, also if None: elements that share a scale.
    compiled_dims : str
        Letters of "mnk": sizes that DeepGEMM compiles for. Changes nothing here.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.
    """
    _check(recipe, compiled_dims)
    (a, a_scale), (b, b_scale) = _parts("a_fp8", a_fp8), _parts("b_fp8", b_fp8)
    _groupwise.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, m_indices, _RECIPE, d)


def m_grouped_fp8_gemm_nt_masked(
    a_fp8: Scaled,
    b_fp8: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
) -> None:
    """``d[g, r] = a[g, r] @ b[g].T`` in 8 bits, for the first ``masked_m[g]`` rows r.

    Parameters
    ----------
    a_fp8 : (torch.Tensor, torch.Tensor)
        Codes ``[groups, m, k]`` and scales ``[groups, m, k / 128]``.
    b_fp8, recipe, compiled_dims
        As for `m_grouped_fp8_gemm_nt_contiguous`, which also lists the errors.
    d : torch.Tensor
        ``[groups, m, n]``, bfloat16 or float16: receives the result.
    masked_m : torch.Tensor
        ``[groups]``, int32: rows that are computed. The others are not written.
    expected_m : int
        Rows that a group typically has: what the tile is chosen for.
    """
    _check(recipe, compiled_dims)
    (a, a_scale), (b, b_scale) = _parts("a_fp8", a_fp8), _parts("b_fp8", b_fp8)
    _groupwise.batch_deepgemm_fp8_nt_groupwise(
        a, b, a_scale, b_scale, masked_m, expected_m, _RECIPE, d
    )


def get_m_alignment_for_contiguous_layout() -> int:
    """Rows to a multiple of which each group of a contiguous layout is padded: 128."""
    return _M_ALIGNMENT


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """The smallest number of elements from `x` on that takes a multiple of 16 bytes.

    Raises
    ------
    ValueError
        If 16 is no multiple of `element_size`, in bytes.
    """
    if element_size < 1 or _COPY_BYTES % element_size:
        raise ValueError(f"`element_size` must divide {_COPY_BYTES}, got {element_size!r}")
    unit = _COPY_BYTES // element_size
    return -(-x // unit) * unit
