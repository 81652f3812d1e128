// Host side of the matrix products for Hopper.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/once_per_device.h>
#include <flashinfer/gemm/sm90/kernel.cuh>
#include <flashinfer/ptx/tensor_map.h>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Clusters that run at a time on the current device: of four CTAs 30, not 33, on an H200, whose SMs
// come in groups of 16 or 18. Also raises the kernel's limit of shared memory, once per device.
template <typename Tile>
inline cudaError_t prepare_gemm_sm90(int* num_clusters) {
  return once_per_device(num_clusters, [](int device, int* count) {
    cudaError_t status =
        cudaFuncSetAttribute(gemm_sm90_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kGemmSharedBytes<Tile>);
    if (status != cudaSuccess) return status;
    int num_sms = 0;
    status = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    *count = num_sms;
    if (Tile::kCluster == 1 || status != cudaSuccess) return status;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = Tile::kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(num_sms / Tile::kCluster * Tile::kCluster);
    config.blockDim = dim3(Tile::kThreads);
    config.dynamicSmemBytes = kGemmSharedBytes<Tile>;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(count, gemm_sm90_kernel<Tile>, &config);
  });
}

// A matrix of each batch: boxes of `box_columns` elements of `box_rows` rows.
template <typename T>
inline bool encode_matrix(ptx::EncodedTensorMap& map, const GemmMatrix& matrix, uint64_t columns,
                          uint64_t rows, uint64_t batches, uint32_t box_columns, uint32_t box_rows,
                          CUtensorMapSwizzle swizzle) {
  const ptx::TensorMapDim dims[2] = {{rows, matrix.stride_row, box_rows},
                                     {batches, matrix.stride_batch, 1}};
  return ptx::encode_tensor_map<T>(map, matrix.data, columns, box_columns, dims, swizzle);
}

// Operands: boxes of 128 bytes of k of all the rows that one CTA loads at once.
template <typename T>
inline bool encode_operand(ptx::EncodedTensorMap& map, const GemmMatrix& matrix, uint64_t k,
                           uint64_t rows, uint64_t batches, uint32_t box_rows) {
  return encode_matrix<T>(map, matrix, k, rows, batches, 128 / sizeof(T), box_rows,
                          CU_TENSOR_MAP_SWIZZLE_128B);
}

template <typename Tile>
inline bool encode_maps(GemmKernelParams& kernel) {
  const GemmParams& p = kernel.gemm;
  constexpr GemmGroups kGroups = Tile::kGroups;
  const bool flat = kGroups != GemmGroups::batch && kGroups != GemmGroups::masked;
  const uint64_t batches = flat ? 1 : p.num_groups;
  const uint64_t rows = p.m;
  // Rows outside A cost the copy engine time, so boxes have no more rows than A.
  constexpr uint32_t kPartRows = Tile::kTileRows / Tile::kSharedA;
  kernel.box_rows_a = p.m < kPartRows ? p.m : kPartRows;
  kernel.parts_a = p.m < kPartRows ? 1 : ceil_div<uint32_t>(p.m, kPartRows);
  if (kernel.parts_a > Tile::kSharedA) kernel.parts_a = Tile::kSharedA;
  if ((!Tile::kGathers &&
       !encode_operand<typename Tile::A>(kernel.a, p.a, p.k, rows, batches, kernel.box_rows_a)) ||
      !encode_operand<typename Tile::B>(kernel.b, p.b, p.k, p.n, p.num_weights,
                                        Tile::kBoxRowsB / Tile::kSharedB)) {
    return false;
  }
  kernel.stores_boxes = false;
  if constexpr (Tile::kStagesOutput && !Tile::kQuantizes) {
    constexpr int kBoxBytes = Tile::kBoxColumns * 2;
    constexpr CUtensorMapSwizzle kSwizzle = kBoxBytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                            : kBoxBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                              : CU_TENSOR_MAP_SWIZZLE_32B;
    // The copy engine writes beyond rows that do not end with whole 16 bytes.
    const uint32_t columns = Tile::kGated ? p.n / 2 : p.n;
    kernel.stores_boxes = columns % 8 == 0 && encode_matrix<typename Tile::D>(
                                                  kernel.d, p.d, columns, rows, batches,
                                                  Tile::kBoxColumns, Tile::kBoxRows, kSwizzle);
  }
  return true;
}

