// In place of the product's header.
#pragma once

namespace flashinfer::ptx {

inline uint4 load_global_16(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emulation::fail("a misaligned load");
  return *static_cast<const uint4*>(address);
}

}  // namespace flashinfer::ptx
