// Tensor maps tell the copy engine of sm_90 (tma.cuh) how a tensor lies in global memory and what a
// box of it is. Host code encodes them into a kernel's parameters.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// A tensor map as a member of a kernel's parameters. The driver's own type, CUtensorMap, is aligned
// to 64 bytes by CUDA 12's headers and to 128 by CUDA 13's. Host and device code of a launch may be
// compiled with different headers, and what follows a map must lie alike in both.
struct alignas(128) EncodedTensorMap {
  uint64_t opaque[16];
};

}  // namespace flashinfer::ptx

#ifndef __CUDACC_RTC__

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace flashinfer::ptx {

static_assert(sizeof(CUtensorMap) == sizeof(EncodedTensorMap) &&
              alignof(CUtensorMap) <= alignof(EncodedTensorMap));

// Whether the thread has the context that the driver's encoder wants. A thread that has made no
// call of the runtime has none, though its device may be in use by others.
inline bool has_context() {
  thread_local const bool has = [] {
    int device = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  }();
  return has;
}

// The driver's cuTensorMapEncodeTiled, which is not linked, ready for this thread to call; null if
// the driver has none, or the thread gets no context.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    constexpr const char* kName = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t status = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return has_context() ? encoder : nullptr;
}

// One dimension of a tensor other than the contiguous one: its length, the elements between
// neighbours, and its extent in a box.
struct TensorMapDim {
  uint64_t length;
  int64_t stride;
  uint32_t box;
};

// Describes a tensor of `columns` contiguous elements, of which a box has `box_columns`, and of the
// dimensions `dims`. Elements outside the tensor are read as zeros. L2 reads pieces of 128 bytes
// (docs/tuning/memory.md). Returns false if the tensor cannot be described: the address or a stride
// is not a multiple of 16 bytes, a stride is too large, or the driver lacks tensor maps.
template <typename T, int kDims>
inline bool encode_tensor_map(EncodedTensorMap& map, const void* data, uint64_t columns,
                              uint32_t box_columns, const TensorMapDim (&dims)[kDims],
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4);
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  cuuint64_t lengths[kDims + 1] = {columns}, strides[kDims];
  cuuint32_t box[kDims + 1] = {box_columns}, steps[kDims + 1] = {1};
  for (int i = 0; i < kDims; ++i) {
    lengths[i + 1] = dims[i].length;
    // The stride of a dimension of one element is arbitrary, since it is never used.
    strides[i] = static_cast<cuuint64_t>(dims[i].length <= 1 ? 128 : dims[i].stride * kSize);
    box[i + 1] = dims[i].box;
    steps[i + 1] = 1;
  }
  constexpr CUtensorMapDataType kType = kSize == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                        : kSize == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  return encode(reinterpret_cast<CUtensorMap*>(&map), kType, kDims + 1, const_cast<void*>(data),
                lengths, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flashinfer::ptx

#endif  // __CUDACC_RTC__
