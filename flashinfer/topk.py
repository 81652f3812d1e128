"""The k largest elements of each row, and index transforms for sparse attention.

The chosen set is that of a sort. Among elements equal to the k-th largest, those with the smallest
index are taken (with ``TopKTieBreak.LARGE`` the largest), NaN counts as +inf, and results come in
the order of their indices unless `sorted` asks for another: every run gives the same bits.
"""

from numbers import Integral
from typing import Any

import torch

from . import env
from ._common import checks
from ._common.arch import get_compute_capability
from ._common.kernels import NOT_LOADED
from ._common.numbers import plain
from ._common.row_kernels import RowKernel, RowKernels
from ._instrument.decorator import flashinfer_api
from .jit.topk import TopKConfig, TopKOutput, gen_topk_module
from .tllm_enums import TopKTieBreak
from .trace.templates.topk import (
    top_k_page_table_transform_trace,
    top_k_ragged_transform_trace,
    top_k_trace,
)

__all__ = [
    "TopKTieBreak",
    "can_implement_filtered_topk",
    "can_use_clusters_topk",
    "can_use_cub_topk",
    "get_topk_module",
    "is_cub_page_table_transform_beneficial",
    "is_cub_ragged_transform_beneficial",
    "is_cub_topk_beneficial",
    "roundup_kbyte",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "topk",
    "topk_clusters_exact",
    "topk_clusters_page_table_transform",
    "topk_clusters_ragged_transform",
]


_MOST_COLUMNS = 2**30 - 1


def _kernels(output: TopKOutput) -> RowKernels:
    return RowKernels(lambda dtype: gen_topk_module(TopKConfig(dtype, output)), "top_k")


_top_k = _kernels(TopKOutput.VALUES)
_page_table = _kernels(TopKOutput.PAGE_TABLE)
_ragged = _kernels(TopKOutput.RAGGED)


def _prefers_large(tie_break: int) -> bool:
    try:
        return TopKTieBreak(tie_break) is TopKTieBreak.LARGE
    except (ValueError, TypeError):
        error = ValueError if isinstance(tie_break, int) else TypeError
        raise error(
            f"`tie_break` must be one of {[int(t) for t in TopKTieBreak]}, got {tie_break!r}"
        ) from None


def _max_cluster() -> int:
    """Multiprocessors that may share a row; 0 leaves it to the shape."""
    return 1 if env.FLASHINFER_TOPK_ALGO.get() == "cta" else 0


def _width(k: Any) -> int:
    """Columns of the result, before they cost memory; other values are refused by the binding."""
    width = max(int(k), 0) if isinstance(k, (int, Integral)) else 0
    if width > _MOST_COLUMNS:
        raise ValueError(f"`k` must be at most {_MOST_COLUMNS}, got {width}")
    return width


def _workspace(kernel: RowKernel, input: Any, width: int) -> torch.Tensor | None:
    if not isinstance(input, torch.Tensor) or input.dim() != 2 or _max_cluster() == 1:
        return None
    rows, columns = input.shape
    return kernel.workspace(input.device, rows, columns, width)


