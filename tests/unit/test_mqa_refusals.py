"""Bad calls of the functions beside latent attention are refused by name, before they write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import attn_scores
from flashinfer._indexer import launch
from flashinfer.concat_ops import concat_mla_kv_quant_fp8
from flashinfer.paged_mqa import fp8_paged_mqa_logits as deep_gemm_logits

FP8 = torch.float8_e4m3fn
Arguments = dict[str, Any]


@pytest.fixture
def bindings(bindings_on_the_cpu: None) -> Any:
    """Kernels without device code, for this test alone."""
    for function in (launch.get_mqa_logits_kernel, launch.get_mqa_logits_check):
        function.cache_clear()
    yield
    for function in (launch.get_mqa_logits_kernel, launch.get_mqa_logits_check):
        function.cache_clear()


def _scores(**changes: Any) -> Arguments:
    return {
        "q": torch.zeros(2, 1, 64, 128, dtype=FP8),
        "kv_fused": torch.zeros(4, 64, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(2, 64),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "max_seq_len": 70,
        "schedule_meta": torch.zeros(133, 2, dtype=torch.int32),
        **changes,
    }


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kv_fused": torch.zeros(4, 64, 1, 128, dtype=torch.uint8)}, "`kv_fused`"),
        ({"out": torch.ones(2, 60)}, "`out` must have at least 70 columns"),
        ({"out": torch.ones(3, 80)}, "`out`"),
        ({"weights": torch.zeros(2, 64).half()}, "`weights`"),
        ({"out": torch.ones(2, 80), "block_tables": torch.zeros(2, 2)}, "`block_tables`"),
    ],
)
def test_scores_that_are_refused_leave_the_result_alone(
    bindings: Any, changes: Arguments, match: str
):
    call = _scores(**changes)
    with pytest.raises(ValueError, match=match):
        attn_scores.fp8_paged_mqa_logits(**call)
    assert "out" not in call or bool((call["out"] == 1).all())


@pytest.mark.compiler
def test_scores_with_another_order_of_arguments_have_its_names(bindings: Any):
    call = _scores()
    kv_cache, schedule = call["kv_fused"], call["schedule_meta"]
    sequences = (call["seq_lens"], call["block_tables"])
    for changed, match in (
        ((kv_cache[..., :128], *sequences), "`kv_cache`"),
        ((kv_cache, sequences[0][1:], sequences[1]), "`block_table`|`context_lens`"),
    ):
        with pytest.raises(ValueError, match=match):
            deep_gemm_logits(call["q"], changed[0], call["weights"], *changed[1:], schedule, 70)


def test_a_schedule_is_for_the_device_of_its_lengths(bindings_on_the_cpu: None):
    lengths = torch.ones(2, dtype=torch.int32)
    for device in ("nonsense", "cuda:7", 3.5):
        with pytest.raises(ValueError, match="`device` must be cpu, that of `seq_lens`"):
            attn_scores.compute_paged_mqa_logits_schedule(lengths, device)


def test_scores_of_4_bit_keys_have_nothing_to_build(monkeypatch: pytest.MonkeyPatch):
    built: list[Any] = []
    monkeypatch.setattr(attn_scores, "get_mqa_logits_kernel", built.append)
    attn_scores.precompile_paged_mqa_logits(variants=("fp4",))
    assert not built
    attn_scores.precompile_paged_mqa_logits()
    assert len(built) == 2
    with pytest.raises(ValueError, match="`variants`"):
        attn_scores.precompile_paged_mqa_logits(variants=("bf16",))


TABLE = torch.zeros(8, 2, 128 + 64 + 128, dtype=FP8)
SHORT = torch.zeros(8, 2, 128, dtype=FP8)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"k_pe": torch.zeros(16, 64)}, "`k_pe` must be"),
        ({"k_pe": torch.zeros(8, 2, 64)}, "`k_pe` must be"),
        ({"k_pe": torch.zeros(8, 64).bfloat16()}, "`k_pe` must be"),
        ({"k_pe": torch.zeros(8, 64).int()}, "`k_pe` must be"),
        ({"kv_nope": torch.zeros(8, 2, 256).int()}, "`kv_nope` must"),
        ({"key": torch.zeros(1, 2, 192, dtype=FP8).expand(8, 2, 192)}, "`key` is written"),
        ({"value": torch.zeros(8, 1, 128, dtype=FP8).expand(8, 2, 128)}, "`value` is written"),
        (
            {"key": TABLE[..., :192], "value": TABLE[..., 160:288]},
            "`key` must not share memory with `value`",
        ),
        (
            {"kv_nope": torch.zeros(8, 2, 256), "value": "kv_nope"},
            "`value` must not share memory with `kv_nope`",
        ),
    ],
)
def test_parts_of_keys_and_values_are_checked(
    bindings_on_the_cpu: None, changes: Arguments, match: str
):
    call = {"kv_nope": torch.zeros(8, 2, 256), "k_pe": torch.zeros(8, 64), **changes}
    if isinstance(call.get("value"), str):
        call["value"] = call[call["value"]].view(-1).view(FP8)[: SHORT.numel()].view(SHORT.shape)
    with pytest.raises(ValueError, match=match):
        concat_mla_kv_quant_fp8(**call)


def test_keys_and_values_may_be_columns_of_one_tensor(bindings_on_the_cpu: None):
    table = torch.zeros(8, 2, 320, dtype=FP8)
    operands = (torch.randn(8, 2, 256), torch.randn(8, 1, 64))
    expected = concat_mla_kv_quant_fp8(*operands)
    concat_mla_kv_quant_fp8(*operands, table[..., :192], table[..., 192:])
    assert torch.equal(table.float(), torch.cat(expected, -1).float())


def test_no_tokens_have_no_keys(bindings_on_the_cpu: None):
    for rotary in (torch.zeros(0, 64), torch.zeros(0, 1, 64)):
        key, value = concat_mla_kv_quant_fp8(torch.zeros(0, 2, 256), rotary)
        assert key.shape == (0, 2, 192) and value.shape == (0, 2, 128)


@pytest.mark.parametrize("stride", [8 * 128, 2 * 8 * 128])
def test_offsets_of_cudnn_are_checked(stride: int):
    """On the host at once; those of keys only where no table says where pages are."""
    k, v = torch.randn(2, 3, 2, 16, 128).half().unbind()
    call: Arguments = {
        "q": torch.randn(3, 8, 128).half(),
        "k_cache": k,
        "v_cache": v,
        "scale": 0.1,
        "workspace_buffer": torch.empty(32 << 20, dtype=torch.uint8),
        "max_sequence_kv": 16,
        "actual_seq_lens_kv": torch.tensor([3, 16, 9], dtype=torch.int32),
    }
    first = torch.arange(4) * stride
    pages = torch.arange(4) * k.stride(0)
    with flashinfer.reference_backend():
        flashinfer.cudnn_batch_decode_with_kv_cache(**call, batch_offsets_k=pages)
        if stride == 8 * 128:
            for form in (first, first.int(), first.view(4, 1, 1, 1)):
                flashinfer.cudnn_batch_decode_with_kv_cache(
                    **call, batch_offsets_q=form, batch_offsets_o=form
                )
            return
        for name in "qokv":
            with pytest.raises(ValueError, match=f"`batch_offsets_{name}` must be those"):
                flashinfer.cudnn_batch_decode_with_kv_cache(
                    **call, **{f"batch_offsets_{name}": first + 1}
                )
        for wrong in (first[1:], first.float(), [0, 1]):
            with pytest.raises((TypeError, ValueError), match="`batch_offsets_q`"):
                flashinfer.cudnn_batch_decode_with_kv_cache(**call, batch_offsets_q=wrong)
