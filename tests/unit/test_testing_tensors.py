"""Copies keep layout and aliasing, poison shows, inputs are as awkward as asked for."""

import pytest
import torch

from flashinfer.testing import clone_arguments, make_tensor, poisoned_allocations, poisoned_like
from flashinfer.testing.tensors import (
    copies_to_exceed,
    fill_with_poison,
    sprinkle_special_values,
    unviewed_bytes,
)

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def test_clone_keeps_strides_offset_and_values():
    tensor = torch.arange(100.0).as_strided((4, 5), (20, 2), 3)
    copy = clone_arguments(tensor)
    assert copy.stride() == (20, 2) and copy.storage_offset() == 3
    assert torch.equal(copy, tensor)
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_clone_keeps_aliasing_and_leaves_the_original_alone():
    base = torch.arange(12.0).reshape(3, 4)
    copy = clone_arguments({"x": base, "rest": [base[1:], (base, 3, None)], "eps": 1e-6})
    copy["x"].fill_(-1)
    assert (copy["rest"][0] == -1).all() and (copy["rest"][1][0] == -1).all()
    assert copy["rest"][1][1:] == (3, None) and copy["eps"] == 1e-6
    assert base[0, 0] == 0


def test_clone_of_empty_tensors_does_not_alias():
    a, b = clone_arguments((torch.empty(0, 4), torch.empty(0)))
    assert a.shape == (0, 4) and b.shape == (0,)


def test_clone_can_share():
    kept, copied = torch.zeros(2), torch.zeros(3)
    out = clone_arguments((kept, copied), where=lambda t: t.numel() == 3)
    assert out[0] is kept
    assert out[1] is not copied


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_of_floats_is_nan(dtype):
    assert poisoned_like(torch.zeros(3, 5, dtype=dtype)).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_poison_of_integers_is_a_pattern(dtype):
    assert (poisoned_like(torch.zeros(7, dtype=dtype)).view(torch.uint8) == 0xA5).all()


def test_poison_keeps_layout_and_fills_gaps():
    like = torch.zeros(4, 16)[:, 2:10]
    poisoned = poisoned_like(like)
    assert poisoned.shape == like.shape and poisoned.stride() == like.stride()
    assert poisoned.storage_offset() == 2
    margin = unviewed_bytes([poisoned])
    poisoned.zero_()
    assert torch.equal(unviewed_bytes([poisoned]), margin)
    assert margin.view(torch.float32).isnan().all()


def test_poison_in_another_dtype():
    out = poisoned_like(torch.zeros(4, 8, dtype=torch.bfloat16), dtype=torch.float8_e4m3fn)
    assert out.dtype == torch.float8_e4m3fn and out.shape == (4, 8)
    assert out.float().isnan().all()


def test_fill_with_poison_touches_only_the_view():
    base = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    fill_with_poison(base[:, 1:3])
    assert base.float().isnan().sum() == 8


def test_unviewed_bytes_sees_a_write_beside_a_view():
    base = torch.zeros(4, 10, dtype=torch.int16)
    left, right = base[:, :4], base[:, 6:]
    before = unviewed_bytes([left, right]).clone()
    assert before.numel() == 4 * 2 * 2
    left.fill_(1)
    right.fill_(2)
    assert torch.equal(unviewed_bytes([left, right]), before)
    base[3, 5] = 9
    assert not torch.equal(unviewed_bytes([left, right]), before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_allocations_are_poisoned_and_settings_restored(dtype):
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    with poisoned_allocations():
        assert torch.empty(9, dtype=dtype).float().isnan().all()
        assert torch.empty_like(torch.zeros(2, 2, dtype=dtype)).float().isnan().all()
    assert before == (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 5), (0, 4), (2, 0)])
def test_make_tensor_layout(shape):
    tensor = make_tensor(
        *shape, dtype=torch.float16, device="cpu", row_stride=shape[-1] + 3, storage_offset=1
    )
    assert tensor.shape == shape
    assert tensor.storage_offset() == 1
    if len(shape) > 1:
        assert tensor.stride(-2) == shape[-1] + 3
    if len(shape) == 3:
        assert tensor.stride(0) == shape[1] * (shape[2] + 3)
    assert tensor.isfinite().all()
    if tensor.numel():
        assert unviewed_bytes([tensor]).view(torch.float16).isnan().all()


def test_make_tensor_repeats_with_its_generator():
    draw = [
        make_tensor(
            4, 4, dtype=torch.bfloat16, device="cpu", generator=torch.Generator().manual_seed(s)
        )
        for s in (1, 1, 2)
    ]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])


def test_make_tensor_refuses_a_short_row():
    with pytest.raises(ValueError, match="row_stride"):
        make_tensor(2, 8, dtype=torch.float32, device="cpu", row_stride=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_special_values_appear(dtype):
    tensor = torch.ones(200, 200, dtype=dtype)
    returned = sprinkle_special_values(
        tensor, generator=torch.Generator().manual_seed(0), fraction=0.1
    )
    assert returned is tensor
    changed = (tensor != 1).float().mean()
    assert 0.05 < float(changed) < 0.15
    assert (
        tensor.isnan().any() and (tensor == float("inf")).any() and (tensor == float("-inf")).any()
    )
    assert (tensor == torch.finfo(dtype).max).any()
    zeros = tensor[tensor == 0]
    assert zeros.signbit().any() and not zeros.signbit().all()
    subnormal = (tensor.abs() > 0) & (tensor.abs() < torch.finfo(dtype).smallest_normal)
    assert subnormal.any()


def test_special_values_without_nan_and_inf_are_finite():
    tensor = sprinkle_special_values(torch.ones(100, 100), fraction=0.5, nan_and_inf=False)
    assert tensor.isfinite().all()


@pytest.mark.parametrize(
    ("each", "wanted", "copies"),
    [(10, 100, 10), (10, 101, 11), (200, 100, 1), (0, 100, 1), (1, 10**9, 64)],
)
def test_copies_to_exceed(each, wanted, copies):
    assert copies_to_exceed(each, wanted, limit=64) == copies
