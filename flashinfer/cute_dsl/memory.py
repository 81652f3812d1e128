"""Loads and stores by address, atomics and fences, for what tensors of the DSL do not express.

Addresses in global memory are `Int64`, those in shared memory `Int32`. Vectors of four words are
aligned to 16 bytes, of two to 8.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, Uint32, cute

from .conversions import cvt_f32x2_to_bfloat2


def _ptx(code: str, results, *operands):
    """One or several results of an instruction, or none."""
    return cute.arch.inline_ptx(code, write_only_types=results, read_only_args=list(operands))


@cute.jit
def get_ptr_as_int64(tensor: cute.Tensor, offset) -> Int64:
    """Address of the element at an offset from a tensor's first one, in elements."""
    return Int64((tensor.iterator + offset).toint())


@cute.jit
def get_smem_ptr_as_int32(tensor: cute.Tensor, offset: Int32) -> Int32:
    """The same in shared memory."""
    return Int32((tensor.iterator + offset).toint())


@cute.jit
def shared_ptr_to_u32(ptr: cute.Pointer) -> Int32:
    """Address of a pointer into shared memory."""
    return Int32(ptr.toint())


# ---- global memory ----

_FOUR = "{{$w0}, {$w1}, {$w2}, {$w3}}"


@cute.jit
def ld_global_v4_u32(base_ptr: Int64):
    """Four words."""
    return _ptx(f"ld.global.v4.u32 {_FOUR}, [{{$r0}}];", [Uint32] * 4, base_ptr)


@cute.jit
def ld_v4_u32(base_ptr: Int64):
    """Four words from an address of any kind of memory."""
    return _ptx(f"ld.v4.u32 {_FOUR}, [{{$r0}}];", [Uint32] * 4, base_ptr)


@cute.jit
def ld_global_nc_v4_u32(base_ptr: Int64):
    """Four words that nobody writes while the kernel runs."""
    return _ptx(f"ld.global.nc.v4.u32 {_FOUR}, [{{$r0}}];", [Uint32] * 4, base_ptr)


@cute.jit
def ld_global_nc_u32(base_ptr: Int64) -> Uint32:
    """A word that nobody writes while the kernel runs."""
    return _ptx("ld.global.nc.u32 {$w0}, [{$r0}];", [Uint32], base_ptr)


@cute.jit
def prefetch_global_l2(base_ptr: Int64):
    """Fetch a cache line to L2."""
    _ptx("prefetch.global.L2 [{$r0}];", [], base_ptr)


@cute.jit
def st_global_v4_u32(base_ptr: Int64, v0: Uint32, v1: Uint32, v2: Uint32, v3: Uint32):
    """Store four words."""
    code = "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    _ptx(code, [], base_ptr, v0, v1, v2, v3)


def _store(instruction: str):
    """A function that stores one value at an address."""

    @cute.jit
    def store(base_ptr, value):
        _ptx(f"{instruction} [{{$r0}}], {{$r1}};", [], base_ptr, value)

    return store


st_global_u64, st_global_u32, st_global_f32, st_global_i32, st_global_release_i32 = (
    _store(f"st.{name}")
    for name in ("global.u64", "global.u32", "global.f32", "global.s32", "release.gpu.global.s32")
)
st_shared_i32, st_shared_f32, st_shared_u8 = (
    _store(f"st.shared.{name}") for name in ("s32", "f32", "u8")
)


# ---- shared memory ----


@cute.jit
def ld_shared_v4_u32(smem_addr: Int32):
    """Four words."""
    return _ptx(f"ld.shared.v4.u32 {_FOUR}, [{{$r0}}];", [Uint32] * 4, smem_addr)


@cute.jit
def ld_shared_v2_u32(smem_addr: Int32):
    """Two words."""
    return _ptx("ld.shared.v2.u32 {{$w0}, {$w1}}, [{$r0}];", [Uint32] * 2, smem_addr)


@cute.jit
def ld_shared_v2_f32(smem_addr: Int32):
    """Two numbers."""
    return _ptx("ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", [Float32] * 2, smem_addr)


@cute.jit
def ld_shared_f32(addr: Int32) -> Float32:
    """One number."""
    return _ptx("ld.shared.f32 {$w0}, [{$r0}];", [Float32], addr)


@cute.jit
def ld_shared_i32_relaxed(addr: Int32) -> Int32:
    """One integer that other warps of the CTA may write meanwhile."""
    return _ptx("ld.relaxed.cta.shared.s32 {$w0}, [{$r0}];", [Int32], addr)


@cute.jit
def copy_4_bytes_async(smem_addr: Int32, base_ptr: Int64):
    """Copy a word from global to shared memory, while the thread goes on."""
    _ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", [], smem_addr, base_ptr)


# ---- between threads of a GPU ----


@cute.jit
def atomic_add_global_i32(addr: Int64, val: Int32) -> Int32:
    """Add and return what was there, without an order of other accesses."""
    return _ptx("atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};", [Int32], addr, val)


@cute.jit
def atomic_cas_global_i32(addr: Int64, compare: Int32, value: Int32) -> Int32:
    """Replace `compare` by `value`, and return what was there; acquires and releases."""
    code = "atom.acq_rel.gpu.global.cas.b32 {$w0}, [{$r0}], {$r1}, {$r2};"
    return _ptx(code, [Int32], addr, compare, value)


@cute.jit
def ld_global_acquire_i32(addr: Int64) -> Int32:
    """Load an integer; what its writer wrote before is seen after."""
    return _ptx("ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", [Int32], addr)


@cute.jit
def spin_wait_global_eq_i32(addr: Int64, expected: Int32):
    """Wait until an integer has a value; acquires."""
    found = ld_global_acquire_i32(addr)
    while found != expected:
        found = ld_global_acquire_i32(addr)


@cute.jit
def threadfence():
    """Order this thread's writes before its later ones, for all threads of the GPU."""
    _ptx("fence.acq_rel.gpu;", [])


@cute.jit
def scatter_add_bf16x2(addr: Int64, val0_f32, val1_f32):
    """Add two numbers to neighbouring bfloat16, as one atomic operation each; no result."""
    pair = cvt_f32x2_to_bfloat2(Float32(val0_f32), Float32(val1_f32))
    _ptx("red.relaxed.gpu.global.add.noftz.bf16x2 [{$r0}], {$r1};", [], addr, pair)


@cute.jit
def scatter_add_v4_bf16x2(addr: Int64, v0, v1, v2, v3, v4, v5, v6, v7):
    """Add eight numbers to neighbouring bfloat16 at a multiple of 16 bytes; SM90 and later."""
    pairs = [
        cvt_f32x2_to_bfloat2(Float32(a), Float32(b))
        for a, b in ((v0, v1), (v2, v3), (v4, v5), (v6, v7))
    ]
    code = "red.relaxed.gpu.global.add.noftz.v4.bf16x2 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    _ptx(code, [], addr, *pairs)
