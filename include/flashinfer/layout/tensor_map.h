// Tensor descriptions for the copy engine of sm_90, made by the driver, which is not linked.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda.h>

#include <cstdint>
#include <flashinfer/ptx/tensor_map.h>

namespace flashinfer {

// Describes a tensor of `kDims` dimensions, the contiguous one first; `strides` are those of the
// other dimensions, in elements. `swizzle` is the bytes of a box's row in shared memory that are
// swizzled: 128, 64 or 32. Returns false if the copy engine cannot read the tensor: addresses and
// strides must be multiples of 16 bytes.
template <typename T, int kDims>
inline bool encode_tensor_map(ptx::EncodedTensorMap& map, const void* data,
                              const uint64_t (&lengths)[kDims], const int64_t* strides,
                              const uint32_t (&box)[kDims], int swizzle) {
  const auto encode = ptx::tensor_map_encoder();
  if (encode == nullptr) return false;
  constexpr int kSize = static_cast<int>(sizeof(T));
  cuuint64_t sizes[kDims], steps_in_bytes[kDims - 1];
  cuuint32_t boxes[kDims], steps[kDims];
  for (int i = 0; i < kDims; ++i) {
    sizes[i] = lengths[i];
    boxes[i] = box[i];
    steps[i] = 1;
    // The stride of a dimension of one element is arbitrary, since it is never used.
    if (i > 0) {
      const int64_t bytes = strides[i - 1] * kSize;
      steps_in_bytes[i - 1] = static_cast<cuuint64_t>(lengths[i] <= 1 ? 128 : bytes);
    }
  }
  constexpr CUtensorMapDataType kType = kSize == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                        : kSize == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const CUtensorMapSwizzle mode = swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                  : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                  : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode(reinterpret_cast<CUtensorMap*>(&map), kType, kDims, const_cast<void*>(data), sizes,
                steps_in_bytes, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, mode,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