@flashinfer_api(trace=top_k_trace)
def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest elements of each row and their indices.

    Parameters
    ----------
    input : torch.Tensor
        ``[batch, size]``, float32, float16 or bfloat16, last dimension contiguous.
    k : int
        1 to size.
    sorted : bool
        Largest first, equal values by index; otherwise in the order of the indices.
    deterministic : bool
        Accepted for compatibility: results are always deterministic.
    tie_break : TopKTieBreak
        Which of the elements equal to the k-th largest are taken.
    dsa_graph_safe : bool
        Accepted for compatibility: every call can be captured in a CUDA graph.

    Returns
    -------
    tuple of torch.Tensor
        Values ``[batch, k]`` in the dtype of `input`, and indices ``[batch, k]``, int64.

    Raises
    ------
    TypeError
        If `input` is not a tensor or `k` not an int.
    ValueError
        If `input` is not on the GPU or has a shape, dtype or stride not listed above, or `k` or
        `tie_break` is out of range.

    Examples
    --------
    >>> values, indices = flashinfer.top_k(torch.randn(4, 128256, device="cuda"), 2048)
    """
    try:
        kernel = _top_k[input.dtype]
    except NOT_LOADED:
        kernel = _top_k.load(input=input)
    checks.optional_flag("sorted", sorted)
    checks.optional_flag("deterministic", deterministic)
    checks.optional_flag("dsa_graph_safe", dsa_graph_safe)
    large = _prefers_large(tie_break)
    width = min((_width(k), *input.shape[-1:]))  # a `k` beyond is refused before it costs memory
    shape = (*input.shape[:1], width)
    indices = torch.empty(shape, dtype=torch.int64, device=input.device)
    values = torch.empty(shape, dtype=input.dtype, device=input.device)
    workspace = _workspace(kernel, input, width)
    kernel.run(indices, values, workspace, input, k, large, _max_cluster(), None)
    if sorted:
        values, order = values.sort(dim=-1, descending=True, stable=True)
        indices = indices.gather(-1, order)
    return values, indices


topk = top_k


@flashinfer_api(trace=top_k_page_table_transform_trace)
def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of the `k` largest scores of each row, through a page table.

    The window of row ``r`` is the columns ``row_starts[r]`` to ``row_starts[r] + lengths[r]``.
    Index ``i`` in it becomes ``table[start + i // page_size] * page_size + i % page_size``, where
    ``table = src_page_table[row_to_batch[r]]`` and ``start = page_table_row_starts[r]``. A row with
    fewer than `k` columns in its window has all of them, then -1.

    Parameters
    ----------
    input : torch.Tensor
        Scores ``[num_rows, size]``, float32, float16 or bfloat16, last dimension contiguous.
    src_page_table : torch.Tensor
        ``[batch, entries]``, int32, last dimension contiguous.
    lengths : torch.Tensor
        ``[num_rows]``, int32: columns of each row's window.
    k : int
        Width of the result; at least 1.
    row_to_batch : torch.Tensor, optional
        ``[num_rows]``, int32: row of `src_page_table`. None: the same row.
    deterministic, tie_break, dsa_graph_safe
        As for `top_k`.
    row_starts : torch.Tensor, optional
        ``[num_rows]``, int32: first column of each row's window. None: 0.
    page_table_row_starts : torch.Tensor, optional
        ``[num_rows]``, int32: first entry of each row in its page table. None: `row_starts`, whose
        columns then are the entries; 0 without them.
    page_size : int
        Slots per page. Above 1, `row_starts` need `page_table_row_starts` beside them: columns
        are not entries then.
    out, out_raw_indices : torch.Tensor, optional
        ``[num_rows, k]``, int32, contiguous: receive the slots, and the indices in the window.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor. Slots are in the order of the indices; an index without an entry in
        the table is -1.

    Raises
    ------
    TypeError, ValueError
        As for `top_k`.
    """
    try:
        kernel = _page_table[input.dtype]
    except NOT_LOADED:
        kernel = _page_table.load(input=input)
    checks.optional_flag("deterministic", deterministic)
    checks.optional_flag("dsa_graph_safe", dsa_graph_safe)
    if page_table_row_starts is None and row_starts is not None:
        page_table_row_starts = _entries_of_columns(row_starts, page_size)
    large = _prefers_large(tie_break)
    width = _width(k)
    if out is None:
        out = torch.empty((*input.shape[:1], width), dtype=torch.int32, device=input.device)
    kernel.run(
        out,
        out_raw_indices,
        _workspace(kernel, input, width),
        input,
        src_page_table,
        (lengths, row_to_batch, row_starts, page_table_row_starts),
        page_size,
        k,
        large,
        _max_cluster(),
        None,
    )
    return out


def _entries_of_columns(row_starts: torch.Tensor, page_size: int) -> torch.Tensor:
    if plain(page_size) != 1:
        raise ValueError(
            "`page_table_row_starts` must be given beside `row_starts` for pages of more than one "
            f"slot, got None with page_size {page_size}"
        )
    return row_starts


