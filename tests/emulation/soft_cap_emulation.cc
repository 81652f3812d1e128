// The soft cap's arithmetic on the CPU: its error over all magnitudes, and its limits.
//
//   soft_cap_emulation
//
// Prints the largest error in units of the cap and exits with 1 if it is above what math.cuh says.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/attention/math.cuh>

#include <cstdio>

int main() {
  using flashinfer::math::SoftCap;
  double worst = 0.;
  for (const float cap : {1e-12f, 1e-3f, 0.5f, 1.f, 30.f, 50.f, 1e3f, 1e12f}) {
    for (const float scale : {1e-20f, 1e-2f, 0.088f, 1.f, 7.f, 1e15f}) {
      const SoftCap soft_cap(cap, scale);
      for (int i = -4000; i <= 4000; ++i) {
        const double x = i / 400. * (1. + (i % 7) * 0.1);  // of tanh
        const float s = static_cast<float>(x * cap / scale);
        const double expected = std::tanh(double{s} * scale / cap);
        worst = std::fmax(worst, std::fabs(soft_cap(s) / double{cap} - expected));
        if (!soft_cap.is_near(std::fabs(s))) continue;
        if (soft_cap.near(s) != soft_cap(s)) {
          std::printf("near %g: %g and %g\n", s, soft_cap.near(s), soft_cap(s));
          return 1;
        }
      }
      const float inf = __builtin_huge_valf();
      if (std::fabs(soft_cap(inf) - cap) > 1e-5f * cap || soft_cap(0.f) != 0.f) return 1;
      if (!std::isnan(soft_cap(__builtin_nanf("")))) return 1;
    }
  }
  for (const float cap : {1e-30f, 1e30f}) {  // far from every scale
    const float capped = SoftCap(cap, 0.1f)(20.f), expected = cap < 1.f ? cap : 2.f;
    if (!(std::fabs(capped - expected) <= 1e-5f * expected)) {
      std::printf("cap %g: %g\n", cap, capped);
      return 1;
    }
  }
  std::printf("error %g\n", worst);
  return worst < 1.2e-5 ? 0 : 1;
}
