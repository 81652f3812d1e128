//   top_k(indices, values, workspace, input, k, prefer_large, max_cluster, enable_pdl)
//   top_k(out, out_raw_indices, workspace, input, src_page_table, rows, page_size, k, prefer_large,
//         max_cluster, enable_pdl)
//   top_k(out, workspace, input, offsets, lengths, row_starts, k, prefer_large, max_cluster,
//         enable_pdl)
//   workspace_bytes(num_rows, num_cols, k) -> int
//
// The output of the configuration decides which top_k there is: kValues, kPageTable or kRagged.
// `rows` is a tuple (lengths, row_to_batch, row_starts, page_table_row_starts), of which all but
// the first may be None. `workspace` may be None: then one kernel does it.
#include "ffi.h"
#include "row_arguments.h"
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
  if (tensor) ffi::check_vector(tensor, ffi::dtype::int32, num_rows);
}

void check_out(const ffi::Tensor& tensor, int64_t num_rows, int64_t k, const ffi::Tensor& input) {
  if (!tensor) return;
  ffi::check_shape(tensor, {num_rows, k});
  ffi::check_contiguous(tensor);
  ffi::check_disjoint(tensor, input);
}

struct Call {
  ffi::Tensor indices, values, raw, workspace, input;
  ffi::Tensor page_table, offsets, lengths, row_to_batch, row_starts, page_starts;
  int64_t page_size = 1, k, max_cluster;
  bool prefer_large;
  ffi::Args::Flag enable_pdl;
};

void take_rows(ffi::Args& args, Call& call) {
  if (kPageTable) {
    call.page_table = args.tensor("src_page_table");
    ffi::Args rows = args.group("rows", 4);
    call.lengths = rows.tensor("lengths");
    call.row_to_batch = rows.optional_tensor("row_to_batch");
    call.row_starts = rows.optional_tensor("row_starts");
    call.page_starts = rows.optional_tensor("page_table_row_starts");
    call.page_size = args.integer_in("page_size", 1, INT32_MAX);
  } else if (!kValues) {
    call.offsets = args.tensor("offsets");
    call.lengths = args.tensor("lengths");
    call.row_starts = args.optional_tensor("row_starts");
  }
}

Call take(ffi::Args& args) {
  Call call;
  call.indices = args.tensor(kValues ? "indices" : "out");
  if (kValues) call.values = args.tensor("values");
  if (kPageTable) call.raw = args.optional_tensor("out_raw_indices");
  call.workspace = args.optional_tensor("workspace");
  call.input = args.tensor("input");
  take_rows(args, call);
  call.k = args.integer("k");
  call.prefer_large = args.flag("tie_break");
  call.max_cluster = args.integer("max_cluster");
  call.enable_pdl = args.optional_flag("enable_pdl");
  args.all_taken();
  return call;
}

void check_rows(const Call& call, int64_t num_rows) {
  for (const ffi::Tensor& tensor :
       {call.lengths, call.offsets, call.row_to_batch, call.row_starts, call.page_starts}) {
    check_row_ints(tensor, num_rows);
  }
  if (!kPageTable) return;
  ffi::check_dtype(call.page_table, ffi::dtype::int32);
  ffi::check_ndim(call.page_table, 2, 2);
  ffi::check_last_dim_contiguous(call.page_table);
  if (!call.row_to_batch && call.page_table.dim(0) != num_rows) {
    ffi::raise("ValueError",
               "`src_page_table` must have a row per row of `input` (%lld) where `row_to_batch` is "
               "None, got shape %s",
               static_cast<long long>(num_rows), call.page_table.shape_text().c_str());
  }
  ffi::check_disjoint(call.indices, call.page_table);
}

int64_t bytes_needed(int64_t num_rows, int64_t num_cols, int64_t k) {
  return TopKStream::suits(kOutput, num_cols, k)
             ? static_cast<int64_t>(TopKStream::workspace_bytes(num_rows))
             : 0;
}

void check_workspace(const Call& call) {
  if (!call.workspace) return;
  const int64_t num_cols = call.input.dim(1);
  const int64_t needed = bytes_needed(call.input.dim(0), num_cols, call.k);
  if (!TopKStream::suits(kOutput, num_cols, call.k)) {
    ffi::raise("ValueError", "`workspace` must be None for %lld columns and `k` %lld",
               static_cast<long long>(num_cols), static_cast<long long>(call.k));
  }
  ffi::check_workspace(call.workspace, needed);
}

