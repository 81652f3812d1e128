"""Products of segments of rows with a matrix each: 16 bits."""

from typing import Any, cast

import torch

from .._common.checks import choice as check_choice
from .._common.checks import count as check_count
from .._common.checks import dtype as check_out_dtype
from .._common.checks import flag as check_flag
from .._common.checks import tensor as check_tensor
from .._common.checks import tensors as check_tensors
from .._common.dtypes import check_dtype
from .._compile.handles import Planned
from .._instrument.decorator import flashinfer_api
from ..compat.backends import backend_requirement, supported_compute_capability
from ..trace.templates.groupwise import grouped_mm_bf16_trace
from ..trace.templates.segments import segment_gemm_run_trace
from ._choice import GemmProblem
from ._launch import TRANSPOSED_B, launch

_OPERANDS = (torch.bfloat16, torch.float16)


@supported_compute_capability([90])
def _check_grouped(a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor) -> bool:
    check_tensors(a=a, b=b, m_indptr=m_indptr)
    check_dtype("a", a.dtype, _OPERANDS)
    check_dtype("b", b.dtype, (a.dtype,))
    check_tensor("a", a, 2)
    check_tensor("b", b, 3)
    return True


@backend_requirement({}, common_check=_check_grouped)
@flashinfer_api(trace=grouped_mm_bf16_trace)
def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    """``out[r] = a[r] @ b[g].T`` for the rows r of each group g, summed in float32.

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, bfloat16 or float16, rows contiguous, on a Hopper GPU; k is a multiple of 8.
    b : torch.Tensor
        ``[groups, n, k]``, dtype of `a`, rows contiguous, at most 1024 groups.
    m_indptr : torch.Tensor
        ``[groups + 1]``, int32 or int64: rows ``m_indptr[g]`` to ``m_indptr[g + 1]`` are group g's.
        Rows of no group are not written.
    out : torch.Tensor, optional
        ``[m, n]``, of `out_dtype`: receives the result.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    backend : {"cudnn", "auto"}
        Both mean this library's kernel.
    tactic : int
        -1: the tuner's result, or this library's choice of the tile. A number from 0 on is a tile
        that the tuner would measure for these sizes; the likely fastest come first.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.
    """
    check_choice("backend", backend, ("cudnn", "auto"))
    check_out_dtype("out_dtype", out_dtype, (*_OPERANDS, torch.float32))
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    check_tensor("out", out)
    check_dtype("out", out.dtype, (out_dtype,))
    (rows, k), (batches, columns, _) = a.shape, b.shape
    problem = GemmProblem(
        a.dtype, b.dtype, out.dtype, rows, columns, k, batches=batches, groups="offsets"
    )
    return launch(problem, "a", out, a, b, rows=(m_indptr, None, None, None), tactic=tactic)


def _check_segments(indices: dict[str, torch.Tensor | None], batch_size: int) -> None:
    """Refuse integers of another number than there are segments; offsets have one more."""
    for name, values in indices.items():
        if values is None:
            continue
        check_tensor(name, values)
        check_dtype(name, values.dtype, (torch.int32, torch.int64))
        expected = batch_size + (name == "seg_indptr")
        if values.shape != (expected,):
            raise ValueError(
                f"`{name}` must have shape [{expected}] for `batch_size` {batch_size}, got "
                f"{list(values.shape)}"
            )


