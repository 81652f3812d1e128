"""Engines plan a captured prefill by `_cached_module.plan` with the lengths that the host has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer

HEADS, SLOTS, CAPACITY = (4, 2, 64), 200, 3


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Engine:
    """A wrapper for CUDA graphs over pages of one token, and the buffers that it reads."""

    def __init__(self, masked: bool) -> None:
        self.pages = torch.zeros(SLOTS, dtype=torch.int32)
        self.qo_indptr, self.kv_indptr = (torch.zeros(CAPACITY + 1).int() for _ in range(2))
        self.last = torch.ones(CAPACITY, dtype=torch.int32)
        self.mask = torch.zeros(4096, dtype=torch.uint8) if masked else None
        self.mask_indptr = torch.zeros(CAPACITY + 1).int() if masked else None
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.zeros(8 << 20, dtype=torch.uint8),
            use_cuda_graph=True,
            qo_indptr_buf=self.qo_indptr,
            paged_kv_indptr_buf=self.kv_indptr,
            paged_kv_indices_buf=self.pages,
            paged_kv_last_page_len_buf=self.last,
            custom_mask_buf=self.mask,
            mask_indptr_buf=self.mask_indptr,
            backend="fa2",
        )

    def plan(self, batch: Batch) -> None:
        self.wrapper.plan(*batch.index_tensors(), *HEADS, 1, **batch.options())

    def replan(self, batch: Batch, **changes: Any) -> list[int]:
        """Do as an engine does: fill the buffers, then plan by the host's lengths."""
        indptr, kv_indptr, pages, _ = batch.index_tensors()
        self.qo_indptr.copy_(indptr)
        self.kv_indptr.copy_(kv_indptr)
        self.pages[: len(pages)] = pages
        if self.mask is not None and self.mask_indptr is not None:
            packed, starts = flashinfer.segment_packbits(
                batch.mask, batch.mask_indptr(), bitorder="little"
            )
            self.mask[: len(packed)] = packed
            self.mask_indptr.copy_(starts)
        call = {
            "float_workspace_buffer": self.wrapper._float_workspace_buffer,
            "int_workspace_buffer": self.wrapper._int_workspace_buffer,
            "pin_memory_int_workspace_buffer": self.wrapper._pin_memory_int_workspace_buffer,
            "qo_indptr": indptr,
            "kv_indptr": kv_indptr,
            "kv_len": kv_indptr.diff(),
            "max_total_num_rows": self.wrapper._max_total_num_rows,
            "batch_size": CAPACITY,
            "num_qo_heads": HEADS[0],
            "num_kv_heads": HEADS[1],
            "page_size": 1,
            "use_cuda_graph": True,
            "head_dim_qk": HEADS[2],
            "head_dim_vo": HEADS[2],
            "causal": self.mask is None,
            "window_left": -1,
            "fixed_split_size": -1,
            "disable_split_kv": False,
            "num_colocated_ctas": 0,
            "uniform_q_len": 0,
        }
        module: Any = self.wrapper._cached_module
        return module.plan(*{**call, **changes}.values())


class Batch:
    """Two query tokens of each of three requests over keys of these lengths."""

    def __init__(self, lengths: tuple[int, int, int], seed: int, masked: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = _ints(*lengths)
        self.pages = torch.randperm(SLOTS, generator=generator)[: sum(lengths)].int()
        self.mask = torch.rand(2 * sum(lengths), generator=generator) < 0.7
        self.masked = masked
        self.q = torch.randn(6, *HEADS[::2], generator=generator).half()

    def index_tensors(self) -> tuple[torch.Tensor, ...]:
        starts = torch.cat([_ints(0), self.lengths.cumsum(0).int()])
        return _ints(0, 2, 4, 6), starts, self.pages, torch.ones(3, dtype=torch.int32)

    def mask_indptr(self) -> torch.Tensor:
        return torch.cat([_ints(0), (2 * self.lengths).cumsum(0).int()])

    def options(self) -> dict[str, Any]:
        mask = {"custom_mask": self.mask} if self.masked else {"causal": True}
        return {**mask, "q_data_type": torch.float16}


@pytest.fixture(autouse=True)
def on_the_reference_backend():
    with flashinfer.reference_backend():
        yield


@pytest.mark.parametrize("masked", [False, True])
def test_a_plan_by_lengths_is_that_of_plan(masked: bool):
    cache = torch.randn(SLOTS, 2, 1, *HEADS[1:]).half()
    engine, other = Engine(masked), Engine(masked)
    first = Batch((9, 1, 4), 1, masked)
    assert engine.wrapper._cached_module is None and engine.wrapper._max_total_num_rows is None
    engine.plan(first)
    assert engine.wrapper._max_total_num_rows == 6
    for batch in (Batch((3, 30, 7), 2, masked), Batch((60, 2, 2), 3, masked), first):
        info = engine.replan(batch)
        assert info == [6, CAPACITY]
        engine.wrapper._plan_info = info
        other.plan(batch)
        expected = other.wrapper.run(batch.q, cache, return_lse=True)
        for got, wanted in zip(
            engine.wrapper.run(batch.q, cache, return_lse=True), expected, strict=True
        ):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_qo_heads": 8}, "num_qo_heads"),
        ({"page_size": 16}, "page_size"),
        ({"head_dim_vo": 128}, "head_dim_vo"),
        ({"use_cuda_graph": False}, "use_cuda_graph"),
        ({"causal": False}, "causal"),
        ({"window_left": 4}, "window_left"),
        ({"batch_size": 2}, "qo_indptr"),
        ({"max_total_num_rows": 3}, "max_total_num_rows"),
        ({"uniform_q_len": 5}, "uniform_q_len"),
        ({"num_colocated_ctas": 1}, "num_colocated_ctas"),
        ({"kv_indptr": _ints(0, 100, 200, 300)}, "kv_indptr"),
        ({"kv_len": _ints(1, 2, 3)}, "kv_len|lengths|seq_lens"),
        ({"int_workspace_buffer": torch.zeros(16)}, "int_workspace_buffer"),
    ],
)
def test_refusals(changes: dict[str, Any], name: str):
    engine, batch = Engine(masked=False), Batch((9, 1, 4), 1, masked=False)
    engine.plan(batch)
    with pytest.raises((TypeError, ValueError), match=name):
        engine.replan(batch, **changes)
