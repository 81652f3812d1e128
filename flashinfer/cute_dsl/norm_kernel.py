"""RMS norm and layer norm of rows, with a residual sum before and a cast to 8 bits after.

    h = x [+ residual]                     residual <- h, rounded
    RMS:    y = h * rsqrt(mean(h^2) + eps) * (weight + weight_offset)
    layer:  y = (h - mean(h)) * rsqrt(var(h) + eps) * weight + bias
    out = y, rounded once                  8 bits: out = saturate(y / out_scale)

A row stays in the registers of its threads: a part of a warp, a CTA, or a cluster of CTAs. Its
length is a constant of the compilation, so that all loops are unrolled. csrc/cute_dsl_norm.cc
launches what is compiled here.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator

from .conversions import float32_of, store_float8
from .reduce import row_reduce

DTYPES = {
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
}
_VECTOR_BYTES = 16
_THREADS = 128  # of a CTA with several rows
_VECTORS_OF_CTA = 2048
# Threads of an SM that hold two vectors of a row, and the next row's: 64 registers each.
_THREADS_OF_SM = 1024
# A CTA has its first row brought to L2 while the preceding grid ends; longer rows lose by it.
_MOST_BYTES_EARLY = 32 << 10  # of the rows of both operands


def _threads_per_row(vectors: int) -> int:
    """Threads of one CTA that share so many vectors of a row: at most 4 vectors for each.

    Two vectors a thread from 4 KiB on: the sum over the CTA costs half, and as many bytes are
    under way. Two in rows of a part of a warp, too, where the sum is most of the instructions.
    """
    if vectors <= 32:
        return 1 << (-(-vectors // 2) - 1).bit_length()
    per_thread = 1 if vectors <= 256 else 2 if vectors <= 1024 else 4
    return (-(-vectors // per_thread) + 31) // 32 * 32


class NormKernel:
    """A norm of rows of one length.

    Parameters
    ----------
    dtype, out_dtype : cutlass.Numeric
        Element types of inputs and output: 16 or 32 bits; the output may have 8.
    hidden : int
        Length of a row; a multiple of 16 bytes.
    subtract_mean : bool
        Layer norm, with a weight and a bias in float32.
    add_residual : bool
        Add a residual first and store the sum.
    """

    def __init__(self, dtype, out_dtype, hidden: int, subtract_mean=False, add_residual=False):
        self.dtype, self.out_dtype = dtype, out_dtype
        self.weight_dtype = cutlass.Float32 if subtract_mean else dtype
        self.subtract_mean, self.add_residual = bool(subtract_mean), bool(add_residual)
        self.hidden = hidden
        self.vec = _VECTOR_BYTES * 8 // dtype.width
        vectors = hidden // self.vec
        self.cluster_n = next(n for n in (1, 2, 4, 8) if vectors <= n * _VECTORS_OF_CTA)
        self.vectors = vectors // self.cluster_n  # of one CTA
        self.threads_per_row = _threads_per_row(self.vectors)
        self.rows_per_cta = max(1, _THREADS // self.threads_per_row) if vectors <= 32 else 1
        self.vecs_per_thread = -(-self.vectors // self.threads_per_row)
        self.threads = self.threads_per_row * self.rows_per_cta
        self.ctas_of_sm = max(
            1, _THREADS_OF_SM // self.threads // max(1, self.vecs_per_thread // 2)
        )
        # Weights stay in registers if these hold them beside the rows: float32 of a layer norm for
        # one vector, others unless there are two operands.
        self.keeps_weights = self.vecs_per_thread == 1 if subtract_mean else not add_residual
        operands = 2 if add_residual else 1
        early = operands * vectors * _VECTOR_BYTES <= _MOST_BYTES_EARLY
        self.starts_early = self.rows_per_cta == 1 and early

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        residual: cute.Pointer,
        out: cute.Pointer,
        weight: cute.Pointer,
        bias: cute.Pointer,
        out_scale: cute.Pointer,
        out_scale_value: Float32,
        eps: Float32,
        weight_offset: Float32,
        x_outer: Int64,
        x_inner: Int64,
        residual_outer: Int64,
        residual_inner: Int64,
        out_outer: Int64,
        out_inner: Int64,
        rows: Int32,
        heads: Int32,
        sms: Int32,
        use_pdl: Int32,
        stream: cuda.CUstream,
    ):
        steps = cute.ceil_div(rows, self.rows_per_cta)
        ctas = steps
        if cutlass.const_expr(self.cluster_n == 1):
            # All CTAs run at once, and each takes as many rows as another.
            ctas = cute.ceil_div(steps, cute.ceil_div(steps, sms * self.ctas_of_sm))
        strides = (x_outer, x_inner, residual_outer, residual_inner, out_outer, out_inner)
        numbers = (out_scale_value, eps, weight_offset)
        self.kernel(
            (x, residual, out, weight, bias, out_scale), numbers, strides, rows, heads
        ).launch(
            grid=[ctas, self.cluster_n, 1],
            block=[self.threads, 1, 1],
            cluster=[1, self.cluster_n, 1] if self.cluster_n > 1 else None,
            min_blocks_per_mp=self.ctas_of_sm if self.cluster_n == 1 else 1,
            preferred_smem_carveout=-1,  # the driver's choice; without it the DSL asks a GPU
            stream=stream,
            use_pdl=use_pdl != 0,
        )

    @cute.jit
    def place_of(self, row: Int32, heads: Int32):
        """A row's two coordinates."""
        outer, inner = Uint32(row), Uint32(0)
        if heads > 1:
            outer = Uint32(row) // Uint32(heads)
            inner = Uint32(row) - outer * Uint32(heads)
        return outer, inner

    @cute.jit
    def row_of(self, pointer: cute.Pointer, place, strides):
        """A row as vectors, from this CTA's part on."""
        return self.vectors_at(pointer, Int64(place[0]) * strides[0] + Int64(place[1]) * strides[1])

    @cute.jit
    def vectors_at(self, pointer: cute.Pointer, offset: Int64):
        """The vectors from an element on. A sum with a pointer would lose the alignment."""
        item = pointer.dtype.width // 8
        if cutlass.const_expr(self.cluster_n > 1):
            offset += Int64(cute.arch.block_idx()[1]) * (self.vectors * self.vec)
        aligned = cute.make_ptr(
            pointer.dtype,
            pointer.toint() + offset * item,
            cute.AddressSpace.gmem,
            assumed_align=min(_VECTOR_BYTES, self.vec * item),
        )
        return cute.make_tensor(aligned, cute.make_layout((self.vec, self.vectors)))

    def index(self, thread: Int32, i: int):
        """A thread's vector `i`. A warp's vectors are neighbours: memory serves them faster."""
        if self.threads_per_row <= 32:
            return thread + i * self.threads_per_row
        return thread // 32 * (32 * self.vecs_per_thread) + thread % 32 + i * 32

    def registers(self, element):
        """Registers for a thread's vectors, zero where there is nothing to load."""
        held = cute.make_rmem_tensor((self.vec, self.vecs_per_thread), element)
        held.fill(0)
        return held

    @cute.jit
    def load(self, held: cute.Tensor, source: cute.Tensor, thread: Int32):
        """Load a thread's vectors, where the row has them."""
        for i in cutlass.range_constexpr(self.vecs_per_thread):
            idx = self.index(thread, i)
            if self.vectors == self.threads_per_row * self.vecs_per_thread or idx < self.vectors:
                cute.autovec_copy(source[None, idx], held[None, i])

    @cute.jit
    def store(self, values: cute.TensorSSA, target: cute.Tensor, thread: Int32, valid):
        """Round a thread's values and store them where the row has them."""
        held = cute.make_rmem_tensor((self.vec, self.vecs_per_thread), target.element_type)
        if cutlass.const_expr(target.element_type.width == 8):
            store_float8(values, held)
        else:
            held.store(values.to(target.element_type))
        for i in cutlass.range_constexpr(self.vecs_per_thread):
            idx = self.index(thread, i)
            if valid and idx < self.vectors:
                cute.autovec_copy(held[None, i], target[None, idx])

    @cute.kernel
    def kernel(self, pointers, numbers, strides, rows: Int32, heads: Int32):
        x, residual, out, weight, bias, out_scale = pointers
        out_scale_value, eps, weight_offset = numbers
        tid, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        thread, part = tid, Int32(0)  # a row's addresses are the same for all threads then
        if cutlass.const_expr(self.rows_per_cta > 1):
            thread, part = tid % self.threads_per_row, tid // self.threads_per_row
        first, step = cta * self.rows_per_cta, cute.arch.grid_dim()[0] * self.rows_per_cta
        outer, inner = self.place_of(first + part, heads)
        # What a step is in both coordinates: a division for each row would take a tenth of it.
        step_outer, step_inner = self.place_of(step, heads)
        strides_of_step = step_outer, step_inner, Uint32(heads)
        # Prefetches even what the preceding grid still writes: grids meet in L2.
        if cutlass.const_expr(self.starts_early):
            self.prefetch(x, residual, strides, (outer, inner))
        if part == 0:
            self.prefetch_vectors(self.vectors_at(weight, Int64(0)), thread)
        scratch, barriers = self.allocate_scratch(SmemAllocator())
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        held = [self.registers(self.dtype) for _ in range(2 if self.add_residual else 1)]
        there = first + part < rows
        self.load_operands(held, x, residual, strides, (outer, inner), thread, there)
        w, b = self.registers(self.weight_dtype), self.registers(self.weight_dtype)
        if cutlass.const_expr(self.keeps_weights):
            self.load_weights(w, b, weight, bias, thread)
        inverse_scale = self.inverse_of(out_scale, out_scale_value)
        parity = Int32(0)
        for start in cutlass.range(first, rows, step, unroll=1):
            valid = start + part < rows  # threads without a row take part in the sums
            values = float32_of(held[0])
            if cutlass.const_expr(self.add_residual):
                values = values + float32_of(held[1])
                target = self.row_of(residual, (outer, inner), strides[2:4])
                self.store(values, target, thread, valid)
            target = self.row_of(out, (outer, inner), strides[4:6])
            # The next row comes while this one is summed: memory would idle.
            outer, inner = after((outer, inner), strides_of_step)
            there = start + part + step < rows
            self.load_operands(held, x, residual, strides, (outer, inner), thread, there)
            if cutlass.const_expr(self.subtract_mean):
                mean = self.sum_of_row(values, scratch, barriers, 0) / self.hidden
                values = self.without(values, mean, thread)
                square = self.sum_of_row(values * values, scratch, barriers, 1)
            else:
                square = self.sum_of_row(values * values, scratch, barriers, parity)
                parity ^= 1
            if cutlass.const_expr(not self.keeps_weights):
                self.load_weights(w, b, weight, bias, thread)
            rstd = cute.math.rsqrt(square / self.hidden + eps)
            y = values * rstd * (float32_of(w) + weight_offset)
            if cutlass.const_expr(self.subtract_mean):
                y = values * rstd * w.load() + b.load()
            if cutlass.const_expr(self.out_dtype.width == 8):
                y = y * inverse_scale
            self.store(y, target, thread, valid)

    @cute.jit
    def inverse_of(self, out_scale: cute.Pointer, out_scale_value: Float32):
        """What a result of 8 bits is multiplied by: the scale is in memory, if not a number."""
        inverse = Float32(1.0)
        if cutlass.const_expr(self.out_dtype.width == 8):
            if out_scale.toint() != 0:
                out_scale_value = cute.make_tensor(out_scale, cute.make_layout(1))[0]
            inverse = Float32(1.0) / out_scale_value
        return inverse

    @cute.jit
    def load_weights(self, w, b, weight, bias, thread: Int32):
        """Load a thread's vectors of the weight, and of the bias of a layer norm."""
        self.load(w, self.vectors_at(weight, Int64(0)), thread)
        if cutlass.const_expr(self.subtract_mean):
            self.load(b, self.vectors_at(bias, Int64(0)), thread)

    @cute.jit
    def load_operands(self, held, x, residual, strides, place, thread: Int32, there):
        """Load a thread's vectors of a row of both operands, if there is the row."""
        if there:
            self.load(held[0], self.row_of(x, place, strides[0:2]), thread)
            if cutlass.const_expr(self.add_residual):
                self.load(held[1], self.row_of(residual, place, strides[2:4]), thread)

    @cute.jit
    def prefetch(self, x, residual, strides, place):
        """Have a row brought to L2, as much of it as this CTA reads."""
        if cute.arch.thread_idx()[0] == 0:
            prefetch_to_l2(self.row_of(x, place, strides[0:2]))
            if cutlass.const_expr(self.add_residual):
                prefetch_to_l2(self.row_of(residual, place, strides[2:4]))

    @cute.jit
    def prefetch_vectors(self, source: cute.Tensor, thread: Int32):
        """Have a thread's vectors brought to L2."""
        for i in cutlass.range_constexpr(self.vecs_per_thread):
            idx = self.index(thread, i)
            if idx < self.vectors:
                cute.arch.inline_ptx(
                    "prefetch.global.L2 [{$r0}];", read_only_args=[source[None, idx].iterator]
                )

    @cute.jit
    def allocate_scratch(self, smem):
        """Two buffers for sums over a row, which take turns, and an mbarrier for each."""
        warps = max(1, self.threads_per_row // 32)
        layout = cute.make_layout((self.rows_per_cta, (warps, self.cluster_n), 2))
        if cutlass.const_expr(self.cluster_n == 1):
            layout = cute.make_layout((self.rows_per_cta, warps, 2))
        barriers = smem.allocate_array(Int64, 2)
        scratch = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        if cutlass.const_expr(self.cluster_n > 1):
            if cute.arch.thread_idx()[0] == 0:
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        return scratch, barriers

    def sum_of_row(self, values: cute.TensorSSA, scratch: cute.Tensor, barriers, which):
        return row_reduce(
            values,
            cute.ReductionOp.ADD,
            self.threads_per_row,
            scratch[None, None, which],
            barriers + which,
            self.cluster_n,
            Float32(0.0),
        )

    @cute.jit
    def without(self, values: cute.TensorSSA, mean: Float32, thread: Int32):
        """Values less the mean; what a thread holds past the end of the row stays 0."""
        if cutlass.const_expr(self.vectors == self.threads_per_row * self.vecs_per_thread):
            return values - mean
        held = cute.make_rmem_tensor((self.vec, self.vecs_per_thread), Float32)
        held.store(values - mean)
        for i in cutlass.range_constexpr(self.vecs_per_thread):
            if self.index(thread, i) >= self.vectors:
                for j in cutlass.range_constexpr(self.vec):
                    held[j, i] = Float32(0.0)
        return held.load()


@cute.jit
def after(place, step):
    """The coordinates of the row that is a step further: `step` has both and the heads."""
    outer, inner = place[0] + step[0], place[1] + step[1]
    if inner >= step[2]:
        inner -= step[2]
        outer += Uint32(1)
    return outer, inner


@cute.jit
def prefetch_to_l2(row: cute.Tensor):
    """Have neighbouring bytes brought to L2, a multiple of 16 from a multiple of 16 on."""
    count = cute.size(row) * row.element_type.width // 8
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
        read_only_args=[row.iterator, Int32(count)],
    )


