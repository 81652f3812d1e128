// Random numbers of the emulations, and their loop over random cases.
#pragma once

#include <cstdio>
#include <random>

namespace flashinfer {

struct Random {
  std::mt19937 engine;
  explicit Random(unsigned seed) : engine(seed) {}
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  float normal(float width = 1.f) { return std::normal_distribution<float>(0.f, width)(engine); }
  bool one_in(int n) { return integer(1, n) == 1; }
};

// The exit status of a program: 1, with its number printed, once check(random) is false for a case.
template <typename Check>
int run_cases(int count, Random random, const Check& check) {
  for (int i = 0; i < count; ++i) {
    if (check(random)) continue;
    std::printf("in case %d\n", i);
    return 1;
  }
  return 0;
}

}  // namespace flashinfer
