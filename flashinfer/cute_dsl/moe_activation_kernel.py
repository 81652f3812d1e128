"""SwiGLU of experts' rows and its quantisation to e4m3 in blocks of 128, before the second product.

    y = silu(gate) * up                       gate: the first half of a row's columns
    scale[block, row] = max(max |y|, eps) / 448      out = y / scale, to nearest

for the first counts[g] rows of group g; the rest is not written. A warp takes one block of a row, a
CTA four neighbouring ones; the CTAs of a group take its rows in turn.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from .conversions import cvt_f32x4_to_e4m3x4
from .reduce import warp_reduce

BLOCK, LANES = 128, 32
PER_LANE = BLOCK // LANES
WARPS = 4
LARGEST = 448.0  # of e4m3
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
            grid=[cute.ceil_div(blocks, WARPS), ctas, groups],
            block=[LANES * WARPS, 1, 1],
            stream=stream,
            use_pdl=use_pdl != 0,
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
        across, slot, group = cute.arch.block_idx()
        _, slots, _ = cute.arch.grid_dim()
        block = across * WARPS + cute.arch.warp_idx()
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        count = cute.make_tensor(counts, cute.make_layout(groups))[group]
        valid = cutlass.min(cutlass.max(count, 0), most)
        if block < blocks:
            for local in cutlass.range(slot, valid, slots, unroll=1):
                row = Int64(group) * most + local
                y = self.activated(rows, row, blocks, block, lane)
                largest = warp_reduce(largest_of(y), lambda a, b: cute.arch.fmax(a, b))
                factor = cute.arch.fmax(largest, eps) / LARGEST
                self.write(out, y, Float32(1.0) / factor, row, blocks, block, lane)
                if lane == 0:
                    place = Int64(block) * (Int64(groups) * most) + row
                    cute.make_tensor(scale + place, cute.make_layout(1))[0] = factor

    @cute.jit
    def activated(self, rows: cute.Pointer, row: Int64, blocks: Int32, block: Int32, lane: Int32):
        """A lane's four values of a block."""
        start = row * (Int64(blocks) * 2 * BLOCK) + Int64(block * BLOCK + lane * PER_LANE)
        gate = self.four_at(rows, start)
        up = self.four_at(rows, start + Int64(blocks) * BLOCK)
        return gate / (1.0 + cute.math.exp(-gate)) * up

    @cute.jit
    def four_at(self, rows: cute.Pointer, offset: Int64):
        item = self.dtype.width // 8
        place = cute.make_ptr(
            self.dtype,
            rows.toint() + offset * item,
            cute.AddressSpace.gmem,
            assumed_align=PER_LANE * item,
        )
        held = cute.make_rmem_tensor((PER_LANE,), self.dtype)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(PER_LANE)), held)
        return held.load().to(Float32)

    @cute.jit
    def write(
        self,
        out: cute.Pointer,
        y: cute.TensorSSA,
        inverse: Float32,
        row: Int64,
        blocks: Int32,
        block: Int32,
        lane: Int32,
    ):
        """Quantise a lane's values and store their codes as one word."""
        scaled = cute.make_rmem_tensor((PER_LANE,), Float32)
        scaled.store(y * inverse)
        codes = cvt_f32x4_to_e4m3x4(*(scaled[i] for i in range(PER_LANE)))
        place = row * (Int64(blocks) * BLOCK) + Int64(block * BLOCK + lane * PER_LANE)
        word = cute.make_ptr(
            Uint32, out.toint() + place, cute.AddressSpace.gmem, assumed_align=PER_LANE
        )
        cute.make_tensor(word, cute.make_layout(1))[0] = codes


@cute.jit
def largest_of(y: cute.TensorSSA):
    """The largest magnitude among a thread's values; NaN counts as nothing."""
    held = cute.make_rmem_tensor((PER_LANE,), Float32)
    held.store(y)
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(PER_LANE):
        largest = cute.arch.fmax(largest, cute.arch.fmax(held[i], -held[i]))
    return largest


def instance(dtype: str):
    """The kernel of a configuration, with arguments of the types that it is compiled for."""
    element = _DTYPES[dtype]

    def pointer(of, align: int):
        return make_ptr(of, 16, cute.AddressSpace.gmem, assumed_align=align)

    return MoeActivationKernel(element), (
        pointer(element, 8),
        pointer(cutlass.Uint8, 4),
        pointer(Float32, 4),
        pointer(Int32, 4),
        *[Int32(1)] * 4,
        Float32(1e-10),
        Int32(0),
        cuda.CUstream(0),
    )
