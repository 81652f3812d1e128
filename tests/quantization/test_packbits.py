"""Bit packing on the GPU, against NumPy's definition."""

from __future__ import annotations

import pytest
import torch

from flashinfer.quantization import packbits, segment_packbits
from flashinfer.testing import assert_matches_reference

pytestmark = pytest.mark.gpu
ORDERS = ("big", "little")


def _mask(length: int, device: torch.device, offset: int = 0) -> torch.Tensor:
    return (torch.rand(offset + length, device=device) < 0.4)[offset:]


@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 31, 32, 33, 47, 48, 1000, 100_003])
def test_packbits(length, bitorder, device):
    for offset in (0, 1, 5, 16):
        x = _mask(length, device, offset)
        assert_matches_reference(packbits, x=x, bitorder=bitorder)
        packed = packbits(x, bitorder)
        assert packed.cpu().tolist() == _numpy(x, bitorder)


def _numpy(x: torch.Tensor, bitorder: str) -> list[int]:
    import numpy

    return numpy.packbits(x.cpu().numpy(), bitorder=bitorder).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float32], ids=str)
def test_anything_but_zero_is_one(dtype, device):
    x = torch.arange(-300, 300, device=device).to(dtype)
    assert torch.equal(packbits(x), packbits(x != 0))


def test_a_bool_byte_beyond_one_is_one(device):
    x = torch.arange(256, dtype=torch.uint8, device=device)
    assert torch.equal(packbits(x.view(torch.bool)), packbits(x != 0))


@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [[], [0], [5], [0, 0, 9, 0], [1] * 70, [64, 3, 1000, 8, 0, 77]])
def test_segments(lengths, index, bitorder, device):
    indptr = torch.tensor([0, *lengths], device=device).cumsum(0).to(index)
    x = _mask(sum(lengths), device)
    assert_matches_reference(segment_packbits, x=x, indptr=indptr, bitorder=bitorder)
    packed, packed_indptr = segment_packbits(x, indptr.cpu(), bitorder)
    assert packed_indptr.device == x.device and packed_indptr.dtype == index
    parts = [packbits(x[a:b], bitorder) for a, b in zip(indptr, indptr[1:], strict=False)]
    assert packed.tolist() == [byte for part in parts for byte in part.tolist()]


def test_many_random_segments(device):
    lengths = torch.randint(0, 300, (3000,), device=device)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    x = _mask(int(indptr[-1]), device)
    assert_matches_reference(segment_packbits, x=x, indptr=indptr, bitorder="little")


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_segments_that_no_mean_length_finds(index, device):
    """A warp looks for its segments where they would be if all were as long: here they are not."""
    empty, short, long = [0] * 5000, [3, 9, 1] * 400, [50_001] * 9
    for lengths in (empty + long + short, long + empty + short + long, short + long + empty):
        indptr = torch.tensor([0, *lengths], device=device).cumsum(0).to(index)
        x = _mask(sum(lengths), device)
        assert_matches_reference(segment_packbits, x=x, indptr=indptr, bitorder="big")


@pytest.mark.parametrize("bitorder", ORDERS)
def test_long_segments(bitorder, device):
    """Long enough for warps that are in one segment, with short ones between."""
    lengths = torch.tensor([1_000_003, 0, 5, 131_072, 700_001, 1, 262_147], device=device)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    for offset in (0, 3):
        x = _mask(int(indptr[-1]), device, offset)
        packed, _ = segment_packbits(x, indptr, bitorder)
        parts = [packbits(part, bitorder) for part in x.split(lengths.tolist())]
        assert torch.equal(packed, torch.cat(parts))


def test_more_than_2_to_the_31_bytes(device, full):
    if not full:
        pytest.skip("2 GB; run with --full")
    x = torch.zeros(2**31 + 64, dtype=torch.bool, device=device)
    x[-3:] = True
    packed = packbits(x, "little")
    assert packed[-1].item() == 0b11100000 and packed.count_nonzero().item() == 1
