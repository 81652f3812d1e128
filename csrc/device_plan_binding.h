// Reads the arguments of plans that are made on the device.
#pragma once

#include <flashinfer/attention/device_plan_params.h>
#include <flashinfer/attention/kv_tiles.h>
#include <flashinfer/scheduler/attention_tiles.h>
#include <flashinfer/scheduler/plan_layout.h>

#include "ffi.h"
#include "struct_tensor.h"

namespace flashinfer {

inline const int32_t* lengths_data(const ffi::Tensor& tensor, int64_t length,
                                   const ffi::Tensor& place) {
  if (!tensor) return nullptr;
  ffi::check_dtype(tensor, ffi::dtype::int32);
  ffi::check_shape(tensor, {length});
  ffi::check_contiguous(tensor);
  ffi::check_same_device(tensor, place);
  return static_cast<const int32_t*>(tensor.data());
}

// Costs of all tiles together are int32.
inline void check_size(const DevicePlanParams& params) {
  const int64_t per_request = params.tiles_per_request.divisor;
  const int64_t requests = params.kv_indptr == nullptr ? params.batch_size : 1;
  const int64_t entries =
      params.kv_indptr == nullptr ? params.pages_per_request : params.kv_entries;
  const int64_t kv_tiles = ceil_div(entries * params.page_size, int64_t{kTileKV}) + 1;
  const int64_t pairs = (kv_tiles * requests + params.batch_size) * per_request;
  if (pairs > INT32_MAX / 2) {
    ffi::raise("ValueError",
               "lengths on the GPU are planned for at most 2^30 pairs of tiles, got %d requests "
               "and %d pages of %d tokens",
               params.batch_size, params.kv_entries, params.page_size);
  }
}

// Takes the rest of the arguments: qo_indptr, kv_indptr, kv_len, last_page_len, page_size, qo_len,
// causal, window_left. `place` is on the device of the index tensors. Without work batch_size is 0.
inline DevicePlanParams read_device_plan(ffi::Args& args, const PlanLayout& layout,
                                         const PlanConfig& config, const ffi::Tensor& place) {
  const ffi::Tensor qo_indptr = args.optional_tensor("qo_indptr");
  const ffi::Tensor kv_indptr = args.optional_tensor("kv_indptr");
  const ffi::Tensor kv_len = args.optional_tensor("kv_len");
  const ffi::Tensor last_page_len = args.optional_tensor("last_page_len");
  DevicePlanParams params = {};
  params.page_size = static_cast<int32_t>(args.integer_in("page_size", 1, INT32_MAX));
  params.qo_len = static_cast<int32_t>(args.integer_in("qo_len", 0, INT32_MAX));
  params.causal = args.flag("causal");
  params.window_left = static_cast<int32_t>(args.integer_in("window_left", -1, INT32_MAX));
  args.all_taken();

  const PlannedGroup& group = layout.groups[0];
  params.qo_tokens = static_cast<int32_t>(group.qo_tokens);
  params.kv_entries = static_cast<int32_t>(group.kv_entries);
  params.qo_indptr = lengths_data(qo_indptr, group.batch_size + 1, place);
  params.kv_indptr = lengths_data(kv_indptr, group.batch_size + 1, place);
  params.kv_len = lengths_data(kv_len, group.batch_size, place);
  params.last_page_len = lengths_data(last_page_len, group.batch_size, place);
  if (!kv_len && !last_page_len) {
    ffi::raise("ValueError", "`kv_len` or `last_page_len` must be given");
  }
  const int64_t rows = int64_t{params.qo_len} * config.group_size;
  params.group_size = FastDivisor(static_cast<uint32_t>(config.group_size));
  params.tile_q = static_cast<int32_t>(config.tile_q);
  params.num_columns = static_cast<int32_t>(layout.num_ctas);
  params.num_merges = static_cast<int32_t>(layout.num_merges);
  params.run_at_once = layout.num_ctas * config.num_kv_heads <= config.cta_slots;
  if (group.batch_size == 0 || rows == 0 || params.num_columns == 0) return params;
  params.tiles_per_request = FastDivisor(static_cast<uint32_t>(ceil_div(rows, config.tile_q)));
  params.batch_size = static_cast<int32_t>(group.batch_size);
  params.pages_per_request = params.kv_entries / params.batch_size;
  check_size(params);
  finish_device_plan(params);
  return params;
}

}  // namespace flashinfer
