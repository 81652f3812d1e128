"""Decode with block tables and lengths on the GPU: planned by a kernel, captured as it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._common.checks import tensor as check_tensor
from ..._common.dtypes import torch_name
from ...jit.attention.config import decode_tile_q
from ..index_tensors import check_index_vector, page_numbers
from ..plan.choice import KernelChoice
from ..plan.launch import NO_OPTIONS
from ..plan.on_device import plan_on_device
from ..plan.requests import (
    ArgumentNames,
    AttentionProblem,
    DeviceLengths,
    DraftMask,
    PlanTensors,
    Requests,
)
from ..wrappers.base import SpecArguments
from ..wrappers.decode import BatchDecodeWithPagedKVCacheWrapper


class TableLengths(NamedTuple):
    """Where the pages of a batch are, and how long its requests are, on the GPU.

    Attributes
    ----------
    block_tables : torch.Tensor
        ``[batch_size, max_pages]`` int32 or int64.
    seq_lens : torch.Tensor
        ``[batch_size]`` int32, int64 or uint32.
    cum_seq_lens_q : torch.Tensor or None
        ``[batch_size + 1]`` rows of the queries; None: as many of each request.
    most_qo_len : int
        The most query tokens of a request.
    page_size : int
        Tokens of a page.
    draft_words : torch.Tensor or None
        What the queries see of each other, as ``DraftMask`` has it.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cum_seq_lens_q: torch.Tensor | None
    most_qo_len: int
    page_size: int
    draft_words: torch.Tensor | None = None

    def check(self) -> None:
        """Refuse tensors that are not as described."""
        check_tensor("block_tables", self.block_tables)
        check_index_vector("seq_lens", self.seq_lens)
        batch_size = len(self.seq_lens)
        table = self.block_tables
        if (
            table.dtype not in (torch.int32, torch.int64)
            or table.ndim != 2
            or len(table) != batch_size
        ):
            raise ValueError(
                f"`block_tables` must be int32 or int64 [{batch_size}, max_pages] for these "
                f"`seq_lens`, got {torch_name(table.dtype)} {list(table.shape)}"
            )
        if self.cum_seq_lens_q is not None:
            check_index_vector("cum_seq_lens_q", self.cum_seq_lens_q)
            if len(self.cum_seq_lens_q) != batch_size + 1:
                raise ValueError(
                    f"`cum_seq_lens_q` must have {batch_size + 1} elements for {batch_size} "
                    f"requests, got {len(self.cum_seq_lens_q)}"
                )


def plan_table_lengths(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    arguments: SpecArguments,
    lengths: TableLengths,
    qo_tokens: int,
) -> None:
    """Plan a wrapper with lengths and page numbers where they lie on the GPU.

    Parameters
    ----------
    wrapper : BatchDecodeWithPagedKVCacheWrapper
        Its next ``run`` computes the batch.
    arguments : SpecArguments
        As of ``plan``.
    lengths : TableLengths
        The batch.
    qo_tokens : int
        Rows of the queries.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    """
    lengths.check()
    spec = wrapper._checked_spec(arguments)
    batch_size, width = lengths.block_tables.shape
    tokens, page_size = lengths.most_qo_len, lengths.page_size
    places = torch.arange(batch_size + 1, dtype=torch.int64)
    bounds = Requests(
        ArgumentNames.DECODE,
        None if lengths.cum_seq_lens_q is None else (places * tokens).clamp(max=qo_tokens).int(),
        (places * width).int(),
        torch.full((batch_size,), width * page_size, dtype=torch.int32),
        None,
        page_size,
        tokens,
        spec.causal,
        spec.window_left,
    )
    rows = tokens * spec.group_size
    tile_q = decode_tile_q(rows, spec.tile_head_dim, spec.kv_data_type)
    choice = KernelChoice("fa2", tile_q)
    entries = page_numbers(lengths.block_tables).to(wrapper.device, torch.int32).reshape(-1)
    words = _on_device(lengths.draft_words, wrapper.device)
    mask = None if words is None else DraftMask(words)
    problem = AttentionProblem(spec, bounds, PlanTensors(kv_indices=entries, mask=mask))
    there = DeviceLengths(
        _on_device(lengths.cum_seq_lens_q, wrapper.device),
        None,
        _on_device(lengths.seq_lens, wrapper.device),
        None,
        tokens,
    )
    plan_on_device(wrapper._executor, problem, there, NO_OPTIONS, choice, by_launches=True)
    wrapper._problem = wrapper._plan_problem = problem


def _on_device(tensor: Any, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device, torch.int32).contiguous()
