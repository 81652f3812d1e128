"""``assert_matches_reference`` accepts a correct function and finds each way to be wrong."""

import functools

import pytest
import torch

from flashinfer.testing import CheckOptions, assert_matches_reference, error_bound, make_tensor
from flashinfer.trace.templates.norm import (
    fused_add_rmsnorm_trace,
    rmsnorm_quant_trace,
    rmsnorm_trace,
)


def api(trace):
    """Give a function a template, as the decorator does."""

    def decorate(function):
        function.__flashinfer_trace__ = trace
        return function

    return decorate


def norm(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@api(rmsnorm_trace)
def correct(input, weight, eps=1e-6, out=None, enable_pdl=None):
    out = torch.empty_like(input) if out is None else out
    return out.copy_(norm(input, weight, eps))


@api(fused_add_rmsnorm_trace)
def correct_in_place(input, residual, weight, eps=1e-6, enable_pdl=None):
    total = input.float() + residual.float()
    input.copy_(norm(total, weight, eps))
    residual.copy_(total)


@api(rmsnorm_quant_trace)
def correct_quant(out, input, weight, scale, eps=1e-6, enable_pdl=None):
    limit = torch.finfo(out.dtype).max
    out.copy_((norm(input, weight, eps) / scale).clamp(-limit, limit))


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(11)
    return functools.partial(make_tensor, device="cpu", generator=generator)


@pytest.fixture
def call(draw):
    x = draw(32, 256, dtype=torch.bfloat16, row_stride=264, storage_offset=3)
    return dict(input=x, weight=draw(256, dtype=torch.bfloat16, mean=1.0), eps=1e-5)


def test_correct_function_passes_and_returns_its_outputs(call):
    outputs = assert_matches_reference(correct, **call)
    assert list(outputs) == ["output"]
    assert torch.equal(outputs["output"], correct(**call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_out_may_be_given(draw, dtype):
    x, w = draw(16, 128, dtype=dtype), draw(128, dtype=dtype)
    out = torch.zeros(16, 200, dtype=dtype)[:, 7:135]
    assert_matches_reference(correct, input=x, weight=w, out=out)
    assert (out == 0).all(), "the caller's output must not be touched"


def test_out_may_be_the_input(call):
    before = call["input"].clone()
    assert_matches_reference(correct, **call, out=call["input"])
    assert torch.equal(call["input"], before)


def test_in_place_function(draw):
    arguments = dict(
        input=draw(8, 64, dtype=torch.float16),
        residual=draw(8, 64, dtype=torch.float16, row_stride=80),
        weight=draw(64, dtype=torch.float16),
    )
    outputs = assert_matches_reference(correct_in_place, **arguments)
    assert list(outputs) == ["output", "residual_out"]


@pytest.mark.parametrize("scale", [0.05, torch.tensor([0.05])])
def test_quantised_output_argument(draw, scale):
    out = torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
    x, w = draw(8, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16)
    assert_matches_reference(correct_quant, out=out, input=x, weight=w, scale=scale)


def test_zero_rows(draw):
    x, w = draw(0, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16)
    assert_matches_reference(correct, input=x, weight=w)


def leaves_an_element(input, weight, eps=1e-6, out=None, enable_pdl=None):
    out = torch.empty_like(input) if out is None else out
    out.view(-1)[:-1].copy_(norm(input, weight, eps).view(-1)[:-1])
    return out


def ignores_eps(input, weight, eps=1e-6, out=None, enable_pdl=None):
    return correct(input, weight, 1e-6, out)


def ignores_out(input, weight, eps=1e-6, out=None, enable_pdl=None):
    return correct(input, weight, eps)


def changes_its_weight(input, weight, eps=1e-6, out=None, enable_pdl=None):
    result = correct(input, weight, eps, out)
    weight[0] += 1
    return result


def truncates(input, weight, eps=1e-6, out=None, enable_pdl=None):
    bits = norm(input, weight, eps).view(torch.int32) & ~0xFFFF
    return bits.view(torch.float32).bfloat16()


def returns_nothing(input, weight, eps=1e-6, out=None, enable_pdl=None):
    correct(input, weight, eps)


def returns_twice(input, weight, eps=1e-6, out=None, enable_pdl=None):
    return correct(input, weight, eps), correct(input, weight, eps)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (leaves_an_element, r"NaN: 1 where none is expected"),
        (ignores_eps, r"differ by more than rounding"),
        (changes_its_weight, r"weight is an input, and was changed"),
        (truncates, r"differ by more than rounding"),
        (returns_nothing, r"0 values returned, expected 1: output"),
        (returns_twice, r"2 values returned"),
    ],
)
def test_wrong_functions_are_found(draw, wrong, message):
    x = draw(32, 256, dtype=torch.bfloat16, std=0.05)
    weight = draw(256, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=message) as caught:
        assert_matches_reference(api(rmsnorm_trace)(wrong), input=x, weight=weight, eps=1e-2)
    assert "input=bfloat16[32, 256] on cpu" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(ignores_out, "another tensor"), (leaves_an_element, "NaN: 1 where none")],
)
def test_wrong_use_of_out(call, wrong, message):
    call["input"] = call["input"].contiguous()
    with pytest.raises(AssertionError, match=message):
        assert_matches_reference(
            api(rmsnorm_trace)(wrong), **call, out=torch.zeros(32, 256).bfloat16()
        )


