"""A kernel that calls the device helpers that no kernel of the package calls; it is only compiled.

The copy of the helpers' files beside it is made by `test_cute_dsl.py`.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator

from . import conversions as conversions
from . import memory as memory


class HelpersKernel:
    """Reads 16 words, computes on them by every helper, and writes one."""

    @cute.jit
    def __call__(self, data: cute.Pointer, stream: cuda.CUstream):
        self.kernel(data).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, data: cute.Pointer):
        words = cute.make_tensor(data, cute.make_layout(64))
        address = memory.get_ptr_as_int64(words, 0)
        smem = SmemAllocator().allocate_tensor(Uint32, cute.make_layout(64), byte_alignment=16)
        shared = memory.get_smem_ptr_as_int32(smem, Int32(0))
        memory.prefetch_global_l2(address)
        a, b, c, d = memory.ld_global_nc_v4_u32(address)
        e, f, g, h = memory.ld_v4_u32(address + Int64(16))
        memory.st_shared_i32(shared, Int32(a))
        memory.st_shared_f32(shared + 4, Float32(1.0))
        cute.arch.barrier()
        i, j = memory.ld_shared_v2_u32(shared)
        k, o, m, n = memory.ld_shared_v4_u32(shared)
        x = self.floats(a ^ b, c ^ d) + self.pairs(e, f) + self.exponents(g ^ h)
        x = x + memory.ld_shared_f32(shared + 4)
        total = i ^ j ^ k ^ o ^ m ^ n ^ memory.ld_global_nc_u32(address)
        memory.st_global_v4_u32(address + Int64(32), total, a, b, c)
        memory.st_global_f32(address + Int64(48), x)
        self.atomics(address + Int64(64))

    @cute.jit
    def floats(self, word: Uint32, other: Uint32):
        x, y, z, w = conversions.cvt_e4m3x4_to_f32x4(word)
        x = conversions.fadd_rn(x, conversions.fsub_rn(y, conversions.fmul_rn(z, w)))
        x = conversions.fdiv_rn(x, conversions.rcp_rn(conversions.fabs_f32(y)))
        x = conversions.fmin_f32(x, conversions.fp8_e4m3_to_f32_and_rcp(other))
        return x + Float32(conversions.cvt_f32_to_e4m3(x))

    @cute.jit
    def pairs(self, a: Uint32, b: Uint32):
        half = conversions.hmax2(conversions.hadd2(a, conversions.half2_mul(a, b)), b)
        wide = conversions.bfloat2_hmax2(
            conversions.bfloat2_add(a, b), conversions.bfloat2_mul(a, b)
        )
        x = conversions.hmax_to_f32(conversions.habs2(half))
        y = conversions.bfloat2_hmax_to_f32(conversions.bfloat2_habs2(wide))
        return x + y + Float32(conversions.cvt_f32x2_to_half2(x, y))

    @cute.jit
    def exponents(self, word: Uint32):
        x, y, z, w = conversions.cvt_e8m0x4_to_f32x4(word)
        power, code = conversions.pow2_ceil_ue8m0(x + y + z + w)
        return power * conversions.ue8m0_to_output_scale(code)

    @cute.jit
    def atomics(self, address: Int64):
        memory.scatter_add_bf16x2(address, 1.0, 2.0)
        memory.scatter_add_v4_bf16x2(address, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
        before = memory.atomic_add_global_i32(address + Int64(16), Int32(1))
        memory.threadfence()
        memory.st_global_release_i32(address + Int64(20), before)
        memory.spin_wait_global_eq_i32(address + Int64(20), before)
        memory.atomic_cas_global_i32(address + Int64(24), before, Int32(0))


def instance(**_: object):
    data = make_ptr(Uint32, 16, cute.AddressSpace.gmem, assumed_align=16)
    return HelpersKernel(), (data, cuda.CUstream(0))
