"""Sum of the experts' rows of each token, with the router's weights, after the second product.

    out[t] = sum over j, in order, of weight[t, j] * rows[entry_row[t, j]]     other rows: none

A CTA takes a part of a token's columns, a vector a thread, so that few tokens have many CTAs. All
rows of a vector are loaded before the first is added. The order is fixed, where atomic additions
would give other roundings in each run. csrc/cute_dsl_moe_finalize.cc launches what is compiled
here, in the place of moe_combine.cu.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

VECTOR, THREADS = 8, 128
_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


class MoeFinalizeKernel:
    """The sum of `top_k` rows.

    Parameters
    ----------
    dtype, out_dtype : cutlass.Numeric
        Types of the rows, of 16 bits, and of the result.
    top_k : int
        Experts of a token.
    """

    def __init__(self, dtype, out_dtype, top_k: int):
        self.dtype, self.out_dtype, self.top_k = dtype, out_dtype, top_k

    @cute.jit
    def __call__(
        self,
        rows: cute.Pointer,
        entry_row: cute.Pointer,
        weights: cute.Pointer,
        out: cute.Pointer,
        rows_stride: Int64,
        out_stride: Int64,
        num_rows: Int32,
        tokens: Int32,
        hidden: Int32,
        use_pdl: Int32,
        stream: cuda.CUstream,
    ):
        parts = cute.ceil_div(hidden, VECTOR * THREADS)
        numbers = (rows_stride, out_stride, num_rows, hidden, parts)
        self.kernel(rows, entry_row, weights, out, *numbers).launch(
            grid=[tokens * parts, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=use_pdl != 0,
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Pointer,
        entry_row: cute.Pointer,
        weights: cute.Pointer,
        out: cute.Pointer,
        rows_stride: Int64,
        out_stride: Int64,
        num_rows: Int32,
        hidden: Int32,
        parts: Int32,
    ):
        token = cute.arch.block_idx()[0] // parts
        part = cute.arch.block_idx()[0] - token * parts
        vector = part * THREADS + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        layout = cute.make_layout(self.top_k)
        own_rows = cute.make_tensor(entry_row + Int64(token) * self.top_k, layout)
        own_weights = cute.make_tensor(weights + Int64(token) * self.top_k, layout)
        entries = [own_rows[j] for j in range(self.top_k)]
        # One compare: as an unsigned number, a negative one is beyond the last row, too.
        is_there = [Uint32(entry) < Uint32(num_rows) for entry in entries]
        factors = [own_weights[j] for j in range(self.top_k)]
        if vector < hidden // VECTOR:
            held = cute.make_rmem_tensor((VECTOR, self.top_k), self.dtype)
            held.fill(0)
            for j in cutlass.range_constexpr(self.top_k):
                if is_there[j]:
                    place = Int64(entries[j]) * rows_stride + Int64(vector * VECTOR)
                    cute.autovec_copy(self.vector_at(rows, place), held[None, j])
            total = cute.zeros_like(held[None, 0].load(), dtype=Float32)
            for j in cutlass.range_constexpr(self.top_k):
                # The weight of an entry that has no row may be anything.
                factor = factors[j] if is_there[j] else Float32(0.0)
                total = total + held[None, j].load().to(Float32) * factor
            rounded = cute.make_rmem_tensor((VECTOR,), self.out_dtype)
            rounded.store(total.to(self.out_dtype))
            target = self.vector_at(out, Int64(token) * out_stride + Int64(vector * VECTOR))
            cute.autovec_copy(rounded, target)

    @cute.jit
    def vector_at(self, pointer: cute.Pointer, offset: Int64):
        item = pointer.dtype.width // 8
        place = cute.make_ptr(
            pointer.dtype,
            pointer.toint() + offset * item,
            cute.AddressSpace.gmem,
            assumed_align=16,
        )
        return cute.make_tensor(place, cute.make_layout(VECTOR))


def instance(dtype: str, dtype_out: str, top_k: int):
    """The kernel of a configuration, with arguments of the types that it is compiled for."""
    element, out_element = _DTYPES[dtype], _DTYPES[dtype_out]

    def pointer(of, align: int = 16):
        return make_ptr(of, 16, cute.AddressSpace.gmem, assumed_align=align)

    pointers = (pointer(element), pointer(Int32, 4), pointer(Float32, 4), pointer(out_element))
    numbers = (Int64(8), Int64(8), Int32(1), Int32(1), Int32(8), Int32(0))
    return MoeFinalizeKernel(element, out_element, top_k), (
        *pointers,
        *numbers,
        cuda.CUstream(0),
    )
