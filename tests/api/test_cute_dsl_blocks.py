"""Helpers of CuTe-DSL for 4 bits and for blocks, on a GPU, against NumPy."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flashinfer._common import driver
from flashinfer.jit import cute_dsl
from flashinfer.jit.binary import device_elfs, read_kernels

THREADS, ROW, OUT = 128, 32, 192  # as in the kernel
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BETWEEN = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
F32 = np.float32
KERNEL = Path(__file__).parents[1] / "unit" / "cute_dsl_blocks_kernel.py"


def compiled(folder: Path) -> Path:
    """The kernel's object, from a copy of the files that it imports."""
    for file in cute_dsl.KERNELS.glob("*.py"):
        (folder / file.name).symlink_to(file)
    source = folder / "blocks_of_test.py"
    source.write_text(KERNEL.read_text())
    out = folder / "blocks_of_test.o"
    command = [*cute_dsl.require().command([], ["90a"]), "--out", str(out), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


def launch(path: Path, *given: np.ndarray) -> np.ndarray:
    """The words that the kernel of an object writes."""
    ((_, _, elf),) = device_elfs(path.read_bytes())
    (kernel,) = read_kernels(path)
    out = torch.full((THREADS, OUT), -1, dtype=torch.int32, device="cuda")
    tensors = [*(torch.from_numpy(array).cuda() for array in given), out]
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), elf)
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.name.encode())
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    array = (ctypes.c_void_p * 4)(*[ctypes.addressof(pointer) for pointer in pointers])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    shared = 4 * THREADS * ROW
    driver.call("cuLaunchKernel", function, 1, 1, 1, THREADS, 1, 1, shared, stream, array, None)
    torch.cuda.synchronize()
    driver.call("cuModuleUnload", module)
    return out.cpu().numpy().view(np.uint32)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with values between two codes, of all sizes, of zeros; factors; global scales."""
    random = np.random.default_rng(7)
    x = random.standard_normal((THREADS, ROW)).astype(F32) * 3
    signs = random.choice([-1, 1], (THREADS, ROW)).astype(F32)
    x[1] = signs[1] * np.resize(np.concatenate([BETWEEN, MAGNITUDES]), ROW)
    x[2] = np.nextafter(signs[2] * np.resize(BETWEEN, ROW), F32(np.inf))
    x[3] = signs[3] * np.exp2(random.uniform(-40, 60, ROW)).astype(F32)
    x[4], x[5] = 0, 1e-3 * x[5]
    x[6, :4] = np.inf, -np.inf, -0.0, 1e-42
    w = random.uniform(0.3, 2, (THREADS, ROW)).astype(F32) * signs
    w[:, 0] = np.abs(w[:, 0])
    return x, w, np.exp2(random.integers(-3, 4, THREADS)).astype(F32) * F32(1.25)


# ---- references ----------------------------------------------------------------------------------


def codes(values: np.ndarray) -> np.ndarray:
    """e2m1 codes: to nearest, of two as near the even one."""
    magnitude = np.minimum(np.abs(values), 6)
    below = np.searchsorted(BETWEEN, magnitude, side="left")
    tie = np.isin(magnitude, BETWEEN) & (below % 2 == 1)
    return (below + tie).astype(np.uint32) | (np.signbit(values).astype(np.uint32) << 3)


def words(of_codes: np.ndarray) -> np.ndarray:
    """Eight codes a word."""
    parts = of_codes.reshape(len(of_codes), -1, 8) << (4 * np.arange(8, dtype=np.uint32))
    return np.bitwise_or.reduce(parts, -1).astype(np.uint32)


def decoded(of_codes: np.ndarray) -> np.ndarray:
    return np.where(of_codes & 8, F32(-1), F32(1)) * MAGNITUDES[of_codes & 7]


def e4m3(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of values that are not negative, and what these stand for."""
    limited = torch.from_numpy(np.clip(values, -448, 448).astype(F32))
    found = limited.to(torch.float8_e4m3fn)
    return found.view(torch.uint8).numpy().astype(np.uint32), found.float().numpy()