class RMSNormKernel(NormKernel):
    """RMS norm of rows of `hidden` elements."""

    def __init__(self, dtype, hidden: int):
        super().__init__(dtype, dtype, hidden)


class QKRMSNormKernel(RMSNormKernel):
    """RMS norm of heads of `hidden` elements: several in a CTA."""


class RMSNormQuantKernel(NormKernel):
    """RMS norm with a result of 8 bits."""

    def __init__(self, dtype, hidden: int, out_dtype):
        super().__init__(dtype, out_dtype, hidden)


class FusedAddRMSNormKernel(NormKernel):
    """Residual sum and RMS norm."""

    def __init__(self, dtype, hidden: int):
        super().__init__(dtype, dtype, hidden, add_residual=True)


class FusedAddRMSNormQuantKernel(NormKernel):
    """Residual sum and RMS norm with a result of 8 bits."""

    def __init__(self, dtype, hidden: int, out_dtype):
        super().__init__(dtype, out_dtype, hidden, add_residual=True)


class LayerNormKernel(NormKernel):
    """Layer norm of rows of `hidden` elements."""

    def __init__(self, dtype, hidden: int):
        super().__init__(dtype, dtype, hidden, subtract_mean=True)


def instance(dtype: str, out_dtype: str, subtract_mean: int, add_residual: int, hidden: int):
    """The kernel of a configuration, with arguments of the types that it is compiled for."""
    kernel = NormKernel(DTYPES[dtype], DTYPES[out_dtype], hidden, subtract_mean, add_residual)

    def pointer(element, align: int = _VECTOR_BYTES):
        return make_ptr(element, _VECTOR_BYTES, cute.AddressSpace.gmem, assumed_align=align)

    out_align = min(_VECTOR_BYTES, kernel.vec * kernel.out_dtype.width // 8)
    pointers = [
        pointer(kernel.dtype),
        pointer(kernel.dtype),
        pointer(kernel.out_dtype, out_align),
        pointer(kernel.weight_dtype),
        pointer(kernel.weight_dtype),
        pointer(cutlass.Float32, 4),
    ]
    numbers = [Float32(1.0), Float32(0.0), Float32(0.0)]
    strides = [Int64(1)] * 6
    return kernel, (*pointers, *numbers, *strides, *[Int32(1)] * 3, Int32(0), cuda.CUstream(0))
