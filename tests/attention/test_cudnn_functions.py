"""The functions that have FlashInfer's arguments for cuDNN, against the wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
from tests.attention.batches import (
    BF16,
    E4M3,
    Batch,
    indptr,
    plan_decode,
    plan_paged,
    plan_ragged,
    ragged_kv,
    workspace,
)

PREFILL = Batch((20, 0, 33, 1), (20, 5, 70, 1), kv_layout="HND")
LIMITS = {"max_token_per_sequence": 40, "max_sequence_kv": 80}


def _lengths(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(values, dtype=torch.int32, device=device).view(-1, 1, 1, 1)
        for name, values in (
            ("actual_seq_lens_q", batch.qo_lens),
            ("actual_seq_lens_kv", batch.kv_lens),
        )
    }


def _tables(batch: Batch, device: torch.device) -> torch.Tensor:
    starts, indices, _, _ = batch.table()
    width = int(starts.diff().max())
    table = torch.zeros(len(starts) - 1, width, dtype=torch.int32)
    for b in range(len(table)):
        pages = indices[starts[b] : starts[b + 1]]
        table[b, : len(pages)] = pages
    return table.to(device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("units", [None, "tokens", "elements"])
def test_ragged_prefill(units, causal, device):
    batch = Batch(PREFILL.qo_lens, PREFILL.kv_lens)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    expected = plan_ragged(batch, device, causal=causal).run(q, k, v, return_lse=True)
    options: dict[str, Any] = _lengths(batch, device)
    if units is not None:
        # As in a fused projection: rows of k are apart.
        k = torch.cat([k, k], 1)[:, :2]
        starts = {"q": batch.qo_lens, "o": batch.qo_lens, "k": batch.kv_lens, "v": batch.kv_lens}
        strides = {"q": q.stride(0), "o": q.stride(0), "k": k.stride(0), "v": v.stride(0)}
        options = {"batch_offsets_units": units}
        for name, lengths in starts.items():
            factor = strides[name] if units == "elements" else 1
            options[f"batch_offsets_{name}"] = indptr(lengths).to(device) * factor
    out, lse = cudnn_batch_prefill_with_kv_cache(
        q, k, v, 128**-0.5, workspace(device), causal=causal, return_lse=True, **LIMITS, **options
    )
    assert lse is not None and lse.shape == (4, 40, 8)
    rows = torch.cat([lse[b, :n] for b, n in enumerate(batch.qo_lens)])
    assert torch.equal(out, expected[0]) and torch.equal(rows, expected[1])


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_paged_prefill(dtype, device):
    batch = Batch(PREFILL.qo_lens, PREFILL.kv_lens, kv_layout="HND", dtype=dtype, o_dtype=BF16)
    q, (k, v) = batch.query(device), batch.cache(device)
    one = torch.tensor([0.5], device=device)
    scales = {"q_scale": one, "k_scale": 1.5, "v_scale": one} if dtype is E4M3 else {}
    expected = plan_paged(batch, device, causal=True).run(q, (k, v), **scales)
    out, lse = cudnn_batch_prefill_with_kv_cache(
        *(q, k, v, 128**-0.5, workspace(device)),
        **_lengths(batch, device),
        **LIMITS,
        **scales,
        block_tables=_tables(batch, device),
        causal=True,
        return_lse=False,
        o_data_type=BF16,
    )
    assert lse is None
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.02, atol=4e-3)


def test_log_sum_exps_of_rows_and_bases(device):
    batch = Batch(PREFILL.qo_lens, PREFILL.kv_lens)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    _, expected = plan_ragged(batch, device).run(q, k, v, return_lse=True)
    arguments = (q, k, v, 128**-0.5, workspace(device))
    options = {**_lengths(batch, device), **LIMITS, "causal": False, "return_lse": True}
    rows = torch.empty_like(expected)
    stats = indptr(batch.qo_lens).to(device) * 8
    _, found = flashinfer.prefill.cudnn_batch_prefill_with_kv_cache(
        *arguments, **options, batch_offsets_stats=stats, lse=rows, lse_base="ln"
    )
    assert found is rows
    torch.testing.assert_close(rows, expected * 0.6931471805599453)
    padded = torch.full((4, 40, 8), 7.0, device=device)
    _, found = cudnn_batch_prefill_with_kv_cache(*arguments, **options, lse=padded)
    assert found is padded and bool((padded[1] == 7.0).all()) and bool((padded[0, 20:] == 7).all())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("has_table", [True, False])
def test_decode(tokens, has_table, device):
    kv_lens = (3, 64, 200, 9) if has_table else (3, 64, 61, 9)
    page_size = 16 if has_table else 64
    batch = Batch((tokens,) * 4, kv_lens, kv_layout="HND", page_size=page_size)
    q, (k, v) = batch.query(device), batch.cache(device)
    expected = plan_decode(batch, device, q_len_per_req=tokens).run(q, (k, v), return_lse=True)
    table = _tables(batch, device)
    rows = torch.arange(5, dtype=torch.int32, device=device) * tokens * q.stride(0)
    options = {"batch_offsets_q": rows, "batch_offsets_o": rows}
    if not has_table:
        k, v = k[table[:, 0].long()], v[table[:, 0].long()]
        options["batch_offsets_k"] = torch.arange(5, device=device) * k.stride(0)
    out, lse = flashinfer.cudnn_batch_decode_with_kv_cache(
        *(q, k, v, 128**-0.5, workspace(device)),
        max_sequence_kv=256,
        actual_seq_lens_kv=torch.tensor(kv_lens, dtype=torch.int32, device=device).view(4, 1, 1, 1),
        block_tables=table if has_table else None,
        return_lse=True,
        q_len_per_req=tokens,
        **options,
    )
    torch.testing.assert_close(out.float(), expected[0].float(), rtol=0.02, atol=4e-3)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-4)


REFUSED = [
    ({"actual_seq_lens_q": None}, "`actual_seq_lens_q` or `batch_offsets_q`"),
    ({"actual_seq_lens_kv": torch.tensor([5, 5])}, "as many requests"),
    ({"actual_seq_lens_kv": torch.tensor([5, -5, 1, 1])}, "`actual_seq_lens_kv`.*negative"),
    ({"batch_offsets_q": torch.tensor([0, 1, 2, 3, 4])}, "`batch_offsets_q`.*follow"),
    ({"batch_offsets_units": "bytes"}, "`batch_offsets_units`"),
    ({"max_token_per_sequence": 32}, "`max_token_per_sequence`"),
    ({"max_sequence_kv": 69}, "`max_sequence_kv`"),
    ({"lse_base": "10"}, "`lse_base`"),
    ({"backend": "cutlass"}, "`backend`"),
    ({"lse": torch.zeros(4, 39, 8)}, "`lse`"),
    ({"o_data_type": torch.float32}, "`o_data_type`"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_wrong_is_refused_by_name(changes, message, device):
    batch = Batch(PREFILL.qo_lens, PREFILL.kv_lens)
    q, (k, v) = batch.query(device), ragged_kv(batch, device)
    options = {**_lengths(batch, device), **LIMITS, "causal": False, "return_lse": True}
    changes = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        cudnn_batch_prefill_with_kv_cache(
            q, k, v, 128**-0.5, workspace(device), **(options | changes)
        )


def test_decode_without_tables_needs_a_page_of_each_request(device):
    q = torch.zeros(2, 8, 128, dtype=BF16, device=device)
    cache = torch.zeros(3, 2, 16, 128, dtype=BF16, device=device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="`block_tables`"):
        cudnn_batch_decode_with_kv_cache(
            *(q, cache, cache, 1.0, workspace(device)),
            max_sequence_kv=16,
            actual_seq_lens_kv=lengths,
        )
