// Plans of MLA that are made on the device. Plain C++.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/scheduler/mla_work.h>

namespace flashinfer {

// Units of MlaPlanParams that CTAs which plan for themselves can divide; a launch plans more.
inline constexpr int64_t kMlaMostOwnUnits = 128;

// Arguments of a plan that is made on the device.
//
// Requests stand in a table of page numbers. A request has `qo_len` query tokens, or those that
// qo_indptr says. The tiles of a request make up to `units_of_request` units of `lanes` tiles.
struct MlaPlanParams {
  const int32_t* kv_lens;    // [num_requests / sharers]
  const int32_t* qo_indptr;  // [num_requests + 1]; may be null
  MlaPlanHeader* header;
  int32_t* cta_begin;          // [num_ctas + 1]
  MlaMerge* merges;            // [num_ctas]
  MlaMergeCounters* counters;  // [num_ctas]; CTAs that plan for themselves find zeros there
  MlaWorkItem* items;
  int32_t num_requests, qo_len, num_tokens;
  FastDivisor num_heads;
  // Consecutive requests that share an entry of kv_lens. Each has one query token, the last of them
  // sees all tokens of the entry, the one before a token less, and so on.
  FastDivisor sharers;
  int32_t table_stride;  // entries of the table from one request to the next
  int32_t most_tokens;   // that a row of the table can name
  FastDivisor units_of_request;
  int32_t lanes, num_ctas;
  bool causal;
};

// A plan as the launch takes it.
struct MlaLaunchPlan : MlaPlan {
  bool made_by_ctas;  // of the kernel, from `planner`
  MlaPlanParams planner;
};

}  // namespace flashinfer
