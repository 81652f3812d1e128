"""Operation and byte counts of attention against counting one by one."""

import math

import pytest
import torch

import flashinfer.testing as testing

LENGTHS = [(1, 1), (1, 17), (5, 5), (3, 8), (8, 3), (7, 1)]


def count_pairs(qo_len: int, kv_len: int, causal: bool) -> int:
    """Query i sits at position kv_len - qo_len + i and sees the keys up to it."""
    return sum(
        1 for i in range(qo_len) for j in range(kv_len) if not causal or j <= kv_len - qo_len + i
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("qo_len", "kv_len"), LENGTHS)
def test_flops_of_equal_lengths(qo_len, kv_len, causal):
    wanted = 2 * (128 + 64) * 4 * 3 * count_pairs(qo_len, kv_len, causal)
    assert testing.attention_flops(3, qo_len, kv_len, 128, 64, 4, causal) == wanted


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_different_lengths(causal):
    q, kv = (torch.tensor(lengths, dtype=torch.int32) for lengths in zip(*LENGTHS, strict=True))
    pairs = sum(count_pairs(*lengths, causal) for lengths in LENGTHS)
    wanted = 2 * (192 + 128) * 8 * pairs
    assert testing.attention_flops_with_actual_seq_lens(q, kv, 192, 128, 8, causal) == wanted
    rate = testing.attention_tflops_per_sec_with_actual_seq_lens(q, kv, 192, 128, 8, causal, 0.5)
    assert rate == pytest.approx(wanted / 0.5e-3 / 1e12)


def test_lengths_must_pair_up():
    with pytest.raises(ValueError, match="one entry per request, got 2 and 3"):
        testing.attention_flops_with_actual_seq_lens(torch.ones(2), torch.ones(3), 64, 64, 1, False)


def test_tflops_take_milliseconds():
    flops = testing.attention_flops(2, 16, 16, 64, 64, 4, True)
    rate = testing.attention_tflops_per_sec(2, 16, 16, 64, 64, 4, True, 2.0)
    assert rate == pytest.approx(flops / 2e-3 / 1e12)
    assert testing.attention_tflops_per_sec(2, 16, 16, 64, 64, 4, True, math.inf) == 0.0


def test_bytes_are_those_of_the_tensors():
    q = torch.empty(2, 3, 8, 192, dtype=torch.float8_e4m3fn)
    k = torch.empty(2, 5, 4, 192, dtype=torch.float16)
    v = torch.empty(2, 5, 4, 128, dtype=torch.bfloat16)
    o = torch.empty(2, 3, 8, 128, dtype=torch.float32)
    wanted = sum(t.numel() * t.element_size() for t in (q, k, v, o))
    rate = testing.attention_tb_per_sec(
        2, 3, 5, 192, 128, 8, 4, 0.25, q.dtype, k.dtype, v.dtype, o.dtype
    )
    assert rate == pytest.approx(wanted / 0.25e-3 / 1e12)
    lens = torch.tensor([3, 3]), torch.tensor([5, 5])
    assert rate == testing.attention_tb_per_sec_with_actual_seq_lens(
        *lens, 192, 128, 8, 4, 0.25, q.dtype, k.dtype, v.dtype, o.dtype
    )
    assert testing.attention_tb_per_sec(2, 3, 5, 192, 128, 8, 4, math.inf) == 0.0
