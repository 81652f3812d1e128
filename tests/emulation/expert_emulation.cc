// Random exchanges of the experts' all-to-all by ranks that are processes, emulated on the CPU,
// against loops: ranks without tokens, skewed choices, experts that do not exist, rows of any
// width.
//
//   expert_emulation <exchanges of each kind>
//
// Prints what is wrong with the first bad exchange of a rank and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/comm/expert_combine.cuh>
#include <flashinfer/comm/expert_dispatch.cuh>

#include "ranks.h"

#include <random>

namespace flashinfer {
namespace {

using BF16 = dtype::bfloat16;
using E4M3 = dtype::float8_e4m3fn;
constexpr int64_t kBufferBytes = 1 << 20;
constexpr uint32_t kStats = 5, kMaxTokens = 70;
constexpr int32_t kInvalid = 77777;

bool complain(uint32_t rank, const char* what, int64_t index, double got, double expected) {
  std::printf("rank %u: %s %lld: got %g, expected %g\n", rank, what, static_cast<long long>(index),
              got, expected);
  return false;
}

// One exchange as every rank knows it.
struct Exchange {
  int max_tokens, top_k, experts_per_rank, row_bytes, hidden;
  bool is_staged;
  std::vector<int> tokens;                    // of each rank
  std::vector<std::vector<int32_t>> experts;  // [tokens, top_k]
  std::vector<std::vector<uint8_t>> rows;     // [tokens, row_bytes]
};

Exchange draw(std::mt19937& engine, uint32_t ranks) {
  const auto integer = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(engine);
  };
  Exchange exchange = {};
  exchange.max_tokens = integer(1, 4) == 1 ? integer(40, kMaxTokens) : integer(1, 12);
  exchange.top_k = integer(1, 6);
  exchange.experts_per_rank = integer(1, 4);
  exchange.row_bytes = integer(0, 2) == 0 ? integer(1, 40) : 4 * integer(1, 40);
  exchange.hidden = 8 * integer(1, 12);
  exchange.is_staged = integer(0, 1);
  const int all = exchange.experts_per_rank * ranks;
  const int skewed = integer(0, 2) == 0 ? exchange.experts_per_rank : all;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const int tokens = integer(0, 3) == 0 ? 0 : integer(0, exchange.max_tokens);
    exchange.tokens.push_back(tokens);
    exchange.experts.emplace_back(tokens * exchange.top_k);
    for (int32_t& expert : exchange.experts.back()) {
      const int kind = integer(0, 9);
      expert = kind == 0 ? -1 : kind == 1 ? all + integer(0, 1) * 1000000 : integer(0, skewed - 1);
    }
    exchange.rows.emplace_back(tokens * exchange.row_bytes);
    for (uint8_t& byte : exchange.rows.back()) byte = integer(0, 255);
  }
  return exchange;
}

bool goes(const Exchange& exchange, uint32_t source, int token, uint32_t rank) {
  for (int k = 0; k < exchange.top_k; ++k) {
    const int expert = exchange.experts[source][token * exchange.top_k + k];
    if (expert >= 0 && expert / exchange.experts_per_rank == static_cast<int>(rank)) return true;
  }
  return false;
}

// What the experts of `rank` make of a token: small integers, which 8 bits hold.
float made(uint32_t rank, uint32_t source, int token, int column) {
  return static_cast<float>((rank * 3 + source * 5 + token * 7 + column) % 17) - 8.f;
}

// Slots, statistics and outputs begin at the same place in every exchange, received rows end there:
// a rank may send its next rows while others still read outputs.
struct Layout {
  int64_t slots, stats, places, rows, ids;
};

Layout layout_of(const Exchange& exchange, uint32_t ranks) {
  const auto whole = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t places = int64_t{ranks} * exchange.max_tokens;
  Layout layout = {};
  layout.slots = 256;
  layout.stats = layout.slots + whole(kMaxTokens * ranks * 4);
  layout.places = layout.stats + whole(ranks * kStats * 4);
  layout.ids = kBufferBytes - whole(places * exchange.top_k * 4);
  layout.rows = layout.ids - whole(places * exchange.row_bytes);
  if (layout.places + places * exchange.hidden * 2 > kBufferBytes / 2 ||
      layout.rows < kBufferBytes / 2)
    emulation::fail("the buffer is too small");
  return layout;
}

