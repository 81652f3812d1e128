// Random products in groups through the kernel of gemm/portable, emulated on the CPU, against loops
// in double precision.
//
//   weight_gemm_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/common/launch.cuh>
#include <flashinfer/gemm/portable/kernel.cuh>

#include "weight_product.h"

namespace flashinfer {
namespace {

template <typename T>
bool check(Random& random) {
  using Tile = WeightGemmTile<T>;
  Product<T> product(random);
  const int columns = Tile::kGated ? product.n / 2 : product.n;
  const dim3 grid(1, product.params.token_tiles, ceil_div(columns, Tile::kOutColumns));
  launch_kernel(weight_gemm_kernel<Tile>, grid, dim3(Tile::kThreads), Tile::kSharedBytes, nullptr,
                false, product.params);
  return product.check();
}

bool check_all(Random& random) {
  using E4M3 = dtype::float8_e4m3fn;
  constexpr auto kSwiglu = GemmActivation::swiglu_gate_last;
  constexpr auto kGeglu = GemmActivation::geglu_gate_last;
  constexpr auto kRelu2 = GemmActivation::relu2, kNone = GemmActivation::identity;
  return check<Config<WeightFormat::mxfp4, BF16, uint8_t, 32, 8, 4, kSwiglu>>(random) &&
         check<Config<WeightFormat::mxfp4, BF16, uint8_t, 32, 16, 2, kNone>>(random) &&
         check<Config<WeightFormat::nvfp4, BF16, E4M3, 16, 8, 4, kNone>>(random) &&
         check<Config<WeightFormat::nvfp4, BF16, E4M3, 16, 32, 4, kSwiglu>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 128, 8, 4, kGeglu>>(random) &&
         check<Config<WeightFormat::int4, BF16, float, 32, 64, 4, kRelu2>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 0, 8, 2, kNone>>(random) &&
         check<Config<WeightFormat::int8, BF16, BF16, 64, 16, 4, kNone>>(random);
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  return run_cases(argc > 1 ? std::atoi(argv[1]) : 1, Random(11), check_all);
}
