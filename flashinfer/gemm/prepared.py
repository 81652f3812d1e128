"""Grouped 8-bit products of fixed tensors, to be launched many times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._common.dtypes import check_dtype
from ..quantization._kernels import SCALE_BLOCK, quantize_rows
from ._checks import check_out
from ._choice import GemmProblem
from ._launch import launch
from .groupwise import (
    batch_deepgemm_fp8_nt_groupwise,
    check_groups,
    group_gemm_fp8_nt_groupwise_contiguous,
)

_BY_ROW = (1, 128, 128)
_ALIGNMENT = 128


def _refuse(**values: Any) -> None:
    """Refuse arguments of Blackwell's kernels."""
    for name, value in values.items():
        if value:
            raise ValueError(
                f"`{name}` is for Blackwell's kernels and must be absent, got {value!r}"
            )


def _given(name: str, tensor: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor:
    """The tensor of a launch, by default the one that was kept."""
    chosen = kept if tensor is None else tensor
    if chosen is None:
        raise ValueError(f"`{name}` was released and must be given, got None")
    return chosen


class PreparedBatchDeepGemmFp8NtGroupwise:
    """A call of `batch_deepgemm_fp8_nt_groupwise` with its tensors.

    `prepare_batch_deepgemm_fp8_nt_groupwise` makes it.

    Attributes
    ----------
    out : torch.Tensor
        ``[groups, m, n]``: receives the result of each launch.
    """

    def __init__(
        self, operands: tuple[torch.Tensor, ...], expected_m: int, out: torch.Tensor
    ) -> None:
        self._operands = operands
        self._expected_m = expected_m
        self.out = out

    def launch(self) -> torch.Tensor:
        """Compute the product of what the tensors hold now, and give `out`."""
        a, b, a_scale, b_scale, masked_m = self._operands
        return batch_deepgemm_fp8_nt_groupwise(
            a, b, a_scale, b_scale, masked_m, self._expected_m, out=self.out
        )


def prepare_batch_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    *,
    out: torch.Tensor | None = None,
    workspace: dict[str, torch.Tensor] | None = None,
    scale_granularity_mnk: tuple[int, int, int] = _BY_ROW,
) -> PreparedBatchDeepGemmFp8NtGroupwise:
    """Keep the tensors of a `batch_deepgemm_fp8_nt_groupwise`, and build its kernel.

    Parameters
    ----------
    a, b, a_scale, b_scale, masked_m, expected_m, scale_granularity_mnk
        As for `batch_deepgemm_fp8_nt_groupwise`. The result is computed once here, so that the
        kernel is compiled and the arguments are checked.
    out : torch.Tensor, optional
        ``[groups, m, n]``, bfloat16 or float16: receives the results; a new tensor if None.
    workspace : dict, optional
        None or empty: the kernel needs no memory.

    Returns
    -------
    PreparedBatchDeepGemmFp8NtGroupwise

    Raises
    ------
    TypeError, ValueError
        As `batch_deepgemm_fp8_nt_groupwise`.
    """
    _refuse(workspace=workspace)
    out = batch_deepgemm_fp8_nt_groupwise(
        a, b, a_scale, b_scale, masked_m, expected_m, scale_granularity_mnk, out
    )
    operands = (a, b, a_scale, b_scale, masked_m)
    return PreparedBatchDeepGemmFp8NtGroupwise(operands, expected_m, out)


