"""The example compiles and loads without a GPU, refuses CPU tensors, and is right on a GPU."""

import shutil

import pytest
import torch
from scale_op import scale
from scale_op.jit import gen_scale_module

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_compiles_and_loads_without_gpu(empty_cache, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    spec = gen_scale_module("float16", "float16")
    module = spec.build_and_load()
    assert spec.try_load() is not None
    x = torch.ones(8, dtype=torch.float16)
    with pytest.raises(ValueError, match="input must be a CUDA tensor"):
        module.run(x, x, 2.0)
    with pytest.raises(TypeError):
        module.run(x, x)


def test_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        scale(torch.randn(128), 2.0)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 128, 4099])
def test_is_correct(dtype, size):
    x = torch.randn(size, dtype=dtype, device="cuda")
    factor = torch.tensor(3.14, dtype=dtype).item()  # the kernel multiplies in the tensor's dtype
    out = torch.full_like(x, float("nan"))
    assert scale(x, factor, out=out) is out
    torch.testing.assert_close(
        out, x * factor, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-5
    )
    torch.testing.assert_close(scale(x, factor), out, rtol=0, atol=0)


@needs_gpu
@pytest.mark.gpu
def test_dtype_without_kernel_is_refused():
    with pytest.raises(TypeError, match=r"input.dtype\(\) must be one of float32"):
        scale(torch.ones(4, dtype=torch.int32, device="cuda"), 2.0)
