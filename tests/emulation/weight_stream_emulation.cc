// Random products in groups through the kernel that streams weights on Hopper, emulated on the CPU,
// against loops in double precision.
//
//   weight_stream_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/common/launch.cuh>
#include <flashinfer/gemm/sm90/weight_kernel.cuh>

#include "weight_product.h"

namespace flashinfer {
namespace {

template <typename T>
ptx::EncodedTensorMap make_map(const T* data, int columns, int box_columns, int64_t rows,
                               int64_t groups, bool swizzles) {
  constexpr int kSize = sizeof(T);
  ptx::emulated::Map map = {
      reinterpret_cast<const char*>(data),
      kSize,
      {static_cast<uint32_t>(box_columns), 64, 1},
      {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), static_cast<uint64_t>(groups)},
      {static_cast<uint64_t>(columns) * kSize, static_cast<uint64_t>(columns) * kSize * rows},
      swizzles ? 128u : 0u};
  ptx::EncodedTensorMap encoded;
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

template <typename T>
bool check(Random& random) {
  using Tile = WeightStreamTile<T>;
  // Rows of scales begin at multiples of 16 bytes.
  constexpr int kUnit = Tile::kHasBoxes ? Tile::kTileK * Tile::kBoxStages : Tile::kTileK;
  Product<T> product(random, random.one_in(2) ? kUnit : 2 * kUnit);
  WeightStreamParams params;
  params.gemm = product.params;
  params.gemm.starts_early = random.one_in(2);
  const int n = product.n, k = product.k, groups = product.groups;
  params.codes = make_map(product.weights.data(), k / 2, Tile::kRowBytes, n, groups, true);
  params.scales =
      make_map(product.scales.data(), product.scales_of_row,
               Tile::kBoxBytes / static_cast<int>(sizeof(typename T::Scale)), n, groups, false);
  launch_kernel(weight_stream_kernel<Tile>, dim3(random.integer(1, 5)), dim3(Tile::kThreads),
                Tile::kSharedBytes, nullptr, false, params);
  return product.check();
}

bool check_all(Random& random) {
  using E4M3 = dtype::float8_e4m3fn;
  constexpr auto kSwiglu = GemmActivation::swiglu_gate_last;
  constexpr auto kRelu2 = GemmActivation::relu2, kNone = GemmActivation::identity;
  return check<Config<WeightFormat::mxfp4, BF16, uint8_t, 32, 8, 8, kSwiglu>>(random) &&
         check<Config<WeightFormat::mxfp4, BF16, uint8_t, 32, 16, 8, kNone>>(random) &&
         check<Config<WeightFormat::nvfp4, BF16, E4M3, 16, 8, 8, kNone>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 128, 8, 8, kRelu2>>(random) &&
         check<Config<WeightFormat::int4, BF16, float, 128, 32, 8, kSwiglu>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 0, 16, 8, kNone>>(random);
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  return run_cases(argc > 1 ? std::atoi(argv[1]) : 1, Random(11), check_all);
}
