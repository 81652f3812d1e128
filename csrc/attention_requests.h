// The requests of an attention plan as bindings take them: host tensors of lengths, each checked
// under the name that the caller uses.
#pragma once

#include <flashinfer/scheduler/attention_tiles.h>

#include <algorithm>
#include <iterator>

#include "index_binding.h"

namespace flashinfer {

using ffi::Tensor;

// Names of these arguments in a public function. Python chooses an entry by its position:
// ArgumentNames in flashinfer/_attention/plan/requests.py.
struct ArgumentNames {
  const char *qo_indptr, *kv_indptr, *kv_len, *last_page_len;
  bool first_row_is_0;  // false: rows before the first request are not the caller's
};
constexpr ArgumentNames kArgumentNames[] = {
    {"qo_indptr", "indptr", "seq_lens", "last_page_len", false},
    {"qo_indptr", "paged_kv_indptr", "seq_lens", "paged_kv_last_page_len", true},
    {"qo_indptr", "kv_indptr", "seq_lens", "last_page_len", true},
    {"qo_indptr", "kv_indptr", "kv_len_arr", "last_page_len", false},
    {"qo_indptr_p", "kv_indptr_p", "seq_lens_p", "last_page_len_p", false},
    {"qo_indptr_d", "kv_indptr_d", "seq_lens_d", "last_page_len_d", false},
};

inline const int32_t* host_indices(const Tensor& tensor, int64_t length) {
  ffi::check_indices(tensor, length);
  if (tensor.dl->device.device_type != kDLCPU && tensor.dl->device.device_type != kDLCUDAHost) {
    ffi::raise("ValueError", "`%s` must be on the host here, got a tensor on a GPU", tensor.name);
  }
  return static_cast<const int32_t*>(tensor.data());
}

[[noreturn]] inline void raise_element(const char* name, int64_t index, int64_t value,
                                       const char* rule, int64_t bound) {
  ffi::raise("ValueError", "`%s`[%lld] must be %s %lld, got %lld", name,
             static_cast<long long>(index), rule, static_cast<long long>(bound),
             static_cast<long long>(value));
}

struct RequestArguments {
  Tensor qo_indptr, kv_indptr, kv_len, last_page_len;
  int64_t page_size, tokens_per_request;
  bool first_row_is_0;
};

// Takes the fields of `Requests` in flashinfer/_attention/plan/requests.py in order, then `causal`
// and `window_left`.
inline RequestArguments take_request_arguments(ffi::Args& args, RequestGroup& group) {
  const int64_t position = args.integer_in("argument_names", 0, std::size(kArgumentNames) - 1);
  const ArgumentNames& names = kArgumentNames[position];
  RequestArguments result;
  result.first_row_is_0 = names.first_row_is_0;
  result.qo_indptr = args.optional_tensor(names.qo_indptr);
  result.kv_indptr = args.tensor(names.kv_indptr);
  result.kv_len = args.optional_tensor(names.kv_len);
  result.last_page_len = args.optional_tensor(names.last_page_len);
  result.page_size = args.integer_in("page_size", 0, INT32_MAX);
  result.tokens_per_request = args.integer_in("tokens_per_request", 0, INT32_MAX);
  group.causal = args.flag("causal");
  group.window_left = args.integer("window_left");
  args.all_taken();
  if (result.page_size == 0 && (result.kv_len || result.last_page_len)) {
    ffi::raise("ValueError", "`%s` is for paged caches: without pages `%s` says all lengths",
               result.kv_len ? names.kv_len : names.last_page_len, names.kv_indptr);
  }
  if (result.page_size > 0 && !result.kv_len && !result.last_page_len) {
    ffi::raise("ValueError", "`%s` or `%s` must say how long the requests are", names.kv_len,
               names.last_page_len);
  }
  return result;
}

// Length in tokens of request i with `pages` pages, from the tensors that were given.
inline int64_t paged_length(const RequestArguments& arguments, const int32_t* kv_len,
                            const int32_t* last_page_len, int64_t i, int64_t pages) {
  const int64_t page_size = arguments.page_size;
  int64_t length = 0;
  if (last_page_len) {
    const int64_t last = last_page_len[i];
    // Engines pad a batch with requests that have no pages and an arbitrary last_page_len.
    const int64_t low = pages > 0 ? 1 : 0;
    if (last < low || last > page_size) {
      ffi::raise("ValueError",
                 "`%s`[%lld] must be from %lld to the page size %lld for a request of %lld pages, "
                 "got %lld",
                 arguments.last_page_len.name, static_cast<long long>(i),
                 static_cast<long long>(low), static_cast<long long>(page_size),
                 static_cast<long long>(pages), static_cast<long long>(last));
    }
    length = pages > 0 ? (pages - 1) * page_size + last : 0;
    if (kv_len && kv_len[i] != length) {
      ffi::raise("ValueError", "`%s`[%lld] is %d, but by `%s` and `%s` the request has %lld tokens",
                 arguments.kv_len.name, static_cast<long long>(i), kv_len[i],
                 arguments.kv_indptr.name, arguments.last_page_len.name,
                 static_cast<long long>(length));
    }
  } else {
    length = kv_len[i];
    if (length < 0) raise_element(arguments.kv_len.name, i, length, "at least", 0);
    if (length > pages * page_size) {
      ffi::raise("ValueError",
                 "`%s`[%lld] must be at most %lld, as the request has %lld pages of %lld tokens, "
                 "got %lld",
                 arguments.kv_len.name, static_cast<long long>(i),
                 static_cast<long long>(pages * page_size), static_cast<long long>(pages),
                 static_cast<long long>(page_size), static_cast<long long>(length));
    }
  }
  if (length > INT32_MAX) {
    ffi::raise("ValueError", "`%s`: request %lld has %lld tokens, there must be fewer than 2^31",
               arguments.kv_indptr.name, static_cast<long long>(i), static_cast<long long>(length));
  }
  return length;
}

// Takes the arguments of a group, checks every number, and collects the requests. Returns the
// largest number of query tokens of a request.
inline int64_t read_requests(ffi::Args& args, int64_t group_size, RequestGroup& group) {
  const RequestArguments arguments = take_request_arguments(args, group);
  const Tensor& kv_name = arguments.kv_indptr;
  const int64_t batch_size = ffi::check_indptr(kv_name);
  const int32_t* kv_indptr = host_indices(kv_name, -1);
  const int32_t* qo_indptr = nullptr;
  const int32_t* kv_len = nullptr;
  const int32_t* last_page_len = nullptr;
  if (arguments.qo_indptr) qo_indptr = host_indices(arguments.qo_indptr, batch_size + 1);
  if (arguments.kv_len) kv_len = host_indices(arguments.kv_len, batch_size);
  if (arguments.last_page_len) last_page_len = host_indices(arguments.last_page_len, batch_size);
  // A slice of a larger batch, whose tensors are given whole, begins above 0.
  if (kv_indptr[0] < 0) raise_element(kv_name.name, 0, kv_indptr[0], "at least", 0);
  if (qo_indptr && qo_indptr[0] < 0) {
    raise_element(arguments.qo_indptr.name, 0, qo_indptr[0], "at least", 0);
  }
  if (qo_indptr && qo_indptr[0] > 0 && arguments.first_row_is_0) {
    ffi::raise("ValueError", "`%s` must begin with 0, got %d", arguments.qo_indptr.name,
               qo_indptr[0]);
  }
  const int64_t even = arguments.tokens_per_request;
  if (!qo_indptr && batch_size * even > INT32_MAX) {
    ffi::raise("ValueError", "%lld requests of %lld tokens are too many: at most 2^31 - 1 tokens",
               static_cast<long long>(batch_size), static_cast<long long>(even));
  }

  group.requests.resize(batch_size);
  int64_t longest = qo_indptr ? 0 : even;
  for (int64_t i = 0; i < batch_size; ++i) {
    PlanRequest& request = group.requests[i];
    request.kv_base = kv_indptr[i];
    const int64_t entries = static_cast<int64_t>(kv_indptr[i + 1]) - kv_indptr[i];
    if (entries < 0) raise_element(kv_name.name, i + 1, kv_indptr[i + 1], "at least", kv_indptr[i]);
    request.kv_len = static_cast<int32_t>(
        arguments.page_size ? paged_length(arguments, kv_len, last_page_len, i, entries) : entries);
    if (qo_indptr) {
      if (qo_indptr[i + 1] < qo_indptr[i]) {
        raise_element(arguments.qo_indptr.name, i + 1, qo_indptr[i + 1], "at least", qo_indptr[i]);
      }
      request.qo_begin = qo_indptr[i];
      request.qo_len = qo_indptr[i + 1] - qo_indptr[i];
      longest = std::max<int64_t>(longest, request.qo_len);
    } else {
      request.qo_begin = static_cast<int32_t>(i * even);
      request.qo_len = static_cast<int32_t>(even);
    }
  }
  if (longest * group_size > INT32_MAX - 1024) {
    ffi::raise("ValueError",
               "`%s`: a request of %lld tokens with %lld query heads for each KV head is too long: "
               "their product must be below 2^31 - 1024",
               arguments.qo_indptr.name, static_cast<long long>(longest),
               static_cast<long long>(group_size));
  }
  group.qo_tokens = qo_indptr ? qo_indptr[batch_size] : batch_size * even;
  group.kv_entries = kv_indptr[batch_size];
  return batch_size ? longest : 0;
}

}  // namespace flashinfer