class SegmentGEMMWrapper(Planned):
    """Products of segments of rows with a weight each, such as those of LoRA adapters.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Kept for callers that ask for it; the kernel needs no workspace.
    backend : {"auto", "sm90", "sm80"}
        All mean this library's kernel for Hopper: one for older GPUs is not there.
    """

    _runs_in_graphs = True

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        check_tensor("float_workspace_buffer", float_workspace_buffer)
        if backend not in ("auto", "sm90", "sm80"):
            raise ValueError(f"`backend` must be 'auto', 'sm90' or 'sm80', got {backend!r}")
        self._float_workspace_buffer = float_workspace_buffer

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other workspaces, which the kernel does not use."""
        check_tensors(
            float_workspace_buffer=float_workspace_buffer, int_workspace_buffer=int_workspace_buffer
        )
        self._float_workspace_buffer = float_workspace_buffer

    @flashinfer_api(trace=segment_gemm_run_trace)
    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: torch.Tensor | None = None,
        seg_lens: torch.Tensor | None = None,
        seg_indptr: torch.Tensor | None = None,
        weight_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``out[r] = x[r] @ W`` for the rows r of each segment and its weight W.

        Parameters
        ----------
        x : torch.Tensor
            ``[rows, d_in]``, bfloat16 or float16, on a Hopper GPU; d_in is a multiple of 8.
        weights : torch.Tensor
            ``[weights, d_out, d_in]`` where `weight_column_major`, else ``[weights, d_in, d_out]``,
            dtype of `x`. The second form is copied to the first, unless its memory is that already.
        batch_size : int
            Segments, at most 1024.
        weight_column_major : bool
            Which form `weights` has.
        out : torch.Tensor, optional
            ``[rows, d_out]``, dtype of `x`: receives the result.
        seg_lens : torch.Tensor, optional
            ``[batch_size]``, int32 or int64: rows of each segment.
        seg_indptr : torch.Tensor, optional
            ``[batch_size + 1]``, int32 or int64: where segments begin and end. Either this or
            `seg_lens` is given; rows of no segment are not written.
        weight_indices : torch.Tensor, optional
            ``[batch_size]``, int32 or int64: weight of each segment, by default its own number.

        Returns
        -------
        torch.Tensor
            ``[rows, d_out]``; `out` if it was given.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as listed above.
        """
        check_tensor("x", x, 2)
        check_tensor("weights", weights, 3)
        check_dtype("x", x.dtype, _OPERANDS)
        check_dtype("weights", weights.dtype, (x.dtype,))
        check_count("batch_size", batch_size, 0)
        if (seg_lens is None) == (seg_indptr is None):
            raise ValueError("either `seg_lens` or `seg_indptr` must be given")
        k = weights.shape[2 if check_flag("weight_column_major", weight_column_major) else 1]
        if k != x.shape[1]:
            raise ValueError(
                f"`weights` must have k {x.shape[1]} as `x` has, got shape {list(weights.shape)} "
                f"for `weight_column_major` {weight_column_major}"
            )
        if not weight_column_major and weights.stride(1) != 1:
            weights = weights.mT.contiguous().mT
        n = weights.shape[1 if weight_column_major else 2]
        if out is None:
            out = x.new_empty((x.shape[0], n))
        check_tensor("out", out)
        check_dtype("out", out.dtype, (x.dtype,))
        groups, kind = (seg_indptr, "offsets") if seg_lens is None else (seg_lens, "lengths")
        assert groups is not None
        name = "seg_lens" if kind == "lengths" else "seg_indptr"
        _check_segments({name: groups, "weight_indices": weight_indices}, batch_size)
        if out.shape != (x.shape[0], n):
            raise ValueError(f"`out` must have shape {[len(x), n]}, got {list(out.shape)}")
        if weight_indices is None and weights.shape[0] != batch_size:
            raise ValueError(
                f"`weights` must have {batch_size} matrices where `weight_indices` is None, got "
                f"shape {list(weights.shape)}"
            )
        if batch_size == 0:
            return out
        problem = GemmProblem(
            x.dtype,
            weights.dtype,
            out.dtype,
            rows=x.shape[0],
            columns=n,
            k=k,
            batches=batch_size,
            groups=kind,
        )
        layout = 0 if weight_column_major else TRANSPOSED_B
        index: tuple[Any, ...] = (groups, weight_indices, None, None)
        return launch(problem, "x", out, x, weights, rows=index, layout=layout)

    forward = run


cast(Any, SegmentGEMMWrapper.run).is_compute_capability_supported = lambda cc: cc == 90
