"""Norms in CuTe-DSL against the expectations of `test_norm.py`.

On a GPU machine without the DSL they run what `tests/cute_dsl_modules.py` has compiled elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer import cute_dsl, rmsnorm
from flashinfer.jit.cute_dsl_norm import gen_cute_dsl_norm_module
from flashinfer.testing import poisoned_like
from tests.cute_dsl_modules import DTYPES, QUANTISED, SHAPES, config_of
from tests.cute_dsl_modules import need as need_module
from tests.norm.test_norm import check, expect_layer, expect_quant, expect_rms, new


def need(device: torch.device, *arguments: Any, **options: bool) -> None:
    need_module(device, gen_cute_dsl_norm_module(config_of(*arguments, **options)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_bias", [0.0, 1.0])
def test_rmsnorm(device, weight_bias, shape, dtype):
    need(device, dtype, dtype, shape[-1])
    x, w = new(device, *shape, dtype=dtype), new(device, shape[-1], dtype=dtype)
    out = poisoned_like(x)
    assert cute_dsl.rmsnorm_cute(x, w, out, 1e-5, weight_bias) is None
    check(out, expect_rms(x, w, 1e-5, weight_bias), shape[-1])
    again = x.clone()
    cute_dsl.rmsnorm_cute(again, w, again, 1e-5, weight_bias, True)
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_add_rmsnorm(device, shape, dtype):
    need(device, dtype, dtype, shape[-1], add_residual=True)
    x, r = new(device, *shape, dtype=dtype), new(device, *shape, dtype=dtype, std=4.0)
    w = new(device, shape[-1], dtype=dtype)
    total = x.double() + r.double()
    cute_dsl.fused_add_rmsnorm_cute(x, r, w)
    check(r, total, 1)
    check(x, expect_rms(total, w, 1e-6), shape[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layernorm(device, shape, dtype):
    need(device, dtype, dtype, shape[-1], subtract_mean=True)
    x = new(device, *shape, dtype=dtype, mean=30.0)
    gemma, beta = (new(device, shape[-1], dtype=torch.float32) for _ in range(2))
    out = poisoned_like(x)
    cute_dsl.layernorm_cute(out, x, gemma, beta, 1e-5)
    magnitude = float(30 * gemma.abs().max() + beta.abs().max())
    check(out, expect_layer(x, gemma, beta, 1e-5), shape[-1], magnitude=magnitude)


def test_more_rows_than_run_at_once(device):
    """Each CTA takes several rows, two at a time in a layer norm, the last of them alone."""
    shape, dtype = (3001, 1000), torch.bfloat16
    need(device, dtype, dtype, 1000, subtract_mean=True)
    need(device, dtype, dtype, 1000, add_residual=True)
    x, r = new(device, *shape), new(device, *shape, std=4.0)
    gemma, beta = (new(device, 1000, dtype=torch.float32) for _ in range(2))
    out = poisoned_like(x)
    cute_dsl.layernorm_cute(out, x, gemma, beta, 1e-5)
    check(out, expect_layer(x, gemma, beta, 1e-5), 1000)
    w, total = new(device, 1000), x.double() + r.double()
    cute_dsl.fused_add_rmsnorm_cute(x, r, w)
    check(r, total, 1)
    check(x, expect_rms(total, w, 1e-6), 1000)


@pytest.mark.parametrize("scale_kind", ["float", "tensor"])
@pytest.mark.parametrize(("out_dtype", "shape"), QUANTISED, ids=str)
@pytest.mark.parametrize("add_residual", [False, True])
def test_quant(device, add_residual, shape, out_dtype, scale_kind):
    need(device, torch.bfloat16, out_dtype, shape[-1], add_residual=add_residual)
    x, r, w = new(device, *shape), new(device, *shape), new(device, shape[-1])
    scale = 0.037 if scale_kind == "float" else torch.tensor([0.037], device=device)
    out = poisoned_like(torch.empty_like(x, dtype=out_dtype))
    before, total = x.clone(), x.double()
    if add_residual:
        total = total + r.double()
        cute_dsl.fused_add_rmsnorm_quant_cute(out, x, r, w, scale)
        check(r, total, 1)
    else:
        cute_dsl.rmsnorm_quant_cute(out, x, w, scale)
    assert torch.equal(x, before)
    check(out, expect_quant(expect_rms(total, w, 1e-6), 0.037, out_dtype), shape[-1])


def test_quant_saturates_and_keeps_nan(device):
    need(device, torch.bfloat16, torch.float8_e4m3fn, 4096)
    x, w = new(device, 4, 4096), torch.full((4096,), 3.0e4, dtype=torch.bfloat16, device=device)
    x[3, 5] = float("nan")
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    cute_dsl.rmsnorm_quant_cute(out, x, w, 1e-9)
    assert torch.equal(out[:3].float(), torch.sign(x[:3].float()) * 448)
    assert out[3].float().isnan().all()


def test_heads_of_a_joint_projection(device):
    """Strided tokens and heads, and more of them than whole CTAs take."""
    need(device, torch.bfloat16, torch.bfloat16, 128)
    joint = new(device, 37, 10 * 128)
    heads = joint.view(37, 10, 128)[:, 1:8]
    w = new(device, 128)
    expected, rest = expect_rms(heads, w, 1e-6, 1.0), joint.clone()
    cute_dsl.qk_rmsnorm_cute(heads, w, heads, weight_bias=1.0)
    check(heads, expected, 128)
    untouched = torch.ones(10, dtype=torch.bool)
    untouched[1:8] = False
    before, after = (t.view(37, 10, 128)[:, untouched] for t in (rest, joint))
    assert torch.equal(before, after)


def test_as_the_kernel_of_this_package(device):
    """The same within two roundings of bfloat16, on many rows."""
    need(device, torch.bfloat16, torch.bfloat16, 4096)
    x, w = new(device, 3000, 4096), new(device, 4096)
    out = poisoned_like(x)
    cute_dsl.rmsnorm_cute(x, w, out)
    check(out, rmsnorm(x, w).double(), 4096, roundings=2)
    empty = x[:0]
    cute_dsl.rmsnorm_cute(empty, w, empty)


@pytest.mark.gpu
def test_rows_that_are_no_vectors_are_refused(device):
    need(device, torch.bfloat16, torch.bfloat16, 4096)
    x, w = new(device, 2, 4097)[:, 1:], new(device, 4096)
    with pytest.raises(ValueError, match="must start at multiples of 16 bytes"):
        cute_dsl.rmsnorm_cute(x, w, torch.empty(2, 4096, dtype=x.dtype, device=device))


@pytest.mark.gpu
def test_captured_in_a_graph(device):
    need(device, torch.bfloat16, torch.bfloat16, 4096)
    x, w = new(device, 5, 4096), new(device, 4096)
    out = torch.empty_like(x)
    cute_dsl.rmsnorm_cute(x, w, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cute_dsl.rmsnorm_cute(x, w, out)
    x.copy_(new(device, 5, 4096))
    graph.replay()
    check(out, expect_rms(x, w, 1e-6), 4096)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_bias": 0.5}, ValueError, "`weight_bias` must be 0 or 1, got 0.5"),
        ({"weight_bias": "1"}, TypeError, "`weight_bias` must be a number"),
        ({"input": 3}, TypeError, "`input` must be a torch.Tensor"),
        ({"input": torch.tensor(1.0)}, ValueError, r"`input` must have 2 to 3 dimensions"),
        ({}, ValueError, "`input` must be a CUDA tensor"),
    ],
    ids=str,
)
def test_refusals_before_any_gpu_work(change, error, message):
    x = torch.zeros(2, 4096)
    arguments = {"input": x, "weight": torch.ones(4096), "out": x, **change}
    with pytest.raises(error, match=message):
        cute_dsl.rmsnorm_cute(**arguments)
