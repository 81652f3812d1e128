"""Scores by which sparse attention chooses tokens, over a paged cache of 8-bit keys.

Per query and KV token (the "lightning indexer" of DeepSeek-AI, "DeepSeek-V3.2", 2025)::

    logits[b * next_n + t, p] = scale[p] * sum_h weights[b * next_n + t, h] * relu(q[b, t, h] k[p])

Products are of e4m3 with float32 sums. `flashinfer.topk.top_k_page_table_transform` takes the best
of them, and `flashinfer.mla` attends to these; docs/mla.md shows the flow.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ._common import checks
from ._common.arch import get_device_sm_count
from ._indexer.launch import UNIT, get_mqa_logits_kernel, paged_logits, schedule_of
from ._instrument.decorator import flashinfer_api
from .jit.mqa_logits import MqaLogitsConfig
from .trace.templates.mqa_logits import fp8_paged_mqa_logits_trace
from .trace.templates.mqa_schedule import paged_mqa_logits_schedule_trace

__all__ = [
    "compute_paged_mqa_logits_schedule",
    "fp8_paged_mqa_logits",
    "min_block_table_width",
    "padded_seq_len",
    "precompile_paged_mqa_logits",
]

_NAMES = {"logits": "out", "keys": "kv_fused", "max_length": "max_seq_len"}
_OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)


def padded_seq_len(max_seq_len: int) -> int:
    """`max_seq_len` rounded up to a multiple of 256, the tokens that are scored at a time.

    Parameters
    ----------
    max_seq_len : int
        Columns of the logits.

    Raises
    ------
    TypeError, ValueError
        If it is no int from 0 on.
    """
    return -(-checks.count("max_seq_len", max_seq_len, 0) // UNIT) * UNIT


def min_block_table_width(seq_len: int, block_size: int) -> int:
    """Pages that `seq_len` tokens take: the columns that a block table needs at least.

    Parameters
    ----------
    seq_len : int
        Tokens of the longest request.
    block_size : int
        Tokens of a page.

    Raises
    ------
    TypeError, ValueError
        If they are no ints, the first from 0 and the second from 1 on.
    """
    return -(-checks.count("seq_len", seq_len, 0) // checks.count("block_size", block_size))


@flashinfer_api(trace=paged_mqa_logits_schedule_trace)
def compute_paged_mqa_logits_schedule(
    seq_lens: torch.Tensor,
    device: torch.device | None = None,
    *,
    next_n: int = 1,
    variant: str = "fp8",
    use_gpu_kernel: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """How the GPU's SMs share the tokens of all requests; once a step, for all layers.

    Parameters
    ----------
    seq_lens : torch.Tensor
        ``[batch_size]`` int32 on the GPU: tokens of each request.
    device : torch.device, optional
        The device of `seq_lens`.
    next_n : int
        Query tokens of a request; the schedule does not depend on it.
    variant : str
        ``"fp8"``.
    use_gpu_kernel : bool
        True: the schedule is computed on the GPU.
    out : torch.Tensor, optional
        Result, ``[SMs + 1, 2]`` int32, contiguous. A CUDA graph computes it anew with each replay.

    Returns
    -------
    torch.Tensor
        For each SM the request and the 256 tokens of it where its share begins, and the end.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    checks.count("next_n", next_n)
    checks.choice("variant", variant, ("fp8",))
    checks.choice("use_gpu_kernel", use_gpu_kernel, (True,))
    checks.cuda_tensors(seq_lens=seq_lens)
    if device is not None and not _is_of(seq_lens, device):
        raise ValueError(f"`device` must be {seq_lens.device}, that of `seq_lens`, got {device!r}")
    return schedule_of(seq_lens, get_device_sm_count(seq_lens.device), out)