void check(const Call& call) {
  const ffi::Tensor& input = call.input;
  ffi::check_dtype(input, kDtype);
  ffi::check_ndim(input, 2, 2);
  ffi::check_last_dim_contiguous(input);
  const int64_t num_rows = input.dim(0), num_cols = input.dim(1);
  if (num_rows > INT32_MAX / 16 || num_cols > INT32_MAX / 2) {
    ffi::raise("ValueError", "`input` must have at most 2^27 rows and 2^30 columns, got shape %s",
               input.shape_text().c_str());
  }
  if (call.k < 1 || (kValues && call.k > num_cols) || call.k > INT32_MAX / 2) {
    ffi::raise("ValueError", "`k` must be at least 1%s, got %lld for %lld columns",
               kValues ? " and at most the number of columns" : "", static_cast<long long>(call.k),
               static_cast<long long>(num_cols));
  }
  check_rows(call, num_rows);
  ffi::check_dtype(call.indices, {ffi::dtype::int32, ffi::dtype::int64});
  if (!kValues) ffi::check_dtype(call.indices, ffi::dtype::int32);
  if (call.values) ffi::check_dtype(call.values, kDtype);
  if (call.raw) ffi::check_dtype(call.raw, ffi::dtype::int32);
  check_out(call.indices, num_rows, call.k, input);
  check_out(call.values, num_rows, call.k, input);
  check_out(call.raw, num_rows, call.k, input);
  if (call.raw) ffi::check_disjoint(call.raw, call.indices);
  check_workspace(call);
  ffi::check_cuda(input);
  for (const ffi::Tensor& tensor :
       {call.indices, call.values, call.raw, call.workspace, call.page_table, call.offsets,
        call.lengths, call.row_to_batch, call.row_starts, call.page_starts}) {
    if (tensor) ffi::check_same_device(tensor, input);
  }
}

TopKParams params_of(const Call& call) {
  TopKParams params = {};
  params.input = call.input.data();
  params.input_stride = call.input.stride(0);
  params.row_starts = row_ints(call.row_starts);
  params.lengths = row_ints(call.lengths);
  params.indices = call.indices.data();
  params.values = call.values ? call.values.data() : nullptr;
  params.raw_indices = call.raw ? static_cast<int32_t*>(call.raw.data()) : nullptr;
  if (kPageTable) {
    params.page_table = row_ints(call.page_table);
    params.page_table_stride = call.page_table.stride(0);
    params.num_batches = static_cast<uint32_t>(call.page_table.dim(0));
    params.num_entries = static_cast<uint32_t>(call.page_table.dim(1));
  }
  params.row_to_batch = row_ints(call.row_to_batch);
  params.page_starts = row_ints(call.page_starts);
  params.offsets = row_ints(call.offsets);
  params.num_rows = static_cast<uint32_t>(call.input.dim(0));
  params.num_cols = static_cast<uint32_t>(call.input.dim(1));
  params.page_size = static_cast<uint32_t>(call.page_size);
  params.k = static_cast<uint32_t>(call.k);
  params.indices_are_64bit = call.indices.itemsize() == 8;
  params.prefer_large_index = call.prefer_large;
  params.workspace = call.workspace ? call.workspace.data() : nullptr;
  params.max_cluster = static_cast<uint32_t>(call.max_cluster);
  return params;
}

void run(ffi::Args& args) {
  const Call call = take(args);
  check(call);
  const ffi::Tensor& input = call.input;
  if (input.dim(0) == 0) return;
  const ffi::DeviceGuard guard(input);
  ffi::check_launch(top_k(params_of(call), input.dl->device.device_id,
                          ffi::device_info(input).num_sms, ffi::resolve_pdl(call.enable_pdl, input),
                          ffi::current_stream(input)));
}

}  // namespace
}  // namespace flashinfer

FLASHINFER_FFI_EXPORT(top_k, args) { flashinfer::run(args); }

// Returns 0 if a single kernel suffices.
FLASHINFER_FFI_EXPORT_INT(workspace_bytes, args) {
  const int64_t num_rows = args.integer("num_rows"), num_cols = args.integer("num_cols");
  return flashinfer::bytes_needed(num_rows, num_cols, args.integer("k"));
}
