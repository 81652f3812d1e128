"""Dense products by cuBLASLt, on the CPU: refusals, parameters, sums of no terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer._common import arch
from flashinfer._common.overlap import check_disjoint
from flashinfer.gemm import dense
from flashinfer.gemm._launch import NAMES

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arch._CAPABILITIES, torch.device("cpu"), (9, 0))
    monkeypatch.setattr(dense, "cuda_tensors", lambda **tensors: None)
    monkeypatch.setattr(dense, "_products", {})
    monkeypatch.setattr(dense, "_checked", {})


def multiply(a: Any, b: Any, bias: Any = None, out: Any = None, **more: Any) -> torch.Tensor:
    dtype, backend = more.get("dtype", BF16), more.get("backend", "cublaslt")
    return dense._product(NAMES["a"], a, b, bias, False, out, dtype, backend)


def square(columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, columns).to(BF16), torch.randn(64, columns).to(BF16).t()


@pytest.mark.parametrize("repeated", [False, True])
def test_result_over_an_argument_is_refused(repeated: bool):
    """Also by a call of a known shape, which is not checked in full again."""
    a, b = square()
    out = torch.empty(64, 64, dtype=BF16)
    bias = torch.zeros(64, dtype=BF16)
    if repeated:
        multiply(a, b, out=out)
        multiply(a, b, bias, out=out)
    for name, change in {
        "a": {"out": a},
        "b": {"b": out.t()},
        "bias": {"bias": out[3]},
    }.items():
        with pytest.raises(ValueError, match=f"`out` must not share memory with `{name}`"):
            multiply(**{"a": a, "b": b, "bias": bias, "out": out, **change})


@pytest.mark.parametrize("repeated", [False, True])
def test_slices_of_one_tensor_do_not_overlap(repeated: bool):
    wide = torch.randn(64, 128).to(BF16)
    a, out, (_, b) = wide[:, :64], wide[:, 64:], square()
    expected = a.clone() @ b
    for _ in range(1 + repeated):
        assert torch.equal(multiply(a, b, out=out), expected)


def test_disjoint_views():
    base = torch.zeros(64, 96)
    for other in (base[:, 32:], base[10:, 32:64], base[:0], base[32:, :32], torch.zeros(4)):
        check_disjoint("out", base[:32, :32], other=other)
    check_disjoint("out", base[:0], other=base)
    for other in (base[:, 31:], base[31:, :32], base[:32, :32].t(), base.view(torch.int32)[0]):
        with pytest.raises(ValueError, match="`out` must not share memory with `other`"):
            check_disjoint("out", base[:32, :32], other=other)


def test_parameters_are_multiplied():
    """Results are given to torch, which differentiates into none."""
    a, b = square()
    weight, bias = (torch.nn.Parameter(t) for t in (b, torch.randn(64).to(BF16)))
    assert torch.equal(multiply(a, weight), a @ b)
    assert torch.equal(multiply(a, b, bias), torch.addmm(bias.detach(), a, b))
    assert not multiply(a, weight, bias).requires_grad


@pytest.mark.parametrize("name", ["b", "bias", "out"])
@pytest.mark.parametrize("repeated", [False, True])
def test_other_device_is_refused(name: str, repeated: bool):
    a, b = square()
    call = {"a": a, "b": b, "bias": b[0].clone(), "out": torch.empty(64, 64, dtype=BF16)}
    if repeated:
        multiply(**call)
    with pytest.raises(ValueError, match=f"`{name}` must be on cpu as `a` is, got meta"):
        multiply(**{**call, name: call[name].to("meta")})


@pytest.mark.parametrize("backend", ["cublaslt", "tinygemm", "auto"])
def test_sums_of_no_terms(backend: str):
    a, b = square(0)
    bias = torch.randn(64).to(BF16)
    for _ in range(2):
        assert torch.equal(multiply(a, b, backend=backend), torch.zeros(64, 64, dtype=BF16))
        assert torch.equal(multiply(a, b, bias, backend=backend), bias.expand(64, 64))
    if backend != "cublaslt":
        whole = multiply(a, b, dtype=torch.float32, backend=backend)
        assert torch.equal(whole, torch.zeros(64, 64))