@flashinfer_api(trace=fp8_paged_mqa_logits_trace)
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    output_dtype: torch.dtype = torch.float32,
    epi_dtype: torch.dtype = torch.float32,
    acc_dtype: torch.dtype = torch.float32,
    schedule_meta: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of all tokens of each request, on Hopper.

    Parameters
    ----------
    q : torch.Tensor
        ``[batch_size, next_n, num_heads, 128]``, float8_e4m3fn, contiguous, aligned to 16 bytes;
        8, 16, 32, 64 or 128 heads, and ``next_n * num_heads`` at most 256.
    kv_fused : torch.Tensor
        ``[num_pages, page_size, 1, 132]`` uint8, pages contiguous and at multiples of 16 bytes. A
        page has its float8_e4m3fn keys first, 128 bytes each, then a float32 scale for each key.
    weights : torch.Tensor
        ``[batch_size * next_n, num_heads]`` float32, rows contiguous and at multiples of 16 bytes.
    block_tables : torch.Tensor
        ``[batch_size, max_pages]`` int32: page numbers of each request.
    seq_lens : torch.Tensor
        ``[batch_size]`` int32: tokens that the last query of each request sees; each query before
        it sees one less.
    max_seq_len : int
        Columns of the result; later tokens are not scored.
    output_dtype : torch.dtype
        float32, float16 or bfloat16.
    epi_dtype, acc_dtype : torch.dtype
        float32: heads and products are summed in it.
    schedule_meta : torch.Tensor, optional
        Result of `compute_paged_mqa_logits_schedule` for `seq_lens`; computed here if None.
    out : torch.Tensor, optional
        ``[batch_size * next_n, >= max_seq_len]``, dtype `output_dtype`, rows contiguous. The
        reference backend takes exactly `max_seq_len` columns.

    Returns
    -------
    torch.Tensor
        ``[batch_size * next_n, max_seq_len]``, a view of `out` if that is wider. Tokens that a
        query does not see have minus infinity.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.
    """
    checks.tensor("q", q, 4)
    columns = checks.count("max_seq_len", max_seq_len, 0)
    checks.dtype("output_dtype", output_dtype, _OUTPUTS)
    checks.dtype("epi_dtype", epi_dtype, (torch.float32,))
    checks.dtype("acc_dtype", acc_dtype, (torch.float32,))
    sequences = (block_tables, seq_lens, columns, schedule_meta)
    if out is None:
        shape = (q.shape[0] * q.shape[1], columns)
        out = torch.full(shape, float("-inf"), dtype=output_dtype, device=q.device)
        paged_logits(q, kv_fused, weights, *sequences, out, _NAMES)
        return out
    if checks.tensor("out", out, 2).dtype != output_dtype:
        raise ValueError(f"`out` must have dtype {output_dtype}, got {out.dtype}")
    result = out if out.shape[1] <= columns else out[:, :columns]
    paged_logits(q, kv_fused, weights, *sequences, out, _NAMES, cleared=result)
    return result


def _is_of(tensor: torch.Tensor, device: Any) -> bool:
    """Whether `device` is that of the tensor; without a number, of its type."""
    try:
        given = torch.device(device)
    except (RuntimeError, TypeError):
        return False
    return given.type == tensor.device.type and given.index in (None, tensor.device.index)


def precompile_paged_mqa_logits(
    device: torch.device | None = None,
    variants: tuple[str, ...] = ("fp8", "fp4"),
    output_dtypes: tuple[torch.dtype, ...] | None = None,
    batch_sizes: Sequence[int] | None = None,
) -> None:
    """Build the kernels of `fp8_paged_mqa_logits` for 64 heads before they are called.

    Parameters
    ----------
    device : torch.device, optional
        Kernels are built for the targets of this process, whatever the device.
    variants : tuple of str
        ``"fp8"``; ``"fp4"``, which there are no kernels of, builds none.
    output_dtypes : tuple of torch.dtype, optional
        Dtypes of the results; by default float32 alone.
    batch_sizes : sequence of int, optional
        Kernels do not depend on them.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    for variant in variants:
        checks.choice("variants", variant, ("fp8", "fp4"))
    for dtype in output_dtypes or (torch.float32,):
        checks.dtype("output_dtypes", dtype, _OUTPUTS)
        for queries in (1, 2) if "fp8" in variants else ():
            get_mqa_logits_kernel(MqaLogitsConfig(dtype, 64, queries, True))