@flashinfer_api(trace=top_k_ragged_transform_trace)
def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions of the `k` largest scores of each row in a ragged tensor: ``offsets[r] + i``.

    Parameters
    ----------
    input, lengths, k, deterministic, tie_break, dsa_graph_safe, row_starts
        As for `top_k_page_table_transform`, which also describes a row's window.
    offsets : torch.Tensor
        ``[num_rows]``, int32: position of each row's first element.

    Returns
    -------
    torch.Tensor
        ``[num_rows, k]``, int32, in the order of the indices; -1 where the window has no more.

    Raises
    ------
    TypeError, ValueError
        As for `top_k`.
    """
    try:
        kernel = _ragged[input.dtype]
    except NOT_LOADED:
        kernel = _ragged.load(input=input)
    checks.optional_flag("deterministic", deterministic)
    checks.optional_flag("dsa_graph_safe", dsa_graph_safe)
    large = _prefers_large(tie_break)
    width = _width(k)
    out = torch.empty((*input.shape[:1], width), dtype=torch.int32, device=input.device)
    workspace = _workspace(kernel, input, width)
    kernel.run(out, workspace, input, offsets, lengths, row_starts, k, large, _max_cluster(), None)
    return out


# ---- names that serving engines import -----------------------------------------------------------


def get_topk_module() -> Any:
    """The module of `top_k` for float32, compiled if need be."""
    return gen_topk_module(TopKConfig(torch.float32, TopKOutput.VALUES)).build_and_load()


def can_implement_filtered_topk() -> bool:
    """Whether there is the algorithm that FlashInfer calls filtered; False: there are others."""
    return False


def can_use_cub_topk(
    algo: str,
    input_tensor: torch.Tensor,
    tie_break: int,
    deterministic: bool,
    sorted_output: bool = False,
) -> bool:
    """Whether CUB's top-k can serve a call: never, all calls have one kernel here."""
    return False


def is_cub_topk_beneficial(
    algo: str,
    num_rows: int,
    d: int,
    k: int,
    dtype: torch.dtype,
    tie_break: int,
    dsa_graph_safe: bool,
    clusters_eligible: bool,
) -> bool:
    """Whether CUB's top-k would be quicker: never, as `can_use_cub_topk`."""
    return False


def is_cub_page_table_transform_beneficial(
    algo: str,
    num_rows: int,
    d: int,
    dtype: torch.dtype,
    tie_break: int,
    dsa_graph_safe: bool,
    clusters_eligible: bool,
) -> bool:
    """Whether CUB would be quicker for `top_k_page_table_transform`: never."""
    return False


def is_cub_ragged_transform_beneficial(
    algo: str,
    num_rows: int,
    d: int,
    dtype: torch.dtype,
    tie_break: int,
    dsa_graph_safe: bool,
    clusters_eligible: bool,
) -> bool:
    """Whether CUB would be quicker for `top_k_ragged_transform`: never."""
    return False


def roundup_kbyte(x: int) -> int:
    """`x` bytes, rounded up to whole KiB."""
    return -(-x // 1024) * 1024


def can_use_clusters_topk(
    algo: str | None,
    device: torch.device,
    deterministic: bool,
    tie_break: int,
    dsa_graph_safe: bool,
) -> bool:
    """Whether several multiprocessors may share a row on `device` (thread-block clusters)."""
    return algo in (None, "auto", "clusters") and get_compute_capability(device)[0] >= 9


def topk_clusters_exact(
    logits: torch.Tensor,
    top_k: int,
    output_values: bool = False,
    out_dtype: torch.dtype = torch.int32,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices of the `top_k` largest elements, and their values if `output_values`, else None.

    `out_dtype` is that of the indices: int32 or int64. As `top_k`, which it calls, but for the
    order of what it returns.
    """
    if out_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`out_dtype` must be torch.int32 or torch.int64, got {out_dtype}")
    values, indices = topk(logits, top_k)
    return indices.to(out_dtype), values if output_values else None


def topk_clusters_page_table_transform(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    src_page_table: torch.Tensor,
    top_k: int,
    pdl: bool = False,
) -> torch.Tensor:
    """`top_k_page_table_transform` with one row per batch entry."""
    return top_k_page_table_transform(logits, src_page_table, seq_lens, top_k)


def topk_clusters_ragged_transform(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    offsets: torch.Tensor,
    top_k: int,
    pdl: bool = False,
) -> torch.Tensor:
    """`top_k_ragged_transform` with its arguments in another order."""
    return top_k_ragged_transform(logits, offsets, seq_lens, top_k)