template <int kRanks>
bool check_dispatch(const Exchange& exchange, const comm::CommWorkspace& workspace,
                    uint64_t active) {
  const uint32_t rank = workspace.rank;
  const Layout layout = layout_of(exchange, kRanks);
  std::vector<int32_t> stats(kStats);
  for (uint32_t i = 0; i < kStats; ++i) stats[i] = 10 * rank + i;
  ExpertDispatchParams params = {};
  params.workspace = workspace;
  params.active.ranks = active;
  params.experts = exchange.experts[rank].data();
  params.slots = layout.slots;
  params.stats = stats.data();
  params.gathered_stats = layout.stats;
  params.num_stats = kStats;
  params.num_payloads = 2;
  const uint32_t unit = exchange.row_bytes % 16 == 0 ? 16 : exchange.row_bytes % 4 == 0 ? 4 : 1;
  params.payloads[0] = {exchange.rows[rank].data(), exchange.row_bytes, layout.rows, unit};
  params.payloads[1] = {params.experts, exchange.top_k * 4, layout.ids, 4};
  params.num_tokens = exchange.tokens[rank];
  params.max_tokens = exchange.max_tokens;
  params.top_k = exchange.top_k;
  params.experts_per_rank = exchange.experts_per_rank;
  launch_expert_dispatch<kRanks>(params, false, nullptr);
  auto* ids = comm::at_offset<int32_t>(workspace, rank, layout.ids);
  const uint32_t top_k = exchange.top_k, max_tokens = exchange.max_tokens;
  launch_expert_sanitize<kRanks>({workspace, ids, max_tokens, top_k, kInvalid}, false, nullptr);

  const auto* rows = comm::at_offset<uint8_t>(workspace, rank, layout.rows);
  const auto* gathered = comm::at_offset<int32_t>(workspace, rank, layout.stats);
  for (uint32_t source = 0; source < kRanks; ++source) {
    const bool is_active = active >> source & 1;
    int64_t place = int64_t{source} * exchange.max_tokens;
    for (int token = 0; is_active && token < exchange.tokens[source]; ++token) {
      if (!goes(exchange, source, token, rank)) continue;
      for (int i = 0; i < exchange.row_bytes; ++i) {
        const uint8_t expected = exchange.rows[source][token * exchange.row_bytes + i];
        const uint8_t got = rows[place * exchange.row_bytes + i];
        if (got != expected) return complain(rank, "byte of a row", i, got, expected);
      }
      for (int k = 0; k < exchange.top_k; ++k) {
        const int expected = exchange.experts[source][token * exchange.top_k + k];
        const int got = ids[place * exchange.top_k + k];
        if (got != expected) return complain(rank, "expert", k, got, expected);
      }
      ++place;
    }
    for (; place < int64_t{source + 1} * exchange.max_tokens; ++place) {
      const int got = ids[place * exchange.top_k];
      if (got != kInvalid) return complain(rank, "unused place", place, got, kInvalid);
    }
    for (uint32_t i = 0; is_active && i < kStats; ++i) {
      const int got = gathered[source * kStats + i], expected = 10 * source + i;
      if (got != expected) return complain(rank, "statistic", i, got, expected);
    }
  }
  return true;
}

template <int kRanks, typename Stored>
bool check_combine(const Exchange& exchange, const comm::CommWorkspace& workspace,
                   uint64_t active) {
  const uint32_t rank = workspace.rank;
  const Layout layout = layout_of(exchange, kRanks);
  const int hidden = exchange.hidden, tokens = exchange.tokens[rank];
  const bool is_staged = exchange.is_staged || !std::is_same_v<Stored, BF16>;
  std::vector<BF16> own(kRanks * exchange.max_tokens * hidden), combined(tokens * hidden);
  BF16* outputs = is_staged ? own.data() : comm::at_offset<BF16>(workspace, rank, layout.places);
  for (uint32_t source = 0; source < kRanks; ++source) {
    int64_t place = int64_t{source} * exchange.max_tokens;
    for (int token = 0; active >> source & 1 && token < exchange.tokens[source]; ++token) {
      if (!goes(exchange, source, token, rank)) continue;
      for (int i = 0; i < hidden; ++i)
        outputs[place * hidden + i] = from_float<BF16>(made(rank, source, token, i));
      ++place;
    }
  }
  ExpertCombineParams params = {};
  params.workspace = workspace;
  params.active.ranks = active;
  params.outputs = is_staged ? outputs : nullptr;
  params.combined = combined.data();
  params.slots = layout.slots;
  params.places = layout.places;
  params.num_tokens = tokens;
  params.max_tokens = exchange.max_tokens;
  params.row_vecs = hidden / 8;
  launch_expert_combine<ExpertCombineTraits<BF16, Stored, BF16, kRanks>>(params, false, nullptr);
  for (int i = 0; i < tokens * hidden; ++i) {
    float expected = 0.f;
    for (uint32_t other = 0; other < kRanks; ++other) {
      if ((active >> other & 1) && goes(exchange, rank, i / hidden, other))
        expected += made(other, rank, i / hidden, i % hidden);
    }
    if (to_float(combined[i]) != expected)
      return complain(rank, "combined", i, to_float(combined[i]), expected);
  }
  return true;
}

template <int kRanks, typename Stored>
bool run(int exchanges, uint64_t active) {
  const emulation::Workspaces workspaces(kRanks, kBufferBytes / 2, 0);
  const bool is_right = emulation::run_ranks(kRanks, [&](uint32_t rank) {
    if (!(active >> rank & 1)) return true;
    std::mt19937 engine(kRanks);
    for (int i = 0; i < exchanges; ++i) {
      const Exchange exchange = draw(engine, kRanks);
      if (!check_dispatch<kRanks>(exchange, workspaces.of_rank[rank], active) ||
          !check_combine<kRanks, Stored>(exchange, workspaces.of_rank[rank], active)) {
        std::printf("in exchange %d of %d ranks\n", i, kRanks);
        return false;
      }
    }
    // A rank that is gone between a dispatch and its combine has no part in the sums.
    const uint64_t left = active & (active - 1);
    const Exchange last = draw(engine, kRanks);
    return check_dispatch<kRanks>(last, workspaces.of_rank[rank], active) &&
           (!(left >> rank & 1) ||
            check_combine<kRanks, Stored>(last, workspaces.of_rank[rank], left));
  });
  return is_right;
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  const int exchanges = argc > 1 ? std::atoi(argv[1]) : 1;
  const bool is_right = run<2, BF16>(exchanges, 0b11) && run<3, E4M3>(exchanges, 0b111) &&
                        run<4, BF16>(exchanges, 0b1011) && run<8, BF16>(exchanges, 0xff);
  return is_right ? 0 : 1;
}
