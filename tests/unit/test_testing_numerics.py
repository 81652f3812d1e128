"""Error bounds and the comparison: rounding passes, every planted defect is found."""

import math

import pytest
import torch

from flashinfer.testing import compare, error_bound, unit_roundoff

ROWS, WIDTH = 64, 512


@pytest.fixture
def exact() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


FORMATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float32, 24),
        (torch.float16, 11),
        (torch.bfloat16, 8),
        (torch.float8_e4m3fn, 4),
        (torch.float8_e5m2, 3),
    ],
)
def test_unit_roundoff_is_half_a_step_at_one(dtype, bits):
    assert unit_roundoff(dtype) == 2.0**-bits


def test_unit_roundoff_refuses_integers():
    with pytest.raises(TypeError):
        unit_roundoff(torch.int32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_correct_rounding_passes(exact, dtype):
    found = compare(exact.to(dtype), exact)
    assert found, str(found)
    assert found.elements == exact.numel()
    assert found.worst_ratio <= 1.0


@pytest.mark.parametrize("dtype", FORMATS[1:])  # float32 is as coarse as its accumulator
def test_the_bound_is_tight(exact, dtype):
    """Half the bound would refuse a correct result."""
    assert compare(exact.to(dtype), exact, bound=error_bound(dtype, operations=0)).worst_ratio > 0.5


def test_float32_sum_passes_with_its_length_and_fails_without():
    generator = torch.Generator().manual_seed(3)
    terms = torch.rand(256, 4096, generator=generator)
    total = torch.zeros(256)
    for i in range(terms.shape[1]):  # in sequence, the worst order
        total += terms[:, i]
    wanted = terms.double().sum(dim=1)
    assert compare(total, wanted, bound=error_bound(torch.float32, 4096))
    assert not compare(total, wanted, bound=error_bound(torch.float32, 1, operations=0))


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_wrong_element_is_found_and_named(exact, dtype):
    actual = exact.to(dtype)
    step = (
        4 * unit_roundoff(dtype) * float(exact[17, 33].abs()) + float(exact[17].abs().max()) * 1e-4
    )
    actual[17, 33] = float(exact[17, 33]) + step
    found = compare(actual, exact)
    assert not found
    assert found.worst_index == (17, 33)
    assert found.wrong_elements == 1
    assert found.worst_actual == float(actual[17, 33])
    assert found.worst_expected == float(exact[17, 33])
    assert "[17, 33]" in str(found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unexpected_special_value(exact, value):
    actual = exact.bfloat16()
    actual[2, 5] = value
    found = compare(actual, exact)
    assert not found
    assert found.worst_index == (2, 5)
    assert "1 where none is expected" in str(found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_missing_special_value(exact, value):
    actual = exact.bfloat16()
    exact[2, 5] = value
    found = compare(actual, exact)
    assert not found
    assert "1 missing" in str(found)


def test_matching_special_values_pass(exact):
    exact[0, 0], exact[0, 1], exact[0, 2] = math.nan, math.inf, -math.inf
    assert compare(exact.bfloat16(), exact)


def test_wrong_sign_of_infinity(exact):
    exact[3, 3] = math.inf
    actual = exact.half()
    actual[3, 3] = -math.inf
    found = compare(actual, exact)
    assert not found
    assert found.worst_index == (3, 3)


def test_overflow_may_round_either_way_only_at_the_end_of_the_range():
    largest = torch.finfo(torch.float16).max
    edge = torch.tensor([largest * 1.0001], dtype=torch.float64)
    assert compare(torch.tensor([math.inf]).half(), edge)
    assert compare(torch.tensor([largest]).half(), edge)
    assert not compare(torch.tensor([math.inf]).half(), edge * 0.9)
    assert not compare(torch.tensor([-math.inf]).half(), edge)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_truncation_instead_of_rounding_is_a_bias(exact, dtype):
    rounded = exact.to(dtype)
    too_large = rounded.double().abs() > exact.abs()
    bits = rounded.view(torch.int16 if rounded.element_size() == 2 else torch.uint8)
    truncated = torch.where(too_large, bits - 1, bits).view(dtype)  # one step towards zero
    assert (truncated.double().abs() <= exact.abs()).all()
    # Each element alone is within what two roundings explain; together they are not.
    found = compare(truncated, exact, bound=error_bound(dtype, roundings=2))
    assert found.wrong_elements == 0
    assert not found
    assert "mean signed error" in str(found)
    assert compare(truncated, exact, bound=error_bound(dtype, roundings=2), check_bias=False)


def test_a_factor_slightly_off_is_found_although_each_element_is_within_rounding(exact):
    actual = (exact * (1 + 2.0**-9)).bfloat16()
    found = compare(actual, exact, bound=error_bound(torch.bfloat16, roundings=2))
    assert found.wrong_elements == 0
    assert not found


def test_equal_elements_share_their_rounding_error_without_being_a_bias():
    exact = torch.full((64, 64), 1.00390, dtype=torch.float64)
    assert compare(exact.bfloat16(), exact)


def test_swapped_rows_are_found(exact):
    actual = exact.bfloat16()
    actual[[4, 9]] = actual[[9, 4]]
    found = compare(actual, exact)
    assert not found
    assert found.worst_index is not None and found.worst_index[0] in (4, 9)
    assert found.wrong_elements > WIDTH
    assert found.cosine < 0.98


def test_small_rows_are_held_to_their_own_size(exact):
    """An error that is nothing beside the large rows must not hide in a small one."""
    exact[5] *= 1e-6
    actual = exact.float()
    actual[5, 1] += 1e-9
    assert compare(actual, exact).worst_index == (5, 1)
    assert not compare(actual, exact)


def test_cancellation_is_allowed_for_when_its_size_is_given():
    expected = torch.zeros(8, dtype=torch.float64)
    actual = torch.full((8,), 3e-5)  # what is left of terms around 1000
    assert not compare(actual, expected)
    bound = error_bound(torch.float32, 1, magnitude=1000.0)
    assert compare(actual, expected, bound=bound, check_bias=False)


def test_a_reference_of_the_same_type_may_be_one_step_away(exact):
    expected = exact.bfloat16()
    actual = (expected.view(torch.int16) + (torch.rand(exact.shape) < 0.01).short()).view(
        torch.bfloat16
    )
    assert compare(actual, expected, check_bias=False)
    assert not compare(actual, expected.double(), check_bias=False)


def test_shape_and_kind_must_match(exact):
    assert "shape" in str(compare(exact[:2].float(), exact))
    assert "dtype" in str(compare(torch.zeros(2, dtype=torch.int32), torch.zeros(2)))
    assert not compare(exact[:2].float(), exact)


def test_integers_must_be_equal():
    expected = torch.arange(12).reshape(3, 4)
    actual = expected.clone()
    assert compare(actual, expected)
    actual[1, 2] += 1
    found = compare(actual, expected)
    assert not found
    assert found.worst_index == (1, 2)
    assert (found.worst_actual, found.worst_expected) == (7.0, 6.0)


def test_empty_and_zero_dimensional():
    assert compare(torch.empty(0, 4), torch.empty(0, 4).double())
    assert compare(torch.tensor(1.5), torch.tensor(1.5, dtype=torch.float64))
    found = compare(torch.tensor(1.5), torch.tensor(2.5, dtype=torch.float64))
    assert not found
    assert found.worst_index == ()


def test_all_zero_expected():
    zeros = torch.zeros(4, 4, dtype=torch.float64)
    assert compare(zeros.bfloat16(), zeros)
    assert not compare(zeros.bfloat16() + 1, zeros)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"accumulation_length": 0}, "accumulation_length"),
        ({"roundings": 0}, "roundings"),
        ({"operations": -1}, "operations"),
    ],
)
def test_error_bound_refuses(options, name):
    with pytest.raises(ValueError, match=name):
        error_bound(torch.float32, **options)


def test_bound_grows_with_every_argument():
    base = error_bound(torch.bfloat16, 64)
    expected = torch.tensor([1.0], dtype=torch.float64)
    limit = float(base.limit(expected))
    for wider in (
        error_bound(torch.float8_e4m3fn, 64),
        error_bound(torch.bfloat16, 4096),
        error_bound(torch.bfloat16, 64, roundings=2),
        error_bound(torch.bfloat16, 64, operations=100),
        error_bound(torch.bfloat16, 64, accumulation_dtype=torch.bfloat16),
        error_bound(torch.bfloat16, 64, magnitude=100.0),
    ):
        assert float(wider.limit(expected)) > limit
