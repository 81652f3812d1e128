"""Top-k and its index transforms against a stable sort."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer import TopKTieBreak, topk
from flashinfer.testing import assert_matches_reference
from flashinfer.topk import (
    topk_clusters_exact,
    topk_clusters_page_table_transform,
    topk_clusters_ragged_transform,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tie_break", list(TopKTieBreak))
@pytest.mark.parametrize("size", [1, 100, 4097, 65536, 300_001])
def test_chosen_elements(size, tie_break, dtype, device):
    rows = torch.randn(5, size, device=device).to(dtype)
    keys = rows.float()
    if tie_break == TopKTieBreak.LARGE:
        order = size - 1 - keys.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    else:
        order = keys.sort(dim=-1, descending=True, stable=True).indices
    for k in sorted({1, min(7, size), min(50, size), min(2048, size), size}):
        values, indices = flashinfer.top_k(rows, k, tie_break=tie_break)
        assert torch.equal(indices, order[:, :k].sort(-1).values)
        assert torch.equal(values, rows.gather(-1, indices))


def test_sorted_gives_the_largest_first(device):
    rows = torch.randint(0, 50, (4, 3000), device=device).float()
    values, indices = flashinfer.top_k(rows, 500, sorted=True)
    wanted, order = rows.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, wanted[:, :500]) and torch.equal(indices, order[:, :500])


def test_special_values(device):
    nan, inf = math.nan, math.inf
    rows = torch.tensor([[1.0, -inf, nan, inf, -0.0, 0.0, -inf]], device=device)
    for k, chosen in ((1, [2]), (2, [2, 3]), (4, [0, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 5])):
        assert flashinfer.top_k(rows, k)[1].tolist() == [chosen]
    assert (
        flashinfer.top_k(torch.full((2, 999), -inf, device=device), 3)[1].tolist()
        == [[0, 1, 2]] * 2
    )


@pytest.mark.parametrize("tie_break", list(TopKTieBreak))
@pytest.mark.parametrize("k", [1, 300, 2048])
def test_long_rows_that_mislead_a_sample(k, tie_break, device):
    """Rows of 20,000 to 130,000 columns are chosen from by a bound that a sample gives."""
    size = 20_003
    rows = torch.randn(7, size, device=device)
    rows[0] = 1.0
    rows[1, 200:] = -math.inf
    rows[2] = rows[2].mul(3).round()
    rows[3] = torch.arange(size, device=device)
    rows[4].view(-1)[::64] += 100.0
    rows[5, : size // 2] = math.nan
    rows[6, 10_000:] = 0.0
    assert_matches_reference(flashinfer.top_k, input=rows, k=k, tie_break=tie_break)
    wide = torch.randn(2, 130_000, device=device).bfloat16()
    assert_matches_reference(flashinfer.top_k, input=wide, k=k, tie_break=tie_break)


@pytest.mark.parametrize("k", [1, 64, 2048])
def test_page_table_transform(k, device):
    generator = torch.Generator(device).manual_seed(1)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=device, generator=generator).int()

    for page_size in (1, 64):
        rows, size = 9, 6007
        scores = torch.randn(rows, size, device=device)
        arguments = {
            "input": scores,
            "src_page_table": ints(10**6, 4, 7000),
            "lengths": torch.tensor([0, 1, 5, 64, 65, 2048, 5000, 6007, -3], device=device).int(),
            "k": k,
            "row_to_batch": ints(4, rows),
            "row_starts": ints(1000, rows),
            "page_table_row_starts": ints(50, rows),
            "page_size": page_size,
        }
        assert_matches_reference(flashinfer.top_k_page_table_transform, **arguments)
        raw = torch.empty(rows, k, dtype=torch.int32, device=device)
        assert_matches_reference(
            flashinfer.top_k_page_table_transform, **arguments, out_raw_indices=raw
        )


def test_entries_of_the_page_table_begin_where_the_window_does(device):
    """A row's window is that of its table, unless `page_table_row_starts` says otherwise."""
    scores = torch.tensor([[9.0, 1, 2, 3, 8, 7, 6, 5]], device=device)
    pages = torch.arange(100, 108, dtype=torch.int32, device=device)[None]
    four = torch.tensor([4], dtype=torch.int32, device=device)
    transform = flashinfer.top_k_page_table_transform
    assert transform(scores, pages, four, 2, row_starts=four).tolist() == [[104, 105]]
    first = transform(scores, pages, four, 2, row_starts=four, page_table_row_starts=four - 4)
    assert first.tolist() == [[100, 101]]
    with pytest.raises(ValueError, match="`page_table_row_starts` must be given"):
        transform(scores, pages, four, 2, row_starts=four, page_size=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_transform(dtype, device):
    rows, size = 6, 3001
    assert_matches_reference(
        flashinfer.top_k_ragged_transform,
        input=torch.randn(rows, size, device=device).to(dtype),
        offsets=(torch.arange(rows, device=device) * size).int(),
        lengths=torch.tensor([3001, 0, 100, 511, 512, 513], device=device).int(),
        k=512,
        row_starts=torch.tensor([0, 0, 2900, 2999, 7, 5000], device=device).int(),
    )


def test_the_algorithm_is_read_at_each_call(monkeypatch):
    for value, clusters in (("", 0), ("auto", 0), ("multi_cta", 0), ("CTA", 1)):
        monkeypatch.setenv("FLASHINFER_TOPK_ALGO", value)
        assert topk._max_cluster() == clusters
    monkeypatch.setenv("FLASHINFER_TOPK_ALGO", "several")
    with pytest.raises(ValueError, match="FLASHINFER_TOPK_ALGO='several' .* auto / cta"):
        topk._max_cluster()


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["auto", "cta"])
def test_algorithms_agree(algorithm, monkeypatch):
    monkeypatch.setenv("FLASHINFER_TOPK_ALGO", algorithm)
    rows = torch.randn(3, 128256, device="cuda")
    indices = flashinfer.top_k(rows, 2048)[1]
    assert torch.equal(indices, rows.topk(2048).indices.sort(-1).values)


def test_names_of_the_cluster_variants(device):
    rows = torch.randn(3, 40, device=device)
    values, wanted = flashinfer.top_k(rows, 7)
    indices, nothing = topk_clusters_exact(rows, 7)
    assert indices.dtype == torch.int32 and torch.equal(indices.long(), wanted) and nothing is None
    indices, got = topk_clusters_exact(rows, 7, output_values=True, out_dtype=torch.int64)
    assert torch.equal(indices, wanted) and torch.equal(got, values)
    with pytest.raises(ValueError, match="`out_dtype`"):
        topk_clusters_exact(rows, 7, out_dtype=torch.float32)
    lengths = torch.tensor([40, 3, 20], device=device).int()
    table = torch.arange(120, device=device).int().view(3, 40)
    slots = topk_clusters_page_table_transform(rows, lengths, table, 7)
    assert torch.equal(slots, flashinfer.top_k_page_table_transform(rows, table, lengths, 7))
    positions = topk_clusters_ragged_transform(rows, lengths, lengths, 7)
    assert torch.equal(positions, flashinfer.top_k_ragged_transform(rows, lengths, lengths, 7))


def test_refusals_of_python(device):
    rows = torch.randn(2, 10, device=device)
    for k in (0, 11, -1):
        with pytest.raises(ValueError, match="`k`"):
            flashinfer.top_k(rows, k)
    with pytest.raises((TypeError, ValueError), match="tie_break"):
        flashinfer.top_k(rows, 1, tie_break=3)
