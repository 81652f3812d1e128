// Arguments that the bindings of row kernels share: one value for all rows or one per row, and
// seeds.
#pragma once

#include <flashinfer/sampling/sampling_params.h>

#include "ffi.h"

namespace flashinfer::ffi {

// A number, or a tensor with one per row.
template <typename T>
struct RowValue {
  Tensor tensor;
  T value;

  PerRow<T> per_row() const {
    return {tensor ? static_cast<const T*>(tensor.data()) : nullptr, value};
  }
  // Whether `num_rows` rows have one value between them.
  bool is_shared(int64_t num_rows) const {
    return !tensor || (tensor.numel() == 1 && num_rows != 1);
  }
  // Whether it is a matrix with one column, [num_rows, 1].
  bool is_column() const { return tensor && tensor.ndim() == 2; }
};

inline void check_row_vector(const Tensor& tensor, int64_t num_rows) {
  check_shape(tensor, {num_rows});
  check_last_dim_contiguous(tensor);
}

// Statistics that one kernel leaves for the next; may be None if they need no bytes.
inline void check_workspace(const Tensor& workspace, int64_t bytes) {
  if (bytes == 0 && !workspace) return;
  if (!workspace) raise("TypeError", "`%s` must be a torch.Tensor, got None", workspace.name);
  check_dtype(workspace, dtype::uint8);
  if (workspace.numel() < bytes || !is_aligned(workspace, 16)) {
    raise("ValueError", "`%s` must have %lld bytes at a 16-byte address, got %lld", workspace.name,
          static_cast<long long>(bytes), static_cast<long long>(workspace.numel()));
  }
}

inline RowValue<float> take_row_float(Args& args, const char* name) {
  if (!args.next_is_tensor()) {
    const double value = args.number(name);
    if (std::isnan(value)) raise("ValueError", "`%s` must be a number, got NaN", name);
    return {{}, static_cast<float>(value)};
  }
  const Tensor tensor = args.tensor(name);
  check_dtype(tensor, dtype::float32);
  return {tensor, 0.f};
}

inline RowValue<int32_t> take_row_int(Args& args, const char* name) {
  if (!args.next_is_tensor()) {
    const int64_t value = args.integer(name);
    return {{}, static_cast<int32_t>(value > INT32_MAX ? INT32_MAX : value < 0 ? 0 : value)};
  }
  const Tensor tensor = args.tensor(name);
  check_dtype(tensor, dtype::int32);
  return {tensor, 0};
}

inline RowValue<uint64_t> take_row_seed(Args& args, const char* name) {
  if (!args.next_is_tensor()) return {{}, static_cast<uint64_t>(args.integer(name))};
  const Tensor tensor = args.tensor(name);
  check_dtype(tensor, {dtype::int64, DLDataType{kDLUInt, 64, 1}});
  return {tensor, 0};
}

// Checks an offset [num_rows] or [1], and a seed, which may also be a column.
inline void check_row_seeds(const RowValue<uint64_t>& seed, const RowValue<uint64_t>& offset,
                            int64_t num_rows) {
  const auto rows_of = [&](const Tensor& tensor) { return tensor.numel() == 1 ? 1 : num_rows; };
  if (offset.tensor) check_row_vector(offset.tensor, rows_of(offset.tensor));
  if (seed.is_column()) {
    check_shape(seed.tensor, {num_rows, 1});
    check_contiguous(seed.tensor);
  } else if (seed.tensor) {
    check_row_vector(seed.tensor, rows_of(seed.tensor));
  }
}

}  // namespace flashinfer::ffi
