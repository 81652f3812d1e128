"""The k largest logits of rows of different lengths: the keys that sparse attention reads."""

from typing import Any

import torch

from ._common import checks
from ._common.kernels import NOT_LOADED
from ._common.row_kernels import RowKernels
from ._instrument.decorator import flashinfer_api
from .jit.topk import TopKConfig, TopKOutput, gen_topk_module
from .trace.templates.topk_varlen import top_k_varlen_trace

__all__ = ["top_k_varlen"]

_kernels = RowKernels(lambda dtype: gen_topk_module(TopKConfig(dtype, TopKOutput.RAGGED)), "top_k")

_BACKENDS = ("auto", "radix_cutlass")


@flashinfer_api(trace=top_k_varlen_trace)
def top_k_varlen(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pre_idx: torch.Tensor | None = None,
    compress_ratio: int = 1,
    next_n: int = 1,
    return_values: bool = False,
    out_indices: torch.Tensor | None = None,
    out_values: torch.Tensor | None = None,
    backend: str = "auto",
    load_balance: bool = True,
    workspace: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices of the `top_k` largest logits of each row, within the row's length.

    Row ``r`` is token ``t = r % next_n`` of request ``i = r // next_n``; it has ``(seq_lens[i] -
    next_n + t + 1) // compress_ratio`` logits. A row with fewer than `top_k` has all of them.

    Parameters
    ----------
    logits : torch.Tensor
        ``[num_rows, max_len]``, float32, float16 or bfloat16, last dimension contiguous.
    seq_lens : torch.Tensor
        ``[num_rows // next_n]``, int32: tokens of each request, its drafts included, before they
        are compressed.
    top_k : int
        Width of the result; at least 1.
    pre_idx : torch.Tensor, optional
        ``[num_rows // next_n, top_k]``, int32: a guess. The kernel needs none and does not read it.
    compress_ratio : int
        Tokens that one logit stands for.
    next_n : int
        Rows of a request: tokens that are decoded at once.
    return_values : bool
        Return the logits as well.
    out_indices : torch.Tensor, optional
        ``[num_rows, top_k]``, int32, contiguous: receives the indices.
    out_values : torch.Tensor, optional
        ``[num_rows, top_k]``, dtype of `logits`: receives the values; only with `return_values`.
    backend : str
        ``"auto"`` or ``"radix_cutlass"``, which are one; the others are for Blackwell.
    load_balance : bool
        Changes nothing: rows are balanced in any case.
    workspace : dict, optional
        Not used: the kernel keeps a scratch of its own.

    Returns
    -------
    tuple of torch.Tensor
        `out_indices` in increasing order, -1 where a row has no more; and None, or `out_values`,
        which are -inf there. Of equal logits the first are taken, and NaN counts as +inf: every run
        gives the same bits.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described or not on the GPU.
    """
    try:
        kernel = _kernels[logits.dtype]
    except NOT_LOADED:
        kernel = _kernels.load(logits=logits)
    checks.choice("backend", backend, _BACKENDS)
    checks.flag("load_balance", load_balance)
    if not isinstance(workspace, dict | None):
        raise TypeError(f"`workspace` must be a dict or None, got {type(workspace).__name__}")
    ratio = checks.count("compress_ratio", compress_ratio)
    rows_of_request = checks.count("next_n", next_n)
    width = checks.count("top_k", top_k, 1, 2**30 - 1)
    checks.flag("return_values", return_values)
    rows = checks.tensor("logits", logits, 2).shape[0]
    _check_requests(rows, seq_lens, rows_of_request, pre_idx, width)
    if out_values is not None and not return_values:
        raise ValueError("`out_values` must be left out without `return_values`, got a tensor")
    if out_indices is None:
        out_indices = torch.empty(rows, width, dtype=torch.int32, device=logits.device)
    else:
        _check_out("out_indices", out_indices, (rows, width), torch.int32, logits.device)
    lengths = _lengths(seq_lens, rows_of_request, ratio)
    scratch = kernel.workspace(logits.device, rows, logits.shape[1], width)
    offsets = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    kernel.run(out_indices, scratch, logits, offsets, lengths, None, width, False, 0, None)
    if not return_values:
        return out_indices, None
    return out_indices, _values(logits, out_indices, out_values)


def _check_requests(
    rows: int, seq_lens: torch.Tensor, next_n: int, pre_idx: torch.Tensor | None, width: int
) -> None:
    requests = checks.tensor("seq_lens", seq_lens, 1).shape[0]
    if requests * next_n != rows:
        raise ValueError(
            f"`seq_lens` must have an element for each {next_n} of {rows} rows, got {requests}"
        )
    if seq_lens.dtype != torch.int32:
        raise ValueError(f"`seq_lens` must have dtype int32, got {seq_lens.dtype}")
    if pre_idx is not None:
        found = tuple(checks.tensor("pre_idx", pre_idx, 2).shape)
        if found != (requests, width) or pre_idx.dtype != torch.int32:
            raise ValueError(
                f"`pre_idx` must be int32 of shape {[requests, width]}, got {pre_idx.dtype} of "
                f"shape {list(found)}"
            )


def _lengths(seq_lens: torch.Tensor, next_n: int, ratio: int) -> torch.Tensor:
    """Logits of each row."""
    if next_n == 1 and ratio == 1:
        return seq_lens
    drafts = torch.arange(1 - next_n, 1, dtype=torch.int32, device=seq_lens.device)
    lengths = (seq_lens[:, None] + drafts).clamp_(min=0)
    return lengths.floor_divide_(ratio).flatten()


def _values(logits: torch.Tensor, indices: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    values = logits.gather(1, indices.clamp(min=0).long())
    values.masked_fill_(indices < 0, -torch.inf)
    if out is None:
        return values
    _check_out("out_values", out, values.shape, values.dtype, values.device)
    return out.copy_(values)


def _check_out(
    name: str, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    checks.tensor(name, out, 2)
    if out.shape != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"`{name}` must be {dtype} of shape {list(shape)} on {device}, "
            f"got {out.dtype} of shape {list(out.shape)} on {out.device}"
        )
