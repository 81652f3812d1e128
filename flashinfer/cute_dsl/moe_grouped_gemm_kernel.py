"""Products of groups of rows with their experts' weights, in e4m3 with scales of blocks, on SM90.

    out[g, r, c] = sum over blocks q of k:  a_scale[g, r, q] b_scale[g, c / 128, q]
                                            sum over k in q of a[g, r, k] b[g, c, k]

for the first counts[g] rows of group g; other rows of `out` are not written. A CTA stays on its SM
and computes tiles of 128 x 128, which `MaskedScheduler` deals. One warp has the copy engine bring
blocks of 128 along k; two warpgroups multiply, each 64 rows. Tensor cores sum one block; its sum is
scaled and added to the result in registers, since no scale is the same along k.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

TILE = (128, 128, 128)  # rows, columns, k: b_scale has one number for a tile's columns
STAGES = 6
CONSUMERS = 2  # warpgroups
THREADS = 128 * (1 + CONSUMERS)
_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


class MaskedScheduler:
    """Deals the tiles of all groups' valid rows to CTAs: tile `work`, then each grid size further.

    Tiles of a group follow one another down its rows, so that CTAs that run together share weights.
    Every warp computes the same schedule from the counts.

    Parameters
    ----------
    counts : cute.Tensor
        Valid rows of each group.
    most : Int32
        Rows that a group has at most.
    columns : Int32
        Tiles along the columns.
    """

    def __init__(self, counts: cute.Tensor, most: Int32, columns: Int32):
        self.counts, self.most, self.columns = counts, most, columns

    # These two let a loop at run time carry an object.
    def __extract_mlir_values__(self):
        return [v for part in self._parts() for v in cutlass.extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values):
        rest, parts = list(values), []
        for part in self._parts():
            count = len(cutlass.extract_mlir_values(part))
            parts.append(cutlass.new_from_mlir_values(part, rest[:count]))
            rest = rest[count:]
        return MaskedScheduler(*parts)

    def _parts(self):
        return self.counts, self.most, self.columns

    @cute.jit
    def rows_of(self, group: Int32):
        """Valid rows of a group."""
        return cutlass.min(cutlass.max(self.counts[group], 0), self.most)

    @cute.jit
    def find(self, work: Int32, group: Int32, first: Int32):
        """The group that a tile lies in, from `group` on, whose first tile is `first`.

        Returns the group, or the number of groups after the last tile, and its first tile.
        """
        groups = self.counts.shape[0]
        searching = Int32(1)
        while searching == 1:
            tiles = Int32(0)
            if group < groups:
                tiles = cute.ceil_div(self.rows_of(group), TILE[0]) * self.columns
            if group >= groups or work < first + tiles:
                searching = Int32(0)
            else:
                first += tiles
                group += 1
        return group, first

    @cute.jit
    def tile_of(self, work: Int32, group: Int32, first: Int32):
        """Row and column of a tile within its group, in tiles."""
        down = cute.ceil_div(self.rows_of(group), TILE[0])
        local = work - first
        return local % down, local // down


class GroupedGemmKernel:
    """The product for one type of the result.

    Parameters
    ----------
    out_dtype : cutlass.Numeric
        Type of the result.
    """

    def __init__(self, out_dtype):
        self.out_dtype = out_dtype

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        out: cute.Pointer,
        a_scale: cute.Pointer,
        b_scale: cute.Pointer,
        counts: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        groups: Int32,
        a_row: Int64,
        a_group: Int64,
        b_row: Int64,
        b_group: Int64,
        out_row: Int64,
        out_group: Int64,
        a_scale_row: Int64,
        a_scale_k: Int64,
        a_scale_group: Int64,
        b_scale_row: Int64,
        b_scale_k: Int64,
        b_scale_group: Int64,
        count_stride: Int32,
        ctas: Int32,
        use_pdl: Int32,
        stream: cuda.CUstream,
    ):
        # The copy engine wants strides of whole 16 bytes, which the binding has checked.
        aligned = [cute.assume(s, divby=16) for s in (a_row, a_group, b_row, b_group)]
        matrix_a = tensor(a, (m, k, groups), (aligned[0], 1, aligned[1]))
        matrix_b = tensor(b, (n, k, groups), (aligned[2], 1, aligned[3]))
        result = tensor(out, (m, n, groups), (out_row, 1, out_group))
        blocks = k // TILE[2]
        scales_a = tensor(a_scale, (m, blocks, groups), (a_scale_row, a_scale_k, a_scale_group))
        scales_b = tensor(
            b_scale,
            (cute.ceil_div(n, TILE[1]), blocks, groups),
            (b_scale_row, b_scale_k, b_scale_group),
        )
        lengths = tensor(counts, (groups,), (count_stride,))

        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            cutlass.Float8E4M3FN,
            cutlass.Float8E4M3FN,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K,
            Float32,
            (CONSUMERS, 1, 1),
            (64, TILE[1]),
        )
        layout = hopper_helpers.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, TILE, cutlass.Float8E4M3FN, STAGES
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        one_stage = cute.slice_(layout, (None, None, 0))
        atom_a, view_a = cpasync.make_tiled_tma_atom(load, matrix_a, one_stage, (TILE[0], TILE[2]))
        atom_b, view_b = cpasync.make_tiled_tma_atom(load, matrix_b, one_stage, (TILE[1], TILE[2]))
        self.kernel(
            tiled_mma, layout, (atom_a, atom_b), (view_a, view_b), result, scales_a, scales_b,
            lengths, m, n, blocks,
        ).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=use_pdl != 0
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        layout: cute.ComposedLayout,
        atoms,
        views,
        result: cute.Tensor,
        scales_a: cute.Tensor,
        scales_b: cute.Tensor,
        lengths: cute.Tensor,
        m: Int32,
        n: Int32,
        blocks: Int32,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * STAGES)
        operands = [
            smem.allocate_tensor(
                cutlass.Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner
            )
            for _ in range(2)
        ]
        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # One thread of each multiplying warp says that a stage is free.
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * CONSUMERS),
            tx_count=(TILE[0] + TILE[1]) * TILE[2],
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        scheduler = MaskedScheduler(lengths, m, cute.ceil_div(n, TILE[1]))
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(40)
            if warp_idx == 0:
                self.load_tiles(scheduler, ring, atoms, views, operands, blocks)
        else:
            cute.arch.setmaxregister_increase(232)
            self.multiply_tiles(
                scheduler, ring, tiled_mma, operands, result, scales_a, scales_b, n, blocks
            )

    @cute.jit
    def load_tiles(self, scheduler, ring, atoms, views, operands, blocks: Int32):
        """The copying warp: both operands' blocks of each tile, one after the other."""
        parts = []
        for atom, view, operand, rows in zip(atoms, views, operands, TILE[:2], strict=True):
            tiles = cute.local_tile(view, (rows, TILE[2]), (None, None, None))
            parts.append(
                cpasync.tma_partition(
                    atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(operand, 0, 2),
                    cute.group_modes(tiles, 0, 2),
                )
            )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        work = cute.arch.block_idx()[0]
        group, first = scheduler.find(work, Int32(0), Int32(0))
        while group < scheduler.counts.shape[0]:
            row, column = scheduler.tile_of(work, group, first)
            for q in cutlass.range(blocks, unroll=1):
                ring.producer_acquire(state)
                for i in cutlass.range_constexpr(2):
                    target, source = parts[i]
                    tile = (None, row if i == 0 else column, q, group)
                    cute.copy(
                        atoms[i],
                        source[tile],
                        target[None, state.index],
                        tma_bar_ptr=ring.producer_get_barrier(state),
                    )
                state.advance()
            work += cute.arch.grid_dim()[0]
            group, first = scheduler.find(work, group, first)
        ring.producer_tail(state)

    @cute.jit
    def multiply_tiles(
        self, scheduler, ring, tiled_mma, operands, result, scales_a, scales_b, n, blocks: Int32
    ):
        """The multiplying warpgroups: 64 rows of each tile for each of them."""
        thread = tiled_mma.get_slice(cute.arch.thread_idx()[0] - 128)
        fragments_a = tiled_mma.make_fragment_A(thread.partition_A(operands[0]))
        fragments_b = tiled_mma.make_fragment_B(thread.partition_B(operands[1]))
        places = thread.partition_C(cute.make_identity_tensor(TILE[:2]))
        block_sum = cute.make_rmem_tensor(places.shape, Float32)
        total = cute.make_rmem_tensor(places.shape, Float32)
        # A thread has two rows, eight apart: values 2 and 3 of each four are of the second.
        rows = (places[0][0], places[2][0])
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        work = cute.arch.block_idx()[0]
        group, first = scheduler.find(work, Int32(0), Int32(0))
        while group < scheduler.counts.shape[0]:
            row, column = scheduler.tile_of(work, group, first)
            valid = scheduler.rows_of(group)
            own = [row * TILE[0] + r for r in rows]
            # Rows past the last one have no scales; their sums are not stored.
            safe = [cutlass.min(r, valid - 1) for r in own]
            total.fill(0.0)
            for q in cutlass.range(blocks, unroll=1):
                of_columns = scales_b[column, q, group]
                factors = [scales_a[r, q, group] * of_columns for r in safe]
                ring.consumer_wait(state)
                warpgroup.fence()
                tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
                for part in cutlass.range_constexpr(cute.size(fragments_a, mode=[2])):
                    at = (None, None, part, state.index)
                    cute.gemm(tiled_mma, block_sum, fragments_a[at], fragments_b[at], block_sum)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                ring.consumer_release(state)
                state.advance()
                for i in cutlass.range_constexpr(cute.size(total)):
                    total[i] += block_sum[i] * factors[i // 2 % 2]
            self.store_tile(total, places, result, own, column, group, valid, n)
            work += cute.arch.grid_dim()[0]
            group, first = scheduler.find(work, group, first)

    @cute.jit
    def store_tile(self, total, places, result, rows, column, group, valid, n):
        """Round and store a tile's valid rows: two neighbours at a time, as threads have them."""
        pair = cute.make_rmem_tensor((2,), self.out_dtype)
        for i in cutlass.range_constexpr(cute.size(total) // 2):
            row, place = rows[i % 2], column * TILE[1] + places[2 * i][1]
            if row < valid and place < n:
                for j in cutlass.range_constexpr(2):
                    pair[j] = total[2 * i + j].to(self.out_dtype)
                address = (
                    result.iterator + cute.crd2idx((row, place, group), result.layout)
                ).toint()
                neighbours = cute.make_ptr(
                    self.out_dtype,
                    address,
                    cute.AddressSpace.gmem,
                    assumed_align=2 * self.out_dtype.width // 8,
                )
                cute.autovec_copy(pair, cute.make_tensor(neighbours, cute.make_layout(2)))


def tensor(pointer: cute.Pointer, shape, stride):
    """A tensor in global memory."""
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def instance(dtype_out: str, **_: object):
    """The kernel of a configuration, with arguments of the types that it is compiled for."""
    out_dtype = _DTYPES[dtype_out]

    def pointer(element, align: int = 16):
        return make_ptr(element, 16, cute.AddressSpace.gmem, assumed_align=align)

    pointers = [
        pointer(cutlass.Float8E4M3FN),
        pointer(cutlass.Float8E4M3FN),
        pointer(out_dtype, 2 * out_dtype.width // 8),
        pointer(Float32, 4),
        pointer(Float32, 4),
        pointer(Int32, 4),
    ]
    sizes, strides = [Int32(1)] * 4, [Int64(16)] * 12
    rest = [Int32(1), Int32(1), Int32(0), cuda.CUstream(0)]
    return GroupedGemmKernel(out_dtype), (*pointers, *sizes, *strides, *rest)