class PreparedGroupGemmFp8NtGroupwiseContiguous:
    """A call of `group_gemm_fp8_nt_groupwise_contiguous` with its tensors.

    `prepare_group_gemm_fp8_nt_groupwise_contiguous` makes it.
    """

    def __init__(
        self,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        self._b, self._b_scale = b, b_scale
        self._operands: tuple[torch.Tensor | None, ...] = operands
        self._out: torch.Tensor | None = out

    def launch(
        self,
        a: torch.Tensor | None = None,
        a_scale: torch.Tensor | None = None,
        m_indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the product; what is given takes the place of the prepared tensor for this call.

        Raises
        ------
        TypeError, ValueError
            As `group_gemm_fp8_nt_groupwise_contiguous`; also where a tensor was released and none
            is given.
        """
        kept_a, kept_scale, kept_indices = self._operands
        return group_gemm_fp8_nt_groupwise_contiguous(
            _given("a", a, kept_a),
            self._b,
            _given("a_scale", a_scale, kept_scale),
            self._b_scale,
            _given("m_indices", m_indices, kept_indices),
            out=self._out if out is None else out,
        )

    def release_prepared_operands(self) -> None:
        """Let go of a, a_scale, m_indices and the result: each launch then brings its own."""
        self._operands = (None, None, None)
        self._out = None


def prepare_group_gemm_fp8_nt_groupwise_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    validate_indices: bool = False,
    fill_padding: bool = False,
    alignment: int = _ALIGNMENT,
) -> PreparedGroupGemmFp8NtGroupwiseContiguous:
    """Keep the tensors of a `group_gemm_fp8_nt_groupwise_contiguous`, and build its kernel.

    Parameters
    ----------
    a, b, a_scale, b_scale, m_indices, out, validate_indices
        As for `group_gemm_fp8_nt_groupwise_contiguous`. The result is computed once here, so that
        the kernel is compiled and the arguments are checked.
    fill_padding : bool
        False: rows with a negative number are not written.
    alignment : int
        128: rows that share a number.

    Returns
    -------
    PreparedGroupGemmFp8NtGroupwiseContiguous

    Raises
    ------
    TypeError, ValueError
        As `group_gemm_fp8_nt_groupwise_contiguous`.
    """
    _refuse(fill_padding=fill_padding)
    if alignment != _ALIGNMENT:
        raise ValueError(f"`alignment` must be {_ALIGNMENT}, got {alignment!r}")
    out = group_gemm_fp8_nt_groupwise_contiguous(
        a, b, a_scale, b_scale, m_indices, _BY_ROW, out, validate_indices=validate_indices
    )
    return PreparedGroupGemmFp8NtGroupwiseContiguous(b, b_scale, (a, a_scale, m_indices), out)


class PreparedGroupGemmFp8NtGroupwiseContiguousSiluQuant:
    """A grouped product with SwiGLU whose result is quantised, with its tensors.

    `prepare_group_gemm_fp8_nt_groupwise_contiguous_silu_quant` makes it.

    Attributes
    ----------
    out_q : torch.Tensor
        ``[m, n / 2]``, float8_e4m3fn: receives the codes of each launch.
    out_s : torch.Tensor
        ``[m, n / 256]``, float32: receives their scales.
    """

    def __init__(
        self,
        operands: tuple[torch.Tensor, ...],
        hidden: torch.Tensor,
        out_q: torch.Tensor,
        out_s: torch.Tensor,
    ) -> None:
        self._operands = operands
        self._hidden = hidden
        self.out_q, self.out_s = out_q, out_s

    def launch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute from what the tensors hold now; gives `out_q` and `out_s`."""
        a, b, a_scale, b_scale, m_indices = self._operands
        problem = GemmProblem(
            a.dtype,
            b.dtype,
            self._hidden.dtype,
            rows=a.shape[0],
            columns=b.shape[1],
            k=a.shape[1],
            batches=b.shape[0],
            scale="block",
            groups="indices",
            activation="swiglu",
        )
        rows = (m_indices, None, None, None)
        launch(problem, "m_indices", self._hidden, a, b, (a_scale, b_scale), rows=rows)
        quantize_rows(self._hidden, column_major=False, out=(self.out_q, self.out_s))
        return self.out_q, self.out_s


def prepare_group_gemm_fp8_nt_groupwise_contiguous_silu_quant(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    out_q: torch.Tensor | None = None,
    out_s: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    validate_indices: bool = False,
    group_counts: Sequence[int] | None = None,
) -> PreparedGroupGemmFp8NtGroupwiseContiguousSiluQuant:
    """Keep the tensors of a product whose result goes through SwiGLU and is quantised.

    ``silu(gates) * values``, of the first and the second half of the product's columns, is rounded
    to bfloat16 and then quantised in groups of 128 columns, as `per_token_group_quant_8bit` does.

    Parameters
    ----------
    a, b, a_scale, b_scale, m_indices, validate_indices
        As for `group_gemm_fp8_nt_groupwise_contiguous`; n is a multiple of 256. The result is
        computed once here.
    out_q : torch.Tensor, optional
        ``[m, n / 2]``, float8_e4m3fn, contiguous: receives the codes.
    out_s : torch.Tensor, optional
        ``[m, n / 256]``, float32, contiguous: receives the scales.
    workspace : None
        Memory between the two kernels is allocated here.
    group_counts : None
        The kernel reads the numbers of rows on the GPU.

    Returns
    -------
    PreparedGroupGemmFp8NtGroupwiseContiguousSiluQuant

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    if workspace is not None or group_counts is not None:
        raise ValueError("`workspace` and `group_counts` are for Blackwell's kernels: pass None")
    check_groups(a, b, a_scale, b_scale, m_indices, validate_indices)
    m, n = a.shape[0], b.shape[1]
    if n % (2 * SCALE_BLOCK):
        raise ValueError(f"`b` must have an n that is a multiple of 256, got {n}")
    check_out(out_q, (m, n // 2), torch.float8_e4m3fn, "out_q")
    check_out(out_s, (m, n // 2 // SCALE_BLOCK), torch.float32, "out_s")
    check_dtype("a", a.dtype, (torch.float8_e4m3fn,))
    if out_q is None:
        out_q = a.new_empty((m, n // 2))
    if out_s is None:
        out_s = a_scale.new_empty((m, n // 2 // SCALE_BLOCK))
    hidden = a.new_empty((m, n // 2), dtype=torch.bfloat16)
    operands = (a, b, a_scale, b_scale, m_indices)
    prepared = PreparedGroupGemmFp8NtGroupwiseContiguousSiluQuant(operands, hidden, out_q, out_s)
    if m:
        prepared.launch()
    return prepared