// How scales of A are copied: as boxes of one row's blocks of k, or of one block's rows,
// whichever are neighbours, if all of them begin at multiples of 16 bytes.
template <typename Tile>
inline void choose_scale_copy(GemmKernelParams& kernel) {
  constexpr GemmGroups kGroups = Tile::kGroups;
  constexpr bool kBatches = kGroups == GemmGroups::batch || kGroups == GemmGroups::masked;
  const GemmParams& p = kernel.gemm;
  const GemmScaleMatrix& s = p.a_scale;
  const uint32_t blocks = ceil_div(p.k, 128u);
  const bool aligned = reinterpret_cast<uint64_t>(s.data) % 16 == 0 && s.stride_batch % 4 == 0;
  // Lanes copy 16 bytes of few rows as fast.
  const bool along_k = s.stride_k == 1 && (Tile::kFewRows || Tile::kTileRows >= 64);
  // Tiles begin wherever groups do; the last tile of a matrix ends with it.
  const bool along_rows =
      s.stride_row == 1 && p.m % 4 == 0 && (kBatches || kGroups == GemmGroups::indices);
  kernel.scale_copy = GemmScaleCopy::kWords;
  if (!Tile::kGathers && s.row_shift == 0 && (along_k || along_rows)) {
    const uint32_t rows = along_k && p.m < Tile::kTileRows ? p.m : Tile::kTileRows;
    ptx::TensorMapDim dims[2] = {{blocks, s.stride_k, Tile::kScaleBlocks},
                                 {kBatches ? p.num_groups : 1, s.stride_batch, 1}};
    if (along_k) dims[0] = {p.m, s.stride_row, rows};
    kernel.box_rows_scale = rows;
    if (Tile::kFewRows && along_k && blocks < Tile::kScaleBlocks && blocks % 4 == 0 &&
        s.stride_row == blocks && aligned) {
      kernel.scale_copy = GemmScaleCopy::kWhole;
      return;
    }
    if (ptx::encode_tensor_map<float>(
            kernel.a_scale, s.data, along_k ? blocks : p.m, along_k ? Tile::kScaleBlocks : rows,
            dims,
            along_k && Tile::kFewRows ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE)) {
      kernel.scale_copy = along_k ? GemmScaleCopy::kBoxAlongK : GemmScaleCopy::kBoxAlongRows;
      return;
    }
  }
  if (!Tile::kFewRows && aligned && s.stride_k == 1 && s.stride_row % 4 == 0 && blocks % 4 == 0) {
    kernel.scale_copy = GemmScaleCopy::kAlongK;
  }
}

// Tiles in clusters, the number of clusters, and the band that keeps operands in L2.
template <typename Tile>
inline uint32_t make_schedule(GemmSchedule& schedule, const GemmParams& p, uint32_t clusters) {
  constexpr uint32_t kUnitRows = Tile::kTileRows * Tile::kClusterRows;
  constexpr uint32_t kUnitColumns = Tile::kOutColumns * Tile::kClusterColumns;
  uint32_t num_columns = ceil_div(Tile::kGated ? p.n / 2 : p.n, kUnitColumns);
  const bool has_rest = Tile::kThirds && p.n % kUnitColumns != 0;
  schedule.num_rows = ceil_div(p.m, kUnitRows);
  const uint32_t batches = Tile::kGroups == GemmGroups::batch ? p.num_groups : 1;
  const uint32_t per_batch = schedule.num_rows * num_columns;
  schedule.num_tiles = per_batch * batches;
  if (has_rest) --num_columns;
  schedule.rest_thirds = ceil_div(p.n % kUnitColumns, 64u * Tile::kClusterColumns);
  schedule.rest_column = num_columns * kUnitColumns;
  schedule.rest_begin = num_columns * schedule.num_rows;
  // Rows and columns of the tiles at work together take about as many bytes.
  uint32_t band = 1;
  while ((band + 1) * (band + 1) * kUnitRows <= clusters * kUnitColumns) ++band;
  const auto divisor = [](uint32_t d) { return FastDivisor(d > 0 ? d : 1); };
  schedule.num_columns = divisor(num_columns);
  schedule.band = divisor(band);
  schedule.per_band = divisor(band * num_columns);
  schedule.per_batch = divisor(per_batch);
  if (Tile::kHasTable || has_rest) return clusters;
  // The number of clusters with which all of them work equally long.
  const uint32_t rounds = ceil_div(schedule.num_tiles, clusters);
  return ceil_div(schedule.num_tiles, rounds);
}

template <typename Tile>
inline cudaError_t launch_gemm_sm90(const GemmParams& params, bool enable_pdl,
                                    cudaStream_t stream) {
  int num_clusters = 0;
  cudaError_t status = prepare_gemm_sm90<Tile>(&num_clusters);
  if (status != cudaSuccess) return status;
  if (params.max_ctas != 0 &&
      params.max_ctas < static_cast<uint32_t>(num_clusters) * Tile::kCluster) {
    num_clusters = params.max_ctas < Tile::kCluster ? 1 : params.max_ctas / Tile::kCluster;
  }
  GemmKernelParams kernel;
  kernel.gemm = params;
  if (!encode_maps<Tile>(kernel)) return cudaErrorInvalidValue;
  if constexpr (Tile::kBlockScales) choose_scale_copy<Tile>(kernel);
  const uint32_t clusters = make_schedule<Tile>(kernel.schedule, params, num_clusters);
  return launch_kernel(gemm_sm90_kernel<Tile>, dim3(clusters * Tile::kCluster),
                       dim3(Tile::kThreads), kGemmSharedBytes<Tile>, stream, enable_pdl, kernel,
                       Tile::kCluster > 1 ? Tile::kCluster : 0);
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
