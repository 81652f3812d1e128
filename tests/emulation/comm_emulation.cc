// Random calls of the all-reduce and the exchange by ranks that are processes, emulated on the CPU,
// against loops in double precision.
//
//   comm_emulation <calls of each kind>
//
// Prints what is wrong with the first bad call of a rank and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/comm/exchange.cuh>
#include <flashinfer/comm/quantized_all_reduce.cuh>

#include "all_reduce_case.h"
#include "ranks.h"

namespace flashinfer {
namespace {

template <typename Traits>
bool check_all_reduce(uint32_t rank, const comm::CommWorkspace& workspace, Random& random) {
  using Input = typename Traits::Input;
  using Output = typename Traits::Output;
  const Call call = draw<Input>(random, Traits::kRanks);
  const float global = 0.05f * random.integer(1, 60);
  Results results;
  AllReduceParams params = params_of<Input, Output>(call, workspace, global, results);
  const uint32_t per_thread = params.row_vecs > 128 ? 4 : params.row_vecs > 32 ? 2 : 1;
  const uint32_t threads = (ceil_div(params.row_vecs, per_thread) + 31) / 32 * 32;
  const AllReduceSchedule schedule = {call.one_shot, threads, per_thread,
                                      static_cast<uint32_t>(random.integer(1, 4))};
  launch_all_reduce<Traits>(params, schedule, false, nullptr);

  for (int row = 0; row < call.rows; ++row) {
    double squares = 0;
    std::vector<double> h(call.hidden);
    for (int i = 0; i < call.hidden; ++i) {
      const int64_t index = int64_t{row} * call.hidden + i;
      float sum = 0.f, magnitude = 0.f;
      for (int r = 0; r < Traits::kRanks; ++r) {
        const double exact = contribution<Input>(call, r, row, i);
        sum += to_float(from_float<BF16>(static_cast<float>(exact)));
        magnitude += std::fabs(exact);
      }
      const float got = to_float(results.sum[index]);
      // Only sums of experts are taken in another order here.
      const bool is_exact = std::is_same_v<Input, row_input::tensor>;
      const float expected = to_float(from_float<BF16>(sum));
      if (is_exact ? got != expected : !(std::fabs(got - expected) <= magnitude / 64))
        return complain(rank, "sum", index, got, expected);
      h[i] = double{got} + to_float(call.residual[index]);
      squares += h[i] * h[i];
      const float rounded = to_float(from_float<BF16>(static_cast<float>(h[i])));
      if (Output::kNorm && to_float(results.residual[index]) != rounded)
        return complain(rank, "residual", index, to_float(results.residual[index]), rounded);
    }
    if constexpr (Output::kNorm) {
      for (int i = 0; i < call.hidden; ++i) {
        const int64_t index = int64_t{row} * call.hidden + i;
        const double expected = h[i] / std::sqrt(squares / call.hidden + kEps) *
                                (double{to_float(call.gamma[i])} + 0.5);
        if (!(std::fabs(to_float(results.norm[index]) - expected) <= std::fabs(expected) / 254))
          return complain(rank, "norm", index, to_float(results.norm[index]), expected);
      }
    }
  }
  if constexpr (Output::kNorm) {
    if constexpr (Output::kCodes) return check_codes<Output>(call, rank, global, results);
  }
  return true;
}

template <int kRanks, typename Input, typename Output>
bool run_all_reduce(const char* name, int calls) {
  using Traits = AllReduceTraits<BF16, Input, Output, kRanks>;
  const emulation::Workspaces workspaces(kRanks, 4 << 20, 0xff);
  const bool is_right = emulation::run_ranks(kRanks, [&](uint32_t rank) {
    Random random{std::mt19937(kRanks)};
    for (int i = 0; i < calls; ++i) {
      if (!check_all_reduce<Traits>(rank, workspaces.of_rank[rank], random)) {
        std::printf("in call %d\n", i);
        return false;
      }
    }
    return true;
  });
  if (!is_right) std::printf("%s of %d ranks\n", name, kRanks);
  return is_right;
}

// Plain calls of changing size and protocol in sequence, by ranks that come late at random. The
// values are small integers, whose sums bfloat16 holds.
template <int kRanks>
bool check_plain(const comm::CommWorkspace& workspace, Random& random, Random& delays, int call) {
  const uint32_t rank = workspace.rank;
  const uint32_t size_class = random.integer(0, 2);
  const uint32_t vecs = random.integer(1, size_class == 0 ? 4 : size_class == 1 ? 200 : 1500);
  const auto value = [&](uint32_t r, uint32_t i) { return int(i * 7 + r * 5 + call) % 16 - 8; };
  std::vector<BF16> input(vecs * kVec), sum(vecs * kVec, BF16{0x7fff});
  for (uint32_t i = 0; i < input.size(); ++i) input[i] = from_float<BF16>(value(rank, i));
  AllReduceParams params = {};
  params.workspace = workspace;
  params.input = input.data();
  params.sum_out = sum.data();
  params.total_vecs = vecs;
  const AllReduceSchedule schedule = {random.integer(0, 1) == 1, 32u << random.integer(0, 2),
                                      1u << random.integer(0, 2),
                                      static_cast<uint32_t>(random.integer(1, 5))};
  params.row_vecs = schedule.threads * schedule.vecs_per_thread;
  params.num_rows = ceil_div(vecs, params.row_vecs);
  if (delays.integer(0, 3) == 0) usleep(delays.integer(0, 2000));
  launch_all_reduce<AllReduceTraits<BF16, row_input::tensor, row_output::sum, kRanks>>(
      params, schedule, false, nullptr);
  for (uint32_t i = 0; i < sum.size(); ++i) {
    int expected = 0;
    for (int r = 0; r < kRanks; ++r) expected += value(r, i);
    if (to_float(sum[i]) != expected)
      return complain(rank, "sum in a sequence", i, to_float(sum[i]), expected);
  }
  return true;
}

template <int kRanks>
bool run_sequence(int calls) {
  const emulation::Workspaces workspaces(kRanks, 1 << 19, 0xff);
  return emulation::run_ranks(kRanks, [&](uint32_t rank) {
    Random random{std::mt19937(kRanks)}, delays{std::mt19937(100 + rank)};
    for (int i = 0; i < calls; ++i) {
      if (!check_plain<kRanks>(workspaces.of_rank[rank], random, delays, i)) {
        std::printf("in call %d of a sequence\n", i);
        return false;
      }
    }
    return true;
  });
}

// All-gather, reduce-scatter and transposing all-to-all are strides of one kernel.
template <int kRanks, bool kSum>
bool check_exchange(uint32_t rank, const comm::CommWorkspace& workspace, Random& random) {
  const int outer = random.integer(1, 4), inner = random.integer(1, 4);
  const int width = random.integer(0, 1) ? 8 * random.integer(1, 30) : 2 * random.integer(1, 50);
  const int block = outer * inner * width;
  std::vector<std::vector<BF16>> sources;
  for (int r = 0; r < kRanks; ++r) sources.push_back(random.numbers(kRanks * block));
  std::vector<BF16> target(kSum ? block : kRanks * block, BF16{0x7fff});
  ExchangeParams params = {};
  params.workspace = workspace;
  params.num_segments = 1;
  ExchangeSegment& segment = params.segments[0];
  segment.is_wide = width % 8 == 0;
  const int unit = segment.is_wide ? 8 : 2;
  segment.outer = outer;
  segment.inner = inner;
  segment.units = width / unit;
  // The source is [rank, outer, inner, width], the target [outer, rank, inner, width].
  const int64_t row = width / unit;
  segment.source = {sources[rank].data(), inner * row, row, outer * inner * row};
  segment.target = {target.data(), (kSum ? 1 : kRanks) * inner * row, row, inner * row};
  params.place_units[0] = outer * inner * row;
  launch_exchange<ExchangeTraits<BF16, kRanks, kSum>>(params, false, nullptr);
  for (int i = 0; i < block; ++i) {
    float sum = 0.f;
    for (int r = 0; r < kRanks; ++r) {
      const BF16 x = sources[r][rank * block + i];
      sum += to_float(x);
      const int o = i / (inner * width), rest = i % (inner * width);
      const int64_t index = (int64_t{o} * kRanks + r) * inner * width + rest;
      if (!kSum && target[index].bits != x.bits)
        return complain(rank, "exchanged", index, to_float(target[index]), to_float(x));
    }
    if (kSum && target[i].bits != from_float<BF16>(sum).bits)
      return complain(rank, "sum of parts", i, to_float(target[i]), sum);
  }
  return true;
}

template <int kRanks, bool kSum>
bool run_exchange(int calls) {
  const emulation::Workspaces workspaces(kRanks, 1 << 20, 0xff);
  return emulation::run_ranks(kRanks, [&](uint32_t rank) {
    Random random{std::mt19937(kRanks)};
    for (int i = 0; i < calls; ++i) {
      if (!check_exchange<kRanks, kSum>(rank, workspaces.of_rank[rank], random)) return false;
    }
    return true;
  });
}

// Within what two roundings to 8 bits cost, and the same bits on all ranks: `bits` has a place for
// each rank.
template <int kRanks, int kGroup>
bool check_quantized(const comm::CommWorkspace& workspace, Random& random, uint64_t* bits) {
  const uint32_t rank = workspace.rank;
  const int size = 16 * random.integer(1, random.integer(1, 3) == 1 ? 900 : 60);
  std::vector<std::vector<BF16>> inputs;
  for (int r = 0; r < kRanks; ++r) inputs.push_back(random.numbers(size));
  std::vector<BF16> output(size, BF16{0x7fff});
  QuantizedAllReduceParams params = {};
  params.workspace = workspace;
  params.input = inputs[rank].data();
  params.output = output.data();
  params.num_elements = size;
  params.owned_groups = ceil_div(ceil_div(size, kGroup), kRanks);
  params.scales_offset = 2 * kRanks * int64_t{params.owned_groups} * kGroup;
  launch_quantized_all_reduce<QuantizedAllReduceTraits<BF16, kRanks, kGroup>>(params, false,
                                                                              nullptr);
  bits[rank] = 14695981039346656037u;
  for (int first = 0; first < size; first += kGroup) {
    const int end = std::min(first + kGroup, size);
    double largest = 0;
    for (int r = 0; r < kRanks; ++r) {
      double of_rank = 0;
      for (int i = first; i < end; ++i)
        of_rank = std::fmax(of_rank, std::fabs(to_float(inputs[r][i])));
      largest += of_rank;
    }
    for (int i = first; i < end; ++i) {
      double expected = 0;
      for (int r = 0; r < kRanks; ++r) expected += to_float(inputs[r][i]);
      if (!(std::fabs(to_float(output[i]) - expected) <= 0.08 * largest))
        return complain(rank, "quantised sum", i, to_float(output[i]), expected);
      bits[rank] = (bits[rank] ^ output[i].bits) * 1099511628211u;
    }
  }
  return true;
}

template <int kRanks, int kGroup>
bool run_quantized(int calls) {
  const emulation::Workspaces workspaces(kRanks, 1 << 20, 0xff);
  auto* bits = static_cast<uint64_t*>(emulation::shared_memory(calls * kRanks * sizeof(uint64_t)));
  const bool is_right = emulation::run_ranks(kRanks, [&](uint32_t rank) {
    Random random{std::mt19937(kRanks)};
    for (int i = 0; i < calls; ++i) {
      if (!check_quantized<kRanks, kGroup>(workspaces.of_rank[rank], random, bits + i * kRanks))
        return false;
    }
    return true;
  });
  for (int i = 0; is_right && i < calls * kRanks; ++i) {
    if (bits[i] != bits[i / kRanks * kRanks])
      return complain(i % kRanks, "bits of call", i / kRanks, 0, 0);
  }
  return is_right;
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  namespace in = row_input;
  namespace out = row_output;
  const int calls = argc > 1 ? std::atoi(argv[1]) : 1;
  const bool is_right =
      run_all_reduce<3, in::tensor, out::sum>("sum", calls) &&
      run_all_reduce<8, in::tensor, out::norm>("norm", calls) &&
      run_all_reduce<2, in::tensor, out::static_e4m3>("e4m3", calls) &&
      run_all_reduce<4, in::tensor, out::row_e4m3>("e4m3 by rows", calls) &&
      run_all_reduce<2, in::tensor, out::nvfp4_linear>("nvfp4", calls) &&
      run_all_reduce<3, in::tensor, out::nvfp4_128x4>("nvfp4 128x4", calls) &&
      run_all_reduce<2, in::tensor, out::nvfp4_8x4>("nvfp4 8x4", calls) &&
      run_all_reduce<2, in::moe_reduction, out::norm>("sums of experts", calls) &&
      run_all_reduce<4, in::moe_finalize, out::norm>("permuted sums", calls) &&
      run_all_reduce<2, in::moe_finalize, out::static_e4m3>("permuted sums, e4m3", calls) &&
      run_sequence<2>(8 * calls) && run_sequence<4>(8 * calls) && run_sequence<8>(8 * calls) &&
      run_quantized<2, 128>(calls) && run_quantized<3, 64>(calls) && run_quantized<8, 128>(calls) &&
      run_exchange<2, false>(calls) && run_exchange<5, true>(calls) &&
      run_exchange<8, false>(calls);
  return is_right ? 0 : 1;
}
