// Decides how many CTAs share a row, and launches them.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/sampling/row/cluster.cuh>

#ifndef __CUDACC_RTC__

namespace flashinfer {

// Limits of a device for a row kernel; the driver is asked once.
struct ClusterLimits {
  unsigned max_cluster;  // CTAs per row
  unsigned max_smem;     // dynamic shared memory of a CTA, bytes
};

inline size_t list_bytes(unsigned cluster_size, unsigned threads) {
  return RowCluster<float>::list_words(cluster_size, threads / 32) * sizeof(uint64_t);
}

// `device` is the current device.
template <typename Params>
inline cudaError_t query_cluster_limits(void (*kernel)(Params), int device, ClusterLimits* limits) {
  int major = 0, max_smem = 0;
  cudaFuncAttributes attributes;
  const auto function = reinterpret_cast<const void*>(kernel);
  cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, function);
  if (status != cudaSuccess) return status;
  max_smem -= static_cast<int>(attributes.sharedSizeBytes);
  status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, max_smem);
  if (status != cudaSuccess) return status;
  *limits = {1, static_cast<unsigned>(max_smem)};
  // With few SMs (MIG, MPS) a large cluster may never be scheduled, so smaller ones are tried.
  for (unsigned size = major >= 9 ? 8 : 1; size > 1; size /= 2) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size);
    config.blockDim = dim3(512);
    config.dynamicSmemBytes = limits->max_smem;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int num_clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&num_clusters, function, &config) == cudaSuccess &&
        num_clusters > 0) {
      limits->max_cluster = size;
      break;
    }
    cudaGetLastError();
  }
  return cudaSuccess;
}

// Number of clusters of `num_ranks` CTAs that run at a time on `device`, the current one; 0 if none
// can.
template <auto kKernel>
inline cudaError_t count_active_clusters(int device, unsigned threads, size_t smem_bytes,
                                         uint32_t num_ranks, int* num_clusters) {
  // The driver is asked once. Threads that race write the same value.
  constexpr int kMaxDevices = 64, kMaxRanks = 16, kUnknown = 0;
  static int known[kMaxDevices][kMaxRanks + 1] = {};
  *num_clusters = 0;
  if (device < 0 || device >= kMaxDevices || num_ranks > kMaxRanks) return cudaSuccess;
  int& entry = known[device][num_ranks];
  if (entry == kUnknown) {
    int count = 0, major = 0;
    const auto function = reinterpret_cast<const void*>(kKernel);
    cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess) return status;
    if (major >= 9) {
      status = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (status != cudaSuccess) return status;
      cudaLaunchAttribute attribute;
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = num_ranks;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(num_ranks);
      config.blockDim = dim3(threads);
      config.dynamicSmemBytes = smem_bytes;
      config.attrs = &attribute;
      config.numAttrs = 1;
      if (cudaOccupancyMaxActiveClusters(&count, function, &config) != cudaSuccess) {
        cudaGetLastError();
        count = 0;
      }
    }
    entry = count > 0 ? count : -1;
  }
  *num_clusters = entry > 0 ? entry : 0;
  return cudaSuccess;
}

struct RowSchedule {
  unsigned cluster_size;
  unsigned threads;
  unsigned max_vecs;  // 0: the row does not fit and is read again for each walk
  size_t smem_bytes;
};

// `row_bytes` is at least one vector.
inline RowSchedule choose_row_schedule(uint64_t row_bytes, uint32_t num_rows, int num_sms,
                                       const ClusterLimits& limits) {
  // The extra vector is for a row that starts inside one.
  const uint32_t num_vecs = static_cast<uint32_t>(row_bytes / 16 + 2);
  // Three CTAs per SM hide each other's barriers; a single row is spread further to reduce its
  // latency.
  constexpr uint64_t kResidentBytes = 65 * 1024, kLeastBytes = 8 * 1024;
  unsigned size = 1;
  while (size < limits.max_cluster && (row_bytes > kResidentBytes * size ||
                                       (row_bytes >= 2 * kLeastBytes * size &&
                                        num_rows * size * 2 <= static_cast<uint32_t>(num_sms)))) {
    size *= 2;
  }
  const uint32_t vecs_per_cta = ceil_div(num_vecs, size);
  const bool few_rows = num_rows * size <= static_cast<uint32_t>(num_sms);
  const unsigned max_threads = few_rows ? 512 : 256;
  const unsigned threads = vecs_per_cta < max_threads ? round_up(vecs_per_cta, 32u) : max_threads;
  size_t smem_bytes = list_bytes(size, threads) + static_cast<size_t>(vecs_per_cta) * 16;
  if (smem_bytes > limits.max_smem) return {size, threads, 0, list_bytes(size, threads)};
  return {size, threads, vecs_per_cta, smem_bytes};
}

// Launches a kernel with one cluster per row. Its Params have num_rows, max_cluster and max_vecs.
template <typename Params>
struct RowLauncher {
  void (*kernel)(Params);
  int device;  // the current one
  int num_sms;

  cudaError_t launch(Params params, uint64_t row_bytes, bool enable_pdl,
                     cudaStream_t stream) const {
    // There is one kernel per module, so one table suffices. Threads that race write the same
    // values.
    constexpr int kMaxDevices = 64;
    static ClusterLimits limits[kMaxDevices] = {};
    if (device < 0 || device >= kMaxDevices) return cudaErrorInvalidDevice;
    if (limits[device].max_cluster == 0) {
      const cudaError_t status = query_cluster_limits(kernel, device, &limits[device]);
      if (status != cudaSuccess) return status;
    }
    ClusterLimits allowed = limits[device];
    if (params.max_cluster != 0 && params.max_cluster < allowed.max_cluster) {
      allowed.max_cluster = params.max_cluster;
    }
    const RowSchedule schedule = choose_row_schedule(row_bytes, params.num_rows, num_sms, allowed);
    params.max_vecs = schedule.max_vecs;
    return launch_kernel(kernel, dim3(params.num_rows * schedule.cluster_size),
                         dim3(schedule.threads), schedule.smem_bytes, stream, enable_pdl, params,
                         schedule.cluster_size > 1 ? schedule.cluster_size : 0);
  }
};

// Launches a kernel with one CTA per tile on all rows. Its Params have first_row.
template <typename Params>
inline cudaError_t launch_row_tiles(void (*kernel)(Params), int threads, uint32_t num_tiles,
                                    uint32_t num_rows, Params params, bool enable_pdl,
                                    cudaStream_t stream) {
  constexpr uint32_t kMaxGridY = 65535;
  for (params.first_row = 0; params.first_row < num_rows; params.first_row += kMaxGridY) {
    const uint32_t rest = num_rows - static_cast<uint32_t>(params.first_row);
    const dim3 grid(num_tiles, rest < kMaxGridY ? rest : kMaxGridY);
    const cudaError_t status =
        launch_kernel(kernel, grid, dim3(threads), 0, stream, enable_pdl, params);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <typename Params>
RowLauncher(void (*)(Params), int, int) -> RowLauncher<Params>;

}  // namespace flashinfer

#endif  // __CUDACC_RTC__
