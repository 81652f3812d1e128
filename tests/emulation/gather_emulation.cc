// Random caches through the kernel that copies keys out of pages, on the CPU.
//
//   gather_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/attention/gather.cuh>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

namespace flashinfer {
namespace {

std::mt19937 engine(11);
int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }

// A cache of [pages, slots, heads, row] or [pages, heads, slots, row] with gaps, and its rows.
struct Operand {
  int row_units = integer(1, 40), gap = 16 * integer(0, 2);
  std::vector<char> cache, rows;
  GatherOperand params = {};

  void make(int pages, int page_size, int heads, int tokens, bool is_hnd) {
    const int64_t row = 16 * row_units + gap;
    params.slot_stride = is_hnd ? row : row * heads;
    params.head_stride = is_hnd ? row * page_size : row;
    params.page_stride = row * heads * page_size + gap;
    cache.resize(params.page_stride * pages);
    for (char& byte : cache) byte = static_cast<char>(integer(0, 255));
    rows.assign(int64_t{16} * tokens * heads * row_units, 0x55);
    params.cache = cache.data();
    params.rows = rows.data();
    params.units_per_row = FastDivisor(row_units);
    params.units_per_token = heads * row_units;
  }
};

bool is_right() {
  const int batch = integer(1, 9), page_size = integer(1, 20), heads = integer(1, 9);
  const bool is_hnd = integer(0, 1);
  std::vector<int32_t> token_indptr = {0}, page_indptr = {0};
  for (int i = 0; i < batch; ++i) {
    const int length = integer(0, 3) ? integer(0, 60) : 0;
    token_indptr.push_back(token_indptr.back() + length);
    page_indptr.push_back(page_indptr.back() + ceil_div(length, page_size));
  }
  const int tokens = token_indptr.back(), num_pages = page_indptr.back() + 2;
  if (tokens == 0) return true;
  std::vector<int32_t> pages(num_pages);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), engine);
  if (integer(0, 1)) pages[0] = integer(0, 1) ? -1 : num_pages;  // outside: zeros
  Operand operands[2];
  GatherParams params = {};
  for (int i = 0; i < 2; ++i) {
    operands[i].make(num_pages, page_size, heads, tokens, is_hnd);
    params.operands[i] = operands[i].params;
  }
  params.pages = pages.data();
  params.page_indptr = page_indptr.data();
  params.token_indptr = token_indptr.data();
  params.page_size = FastDivisor(page_size);
  params.batch_size = batch;
  params.num_tokens = tokens;
  params.num_pages = num_pages;
  launch_gather(params, false, nullptr);
  for (int request = 0; request < batch; ++request) {
    for (int token = token_indptr[request]; token < token_indptr[request + 1]; ++token) {
      const int position = token - token_indptr[request];
      const int64_t page = pages[page_indptr[request] + position / page_size];
      for (const Operand& operand : operands) {
        const GatherOperand& p = operand.params;
        for (int head = 0; head < heads; ++head) {
          const char* const expected = p.cache + page * p.page_stride +
                                       position % page_size * p.slot_stride + head * p.head_stride;
          const int64_t at = (int64_t{token} * heads + head) * operand.row_units * 16;
          const char* const row = p.rows + at;
          const bool in_cache = page >= 0 && page < num_pages;
          if (in_cache
                  ? std::equal(expected, expected + operand.row_units * 16, row)
                  : std::all_of(row, row + operand.row_units * 16, [](char c) { return !c; })) {
            continue;
          }
          std::printf("request %d position %d head %d differs\n", request, position, head);
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 1;
  for (int i = 0; i < cases; ++i) {
    if (!flashinfer::is_right()) {
      std::printf("in case %d\n", i);
      return 1;
    }
  }
  return 0;
}
