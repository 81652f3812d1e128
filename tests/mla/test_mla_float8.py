"""Caches of 8 bits: latent rows in e4m3, rotary rows in 8 or 16 bits, scales, page sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
from tests.mla.batches import BF16, FP16, Batch, check, indptr, make_wrapper, need_hopper

E4M3 = torch.float8_e4m3fn
MIXED = (700, 64, 0, 1, 129, 1300)


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    need_hopper(device)


def arguments(batch: Batch, device: torch.device, kpe: torch.dtype = E4M3) -> dict[str, Any]:
    """Slots that belong to no request hold NaN, as in caches of 16 bits."""
    found = batch.arguments(device)
    found["ckv_cache"] = found["ckv_cache"].to(E4M3)
    if batch.head_dim_kpe:
        found["kpe_cache"] = found["kpe_cache"].to(kpe)
    return found


def run(
    batch: Batch, device: torch.device, kpe: torch.dtype = E4M3, **options: Any
) -> dict[str, torch.Tensor]:
    wrapper = make_wrapper(device, backend="auto")
    batch.plan(wrapper, kv_data_type=E4M3)
    return check(wrapper, **arguments(batch, device, kpe), return_lse=True, **options)


@pytest.mark.parametrize("num_heads", [8, 16, 20, 128])
@pytest.mark.parametrize("kpe", [E4M3, BF16])
def test_decode(num_heads: int, kpe: torch.dtype, device: torch.device, full: bool):
    if device.type != "cuda" and num_heads > 16 and not full:
        pytest.skip("needs a GPU: without one, more heads are more of the same")
    run(Batch((1,) * 6, MIXED, num_heads), device, kpe)


@pytest.mark.parametrize("queries", [1, 2])  # few rows, and more
@pytest.mark.parametrize(
    ("dims", "dtype", "kpe"),
    [
        ((512, 64), FP16, FP16),
        ((512, 0), BF16, E4M3),
        ((256, 64), BF16, E4M3),
        ((256, 0), BF16, E4M3),
    ],
)
def test_head_sizes(
    dims: tuple[int, int],
    dtype: torch.dtype,
    kpe: torch.dtype,
    queries: int,
    device: torch.device,
):
    run(Batch((1, 1, queries), (300, 64, 5), 16, *dims, dtype=dtype), device, kpe)


@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 2, 5)])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100])
def test_page_sizes_and_several_queries(
    page_size: int, queries: tuple[int, ...], device: torch.device
):
    run(Batch(queries, (700, 130, 3), 16, page_size=page_size, causal=True), device)


def test_scales(device: torch.device):
    """Each part has its own scale; sinks are not scaled."""
    batch = Batch((1, 2, 1), (700, 130, 0), 16, causal=True)
    sinks = torch.linspace(-3, 3, 16, device=device)
    for kpe, scale in ((E4M3, 0.25), (BF16, 1.0)):
        options = {"ckv_scale": 0.5, "kpe_scale": scale, "return_lse_base_on_e": True}
        run(batch, device, kpe, sinks=sinks, **options)


def test_queries_of_any_size(device: torch.device):
    """Rows of queries far beyond what float16 holds, and far below it."""
    batch = Batch((1, 1), (200, 70), 16)
    wrapper = make_wrapper(device, backend="auto")
    call = arguments(batch, device)
    for size, sm_scale in ((1e6, 1e-7), (1e-7, 1e6)):
        batch.plan(wrapper, sm_scale=sm_scale, kv_data_type=E4M3)
        scaled = {name: call[name] * size for name in ("q_nope", "q_pe")}
        check(wrapper, **{**call, **scaled}, return_lse=True)


def test_queries_of_8_bits(device: torch.device):
    batch = Batch((1, 2, 1), (700, 130, 3), 16, causal=True)
    wrapper = make_wrapper(device, backend="auto")
    starts, indices, _ = batch.pages()
    wrapper.plan(
        *(indptr(batch.qo_lens), starts, indices.to(device)),
        torch.tensor(batch.kv_lens, dtype=torch.int32),
        *(16, 512, 64, 64, True, 192**-0.5, E4M3, E4M3),
    )
    call = arguments(batch, device)
    call |= {name: call[name].to(E4M3) for name in ("q_nope", "q_pe")}
    assert check(wrapper, **call, return_lse=True)["output"].dtype == BF16


def test_one_call(device: torch.device):
    batch = Batch((1,) * 4, (700, 64, 129, 1300), 16)
    wrapper = make_wrapper(device, backend="auto")
    batch.plan(wrapper, kv_data_type=E4M3)
    call = arguments(batch, device)
    expected = wrapper.run(**call)
    starts, indices, _ = batch.pages()
    table = torch.zeros(4, int(starts.diff().max()), dtype=torch.int32)
    for row, own in zip(table, indices.split(starts.diff().tolist()), strict=True):
        row[: len(own)] = own
    found = trtllm_batch_decode_with_kv_cache_mla(
        torch.cat([call["q_nope"], call["q_pe"]], -1)[:, None],
        torch.cat(
            [call["ckv_cache"].view(torch.uint8), call["kpe_cache"].view(torch.uint8)], -1
        ).view(E4M3),
        torch.empty(64 << 20, dtype=torch.uint8, device=device),
        *(128, 512, 64, table.to(device)),
        torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
        1300,
        bmm1_scale=192**-0.5,
    )
    torch.testing.assert_close(found[:, 0], expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_results_repeat(heads: int, device: torch.device):
    batch = Batch((1, 1, 1 if heads == 16 else 4), (5000, 70, 900), heads)
    wrapper = make_wrapper(device, backend="auto")
    batch.plan(wrapper, kv_data_type=E4M3)
    call = arguments(batch, device)
    first = wrapper.run(**call)
    for _ in range(200):
        assert torch.equal(wrapper.run(**call), first)


def test_refusals(device: torch.device):
    batch = Batch((1, 1), (70, 64), 16)
    with pytest.raises(ValueError, match="kv_data_type"):
        batch.plan(make_wrapper(device, backend="fa2"), kv_data_type=E4M3)
    wrapper = make_wrapper(device, backend="auto")
    with pytest.raises(ValueError, match="kv_data_type"):
        batch.plan(wrapper, kv_data_type=torch.float8_e5m2)
    batch.plan(wrapper, kv_data_type=E4M3)
    call = arguments(batch, device)
    for name in ("ckv_cache", "kpe_cache"):
        with pytest.raises((TypeError, ValueError), match=name):
            wrapper.run(**{**call, name: call[name].float()})
