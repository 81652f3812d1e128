// Arguments of the experts' all-to-all. Plain C++: shared by kernels, launchers and bindings.
//
// A rank's buffer, whose halves are used as one, begins with an ExpertHeader. Offsets in bytes say
// where the rest lies, alike on all ranks. Tokens of one exchange may arrive while other ranks
// still read outputs of the exchange before, so no place may serve both in two exchanges.
#pragma once

#include <cstdint>
#include <flashinfer/comm/workspace.h>

namespace flashinfer {

struct ExpertHeader {
  uint32_t num_sent[comm::kMaxRanks];  // tokens that this rank sends to each
  uint32_t num_done;                   // CTAs that have sent theirs
};

// Columns of the flags that a rank has for each other rank.
enum class ExpertFlag : uint32_t {
  kDispatched = 0,  // the number of the last exchange whose tokens have come
  kNumTokens = 1,   // how many tokens came then
  kComputed = 2,    // the number of the last exchange whose outputs can be read
};

// Ranks that take part, a bit each.
struct ActiveRanks {
  const uint64_t* on_device;  // null: `ranks`
  uint64_t ranks;
};

struct ExpertDispatchParams {
  static constexpr int kMaxPayloads = 8;
  struct Payload {
    const void* data;   // [tokens, row_bytes]
    int64_t row_bytes;  // received in [ranks, max_tokens, row_bytes]
    int64_t offset;
    uint32_t unit;  // bytes of an access: 16, 4 or 1
  };

  comm::CommWorkspace workspace;
  ActiveRanks active;
  const int32_t* experts;  // [tokens, top_k]
  int64_t slots;           // int32 [tokens, ranks]: where a token lies at a rank, -1: nowhere
  const int32_t* stats;    // [num_stats], may be null
  int64_t gathered_stats;  // int32 [ranks, num_stats]
  Payload payloads[kMaxPayloads];
  uint32_t num_payloads;
  uint32_t num_tokens;
  uint32_t max_tokens;  // places for tokens of one rank
  uint32_t top_k;
  uint32_t experts_per_rank;
  uint32_t num_stats;
};

struct ExpertCombineParams {
  comm::CommWorkspace workspace;
  ActiveRanks active;
  const void* outputs;  // [ranks, max_tokens, hidden]; null: they are in the buffer
  void* combined;       // [tokens, hidden]
  int64_t slots;        // of the dispatch
  int64_t places;       // [ranks, max_tokens, hidden]
  uint32_t num_tokens;
  uint32_t max_tokens;
  uint32_t row_vecs;  // vectors of 8 elements in a row
};

struct ExpertSanitizeParams {
  comm::CommWorkspace workspace;
  int32_t* experts;  // [ranks, max_tokens, top_k]
  uint32_t max_tokens;
  uint32_t top_k;
  int32_t invalid;
};

}  // namespace flashinfer
