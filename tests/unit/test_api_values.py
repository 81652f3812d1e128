"""Arguments as JSON and bytes, and back: ``_instrument/values.py``."""

from __future__ import annotations

import enum
import io
import json
import os
from typing import NamedTuple

import pytest
import torch

import flashinfer
from flashinfer._attention.plan.launch import RowRange as Pair
from flashinfer._instrument.values import Decoder, Encoder


class ForeignMode(enum.Enum):
    FAST = "fast"


class ForeignLevel(enum.IntEnum):
    HIGH = 3


class ForeignPair(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


def saved(values):
    """What a dump would hold of a list of values: JSON text and the content of a file."""
    encoder = Encoder()
    nodes = [encoder.encode(value, f"v{i}") for i, value in enumerate(values)]
    blobs = encoder.group()
    payload = {encoder.blob_name(blob): encoder.payload(blob, blob.read()) for blob in blobs}
    return json.dumps([nodes, encoder.describe(blobs)]), payload


def round_trip(*values, objects=None):
    text, payload = saved(values)
    file = io.BytesIO()
    torch.save(payload, file)
    file.seek(0)
    nodes, tensors = json.loads(text)
    blobs = torch.load(file, weights_only=True)
    return Decoder(tensors, blobs, torch.device("cpu"), objects or {}).decode(nodes)


def test_dense_tensors_are_stored_as_themselves():
    x, y = torch.randn(2, 3, dtype=torch.bfloat16), torch.arange(5)
    _, payload = saved([x, y])
    assert torch.equal(payload["v0"], x) and torch.equal(payload["v1"], y)


def test_overlapping_tensors_share_memory_again():
    qkv = torch.arange(48.0).reshape(4, 12)
    q, k = qkv[:, :4], qkv[:, 4:8].t()
    _, payload = saved([q, k, qkv])
    assert sum(content.nbytes for content in payload.values()) == qkv.nbytes
    q2, k2, qkv2, q3 = round_trip(q, k, qkv, q)
    assert q2.stride() == q.stride() and k2.stride() == (1, 12) and q3 is q2
    assert torch.equal(q2, q) and torch.equal(k2, k) and torch.equal(qkv2, qkv)
    qkv2.fill_(7)
    assert (q2 == 7).all() and (k2 == 7).all()


def test_gaps_between_rows_are_kept():
    padded = torch.arange(24.0).reshape(4, 6)
    (x,) = round_trip(padded[:, :4])
    assert torch.equal(x.as_strided((4, 4), (6, 1)), padded[:, :4])
    assert x.untyped_storage().nbytes() >= padded[:, :4].numel() * 4 + 3 * 2 * 4


def test_broadcast_tensors():
    x = torch.tensor([1.0, 2.0]).expand(3, 2)
    (restored,) = round_trip(x)
    assert restored.stride() == (0, 1) and torch.equal(restored, x)


def test_a_small_view_does_not_store_the_whole_pool():
    pool = torch.arange(1 << 20)
    views = [pool[10:20], pool[-5:], pool[30:50:2]]
    _, payload = saved(views)
    assert sum(content.nbytes for content in payload.values()) == 8 * (10 + 5 + 19)
    for view, restored in zip(views, round_trip(*views), strict=True):
        assert torch.equal(view, restored) and view.stride() == restored.stride()


def test_alignment_comes_back():
    memory = torch.zeros(1024, dtype=torch.uint8)
    base = -memory.data_ptr() % 256
    views = [memory[base + offset :][:8] for offset in (0, 16, 34, 129, 300)]
    assert [v.data_ptr() % 256 for v in round_trip(*views)] == [v.data_ptr() % 256 for v in views]


DTYPES = [
    torch.float64,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int64,
    torch.uint32,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_dtypes(dtype, step):
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8)
    x = raw.view(dtype)[::step]
    (restored,) = round_trip(x)
    assert restored.dtype == dtype and restored.stride() == x.stride()
    bits = [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in (x, restored)]
    begin = restored.storage_offset() * dtype.itemsize
    length = (x.numel() - 1) * step * dtype.itemsize + dtype.itemsize
    assert torch.equal(bits[0][:length], bits[1][begin : begin + length])


def test_values_that_are_not_tensors():
    values = [
        None,
        True,
        2**70,
        1e-6,
        float("-inf"),
        "NHD",
        [1, (2, [3.5])],
        {"a": 1, 2: (3,)},
        torch.Size([2, 3]),
        torch.float8_e4m3fn,
        torch.device("cpu"),
        flashinfer.SfLayout.layout_linear,
        flashinfer.rmsnorm,
        Pair,
        (),
        {},
    ]
    for value, restored in zip(values, round_trip(*values), strict=True):
        assert restored == value and type(restored) is type(value)
    (nan,) = round_trip(float("nan"))
    assert nan != nan


def test_tensors_inside_containers():
    restored = round_trip(Pair(torch.ones(2), torch.zeros(2)), {"x": [torch.arange(3)]})
    assert isinstance(restored[0], Pair) and torch.equal(restored[0][0], torch.ones(2))
    assert torch.equal(restored[1]["x"][0], torch.arange(3))


def test_generators_continue_where_they_were():
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    (restored,) = round_trip(generator)
    assert torch.equal(torch.rand(3, generator=restored), torch.rand(3, generator=generator))


def test_empty_meta_and_gradient_tensors():
    values = torch.empty(0, 4), torch.empty(3, 4, device="meta"), torch.ones(2, requires_grad=True)
    empty, meta, parameter = round_trip(*values)
    assert empty.shape == (0, 4) and meta.is_meta and meta.shape == (3, 4)
    assert parameter.requires_grad and parameter.is_leaf


def test_tensors_of_a_gpu_go_to_the_device_asked_for():
    entry = {"dtype": "float32", "shape": [2], "stride": [1], "requires_grad": False}
    tensors = [{**entry, "device": device} for device in ("cuda:1", "cpu")]
    decoder = Decoder(tensors, {}, torch.device("meta"), {})
    assert decoder.tensor(0).is_meta and decoder.tensor(1).device.type == "cpu"
    assert decoder.decode({"device": "cuda:1"}) == torch.device("meta")


def test_objects_come_from_the_registry():
    thing = object()
    assert round_trip(thing, objects={(os.getpid(), id(thing)): "stand-in"}) == ["stand-in"]
    with pytest.raises(ValueError, match="uses object .* of builtins:object.*object_registry"):
        round_trip(thing)
    with pytest.raises(ValueError, match="uses object"):
        round_trip(lambda: None)  # a function without a place to import it from
    with pytest.raises(ValueError, match="not plain strided"):
        round_trip(torch.eye(3).to_sparse())


def test_types_of_others_are_kept_as_the_plain_values_that_they_are():
    pair, level = round_trip(ForeignPair(torch.ones(2), torch.zeros(2)), ForeignLevel.HIGH)
    assert type(pair) is tuple and torch.equal(pair[0], torch.ones(2))
    assert type(level) is int and level == 3
    for value in (ForeignMode.FAST, ForeignPair, torch.nn.functional.relu):
        with pytest.raises(ValueError, match="which a dump does not hold"):
            round_trip(value)
