// In place of the product's header: tensor maps that the emulated copy engine reads.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

struct alignas(128) EncodedTensorMap {
  uint64_t opaque[16];
};

namespace emulated {

// A map has three dimensions, and strides in bytes.
struct Map {
  const char* data;
  uint32_t element, box[3];
  uint64_t length[3], stride[2];
  bool swizzles;
};
static_assert(sizeof(Map) <= sizeof(EncodedTensorMap));

}  // namespace emulated
}  // namespace flashinfer::ptx
