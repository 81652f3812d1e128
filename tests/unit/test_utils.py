"""Helpers of ``flashinfer.utils``."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer import utils


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_ceil_div_and_round_up(x, y):
    quotient = utils.ceil_div(x, y)
    assert (quotient - 1) * y < x <= quotient * y
    assert utils.round_up(x, y) == quotient * y


@given(st.integers(1, 2**40))
def test_powers_of_two(x):
    above, below = utils.next_positive_power_of_2(x), utils.last_positive_power_of_2(x)
    assert above.bit_count() == below.bit_count() == 1
    assert below <= x <= above < 2 * x
    assert x < 2 * below


def test_powers_of_two_below_one():
    assert utils.next_positive_power_of_2(0) == 1
    with pytest.raises(ValueError, match="x must be at least 1, got 0"):
        utils.last_positive_power_of_2(0)


def test_canonicalize_torch_dtype():
    for name in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert utils.canonicalize_torch_dtype(name) is torch.bfloat16
    with pytest.raises(ValueError, match="got 'bf16'"):
        utils.canonicalize_torch_dtype("bf16")
    with pytest.raises(ValueError, match="got 'nn'"):
        utils.canonicalize_torch_dtype("nn")
    with pytest.raises(TypeError, match="got 16"):
        utils.canonicalize_torch_dtype(16)


def test_is_float8():
    assert utils.is_float8(torch.zeros(2).to(torch.float8_e4m3fn))
    assert utils.is_float8(torch.zeros(2).to(torch.float8_e5m2))
    assert not utils.is_float8(torch.zeros(2, dtype=torch.uint8))


def test_check_shape_dtype_device():
    x = torch.zeros(2, 3)
    utils.check_shape_dtype_device(x, (2, 3), torch.float32, torch.device("cpu"), "x")
    utils.check_shape_dtype_device(x, None, None, None, "x")
    with pytest.raises(ValueError, match=r"x must have shape \(2,\), got \(2, 3\)"):
        utils.check_shape_dtype_device(x, [2], None, None, "x")
    with pytest.raises(ValueError, match="x must have dtype torch.float16, got torch.float32"):
        utils.check_shape_dtype_device(x, None, torch.float16, None, "x")
    with pytest.raises(ValueError, match="x must be on cuda:0, got cpu"):
        utils.check_shape_dtype_device(x, None, None, torch.device("cuda", 0), "x")


@pytest.mark.parametrize(
    "version, base, expected",
    [
        ("2.10.0", "2.9", True),
        ("2.9", "2.10", False),
        ("2.4.0rc1", "2.4.0", False),
        (None, "12.9", False),
        ("12.9", None, False),
    ],
)
def test_version_at_least(version, base, expected):
    assert utils.version_at_least(version, base) is expected


def test_default_generators_are_those_of_gpus():
    with pytest.raises(ValueError, match="device must be a cuda device, got 'cpu'"):
        utils.get_default_generators(torch.device("cpu"))


def test_custom_op_with_fake():
    @utils.register_custom_op("flashinfer_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @utils.register_fake_op("flashinfer_test::double")
    def _(x):
        return torch.empty_like(x)

    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert double(torch.ones(3, device="meta")).shape == (3,)


def test_names_of_the_decorators_are_the_real_ones():
    from flashinfer.compat import backends

    assert utils.backend_requirement is backends.backend_requirement
    assert utils.supported_compute_capability is backends.supported_compute_capability
    assert utils.BackendSupportedError is backends.BackendSupportedError
    assert utils.MaskMode.CUSTOM.value == 2 and utils.PosEncodingMode.ALIBI.value == 2
    assert utils.TensorLayout["HND"].value == 1


def test_an_experimental_function_warns_once():
    from flashinfer.api_logging import ExperimentalWarning, flashinfer_experimental_api

    @flashinfer_experimental_api(feature="doubling")
    def double(x: int) -> int:
        return 2 * x

    with pytest.warns(ExperimentalWarning, match="doubling is experimental"):
        assert double(2) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(x=3) == 6
    assert str(inspect.signature(double)) == "(x: 'int') -> 'int'"


def test_global_scales_of_nvfp4():
    from flashinfer.quantization import nvfp4_quantization_utils as nvfp4

    x = torch.tensor([[1.0, -7.0], [0.0, 0.0]])
    assert nvfp4.make_nvfp4_global_scale(x, False).tolist() == pytest.approx([384.0])
    of_rows = nvfp4.make_nvfp4_global_scale(x, per_token_activation=True)
    assert of_rows.tolist() == pytest.approx([384.0, 1.0])
    config = nvfp4.NVFP44Over6Config(e4m3_max=256, err_mode="mse")
    assert nvfp4.nvfp4_e4m3_max(config) == 256.0 and nvfp4.nvfp4_e4m3_max() == 448.0
    assert config.err_mode_name() == "MSE"
    assert nvfp4.NVFP44Over6Config().err_mode_name() == "MAE"
    assert nvfp4.make_nvfp4_global_scale(x, False, global_scale=3.0).tolist() == [3.0]
