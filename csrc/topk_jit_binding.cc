// kValues: top_k(indices, values, workspace, input, k, tie_break, max_cluster, enable_pdl)
// kPageTable: top_k(out, out_raw_indices, workspace, input, src_page_table, lengths, row_to_batch,
//                   row_starts, page_table_row_starts, page_size, k, ...)
// kRagged: top_k(out, workspace, input, offsets, lengths, row_starts, k, ...)
#include "ffi.h"
#include "topk.h"

namespace flashinfer {
namespace {

constexpr DLDataType kDtype = ffi::dtype::FLASHINFER_CFG_DTYPE;
constexpr TopKOutput kOutput = TopKOutput::FLASHINFER_CFG_OUTPUT;
constexpr bool kValues = kOutput == TopKOutput::kValues;
constexpr bool kPageTable = kOutput == TopKOutput::kPageTable;

const int32_t* row_ints(const ffi::Tensor& tensor) {
  return tensor ? static_cast<const int32_t*>(tensor.data()) : nullptr;
}

void check_row_ints(const ffi::Tensor& tensor, int64_t num_rows) {
  if (!tensor) return;
  ffi::check_dtype(tensor, ffi::dtype::int32);
  ffi::check_shape(tensor, {num_rows});
  ffi::check_last_dim_contiguous(tensor);
}

void check_out(const ffi::Tensor& tensor, int64_t num_rows, int64_t k) {
  if (!tensor) return;
  ffi::check_shape(tensor, {num_rows, k});
  if (tensor.numel() != 0 && (tensor.stride(1) != 1 && k > 1)) {
    ffi::raise("ValueError", "`%s` must be contiguous", tensor.name);
  }
  if (num_rows > 1 && k > 0 && tensor.stride(0) != k) {
    ffi::raise("ValueError", "`%s` must be contiguous", tensor.name);
  }
}

void run(ffi::Args& args) {
  const ffi::Tensor indices = args.tensor(kValues ? "indices" : "out");
  const ffi::Tensor values = kValues ? args.tensor("values") : ffi::Tensor{};
  const ffi::Tensor raw = kPageTable ? args.optional_tensor("out_raw_indices") : ffi::Tensor{};
  const ffi::Tensor workspace = args.optional_tensor("workspace");
  const ffi::Tensor input = args.tensor("input");
  ffi::Tensor page_table, offsets, lengths, row_to_batch, row_starts, page_starts;
  int64_t page_size = 1;
  if (kPageTable) {
    page_table = args.tensor("src_page_table");
    lengths = args.tensor("lengths");
    row_to_batch = args.optional_tensor("row_to_batch");
    row_starts = args.optional_tensor("row_starts");
    page_starts = args.optional_tensor("page_table_row_starts");
    page_size = args.integer("page_size");
  } else if (!kValues) {
    offsets = args.tensor("offsets");
    lengths = args.tensor("lengths");
    row_starts = args.optional_tensor("row_starts");
  }
  const int64_t k = args.integer("k");
  const bool prefer_large = args.integer("tie_break") != 0;
  const int64_t max_cluster = args.integer("max_cluster");
  const ffi::Args::Flag enable_pdl = args.optional_flag("enable_pdl");

  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 2, 2);
  ffi::check_last_dim_contiguous(input);
  const int64_t num_rows = input.dim(0), num_cols = input.dim(1);
  if (num_rows > INT32_MAX / 16 || num_cols > INT32_MAX / 2) {
    ffi::raise("ValueError", "`input` must have at most 2^27 rows and 2^30 columns, got shape %s",
               input.shape_text().c_str());
  }
  if (k < 1 || (kValues && k > num_cols) || k > INT32_MAX / 2) {
    ffi::raise("ValueError", "`k` must be at least 1%s, got %lld for %lld columns",
               kValues ? " and at most the number of columns" : "", static_cast<long long>(k),
               static_cast<long long>(num_cols));
  }
  if (page_size < 1 || page_size > INT32_MAX) {
    ffi::raise("ValueError", "`page_size` must be positive, got %lld",
               static_cast<long long>(page_size));
  }
  check_row_ints(lengths, num_rows);
  check_row_ints(offsets, num_rows);
  check_row_ints(row_to_batch, num_rows);
  check_row_ints(row_starts, num_rows);
  check_row_ints(page_starts, num_rows);
  if (kPageTable) {
    ffi::check_dtype(page_table, ffi::dtype::int32);
    ffi::check_ndim(page_table, 2, 2);
    ffi::check_last_dim_contiguous(page_table);
    if (!row_to_batch && page_table.dim(0) != num_rows) {
      ffi::raise("ValueError",
                 "`src_page_table` must have a row per row of `input` (%lld) where "
                 "`row_to_batch` is None, got shape %s",
                 static_cast<long long>(num_rows), page_table.shape_text().c_str());
    }
    ffi::check_disjoint(indices, page_table);
    if (raw) ffi::check_disjoint(raw, indices);
  }
  ffi::check_dtype(indices, {ffi::dtype::int32, ffi::dtype::int64});
  if (!kValues) ffi::check_dtype(indices, ffi::dtype::int32);
  if (values) ffi::check_dtype(values, kDtype);
  if (raw) ffi::check_dtype(raw, ffi::dtype::int32);
  check_out(indices, num_rows, k);
  check_out(values, num_rows, k);
  check_out(raw, num_rows, k);
  for (const ffi::Tensor& tensor : {indices, values, raw}) {
    if (tensor) ffi::check_disjoint(tensor, input);
  }

