// Random products of the kernel that streams 4-bit weights, of tiles that a CTA visits once,
// emulated on the CPU, against loops in double precision. Compiled with W_ROWS and W_TEAMS.
//
//   weight_once_emulation <cases>
#include "cuda_emulation.h"
// The order matters: the builtins come first.
#include <flashinfer/common/launch.cuh>
#include <flashinfer/gemm/sm90/weight_kernel.cuh>

#include "weight_product.h"

namespace flashinfer {
namespace {

template <typename T>
ptx::EncodedTensorMap make_map(const T* data, const uint32_t (&box)[3], const uint64_t (&length)[3],
                               int64_t stride1, int64_t stride2, bool swizzles) {
  constexpr int kSize = sizeof(T);
  ptx::emulated::Map map = {reinterpret_cast<const char*>(data), kSize, {box[0], box[1], box[2]},
                            {length[0], length[1], length[2]},
                            {stride1 * kSize, stride2 * kSize}, swizzles};
  ptx::EncodedTensorMap encoded;
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

template <typename T>
bool check(Random& random) {
  using Tile = WeightStreamTile<T>;
  constexpr int kScaleBox = Tile::kBoxBytes / static_cast<int>(sizeof(typename T::Scale));
  // Rows of scales begin at multiples of 16 bytes.
  constexpr int kScaleUnit = Tile::kHasBoxes ? 16 / static_cast<int>(sizeof(typename T::Scale)) * T::kGroup : 256;
  Product<T> product(random, kScaleUnit < 256 ? 256 : kScaleUnit);
  const int m = random.integer(1, T::kTokens + 4), n = product.n, k = product.k;
  product.groups = 1;
  product.offsets = {0, m};
  product.rows = product.inputs = m;
  product.row_index.resize(m);
  for (int i = 0; i < m; ++i) product.row_index[i] = i;
  product.a.resize(m * k);
  for (auto& value : product.a) value = from_float<typename T::A>(random.normal(1.f));
  product.out.assign(m * n, typename T::A{0x7fff});
  product.set_params(random);
  WeightStreamParams params;
  WeightGemmParams& p = params.gemm;
  p = product.params;
  p.offsets = nullptr;
  p.row_index = nullptr;
  p.m = m;
  p.token_tiles = ceil_div(m, T::kTokens);
  p.starts_early = false;
  params.box_tokens = m < T::kTokens ? m : T::kTokens;
  const uint64_t rows = n, lines = k / 256, scales = product.scales_of_row;
  params.codes = make_map(product.weights.data(), {128, Tile::kColumns, Tile::kParts / 2},
                          {128, rows, lines}, k / 2, 128, true);
  params.scales = make_map(product.scales.data(), {kScaleBox, Tile::kColumns, 1}, {scales, rows, 1},
                           scales, 0, false);
  params.activations =
      make_map(product.a.data(), {64, params.box_tokens, Tile::kParts * 2},
               {64, static_cast<uint64_t>(m), static_cast<uint64_t>(k / 64)}, k, 64, true);
  const int tiles = ceil_div(n, Tile::kColumns) * p.token_tiles;
  launch_kernel(weight_stream_kernel<Tile>, dim3(tiles), dim3(Tile::kThreads), Tile::kSharedBytes,
                nullptr, false, params);
  return product.check();
}

bool check_all(Random& random) {
  using E4M3 = dtype::float8_e4m3fn;
  constexpr auto kRelu2 = GemmActivation::relu2, kNone = GemmActivation::identity;
  return check<Config<WeightFormat::int4, BF16, BF16, 128, 8, 8, kRelu2>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 128, 16, 8, kNone>>(random) &&
         check<Config<WeightFormat::int4, BF16, float, 128, 8, 8, kNone>>(random) &&
         check<Config<WeightFormat::int4, BF16, BF16, 0, 16, 8, kNone>>(random) &&
         check<Config<WeightFormat::mxfp4, BF16, uint8_t, 32, 8, 8, kNone>>(random) &&
         check<Config<WeightFormat::nvfp4, BF16, E4M3, 16, 16, 8, kNone>>(random);
}

}  // namespace
}  // namespace flashinfer

int main(int argc, char** argv) {
  using namespace flashinfer;
  return run_cases(argc > 1 ? std::atoi(argv[1]) : 1, Random(11), check_all);
}
