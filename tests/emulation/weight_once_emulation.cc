// Random products through the kernel that streams weights on Hopper, of tiles that are their CTAs'
// only ones, emulated on the CPU, against loops in double precision. Clusters are not emulated.
//
//   weight_once_emulation <cases>
//
// Prints what is wrong with the first bad case and exits with 1.
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/common/launch.cuh>
#include <flashinfer/gemm/sm90/weight_kernel.cuh>

#include "weight_product.h"

namespace flashinfer {
namespace {

// A map of `length` elements in each dimension; strides count elements.
template <typename T>
ptx::EncodedTensorMap make_map(const T* data, const uint32_t (&box)[3], const uint64_t (&length)[3],
                               int64_t stride1, int64_t stride2, bool swizzles) {
  constexpr int kSize = sizeof(T);
  const ptx::emulated::Map map = {reinterpret_cast<const char*>(data),
                                  kSize,
                                  {box[0], box[1], box[2]},
                                  {length[0], length[1], length[2]},
                                  {stride1 * kSize, stride2 * kSize},
                                  swizzles ? 128u : 0u};
  ptx::EncodedTensorMap encoded;
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

template <typename T>
bool check(Random& random) {
  using Tile = WeightStreamTile<T>;
  constexpr int kScaleSize = sizeof(typename T::Scale), kScaleUnit = 16 / kScaleSize * T::kGroup;
  // Rows of scales begin at multiples of 16 bytes. Last stages are parts of one.
  const int tokens = random.integer(1, 3 * T::kTokens);
  Product<T> product(random, kScaleUnit < 256 ? 256 : kScaleUnit, tokens);
  const uint32_t columns = product.n, k = product.k, scales = product.scales_of_row;
  const uint32_t rows = tokens;
  WeightStreamParams params;
  params.gemm = product.params;
  params.gemm.offsets = nullptr;
  params.gemm.row_index = nullptr;
  params.gemm.starts_early = false;
  params.gemm.token_tiles = ceil_div(tokens, T::kTokens);
  params.box_tokens = std::min(tokens, T::kTokens);
  params.codes = make_map(product.weights.data(), {128, Tile::kColumns, Tile::kParts / 2},
                          {128, columns, k / 256}, k / 2, 128, true);
  params.scales = make_map(product.scales.data(), {Tile::kBoxBytes / kScaleSize, Tile::kColumns, 1},
                           {scales, columns, 1}, scales, 0, false);
  params.activations = make_map(product.a.data(), {64, params.box_tokens, Tile::kParts * 2},
                                {64, rows, k / 64}, k, 64, true);
  const uint32_t tiles = ceil_div<uint32_t>(columns, Tile::kColumns) * params.gemm.token_tiles;
  launch_kernel(weight_stream_kernel<Tile>, dim3(tiles), dim3(Tile::kThreads), Tile::kSharedBytes,
                nullptr, false, params);
  return product.check();
}

bool check_all(Random& random) {
  using E4M3 = dtype::float8_e4m3fn;
  constexpr auto kRelu2 = GemmActivation::relu2, kNone = GemmActivation::identity;
  return check<Config<WeightFormat::int4, BF16, BF16, 128, 8, 8, kRelu2, 32>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 128, 16, 16, kNone, 64>>(random) &&
         check<Config<WeightFormat::int4, BF16, float, 128, 8, 8, kNone, 128>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 0, 16, 16, kNone, 32>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 128, 16, 8, kNone, 32>>(random) &&
         check<Config<WeightFormat::mxfp4, BF16, uint8_t, 32, 8, 8, kNone, 64>>(random) &&
         check<Config<WeightFormat::mxfp4, BF16, uint8_t, 32, 16, 16, kNone, 32>>(random) &&
         check<Config<WeightFormat::nvfp4, BF16, E4M3, 16, 16, 8, kNone, 64>>(random) &&
         check<Config<WeightFormat::nvfp4, BF16, E4M3, 16, 8, 8, kNone, 32>>(random);
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  return run_cases(argc > 1 ? std::atoi(argv[1]) : 1, Random(11), check_all);
}