def floats(found: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(found).view(F32)


def halves(found: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(found).view(np.float16)


def bfloats(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def nvfp4(x: np.ndarray, largest: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale, value = e4m3(factor * (largest / F32(6)))
    by = np.where(value > 0, factor / np.where(value > 0, value, F32(1)), F32(0)).astype(F32)
    return words(codes(x * by[:, None])), scale


def near(found: np.ndarray, expected: np.ndarray, rtol: float) -> None:
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(found, expected.astype(F32), rtol=rtol, atol=1e-37)


# ---- comparisons ---------------------------------------------------------------------------------


def check_codes(out: np.ndarray, x: np.ndarray, w: np.ndarray, factor: np.ndarray) -> None:
    of_x = codes(x)
    assert np.array_equal(out[:, :4], words(of_x))
    values = decoded(of_x)
    assert np.array_equal(halves(out[:, 4:8]), values[:, :8].astype(np.float16))
    again = decoded(codes(x[:, :2] * w[:, :1])) * factor[:, None]
    assert np.array_equal(floats(out[:, 8:10]), again)
    scaled = x[:, :2] * w[:, :1]
    signs = np.sign(scaled)
    assert np.array_equal(floats(out[:, 10:12]), signs * e4m3(np.abs(scaled))[1] * factor[:, None])
    w16 = w.astype(np.float16).astype(np.float64)
    for place, count, rtol in ((12, 8, 0.03), (13, 16, 0.03), (14, 8, 1e-6), (15, 16, 1e-6)):
        products = values[:, :count] * w16[:, :count]
        size = np.abs(products).sum(-1) + 1e-30
        assert (np.abs(floats(out[:, place]) - products.sum(-1)) <= rtol * size).all()


def check_scales(out: np.ndarray, x: np.ndarray, factor: np.ndarray) -> None:
    largest = np.abs(x[:, 0])
    exact = factor * (largest / F32(6))
    near(floats(out[:, 16]), exact, 1e-6)
    assert np.array_equal(floats(out[:, 17]), exact)
    _, value = e4m3(largest)
    by = np.where(value > 0, factor / np.where(value > 0, value, F32(1)), F32(0)).astype(F32)
    near(floats(out[:, 18]), by, 1e-6)
    assert np.array_equal(floats(out[:, 19]), np.where(x[:, 1] == 0, F32(0), by))
    half = (out[:, 0] & 0xFF) << 7
    assert np.array_equal(out[:, 20], half | half << 16)


def check_quantised(out: np.ndarray, x: np.ndarray, w: np.ndarray, factor: np.ndarray) -> None:
    scaled = words(codes(x * w[:, :1]))
    assert np.array_equal(out[:, 21:23], scaled[:, :2])
    assert np.array_equal(out[:, 23:27], scaled)
    of_16, of_32 = np.abs(x[:, :16]).max(-1), np.abs(x).max(-1)
    assert np.array_equal(floats(out[:, 38:40]), np.stack([of_16, of_32], 1))
    finite = np.isfinite(of_32)
    packed, scale = nvfp4(x[:, :16], of_16, factor)
    for place in (27, 30):  # with exact and with approximate reciprocals
        differ = (out[:, place : place + 2] != packed).any(-1) | (out[:, place + 2] != scale)
        assert differ[finite].mean() <= (0 if place == 27 else 0.1)
    exponent = np.ceil(np.log2(np.maximum(of_32 / F32(6), F32(2.0**-126)).astype(np.float64)))
    by = np.exp2(-exponent).astype(F32)
    near_most = finite & (of_32 > 0)
    assert np.array_equal(out[near_most, 37], (exponent + 127).astype(np.uint32)[near_most])
    assert np.array_equal(out[near_most, 33:37], words(codes(x * by[:, None]))[near_most])
    assert not out[of_32 == 0, 33:38].any()


def check_activations(out: np.ndarray, x: np.ndarray, w: np.ndarray, factor: np.ndarray) -> None:
    usual = (np.abs(x) < 50).all(-1)
    wide = x.astype(np.float64)
    silu = wide / (1 + np.exp(-np.clip(wide, -500, 500))) * w
    assert np.abs(floats(out[:, 40:56]) - silu[:, :16])[usual].max() < 3e-4
    relu = np.square(np.maximum(x, 0))[:, :16]
    assert np.array_equal(floats(out[:, 56:72]), relu)
    for place, values in ((72, floats(out[:, 40:56])), (75, relu)):
        packed, scale = nvfp4(values, np.abs(values).max(-1), factor)
        assert np.array_equal(out[usual, place : place + 2], packed[usual])
        assert np.array_equal(out[usual, place + 2], scale[usual])
    y = (x * factor[:, None] * w)[:, :16]
    near(floats(out[:, 128:144]), y, 1e-6)
    near(floats(out[:, 144]), np.abs(y).max(-1), 1e-6)


def check_pairs(out: np.ndarray, x: np.ndarray, w: np.ndarray, factor: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = x[:, :16].astype(np.float16), w[:, :16].astype(np.float16)
        product = (a.astype(F32) * b.astype(F32)).astype(np.float16)
        near(halves(out[:, 78:86]), product, 0)
        largest = np.abs(product).reshape(THREADS, 8, 2).max(1)
        near(halves(out[:, 86:87]), largest, 0)
        near(floats(out[:, 96:112]), a.astype(F32) * factor[:, None], 0)
    a, b = bfloats(x[:, :16]), bfloats(w[:, :16])
    product = bfloats(a * b)
    shown = np.ascontiguousarray(out[:, 87:95]).view(np.uint16).astype(np.uint32) << 16
    near(shown.view(F32), product, 0)
    shown = np.ascontiguousarray(out[:, 95:96]).view(np.uint16).astype(np.uint32) << 16
    near(shown.view(F32), np.abs(product).reshape(THREADS, 8, 2).max(1), 0)
    near(floats(out[:, 112:128]), a * factor[:, None], 0)


def check_loads(out: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    assert np.array_equal(out[:, 145:153], x.view(np.uint32)[:, 8:16])
    assert np.array_equal(out[:, 153:161], np.tile(w.view(np.uint32)[0, 8:16], (THREADS, 1)))
    other = x[np.arange(THREADS) ^ 1]
    assert np.array_equal(out[:, 161:177], other.view(np.uint32)[:, 8:24])
    assert (out[:, 177] == 2).all()
    first = 4 * (np.arange(THREADS) % 4)[:, None] + np.array([0, 16])  # of each of two vectors
    assert np.array_equal(out[:, 178:180], (first < 20).astype(np.uint32))


def check_all(path: Path) -> None:
    """Everything that the kernel of an object writes."""
    x, w, factor = inputs()
    out = launch(path, x, w, factor)
    check_codes(out, x, w, factor)
    check_scales(out, x, factor)
    check_quantised(out, x, w, factor)
    check_activations(out, x, w, factor)
    check_pairs(out, x, w, factor)
    check_loads(out, x, w)


@pytest.mark.gpu
@pytest.mark.compiler
@pytest.mark.skipif(cute_dsl.find() is None, reason="nvidia-cutlass-dsl is not installed")
def test_blocks_on_a_gpu(tmp_path: Path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    check_all(compiled(tmp_path))


@pytest.mark.compiler
@pytest.mark.skipif(cute_dsl.find() is None, reason="nvidia-cutlass-dsl is not installed")
def test_blocks_compile_without_local_memory(tmp_path: Path):
    (kernel,) = read_kernels(compiled(tmp_path))
    assert (kernel.arch, kernel.stack_bytes, kernel.parameter_bytes) == ("sm_90a", 0, 32)
