// Arguments of the scores by which sparse attention chooses tokens. Plain C++: shared by kernels,
// launchers and bindings.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>

namespace flashinfer {

// KV tokens of a request or of a block of queries that a CTA scores at a time.
inline constexpr int kMqaUnit = 256;

// logits[i, p] = scale[p] sum over h of weights[i, h] max(q[i, h] k[p], 0), with e4m3 queries and
// keys of 128 columns. Query i sees the positions of one range; others get minus infinity where
// they are written at all.
struct MqaLogitsParams {
  const void* q;         // [num_queries, heads, 128]
  int64_t q_stride;      // bytes from one query to the next
  const float* weights;  // [num_queries, heads]
  int64_t weights_stride;
  void* logits;  // [num_queries, >= max_length]
  int64_t logits_stride;
  int32_t num_queries;
  int32_t groups;  // products that the queries of a request (or block) take

  // Keys are rows of 128 bytes. Their scales follow the rows of a page, or have their own tensor.
  const char* keys;
  int64_t key_stride;   // bytes from one page (paged) or key to the next
  const float* scales;  // not paged
  int32_t max_length;   // positions below it are scored

  // Paged: request r has queries r * next_n to r * next_n + next_n - 1, and query t of them sees
  // the first seq_lens[r] - next_n + t + 1 positions.
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* seq_lens;
  int64_t seq_lens_stride;
  const int32_t* schedule;  // [CTAs + 1, 2]: request and unit where each CTA begins
  FastDivisor page_size;
  int32_t num_pages, batch_size, next_n;

  // Not paged: query i sees positions starts[i] to ends[i] - 1. A block's units are cut into
  // `splits` parts, a CTA for each.
  const int32_t *starts, *ends;
  int32_t splits;
};

// Equal shares of all requests' units.
struct MqaScheduleParams {
  const int32_t* seq_lens;
  int64_t seq_lens_stride;
  int32_t batch_size, parts;
  int32_t* schedule;  // [parts + 1, 2]
};

}  // namespace flashinfer
