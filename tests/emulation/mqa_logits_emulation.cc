// Random batches through the scores of sparse attention, emulated on the CPU, against double
// precision: paged with their schedule, or a range per query.
//
//   mqa_logits_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include "mqa_logits.cu"
#include "mqa_schedule.cu"

#include <random>
#include <vector>

namespace flashinfer {
namespace {

constexpr int kHeads = FLASHINFER_CFG_HEADS, kQueries = FLASHINFER_CFG_QUERIES;
constexpr bool kPaged = FLASHINFER_CFG_PAGED;
using Out = dtype::FLASHINFER_CFG_DTYPE_OUT;

std::mt19937 engine(7);
int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
float normal() { return std::normal_distribution<float>()(engine); }

double product(char x, char y) {
  using Code = dtype::float8_e4m3fn;
  return static_cast<double>(to_float(Code{static_cast<uint8_t>(x)})) *
         to_float(Code{static_cast<uint8_t>(y)});
}

struct Case {
  int batch = integer(1, 5), next_n = integer(1, 2 * kQueries), page_size = 4 * integer(1, 40);
  int groups = kPaged ? ceil_div(next_n, kQueries) : integer(1, 2);
  int num_queries = kPaged ? batch * next_n : integer(1, 3 * kQueries + 2);
  int max_length = integer(1, 1100), num_ctas = integer(1, 4);
  std::vector<int32_t> lengths, table, starts, ends, schedule;
  std::vector<char> keys, q;
  std::vector<float> scales, weights;
  std::vector<Out> logits;
  int columns = 0, num_pages = 0;

  Case() {
    columns = ceil_div(max_length, page_size);
    num_pages = kPaged ? batch * columns : 1;
    const int64_t num_keys = kPaged ? int64_t{num_pages} * page_size : max_length;
    for (int i = 0; i < batch; ++i) lengths.push_back(integer(0, max_length));
    for (int i = 0; i < num_pages; ++i) table.push_back(i);
    std::shuffle(table.begin(), table.end(), engine);
    for (int i = 0; i < num_queries; ++i) {
      starts.push_back(integer(0, max_length / 2));
      ends.push_back(integer(0, max_length));
    }
    for (int64_t i = 0; i < num_keys * 132; ++i) keys.push_back(finite());
    for (int i = 0; i < num_queries * kHeads * 128; ++i) q.push_back(finite());
    for (int i = 0; i < num_queries * kHeads; ++i) weights.push_back(normal());
    for (int64_t i = 0; i < num_keys; ++i) {
      scales.push_back(std::fabs(normal()) + 0.01f);
      if (kPaged) std::memcpy(scale_of_key(i), &scales.back(), 4);
    }
    logits.assign(static_cast<size_t>(num_queries) * max_length, from_float<Out>(-7.f));
  }

  static char finite() { return static_cast<char>(integer(0, 0x5f) | integer(0, 1) << 7); }
  char* scale_of_key(int64_t i) {
    const int64_t page = i / page_size, slot = i % page_size;
    return keys.data() + page * page_size * 132 + page_size * 128 + slot * 4;
  }
  const char* key(int64_t i) const {
    if (!kPaged) return keys.data() + i * 128;
    return keys.data() + i / page_size * page_size * 132 + i % page_size * 128;
  }

  void run() {
    MqaLogitsParams params = {};
    params.q = q.data();
    params.q_stride = kHeads * 128;
    params.weights = weights.data();
    params.weights_stride = kHeads;
    params.logits = logits.data();
    params.logits_stride = max_length;
    params.num_queries = num_queries;
    params.groups = groups;
    params.keys = keys.data();
    params.key_stride = kPaged ? page_size * 132 : 128;
    params.scales = scales.data();
    params.max_length = max_length;
    params.block_table = table.data();
    params.block_table_stride = columns;
    params.seq_lens = lengths.data();
    params.seq_lens_stride = 1;
    params.page_size = FastDivisor(page_size);
    params.num_pages = num_pages;
    params.batch_size = batch;
    params.next_n = next_n;
    params.starts = starts.data();
    params.ends = ends.data();
    params.splits = integer(1, 3);
    int ctas = ceil_div(num_queries, groups * kQueries) * params.splits;
    if (kPaged) {
      ctas = num_ctas;
      schedule.assign(2 * (num_ctas + 1), -1);
      mqa_schedule({lengths.data(), 1, batch, num_ctas, schedule.data()}, false, nullptr);
    }
    params.schedule = schedule.data();
    mqa_logits(params, ctas, false, nullptr);
  }

  // Whether query i sees position p; `written`: whether the position must have been written.
  bool sees(int i, int p) const {
    if (!kPaged) return starts[i] <= p && p < ends[i];
    return p < lengths[i / next_n] - next_n + i % next_n + 1;
  }

  bool is_right() const {
    for (int i = 0; i < num_queries; ++i) {
      for (int p = 0; p < max_length; ++p) {
        const float got = to_float(logits[static_cast<size_t>(i) * max_length + p]);
        if (!sees(i, p)) {
          const bool untouched = got == -7.f, hidden = std::isinf(got) && got < 0;
          if (untouched || (hidden && (!kPaged || p < lengths[i / next_n]))) continue;
          std::printf("query %d must not see %d, got %g\n", i, p, got);
          return false;
        }
        const int64_t at =
            kPaged
                ? int64_t{table[i / next_n * columns + p / page_size]} * page_size + p % page_size
                : p;
        double expected = 0, size = 0;
        for (int h = 0; h < kHeads; ++h) {
          double dot = 0, terms = 0;
          for (int k = 0; k < 128; ++k) {
            const double term =
                product(q[(static_cast<size_t>(i) * kHeads + h) * 128 + k], key(at)[k]);
            dot += term;
            terms += std::fabs(term);
          }
          expected += weights[i * kHeads + h] * std::max(dot, 0.);
          size += std::fabs(weights[i * kHeads + h]) * terms;
        }
        const double bound = (sizeof(Out) == 4 ? 1e-6 : 1e-2) * (size * scales[at] + 1e-3);
        if (!(std::fabs(got - expected * scales[at]) <= bound)) {
          std::printf("query %d position %d: %g in place of %g\n", i, p, got,
                      expected * scales[at]);
          return false;
        }
      }
    }
    return true;
  }
};

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 1;
  for (int i = 0; i < cases; ++i) {
    flashinfer::Case problem;
    problem.run();
    if (!problem.is_right()) {
      std::printf("in case %d\n", i);
      return 1;
    }
  }
  return 0;
}
