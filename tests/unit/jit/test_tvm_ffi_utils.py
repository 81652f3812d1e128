"""csrc/tvm_ffi_utils.h, by a module for the host compiler that uses all of it on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from flashinfer import jit

SOURCE = """
#include "tvm_ffi_utils.h"

#define EXPORT_CHECK(name, ...)                                                     \\
  void name(TensorView x, TensorView y) { __VA_ARGS__; }                            \\
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, name)
#define EXPORT_SIZE(name, dispatch)                                                 \\
  int64_t name(TensorView x) {                                                      \\
    return dispatch(x.dtype(), DType, [&] { return int64_t{sizeof(DType)}; });      \\
  }                                                                                 \\
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, name)

EXPORT_CHECK(check_input, CHECK_INPUT(x))
EXPORT_CHECK(check_last_input, CHECK_LAST_DIM_CONTIGUOUS_INPUT(x))
EXPORT_CHECK(check_input_and_type, CHECK_INPUT_AND_TYPE(x, flashinfer::dl_float16))
EXPORT_CHECK(check_cpu, CHECK_CPU(x))
EXPORT_CHECK(check_contiguous, CHECK_CONTIGUOUS(x))
EXPORT_CHECK(check_last, CHECK_LAST_DIM_CONTIGUOUS(x))
EXPORT_CHECK(check_type, CHECK_INPUT_TYPE(x, flashinfer::dl_float16))
EXPORT_CHECK(check_dim, CHECK_DIM(2, x))
EXPORT_CHECK(check_shape, CHECK_SHAPE(x, y))
EXPORT_CHECK(check_device, CHECK_DEVICE(x, y))
EXPORT_CHECK(check_eq, CHECK_EQ(x.size(0), y.size(0)))
EXPORT_CHECK(check_ge, CHECK_GE(x.size(0), y.size(0)))
EXPORT_CHECK(check_heads, CHECK_GQA_HEAD_DIVISIBLE(x.size(0), y.size(0)))
EXPORT_SIZE(size_fp16, DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP16)
EXPORT_SIZE(size_fp32_fp16, DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16)
EXPORT_SIZE(size_fp8, DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP8)
EXPORT_SIZE(size_fp16_fp8, DISPATCH_DLPACK_DTYPE_TO_CTYPE)
EXPORT_SIZE(size_int, DISPATCH_DLPACK_IDTYPE_TO_CTYPE)

double first(TensorView x) { return *x.data_ptr<float>(); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(first, first)

int64_t branch(bool flag) {
  return DISPATCH_BOOL(flag, kFlag, [&] { return int64_t{kFlag ? 10 : 20}; });
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(branch, branch)

void raise(bool type) {
  if (type) TVM_FFI_THROW(TypeError) << "type " << 1;
  TVM_FFI_THROW(ValueError) << "value " << 2;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(raise, raise)

Tensor like(TensorView x) { return alloc_tensor(x.shape(), x.dtype(), x.device()); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(like, like)
"""

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("utils")
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(folder))
        (folder / "checks.cc").write_text(SOURCE)
        return jit.gen_jit_spec("checks", [folder / "checks.cc"]).build_and_load()


A, B = torch.zeros(2, 4), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("check", "x", "y", "error", "message"),
    [
        ("check_input", A, A, ValueError, "x must be a CUDA tensor"),
        ("check_last_input", A, A, ValueError, "x must be a CUDA tensor"),
        ("check_input_and_type", A, A, ValueError, "x must be a CUDA tensor"),
        ("check_cpu", A, A, None, ""),
        ("check_contiguous", A, A, None, ""),
        ("check_contiguous", A.T, A, ValueError, "x must be contiguous"),
        ("check_last", A[:, :2], A, None, ""),
        ("check_last", A.T, A, ValueError, "x must be contiguous in its last dimension"),
        ("check_type", A.half(), A, None, ""),
        ("check_type", A, A, TypeError, "x must have dtype float16, got float32"),
        ("check_dim", A, A, None, ""),
        ("check_dim", A[0], A, ValueError, "x must have 2 dimensions, got 1"),
        ("check_shape", A, A.half(), None, ""),
        ("check_shape", A, B, ValueError, "x must have the shape of y: .* 0 is 2, expected 3"),
        ("check_shape", A, A[0], ValueError, "x must have 1 dimensions, got 2"),
        ("check_device", A, B, None, ""),
        ("check_eq", A, B, ValueError, "2 vs. 3"),
        ("check_ge", B, A, None, ""),
        ("check_ge", A, B, ValueError, "2 vs. 3"),
        ("check_heads", torch.zeros(6), B, None, ""),
        ("check_heads", torch.zeros(7), B, ValueError, r"\(7\) must be a multiple of"),
    ],
)  # fmt: skip
def test_checks(module, check, x, y, error, message):
    if error is None:
        getattr(module, check)(x, y)
    else:
        with pytest.raises(error, match=message):
            getattr(module, check)(x, y)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        ("size_fp16", {torch.float16: 2, torch.bfloat16: 2}),
        ("size_fp32_fp16", {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}),
        ("size_fp8", {torch.float8_e4m3fn: 1, torch.float8_e5m2: 1}),
        ("size_fp16_fp8", {torch.float16: 2, torch.bfloat16: 2, torch.float8_e4m3fn: 1}),
        ("size_int", {torch.int32: 4, torch.int64: 8}),
    ],
)
def test_dispatch(module, function, sizes):
    for dtype, size in sizes.items():
        assert getattr(module, function)(torch.zeros(1).to(dtype)) == size
    with pytest.raises(TypeError, match=r"x.dtype\(\) must be one of .*, got float64"):
        getattr(module, function)(torch.zeros(1, dtype=torch.float64))


def test_tensor_view(module):
    x = torch.arange(4.0)
    assert module.first(x[2:]) == 2.0
    out = module.like(A)
    assert torch.from_dlpack(out).shape == A.shape
    assert (module.branch(True), module.branch(False)) == (10, 20)


def test_throw(module):
    with pytest.raises(TypeError, match="type 1"):
        module["raise"](True)
    with pytest.raises(ValueError, match="value 2"):
        module["raise"](False)
