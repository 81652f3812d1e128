"""Stores a tile of a product from the registers of the tensor cores' sums.

Of each four sums of a thread, two are neighbours in a left row and two in the row 8 below.
Functions take a thread's sums (`total`), where these lie in the tile (`places`), the result, the
tile's first row, column and group (`origin`), and how many rows and columns there are (`limits`).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from .conversions import cvt_f32x2_to_bfloat2, cvt_f32x2_to_half2
from .memory import st_global_v4_u32


@cute.jit
def address_of(x: cute.Tensor, place):
    """The address of an element."""
    return (x.iterator + cute.crd2idx(place, x.layout)).toint()


@cute.jit
def has_wide_rows(result: cute.Tensor, n: Int32):
    """Whether 8 neighbouring columns of 16 bits can be stored at once."""
    stride = result.layout.stride
    wide = (n % 8 == 0) & (result.iterator.toint() % 16 == 0)
    return wide & (stride[0] % 8 == 0) & (stride[2] % 8 == 0)


@cute.jit
def store(total, places, result, origin, limits):
    """Round and store a tile's valid rows: two neighbours at a time, as threads have them."""
    for i in cutlass.range_constexpr(cute.size(total) // 2):
        row, column = origin[0] + places[2 * i][0], origin[1] + places[2 * i][1]
        if row < limits[0] and column < limits[1]:
            _store_pair(result, (row, column, origin[2]), total[2 * i], total[2 * i + 1])


@cute.jit
def store_wide(total, places, result, origin, limits):
    """The same of 8 neighbours of 16 bits at a time: stores of 4 bytes fill no sector of memory.

    Four threads have two of 8 columns each. They exchange four times 8 columns, so that each has
    one of the four whole.
    """
    lane = cute.arch.lane_idx() % 4
    pack = cvt_f32x2_to_bfloat2
    if cutlass.const_expr(result.element_type is cutlass.Float16):
        pack = cvt_f32x2_to_half2
    for i in cutlass.range_constexpr(cute.size(total) // 8):
        # Sixteen sums are four times two columns of a row, and of the one 8 below.
        first = i // 2 * 16 + i % 2 * 2
        words = [pack(total[first + 4 * j], total[first + 4 * j + 1]) for j in range(4)]
        for step in (1, 2):
            odd = lane & step != 0
            for low in (j for j in range(4) if j & step == 0):
                mine, other = words[low], words[low + step]
                received = cute.arch.shuffle_sync_bfly(mine if odd else other, offset=step)
                words[low] = received if odd else mine
                words[low + step] = other if odd else received
        row = origin[0] + places[first][0]
        # The first of the thread's own two columns, and from there to those that it now has.
        column = origin[1] + places[first][1] + lane * (8 - 2)
        if row < limits[0] and column < limits[1]:
            st_global_v4_u32(address_of(result, (row, column, origin[2])), *words)


@cute.jit
def store_turned(total, places, result, origin, limits):
    """The same as `store` where left rows are columns of the result.

    A thread's neighbours are then of two rows. Two threads with neighbouring columns exchange a
    value, so that each has two of one row.
    """
    odd = cute.arch.lane_idx() // 4 % 2 == 1
    for i in cutlass.range_constexpr(cute.size(total) // 2):
        mine, other = total[2 * i], total[2 * i + 1]
        sent = mine if odd else other
        received = cute.arch.shuffle_sync_bfly(sent, offset=4)
        low = received if odd else mine
        high = other if odd else received
        row, column = origin[0] + places[2 * i][1], origin[1] + places[2 * i][0]
        if odd:
            row += 1
            column -= 1
        if row < limits[0] and column < limits[1]:
            _store_pair(result, (row, column, origin[2]), low, high)


@cute.jit
def _store_pair(result, place, low: Float32, high: Float32):
    """Round and store two neighbouring columns."""
    element = result.element_type
    pair = cute.make_rmem_tensor((2,), element)
    pair[0], pair[1] = low.to(element), high.to(element)
    neighbours = cute.make_ptr(
        element,
        address_of(result, place),
        cute.AddressSpace.gmem,
        assumed_align=2 * element.width // 8,
    )
    cute.autovec_copy(pair, cute.make_tensor(neighbours, cute.make_layout(2)))
