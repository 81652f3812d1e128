// In place of the product's header: fibers see each other's writes at once. Copies happen when
// someone looks at their barrier; until then NaN is where they will go.
#pragma once

#include <flashinfer/ptx/mbarrier.cuh>
#include <flashinfer/ptx/shared.cuh>
#include <flashinfer/ptx/tensor_map.h>

namespace flashinfer::ptx {

inline void async_proxy_fence() {}

namespace emulated {

inline void copy_later(uint32_t shared, uint32_t bytes, uint32_t barrier,
                       std::function<void()> copy) {
  if (shared % 16 != 0 || bytes % 16 != 0) emulation::fail("a misaligned bulk copy");
  if (shared + bytes > emulation::shared_bytes) emulation::fail("a bulk copy past shared memory");
  std::memset(dynamic_shared + shared, 0xff, bytes);
  Barrier& at = barrier_at(barrier);
  at.copies.push_back(std::move(copy));
  at.bytes -= bytes;
}

}  // namespace emulated

inline void bulk_load(uint32_t shared, const void* source, uint32_t bytes, uint32_t barrier) {
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0) emulation::fail("a misaligned bulk copy");
  emulated::copy_later(shared, bytes, barrier,
                       [=] { std::memcpy(dynamic_shared + shared, source, bytes); });
}

// Boxes whose rows are at most as long as what is swizzled.
inline void tma_load(uint32_t shared, const void* map, uint32_t barrier, int x, int y, int z) {
  const auto box = *static_cast<const emulated::Map*>(map);
  const uint32_t row_bytes = box.box[0] * box.element;
  if (box.swizzle != 0 && shared % (8 * box.swizzle) != 0)
    emulation::fail("a swizzled box is misaligned");
  emulated::copy_later(shared, row_bytes * box.box[1] * box.box[2], barrier, [=] {
    for (uint32_t row = 0; row < box.box[1] * box.box[2]; ++row) {
      for (uint32_t byte = 0; byte < row_bytes; ++byte) {
        const uint64_t at[3] = {x + byte / box.element, y + row % box.box[1], z + row / box.box[1]};
        const uint32_t unit = box.swizzle == 64 ? row / 2 % 4 : row % 8;
        const uint32_t place = box.swizzle != 0 ? byte ^ unit * 16 : byte;
        const bool inside = at[0] < box.length[0] && at[1] < box.length[1] && at[2] < box.length[2];
        const char* const source = box.data + at[0] * box.element + byte % box.element +
                                   at[1] * box.stride[0] + at[2] * box.stride[1];
        dynamic_shared[shared + row * row_bytes + place] = inside ? *source : 0;
      }
    }
  });
}

}  // namespace flashinfer::ptx
