"""Reductions over the threads of a warp, of a CTA, of a cluster, and of a row of several threads.

Every thread of the group gets the result. The order of the operations does not depend on timing, so
results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
from cutlass import Float32, Int32, cute


@cute.jit
def warp_reduce(val, op, width: cutlass.Constexpr[int] = 32):
    """Reduce over groups of `width` neighbouring lanes, a power of two up to 32."""
    if cutlass.const_expr(isinstance(val, cute.TensorSSA)):
        reduced = cute.make_rmem_tensor(val.shape, val.dtype)
        reduced.store(val)
        for i in cutlass.range_constexpr(cute.size(val.shape)):
            reduced[i] = warp_reduce(reduced[i], op, width)
        return reduced.load()
    return cute.arch.warp_reduction(val, op, threads_in_group=width)


@cute.jit
def block_reduce(val: Float32, op: Callable, reduction_buffer: cute.Tensor, init_val: Float32):
    """Reduce what each warp has reduced over the warps that share a row of the CTA.

    `reduction_buffer` is in shared memory, ``(rows, warps of a row)``. A CTA that reduces again
    needs another buffer: the values of the first are read without a barrier after that.
    """
    lane_idx, warp_idx = cute.arch.lane_idx(), cute.arch.warp_idx()
    warps_per_row = cute.size(reduction_buffer.shape[1])
    row_idx, column = warp_idx // warps_per_row, warp_idx % warps_per_row
    if lane_idx == 0:
        reduction_buffer[row_idx, column] = val
    cute.arch.barrier()
    # No more lanes than a row has warps, rounded up to a power of two: fewer shuffles.
    width = 1 << (warps_per_row - 1).bit_length()
    reduced = init_val
    if lane_idx % width < warps_per_row:
        reduced = reduction_buffer[row_idx, lane_idx % width]
    return warp_reduce(reduced, op, width)


@cute.jit
def cluster_reduce(
    val: Float32,
    op: Callable,
    reduction_buffer: cute.Tensor,
    mbar_ptr: cute.Pointer,
    cluster_n: cutlass.Constexpr[int],
    init_val: Float32,
):
    """Reduce what each warp has reduced over the warps of all CTAs that share a row.

    Each warp writes its value to every CTA of the cluster, which counts the bytes in its mbarrier.
    `reduction_buffer` is ``(rows, (warps of a row, cluster_n))``. The mbarrier has been initialised
    for one arrival, and the cluster has seen that. It is used for one reduction.
    """
    cta_rank = cute.arch.block_idx_in_cluster()
    lane_idx, warp_idx = cute.arch.lane_idx(), cute.arch.warp_idx()
    rows = reduction_buffer.shape[0]
    warps_per_row = reduction_buffer.shape[1][0]
    row_idx, column = warp_idx // warps_per_row, warp_idx % warps_per_row
    if warp_idx == 0:
        with cute.arch.elect_one():
            bytes_expected = rows * warps_per_row * cluster_n * Float32.width // 8
            cute.arch.mbarrier_arrive_and_expect_tx(mbar_ptr, bytes_expected)
    if lane_idx < cluster_n:
        own = elem_pointer(reduction_buffer, (row_idx, (column, cta_rank)))
        store_shared_remote(val, own, mbar_ptr, lane_idx)
    cute.arch.mbarrier_wait(mbar_ptr, phase=0)
    reduced = init_val
    for i in cutlass.range_constexpr(cute.ceil_div(warps_per_row * cluster_n, 32)):
        idx = lane_idx + i * 32
        if idx < warps_per_row * cluster_n:
            reduced = op(reduced, reduction_buffer[row_idx, idx])
    return warp_reduce(reduced, op)


@cute.jit
def row_reduce(
    x,
    op: cutlass.Constexpr,
    threads_per_row: cutlass.Constexpr[int],
    reduction_buffer: cute.Tensor,
    mbar_ptr,
    cluster_n: cutlass.Constexpr[int],
    init_val: Float32,
):
    """Reduce the elements that a row's threads hold: `x` of each thread, then over the threads.

    `op` is ``cute.ReductionOp.ADD``, ``MAX`` or ``MIN``. A row of more than 32 threads takes whole
    warps and needs the buffer; one of several CTAs needs the mbarrier, too.
    """
    val = x.reduce(op, init_val=init_val, reduction_profile=0)
    combine = _COMBINE[op]
    val = warp_reduce(val, combine, width=min(threads_per_row, 32))
    if cutlass.const_expr(cluster_n > 1):
        val = cluster_reduce(val, combine, reduction_buffer, mbar_ptr, cluster_n, init_val)
    elif cutlass.const_expr(threads_per_row > 32):
        val = block_reduce(val, combine, reduction_buffer, init_val)
    return val


_COMBINE = {
    cute.ReductionOp.ADD: lambda a, b: a + b,
    cute.ReductionOp.MAX: lambda a, b: cute.arch.fmax(a, b),
    cute.ReductionOp.MIN: lambda a, b: cute.arch.fmin(a, b),
}


@cute.jit
def elem_pointer(x: cute.Tensor, coord):
    """Pointer to an element of a tensor."""
    return x.iterator + cute.crd2idx(coord, x.layout)


@cute.jit
def set_block_rank(smem_ptr: cute.Pointer, peer_cta_rank_in_cluster: Int32):
    """The address in the cluster's shared memory of a place in another CTA's."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[smem_ptr.toint(), peer_cta_rank_in_cluster],
    )


@cute.jit
def store_shared_remote(
    val: Float32, smem_ptr: cute.Pointer, mbar_ptr: cute.Pointer, peer_cta_rank_in_cluster: Int32
):
    """Write to the same place of another CTA's shared memory; its mbarrier counts the bytes."""
    place = set_block_rank(smem_ptr, peer_cta_rank_in_cluster)
    barrier = set_block_rank(mbar_ptr, peer_cta_rank_in_cluster)
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[place, val, barrier],
    )