  if (workspace) {
    const auto needed = static_cast<int64_t>(TopKStream::workspace_bytes(num_rows));
    ffi::check_dtype(workspace, ffi::dtype::uint8);
    if (!TopKStream::suits(num_cols, k) || workspace.numel() < needed ||
        !ffi::is_aligned(workspace, 16)) {
      ffi::raise("ValueError", "`workspace` must have %lld bytes at a 16-byte address, got %lld",
                 static_cast<long long>(needed), static_cast<long long>(workspace.numel()));
    }
  }

  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor : {indices, values, raw, workspace, page_table, offsets, lengths,
                                    row_to_batch, row_starts, page_starts}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
  if (num_rows == 0) return;

  TopKParams params = {};
  params.input = input.data();
  params.input_stride = input.stride(0);
  params.row_starts = row_ints(row_starts);
  params.lengths = row_ints(lengths);
  params.indices = indices.data();
  params.values = values ? values.data() : nullptr;
  params.raw_indices = raw ? static_cast<int32_t*>(raw.data()) : nullptr;
  if (kPageTable) {
    params.page_table = row_ints(page_table);
    params.page_table_stride = page_table.stride(0);
    params.num_batches = static_cast<uint32_t>(page_table.dim(0));
    params.num_entries = static_cast<uint32_t>(page_table.dim(1));
  }
  params.row_to_batch = row_ints(row_to_batch);
  params.page_starts = row_ints(page_starts);
  params.offsets = row_ints(offsets);
  params.num_rows = static_cast<uint32_t>(num_rows);
  params.num_cols = static_cast<uint32_t>(num_cols);
  params.page_size = static_cast<uint32_t>(page_size);
  params.k = static_cast<uint32_t>(k);
  params.indices_are_64bit = indices.itemsize() == 8;
  params.prefer_large_index = prefer_large;
  params.workspace = workspace ? workspace.data() : nullptr;
  params.max_cluster = static_cast<uint32_t>(max_cluster);

  const ffi::DeviceGuard guard(input);
  ffi::check_launch(top_k(params, input.dl->device.device_id, ffi::device_info(input).num_sms,
                          ffi::resolve_pdl(enable_pdl, input), ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(top_k, args) { flashinfer::run(args); }
