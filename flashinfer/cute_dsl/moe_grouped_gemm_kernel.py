"""Products of groups of rows with their experts' weights, in e4m3 with scales of blocks, on SM90.

    out[g, r, c] = sum over blocks q of k:  a_scale[g, r, q] b_scale[g, c / 128, q]
                                            sum over k in q of a[g, r, k] b[g, c, k]

for the first counts[g] rows of group g; other rows of `out` are not written. CTAs stay on their SMs
and compute tiles, which `MaskedScheduler` deals. One warp has the copy engine bring blocks of 128
along k, another one copies the scales of each block beside it; two warpgroups multiply. Tensor
cores sum one block; its sum is scaled and added to the result in registers, since no scale is the
same along k.

The tensor cores' left operand has 128 rows, 64 of each warpgroup; the right one has as many as one
asks for. Many rows of `a` are the left operand, in tiles of 128 x 256, and the two CTAs of a
cluster, one below the other, each bring half of the weights for both. Few rows are the right
operand (`swap`), and the left one is 128 rows of weights: then no product is of rows that are not.
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

from .masked_scheduler import MaskedScheduler
from .memory import copy_4_bytes_async, ld_shared_f32, ld_shared_v2_f32, shared_ptr_to_u32
from .tile_store import address_of, has_wide_rows, store, store_turned, store_wide

BLOCK = 128  # along k, and columns that share a scale of b
CONSUMERS = 2  # warpgroups
THREADS = 128 * (1 + CONSUMERS)
STAGE_BYTES = 222 << 10  # of shared memory, for all stages
MAX_STAGES = 12
# Policy of L2 for what is read once, as the copy engine takes it.
EVICT_FIRST = 0x12F0000000000000
_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
_CODES = cutlass.Float8E4M3FN


class GroupedGemmKernel:
    """The product for one type of the result and one tile.

    Parameters
    ----------
    out_dtype : cutlass.Numeric
        Type of the result.
    tile_rows, tile_columns : int
        Size of a tile of `out`: 128 by 128 or 256, or with `swap` 8 to 128 by 128.
    swap : bool
        Whether weights are the left operand.
    cluster_rows : int
        CTAs, one below the other, that share weights: 1 or 2.
    """

    def __init__(self, out_dtype, tile_rows: int, tile_columns: int, swap: bool, cluster_rows: int):
        self.out_dtype, self.swap, self.cluster_rows = out_dtype, swap, cluster_rows
        self.tile_rows, self.tile_columns = tile_rows, tile_columns
        self.right_rows = tile_rows if swap else tile_columns
        # A thread has registers for the products of 128 right rows, beside the sums.
        self.part_rows = min(self.right_rows, 128)
        self.parts = self.right_rows // self.part_rows
        # Scales of a stage: of each row of `a`, then of each 128 columns.
        self.column_scales = tile_columns // BLOCK
        self.scales = tile_rows + self.column_scales
        self.scale_bytes = -(-self.scales * 4 // 16) * 16
        bytes_of_stage = (tile_rows + tile_columns) * BLOCK + self.scale_bytes
        self.stages = min(MAX_STAGES, STAGE_BYTES // bytes_of_stage)

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
        blocks = k // BLOCK
        scales_a = tensor(a_scale, (m, blocks, groups), (a_scale_row, a_scale_k, a_scale_group))
        scales_b = tensor(
            b_scale,
            (cute.ceil_div(n, BLOCK), blocks, groups),
            (b_scale_row, b_scale_k, b_scale_group),
        )
        lengths = tensor(counts, (groups,), (count_stride,))

        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            _CODES,
            _CODES,
            cute.nvgpu.OperandMajorMode.K,
            cute.nvgpu.OperandMajorMode.K,
            Float32,
            (CONSUMERS, 1, 1),
            (64, self.part_rows),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_b = load
        if cutlass.const_expr(self.cluster_rows > 1):
            load_b = cpasync.CopyBulkTensorTileG2SMulticastOp()
        layouts, atoms, views = [], [], []
        for op, matrix, rows, shared in (
            (load, matrix_a, self.tile_rows, 1),
            (load_b, matrix_b, self.tile_columns, self.cluster_rows),
        ):
            layout = hopper_helpers.make_smem_layout_a(
                LayoutEnum.ROW_MAJOR, (rows, 1, BLOCK), _CODES, self.stages
            )
            one_stage = cute.slice_(layout, (None, None, 0))
            atom, view = cpasync.make_tiled_tma_atom(op, matrix, one_stage, (rows, BLOCK), shared)
            layouts.append(layout)
            atoms.append(atom)
            views.append(view)
        self.kernel(
            tiled_mma, tuple(layouts), tuple(atoms), tuple(views), result, scales_a, scales_b,
            lengths, m, n, blocks,
        ).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster_rows, 1, 1] if self.cluster_rows > 1 else None,
            stream=stream,
            use_pdl=use_pdl != 0,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        layouts,
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
        barriers = smem.allocate_array(Int64, 2 * self.stages)
        operands = [
            smem.allocate_tensor(_CODES, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in layouts
        ]
        scales = smem.allocate_array(Float32, self.stages * self.scale_bytes // 4)
        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            # What the copy engine brings counts as one arrival, each lane's scales as another.
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1 + 32),
            # One thread of each multiplying warp, here and in the other CTA of a cluster, says that
            # a stage is free.
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, 4 * CONSUMERS * self.cluster_rows
            ),
            tx_count=(self.tile_rows + self.tile_columns) * BLOCK,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, self.cluster_rows, 1, 1)),
        )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        scheduler = MaskedScheduler(
            lengths, m, cute.ceil_div(n, self.tile_columns), self.tile_rows * self.cluster_rows
        )
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(40)
            if warp_idx == 0:
                self.load_tiles(scheduler, ring, atoms, views, operands, blocks)
            elif warp_idx == 1:
                self.load_scales(scheduler, ring, scales, scales_a, scales_b, blocks)
        else:
            cute.arch.setmaxregister_increase(232)
            self.multiply_tiles(scheduler, ring, tiled_mma, operands, result, scales, n, blocks)

    @cute.jit
    def first_work(self):
        """The first tile of this CTA's cluster, and how many further the next one is."""
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if cutlass.const_expr(self.cluster_rows > 1):
            first, step = first // self.cluster_rows, step // self.cluster_rows
        return first, step

    @cute.jit
    def first_row(self, row: Int32, most: Int32):
        """Where this CTA's part of a row of tiles begins within the group.

        The copy engine takes longer for a row outside a tensor than for a row inside. So the last
        tile ends with the tensor; two tiles then store the same values for the rows they share.
        """
        first = row * (self.tile_rows * self.cluster_rows)
        if cutlass.const_expr(self.cluster_rows > 1):
            first += cute.arch.block_idx_in_cluster() * self.tile_rows
        return cutlass.min(first, cutlass.max(most - self.tile_rows, 0))

    @cute.jit
    def load_tiles(self, scheduler, ring, atoms, views, operands, blocks: Int32):
        """The copying warp: both operands' blocks of each tile, one after the other."""
        # Few rows read weights once; what stays in L2 is then the rows.
        policy = Int64(EVICT_FIRST)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        work, step = self.first_work()
        group, first = scheduler.find(work, Int32(0), Int32(0))
        while group < scheduler.counts.shape[0]:
            row, column = scheduler.tile_of(work, group, first)
            start = self.first_row(row, scheduler.most)
            rows = cute.domain_offset((start, 0, 0), views[0])
            target_a, source_a = self.places(atoms[0], operands[0], rows, self.tile_rows, False)
            target_b, source_b = self.places(
                atoms[1], operands[1], views[1], self.tile_columns, self.cluster_rows > 1
            )
            for q in cutlass.range(blocks, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                cute.copy(
                    atoms[0],
                    source_a[None, 0, q, group],
                    target_a[None, state.index],
                    tma_bar_ptr=barrier,
                )
                source, target = source_b[None, column, q, group], target_b[None, state.index]
                if cutlass.const_expr(self.cluster_rows > 1):
                    mask = cutlass.Int16((1 << self.cluster_rows) - 1)
                    cute.copy(atoms[1], source, target, tma_bar_ptr=barrier, mcast_mask=mask)
                elif cutlass.const_expr(self.swap):
                    cute.copy(atoms[1], source, target, tma_bar_ptr=barrier, cache_policy=policy)
                else:
                    cute.copy(atoms[1], source, target, tma_bar_ptr=barrier)
                state.advance()
            work += step
            group, first = scheduler.find(work, group, first)
        ring.producer_tail(state)

    @cute.jit
    def places(self, atom, operand, view, rows: cutlass.Constexpr, shared: cutlass.Constexpr):
        """Where an operand's blocks go, by stage, and come from, by row of tiles, block, group."""
        tiles = cute.local_tile(view, (rows, BLOCK), (None, None, None))
        part, parts = 0, cute.make_layout(1)
        if cutlass.const_expr(shared):
            part, parts = cute.arch.block_idx_in_cluster(), cute.make_layout(self.cluster_rows)
        return cpasync.tma_partition(
            atom, part, parts, cute.group_modes(operand, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def load_scales(self, scheduler, ring, scales, scales_a, scales_b, blocks: Int32):
        """The warp that copies scales: those of each block, to its stage.

        They come as early as their blocks. Threads that multiply would wait for their own loads
        longer than for a block's products.
        """
        lane = cute.arch.lane_idx()
        each = -(-self.scales // 32)
        base = shared_ptr_to_u32(scales) + lane * 4
        addresses = cute.make_rmem_tensor((each,), Int64)
        steps = cute.make_rmem_tensor((each,), Int64)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        work, step = self.first_work()
        group, first = scheduler.find(work, Int32(0), Int32(0))
        while group < scheduler.counts.shape[0]:
            row, column = scheduler.tile_of(work, group, first)
            start, valid = self.first_row(row, scheduler.most), scheduler.rows_of(group)
            for i in cutlass.range_constexpr(each):
                index = lane + 32 * i
                # Rows past the last one have no scales; their sums are not stored.
                place = (cutlass.min(start + index, valid - 1), 0, group)
                addresses[i] = address_of(scales_a, place)
                steps[i] = Int64(scales_a.layout.stride[1]) * 4
                if index >= self.tile_rows:
                    of_column = column * self.column_scales + index - self.tile_rows
                    place = (cutlass.min(of_column, scales_b.shape[0] - 1), 0, group)
                    addresses[i] = address_of(scales_b, place)
                    steps[i] = Int64(scales_b.layout.stride[1]) * 4
            for _ in cutlass.range(blocks, unroll=1):
                ring.sync_object_empty.wait(state.index, state.phase)
                target = base + state.index * self.scale_bytes
                for i in cutlass.range_constexpr(each):
                    if lane + 32 * i < self.scales:
                        copy_4_bytes_async(target + 128 * i, addresses[i])
                    addresses[i] += steps[i]
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.producer_get_barrier(state))
                state.advance()
            work += step
            group, first = scheduler.find(work, group, first)

    @cute.jit
    def multiply_tiles(
        self, scheduler, ring, tiled_mma, operands, result, scales, n: Int32, blocks: Int32
    ):
        """The multiplying warpgroups: 64 left rows of each tile for each of them."""
        thread = tiled_mma.get_slice(cute.arch.thread_idx()[0] - 128)
        left, right = (operands[1], operands[0]) if self.swap else (operands[0], operands[1])
        right_parts = [
            cute.local_tile(right, (self.part_rows, BLOCK), (part, 0, None))
            for part in range(self.parts)
        ]
        fragments = (
            tiled_mma.make_fragment_A(thread.partition_A(left)),
            *[tiled_mma.make_fragment_B(thread.partition_B(rows)) for rows in right_parts],
        )
        # Of each four values of a thread, two neighbours have a left row and two the one 8 below.
        places = thread.partition_C(cute.make_identity_tensor((128, self.right_rows)))
        products = cute.make_rmem_tensor(thread.partition_shape_C((128, self.part_rows)), Float32)
        total = cute.make_rmem_tensor((cute.size(places),), Float32)
        base = shared_ptr_to_u32(scales)
        wide = has_wide_rows(result, n)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        work, step = self.first_work()
        group, first = scheduler.find(work, Int32(0), Int32(0))
        while group < scheduler.counts.shape[0]:
            row, column = scheduler.tile_of(work, group, first)
            valid = scheduler.rows_of(group)
            start = self.first_row(row, scheduler.most)
            total.fill(0.0)
            for _ in cutlass.range(blocks, unroll=1):
                ring.consumer_wait(state)
                for part in cutlass.range_constexpr(self.parts):
                    self.start(tiled_mma, products, fragments, part, state.index)
                    if cutlass.const_expr(part == 0):
                        # In the time of the products.
                        factors = self.factors(base + state.index * self.scale_bytes, places)
                    warpgroup.wait_group(0)
                    if cutlass.const_expr(part == self.parts - 1):
                        ring.consumer_release(state)
                    self.add(total, products, factors, part)
                state.advance()
            origin = (start, column * self.tile_columns, group)
            if cutlass.const_expr(self.swap):
                store_turned(total, places, result, origin, (valid, n))
            elif cutlass.const_expr(self.out_dtype.width == 16):
                if wide:
                    store_wide(total, places, result, origin, (valid, n))
                else:
                    store(total, places, result, origin, (valid, n))
            else:
                store(total, places, result, origin, (valid, n))
            work += step
            group, first = scheduler.find(work, group, first)

    def row_scales(self) -> int:
        """Rows of `a` that a thread has values of."""
        return self.right_rows // 4 if self.swap else 2

    @cute.jit
    def factors(self, scales: Int32, places):
        """Load what products are multiplied with: for each part, each of a thread's rows."""
        rows = self.row_scales()
        held = cute.make_rmem_tensor((rows,), Float32)
        if cutlass.const_expr(self.swap):
            own = scales + places[0][1] * 4  # two neighbours, and those 8 further on
            for i in cutlass.range_constexpr(rows // 2):
                held[2 * i], held[2 * i + 1] = ld_shared_v2_f32(own + 32 * i)
        else:
            for i in cutlass.range_constexpr(rows):
                held[i] = ld_shared_f32(scales + places[2 * i][0] * 4)
        found = cute.make_rmem_tensor((rows, self.parts), Float32)
        for part in cutlass.range_constexpr(self.parts):
            of_column = ld_shared_f32(scales + (self.tile_rows + part) * 4)
            for i in cutlass.range_constexpr(rows):
                found[i, part] = held[i] * of_column
        return found

    @cute.jit
    def start(self, tiled_mma, products, fragments, part: cutlass.Constexpr, stage: Int32):
        """Start the products of a stage with one part of the right rows."""
        left, right = fragments[0], fragments[1 + part]
        warpgroup.fence()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for step in cutlass.range_constexpr(cute.size(left, mode=[2])):
            at = (None, None, step, stage)
            cute.gemm(tiled_mma, products, left[at], right[at], products)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def add(self, total, products, factors, part: cutlass.Constexpr):
        """Scale products and add them to a thread's sums."""
        count = cute.size(products)
        for i in cutlass.range_constexpr(count):
            row = i // 4 * 2 + i % 2 if self.swap else i // 2 % 2
            total[part * count + i] += products[i] * factors[row, part]


def tensor(pointer: cute.Pointer, shape, stride):
    """A tensor in global memory."""
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def instance(
    dtype_out: str, tile_rows: int, tile_columns: int, swap: int, cluster_rows: int, **_: object
):
    """The kernel of a configuration, with arguments of the types that it is compiled for."""
    out_dtype = _DTYPES[dtype_out]

    def pointer(element, align: int = 16):
        return make_ptr(element, 16, cute.AddressSpace.gmem, assumed_align=align)

    pointers = [
        pointer(_CODES),
        pointer(_CODES),
        pointer(out_dtype, 2 * out_dtype.width // 8),
        pointer(Float32, 4),
        pointer(Float32, 4),
        pointer(Int32, 4),
    ]
    sizes, strides = [Int32(1)] * 4, [Int64(16)] * 12
    rest = [Int32(1), Int32(1), Int32(0), cuda.CUstream(0)]
    kernel = GroupedGemmKernel(out_dtype, tile_rows, tile_columns, bool(swap), cluster_rows)
    return kernel, (*pointers, *sizes, *strides, *rest)
