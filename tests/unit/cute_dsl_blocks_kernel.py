"""A kernel that writes what the helpers for 4 bits and for blocks make of a thread's row.

`tests/api/test_cute_dsl_blocks.py` compares; it makes a copy of the helpers' files beside this one.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float16, Float32, Int32, Uint32, Uint64, cute
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator

from . import blocks as blocks
from . import conversions as conversions
from . import float4 as float4

THREADS, ROW, OUT = 128, 32, 192


class BlocksKernel:
    """A thread reads a row of `x` and of `w`, and a number, and writes a row of words."""

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w: cute.Pointer,
        scale: cute.Pointer,
        out: cute.Pointer,
        stream: cuda.CUstream,
    ):
        self.kernel(x, w, scale, out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Pointer, w: cute.Pointer, scale: cute.Pointer, out: cute.Pointer):
        tid, _, _ = cute.arch.thread_idx()
        rows = cute.make_layout((THREADS, ROW), stride=(ROW, 1))
        xs, ws = cute.make_tensor(x, rows)[tid, None], cute.make_tensor(w, rows)[tid, None]
        held_x, held_w = self.held(xs), self.held(ws)
        factor = cute.make_tensor(scale, cute.make_layout(THREADS))[tid]
        self.floats = cute.make_tensor(out, cute.make_layout((THREADS, OUT), stride=(OUT, 1)))[
            tid, None
        ]
        self.words = cute.recast_tensor(self.floats, Uint32)
        self.codes(held_x, held_w, factor)
        self.quantised(held_x, held_w, factor)
        self.arithmetic(held_x, held_w, factor)
        self.pairs(held_x, held_w, factor)
        self.loads(x, w, held_x, tid)

    @cute.jit
    def held(self, row: cute.Tensor) -> cute.Tensor:
        found = cute.make_rmem_tensor((ROW,), Float32)
        for i in cutlass.range_constexpr(ROW):
            found[i] = row[i]
        return found

    @cute.jit
    def put(self, place: cutlass.Constexpr[int], values):
        """Words, floats, and halves of 64 bits from a place on."""
        for i in cutlass.range_constexpr(len(values)):
            if cutlass.const_expr(isinstance(values[i], Float32)):
                self.floats[place + i] = values[i]
            else:
                self.words[place + i] = Uint32(values[i])

    @cute.jit
    def halves(self, word: Uint64):
        return Uint32(word & Uint64(0xFFFFFFFF)), Uint32(word >> Uint64(32))

    @cute.jit
    def packed(self, values: cute.Tensor, convert: cutlass.Constexpr) -> cute.Tensor:
        found = cute.make_rmem_tensor((8,), Uint32)
        for i in cutlass.range_constexpr(8):
            found[i] = convert(values[2 * i], values[2 * i + 1])
        return found

    @cute.jit
    def codes(self, x: cute.Tensor, w: cute.Tensor, factor: Float32):
        words = tuple(
            float4.cvt_e2m1x8_f32(*(x[8 * part + i] for i in range(8))) for part in range(4)
        )
        self.put(0, words)
        self.put(4, float4.fp4_decode_4bytes(words[0]))
        self.put(8, float4.quant_dequant_2(x[0], x[1], factor, w[0]))
        self.put(10, float4.quant_dequant_e4m3_2(x[0], x[1], w[0], factor))
        pairs = self.packed(w, conversions.cvt_f32x2_to_half2)
        ws = tuple(pairs[i] for i in range(8))
        self.put(12, (float4.fp4_dot4_sum(words[0], *ws[:4]),))
        self.put(13, (float4.fp4_dot8_sum(words[0], words[1], *ws),))
        self.put(14, (float4.fp4_dot4_sum_f32acc(words[0], *ws[:4]),))
        self.put(15, (float4.fp4_dot8_sum_f32acc(words[0], words[1], *ws),))
        largest = conversions.fabs_f32(x[0])
        self.put(16, (float4.nvfp4_scale_from_amax(largest, factor),))
        self.put(17, (float4.nvfp4_scale_from_amax_rn(largest, factor),))
        code = conversions.cvt_f32_to_e4m3(largest)
        self.put(18, (float4.nvfp4_compute_output_scale(code, factor),))
        self.put(19, (float4.nvfp4_compute_output_scale_rn(code, factor, x[1]),))
        self.put(20, (float4.cvt_s0e5m3_to_f16x2_broadcast(words[0]),))

    @cute.jit
    def quantised(self, x: cute.Tensor, w: cute.Tensor, factor: Float32):
        self.put(21, self.halves(blocks.quantize_and_pack_16(x, w[0])))
        low, high = blocks.quantize_and_pack_32(x, w[0])
        self.put(23, (*self.halves(low), *self.halves(high)))
        largest = blocks.max_abs_16(x)
        codes, scale = blocks.quantize_block_fp4(x, largest, factor)
        self.put(27, (*self.halves(codes), scale))
        codes, scale = blocks.quantize_block_fp4_fast(x, largest, factor)
        self.put(30, (*self.halves(codes), scale))
        low, high, scale = blocks.quantize_block_mxfp4(x, blocks.max_abs_32(x))
        self.put(33, (*self.halves(low), *self.halves(high), scale))
        self.put(38, (largest, blocks.max_abs_32(x)))
        codes, scale = blocks.silu_mul_quantize_block_fp4(x, w, factor)
        self.put(72, (*self.halves(codes), scale))
        codes, scale = blocks.relu2_quantize_block_fp4(x, factor)
        self.put(75, (*self.halves(codes), scale))

    @cute.jit
    def put_block(self, place: cutlass.Constexpr[int], block: cute.Tensor):
        for i in cutlass.range_constexpr(cute.size(block)):
            self.put(place + i, (block[i],))

    @cute.jit
    def arithmetic(self, x: cute.Tensor, w: cute.Tensor, factor: Float32):
        self.put_block(40, blocks.silu_mul_16(x, w))
        self.put_block(56, blocks.relu2_16(x))
        y, largest = blocks.compute_y_and_max_abs_f32(x, w, factor)
        self.put_block(128, y)
        self.put(144, (largest,))

    @cute.jit
    def pairs(self, x: cute.Tensor, w: cute.Tensor, factor: Float32):
        a = self.packed(x, conversions.cvt_f32x2_to_half2)
        product = blocks.half2_mul_8(a, self.packed(w, conversions.cvt_f32x2_to_half2))
        self.put_block(78, product)
        self.put(86, (blocks.half2_max_abs_8(product),))
        self.put_block(96, blocks.half2_to_float16(a, factor))
        b = self.packed(x, conversions.cvt_f32x2_to_bfloat2)
        product = blocks.bfloat2_mul_8(b, self.packed(w, conversions.cvt_f32x2_to_bfloat2))
        self.put_block(87, product)
        self.put(95, (blocks.bfloat2_max_abs_8(product),))
        self.put_block(112, blocks.bfloat2_to_float16(b, factor))

    @cute.jit
    def loads(self, x: cute.Pointer, w: cute.Pointer, held: cute.Tensor, tid: Int32):
        layout = cute.make_layout((THREADS, 2 * ROW), stride=(2 * ROW, 1))
        halves = [
            cute.make_tensor(
                cute.make_ptr(Float16, p.toint(), cute.AddressSpace.gmem, assumed_align=16), layout
            )
            for p in (x, w)
        ]
        of_x, of_w = blocks.load_8_half2(*halves, tid, Int32(16), 2 * ROW)
        self.put_block(145, of_x)
        self.put_block(153, of_w)
        shared = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((THREADS, ROW), stride=(ROW, 1)), byte_alignment=16
        )
        for i in cutlass.range_constexpr(ROW):
            shared[tid, i] = held[i]
        cute.arch.barrier()
        other = tid ^ 1
        self.put_block(161, blocks.load_f32_16_from_smem(shared, other, Int32(8)))
        # Four threads have two vectors of four columns each.
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
        threads = cute.make_layout((1, 4), stride=(4, 1))
        tiled = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, 4), stride=(4, 1)))
        coordinates = tiled.get_slice(tid % 4).partition_S(cute.make_identity_tensor((1, ROW)))
        inside = blocks.predicate_k(coordinates, 20)
        self.put(177, (Uint32(cute.size(inside)),))
        for i in cutlass.range_constexpr(cute.size(inside)):
            self.put(178 + i, (Uint32(inside[i]),))


def instance(**_: object):
    data = [make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=16) for _ in range(4)]
    return BlocksKernel(), (*data, cuda.CUstream(0))
