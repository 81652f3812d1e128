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
  uint32_t swizzle;  // bytes of a row that is swizzled; 0: none is
};
static_assert(sizeof(Map) <= sizeof(EncodedTensorMap));

}  // namespace emulated

}  // namespace flashinfer::ptx

enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B = 64, CU_TENSOR_MAP_SWIZZLE_128B = 128 };

namespace flashinfer::ptx {

struct TensorMapDim {
  uint64_t length;
  int64_t stride;
  uint32_t box;
};

template <typename T>
inline bool encode_tensor_map(EncodedTensorMap& map, const void* data, uint64_t columns,
                              uint32_t box_columns, const TensorMapDim (&dims)[2],
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  const emulated::Map encoded = {static_cast<const char*>(data),
                                 sizeof(T),
                                 {box_columns, dims[0].box, dims[1].box},
                                 {columns, dims[0].length, dims[1].length},
                                 {dims[0].stride * sizeof(T), dims[1].stride * sizeof(T)},
                                 static_cast<uint32_t>(swizzle)};
  std::memcpy(&map, &encoded, sizeof(encoded));
  return true;
}

}  // namespace flashinfer::ptx