def test_a_write_between_rows_is_found(call):
    @api(rmsnorm_trace)
    def writes_too_far(input, weight, eps=1e-6, out=None, enable_pdl=None):
        correct(input, weight, eps, out)
        out.as_strided((out.shape[0],), (out.stride(0),), out.shape[1]).fill_(0)
        return out

    out = torch.zeros(32, 300, dtype=torch.bfloat16)[:, :256]
    with pytest.raises(AssertionError, match="memory around a tensor"):
        assert_matches_reference(writes_too_far, **call, out=out)


def test_an_overrun_past_the_end_is_found(call):
    @api(rmsnorm_trace)
    def writes_one_more(input, weight, eps=1e-6, out=None, enable_pdl=None):
        correct(input, weight, eps, out)
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)
        return out

    with pytest.raises(AssertionError, match="memory around a tensor"):
        assert_matches_reference(writes_one_more, **call, out=torch.zeros(32, 256).bfloat16())


def test_forgotten_residual_is_found(draw):
    @api(fused_add_rmsnorm_trace)
    def forgets(input, residual, weight, eps=1e-6, enable_pdl=None):
        input.copy_(norm(input.float() + residual.float(), weight, eps))

    x, r, w = (draw(*s, dtype=torch.float16) for s in [(8, 64), (8, 64), (64,)])
    with pytest.raises(AssertionError, match="residual_out"):
        assert_matches_reference(forgets, input=x, residual=r, weight=w)


def test_options_widen_the_bound(draw):
    @api(rmsnorm_trace)
    def rounds_twice(input, weight, eps=1e-6, out=None, enable_pdl=None):
        x = input.float()
        unit = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(input.dtype)
        return unit * weight

    call = dict(input=draw(64, 512, dtype=torch.bfloat16), weight=draw(512, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        assert_matches_reference(rounds_twice, **call)
    assert_matches_reference(rounds_twice, CheckOptions(roundings=2), **call)
    bound = error_bound(torch.bfloat16, 512, roundings=2)
    assert_matches_reference(rounds_twice, CheckOptions(bound=bound), **call)


def test_unknown_arguments_and_missing_templates_are_refused(call):
    with pytest.raises(TypeError, match="epsilon"):
        assert_matches_reference(correct, **call, epsilon=1.0)
    with pytest.raises(ValueError, match="norm has no trace template"):
        assert_matches_reference(norm, x=call["input"], weight=call["weight"], eps=1e-6)


def test_dispatching_trace(call):
    def dispatch(**kwargs):
        return rmsnorm_trace

    dispatch.templates = [rmsnorm_trace]

    @api(dispatch)
    def dispatched(input, weight, eps=1e-6, out=None, enable_pdl=None):
        return correct(input, weight, eps, out)

    assert_matches_reference(dispatched, **call)
