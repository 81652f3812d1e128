"""SwiGLU of experts' rows and its quantisation to e4m3 in blocks of 128, before the second product.

    y = silu(gate) * up                       gate: the first half of a row's columns
    scale[block, row] = max(max |y|, eps) / 448      out = y / scale, to nearest

for the first counts[g] rows of group g; the rest is not written. Eight lanes take a block of a row,
16 values each, so that a warp has 4 KiB under way. The blocks of a group's rows follow one another
through its CTAs, whatever the width.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from .conversions import cvt_f32x4_to_e4m3x4
from .reduce import warp_reduce

BLOCK, THREADS = 128, 128
PER_LANE = 16  # two loads each of gate and value, one store of 16 codes
LANES = BLOCK // PER_LANE  # of a block
BLOCKS_OF_CTA, BLOCKS_OF_WARP = THREADS // LANES, 32 // LANES
LARGEST = 448.0  # of e4m3
LOG2_E = 1.4426950408889634
_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class MoeActivationKernel:
    """The operation for one type of rows.

    Parameters
    ----------
    dtype : cutlass.Numeric
        Type of the rows, of 16 bits.
    """

    def __init__(self, dtype):
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        rows: cute.Pointer,
        out: cute.Pointer,
        scale: cute.Pointer,
        counts: cute.Pointer,
        groups: Int32,
        most: Int32,
        width: Int32,
        ctas: Int32,
        eps: Float32,
        use_pdl: Int32,
        stream: cuda.CUstream,
    ):
        blocks = width // BLOCK
        self.kernel(rows, out, scale, counts, groups, most, blocks, eps).launch(
            grid=[ctas, groups, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=use_pdl != 0
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Pointer,
        out: cute.Pointer,
        scale: cute.Pointer,
        counts: cute.Pointer,
        groups: Int32,
        most: Int32,
        blocks: Int32,
        eps: Float32,
    ):
        slot, group, _ = cute.arch.block_idx()
        slots, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        own, part = lane // LANES, lane % LANES
        first = slot * BLOCKS_OF_CTA + cute.arch.warp_idx() * BLOCKS_OF_WARP
        step = slots * BLOCKS_OF_CTA
        # A lane's row and block advance by a fixed number: one division, not one a block.
        local, block = (first + own) // blocks, (first + own) % blocks
        rows_on, blocks_on = step // blocks, step % blocks
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        count = cute.make_tensor(counts, cute.make_layout(groups))[group]
        valid = cutlass.min(cutlass.max(count, 0), most)
        # Lanes past the last block read the last row and take part in the warp's exchanges.
        for _ in cutlass.range(first, valid * blocks, step, unroll=1):
            row = Int64(group) * most + cutlass.min(local, valid - 1)
            y = self.activated(rows, row, blocks, block, part)
            largest = warp_reduce(largest_of(y), lambda a, b: cute.arch.fmax(a, b), LANES)
            factor = cute.arch.fmax(largest, eps) * Float32(1.0 / LARGEST)
            if local < valid:
                self.write(out, y, cute.arch.rcp_approx(factor), row, blocks, block, part)
                if part == 0:
                    place = Int64(block) * (Int64(groups) * most) + row
                    cute.make_tensor(scale + place, cute.make_layout(1))[0] = factor
            local += rows_on
            block += blocks_on
            if block >= blocks:
                local += 1
                block -= blocks

    @cute.jit
    def activated(self, rows: cute.Pointer, row: Int64, blocks: Int32, block: Int32, part: Int32):
        """A lane's values of a block."""
        start = row * (Int64(blocks) * 2 * BLOCK) + Int64(block * BLOCK + part * PER_LANE)
        gate = self.values_at(rows, start)
        up = self.values_at(rows, start + Int64(blocks) * BLOCK)
        # The fast exponential and reciprocal: the result has 8 bits, its scale is of large gates.
        y = cute.make_rmem_tensor((PER_LANE,), Float32)
        for i in cutlass.range_constexpr(PER_LANE):
            power = cute.math.exp2(gate[i] * Float32(-LOG2_E), fastmath=True)
            y[i] = gate[i] * cute.arch.rcp_approx(1.0 + power) * up[i]
        return y

    @cute.jit
    def values_at(self, rows: cute.Pointer, offset: Int64):
        """A lane's neighbours from an element on, as float32."""
        item = self.dtype.width // 8
        place = cute.make_ptr(
            self.dtype, rows.toint() + offset * item, cute.AddressSpace.gmem, assumed_align=16
        )
        held = cute.make_rmem_tensor((PER_LANE,), self.dtype)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(PER_LANE)), held)
        return held.load().to(Float32)

    @cute.jit
    def write(
        self,
        out: cute.Pointer,
        y: cute.Tensor,
        inverse: Float32,
        row: Int64,
        blocks: Int32,
        block: Int32,
        part: Int32,
    ):
        """Quantise a lane's values and store their codes as four words."""
        words = cute.make_rmem_tensor((PER_LANE // 4,), Uint32)
        for i in cutlass.range_constexpr(PER_LANE // 4):
            words[i] = cvt_f32x4_to_e4m3x4(*(y[4 * i + j] * inverse for j in range(4)))
        place = row * (Int64(blocks) * BLOCK) + Int64(block * BLOCK + part * PER_LANE)
        target = cute.make_ptr(
            Uint32, out.toint() + place, cute.AddressSpace.gmem, assumed_align=PER_LANE
        )
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(PER_LANE // 4)))


@cute.jit
def largest_of(y: cute.Tensor):
    """The largest magnitude among a thread's values; NaN counts as nothing."""
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(PER_LANE):
        largest = cute.arch.fmax(largest, cute.arch.fmax(y[i], -y[i]))
    return largest


def instance(dtype: str):
    """The kernel of a configuration, with arguments of the types that it is compiled for."""
    element = _DTYPES[dtype]

    def pointer(of, align: int = 16):
        return make_ptr(of, 16, cute.AddressSpace.gmem, assumed_align=align)

    return MoeActivationKernel(element), (
        pointer(element),
        pointer(cutlass.Uint8),
        pointer(Float32, 4),
        pointer(Int32, 4),
        *[Int32(1)] * 4,
        Float32(1e-10),
        Int32(0),
        cuda.CUstream(0),
    )
