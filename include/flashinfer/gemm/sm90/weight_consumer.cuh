// The warps that multiply. A warp turns codes of 32 rows into pairs of bfloat16 in registers and
// multiplies them by the tokens with mma.m16n8k16, whose left operand they are.
//
// Lane t of four has bytes 16 t to 16 t + 15 of a row's 64, so each instruction sums elements of
// four different stretches of k; that is no matter as long as activations are read alike. Lanes 2
// and 3 begin with their upper eight bytes, and rows have an order of their own, so that no two
// lanes that read together meet in a bank.
#pragma once

#include <flashinfer/gemm/sm90/weight_producer.cuh>
#include <flashinfer/gemm/sm90/weight_split.cuh>
#include <flashinfer/gemm/weight_epilogue.cuh>
#include <flashinfer/ptx/fma_pair.cuh>
#include <flashinfer/ptx/mma.cuh>
#include <flashinfer/ptx/named_barrier.cuh>
#include <flashinfer/ptx/opaque.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer {

// Scales of MXFP4 (exponents, biased by 127) as factors of pairs of subnormal codes.
template <typename Tile>
struct PowerFactors {
  // Factors of larger scales are not finite.
  static constexpr uint32_t kMost = 128 + Tile::kShift;

  __device__ __forceinline__ static uint32_t pair(uint32_t exponent) {
    constexpr uint32_t kBase = (126 - Tile::kShift) << 7;
    return exponent * 0x00800080u + kBase * 0x00010001u;
  }
};

template <typename Tile>
class WeightConsumer {
  using A = typename Tile::A;
  using Codes = typename Tile::Codes;
  using Scale = typename Tile::Scale;
  static constexpr int kBoxes = Tile::kBoxes, kTokenTiles = Tile::kTokenTiles;
  static constexpr bool kPowers = Tile::kFormat == WeightFormat::mxfp4;
  static constexpr bool kQuarters = Tile::kFormat == WeightFormat::nvfp4;
  static constexpr uint32_t kAll = 0xffffffffu;
  using Sums = float[kBoxes][kTokenTiles][4];
  // Codes and factors of rows lane / 4 and lane / 4 + 8 of each box, in the order of row_of_lane().
  using Words = uint32_t[kBoxes][2][4];
  using Factors = uint32_t[kBoxes][2][kQuarters ? 2 : 1];

 public:
  __device__ __forceinline__ WeightConsumer(const WeightStreamParams& params, uint32_t shared,
                                            const uint32_t* table, float* partial)
      : params_(params),
        schedule_(params.gemm, table),
        stages_(params.gemm.k),
        shared_(shared),
        partial_(partial) {
    const uint32_t warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const uint32_t g = lane_idx / 4;
    t_ = lane_idx % 4;
    if constexpr (Codes::kIsInt4) {
      factor_ = ptx::resident(Codes::factor(1.f), params.gemm.m == 0);
      signs_ = ptx::resident(Codes::kSigns, params.gemm.m == 0);
    }
    slice_ = warp_idx % Tile::kSlices;
    half_ = warp_idx / Tile::kSlices % Tile::kParts;
    team_ = warp_idx / Tile::kTeamWarps;
    const uint32_t row = (g & 3) * 2 + (g >> 2);
    row_ = slice_ * 16 + row;
    const uint32_t chunk = (half_ % 2 * 4 + t_) ^ row;
    codes_ = kept(shared + (half_ / 2 * Tile::kColumns + row_) * Tile::kRowBytes + chunk * 16 +
                  t_ / 2 * 8);
    // The scale is of the lane's elements, or of all four lanes'.
    const uint32_t scale = Tile::kScalesSums
                               ? half_ * (Tile::kStageScaleBytes / Tile::kParts)
                               : (half_ * 4 + t_) * (Tile::kStageScaleBytes / Tile::kParts / 4);
    scales_ = kept(shared + Tile::kOffsetScales + row_ * Tile::kBoxBytes + scale);
    if constexpr (Tile::kOnce) {
      // Lanes of absent tokens read the last one's.
      const uint32_t tokens = params.box_tokens, token = g < tokens ? g : tokens - 1;
      const uint32_t line = (half_ * 2 + t_ / 2) * tokens + token;
      const uint32_t first = (t_ % 2 * 4 + t_ / 2 * 2) ^ (line & 7);
      activations_[0] = kept(shared + Tile::kOffsetActivations + line * 128 + first * 16);
    } else {
      const uint32_t activations =
          shared + Tile::kOffsetActivations + g * Tile::kTokenStride + half_ * 256 + t_ * 64;
      activations_[0] = kept(activations + t_ / 2 * 32);
      activations_[1] = kept(activations + (1 - t_ / 2) * 32);
    }
  }

  __device__ __forceinline__ void run() {
    WeightRing<Tile> ring;
    WeightGemmWork work;
    while (schedule_.next(work)) {
      if (Tile::kOnce) ptx::grid_dependency_wait();
      Sums sums = {};
      for (uint32_t i = 0; i < stages_.count; ++i) {
        if (stages_.begins_box(i)) ring.advance_box();
        if (Tile::kTeams == 1 || i % Tile::kTeams == team_) {
          const uint32_t full = shared_ + Tile::kOffsetBarriers + ring.stage * 8;
          ptx::mbarrier_wait(full, ring.phase);
          multiply(ring, stages_.first + i, sums);
          __syncwarp();
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(full + Tile::kStages * 8);
        }
        ring.advance();
      }
      finish(work, sums);
    }
  }

 private:
  // An address that stays in its register: the compiler would find it anew for every stage.
  __device__ __forceinline__ static uint32_t kept(uint32_t address) {
    asm volatile("" : "+r"(address));
    return address;
  }

  __device__ __forceinline__ void multiply(const WeightRing<Tile>& ring, uint32_t stage,
                                           Sums& sums) const {
    const uint32_t codes = codes_ + ring.stage * Tile::kStageBytes;
    const uint32_t activations = ring.stage * Tile::kActivationBytes;
    Factors factors;
    const uint32_t scales =
        scales_ + ring.box * Tile::kScaleBytes + stage % Tile::kBoxStages * Tile::kStageScaleBytes;
    if constexpr (kPowers) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < 2 * kBoxes; ++i) {
        const uint32_t exponent = ptx::load_shared_1(scale_place(scales, i));
        most = max(most, exponent);
        factors[i / 2][i % 2][0] = PowerFactors<Tile>::pair(exponent);
      }
      if (__any_sync(0xffffffffu, most > PowerFactors<Tile>::kMost)) {
        multiply_large(codes, activations, scales, sums);
        return;
      }
    } else if constexpr (kQuarters) {
#pragma unroll
      for (int i = 0; i < 2 * kBoxes; ++i) {
        const uint32_t both = ptx::load_shared_2(scale_place(scales, i));
        // The lanes that begin with the upper eight bytes need the second scale first.
        const uint32_t ordered = t_ < 2 ? both : __byte_perm(both, 0, 0x4401);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          factors[i / 2][i % 2][j] =
              Codes::factor(scale_of_bits<Scale>(ordered >> (8 * j) & 0xffu));
        }
      }
    } else if constexpr (Codes::kIsInt4) {
#pragma unroll
      for (int i = 0; i < 2 * kBoxes; ++i) factors[i / 2][i % 2][0] = factor_;
    }
    if constexpr (!Tile::kScalesSums) {
      add_products(codes, kAll, factors, activations, sums);
    } else {
      Sums products = {};
      add_products(codes, kAll, factors, activations, products);
#pragma unroll
      for (int i = 0; i < 2 * kBoxes; ++i) {
        const uint32_t place = scale_place(scales, i);
        const uint32_t bits =
            sizeof(Scale) == 2 ? ptx::load_shared_2(place) : ptx::load_shared_4(place);
        add_scaled(products, scale_of_bits<Scale>(bits), i, sums);
      }
    }
  }

  // Address of the scales of row `i` of this lane's four: two in each box.
  __device__ __forceinline__ static uint32_t scale_place(uint32_t scales, int i) {
    return scales + (i / 2 * Tile::kBoxRows + i % 2 * 8) * Tile::kBoxBytes;
  }

  __device__ __forceinline__ static void load_words(uint32_t codes, Words& words) {
#pragma unroll
    for (int i = 0; i < 2 * kBoxes; ++i) {
      const uint32_t offset = (i / 2 * Tile::kBoxRows + i % 2 * 8) * Tile::kRowBytes;
      const uint2 front = ptx::load_shared_8(codes + offset);
      const uint2 back = ptx::load_shared_8((codes ^ 8) + offset);
      uint32_t (&row)[4] = words[i / 2][i % 2];
      row[0] = front.x, row[1] = front.y, row[2] = back.x, row[3] = back.y;
    }
  }

  // Eight activations of a token in the order of the pairs; `j` counts the lane's words.
  __device__ __forceinline__ uint4 load_activations(uint32_t activations, int tile, int j) const {
    if constexpr (Tile::kOnce) {
      return pair_activations<Codes>(
          ptx::load_shared_16(((activations_[0] + activations) ^ (j * 16)) + tile * 1024));
    }
    return pair_activations<Codes>(ptx::load_shared_16(activations_[j / 2] + activations +
                                                       tile * 8 * Tile::kTokenStride + j % 2 * 16));
  }

  // Adds products of a stage's codes; those without bits in `keep` count as zeros.
  __device__ __forceinline__ void add_products(uint32_t codes, uint32_t keep,
                                               const Factors& factors, uint32_t activations,
                                               Sums& sums) const {
    Words words;
    load_words(codes, words);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint4 x[kTokenTiles];
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        x[tile] = load_activations(activations, tile, j);
      }
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        uint32_t low[4], high[4];
        constexpr int kLast = kQuarters ? 1 : 0;
        Codes::unpack({words[box][0][j] & keep}, factors[box][0][j / 2 * kLast], signs_, low);
        Codes::unpack({words[box][1][j] & keep}, factors[box][1][j / 2 * kLast], signs_, high);
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          float (&sum)[4] = sums[box][tile];
          ptx::mma_m16n8k16<A>(sum, {low[0], high[0], low[1], high[1]}, x[tile].x, x[tile].y);
          ptx::mma_m16n8k16<A>(sum, {low[2], high[2], low[3], high[3]}, x[tile].z, x[tile].w);
        }
      }
    }
  }

  // The same for scales beyond the range of bfloat16: the codes of one lane of four at a time, so
  // that sums belong to one scale of each row.
  __device__ __forceinline__ void multiply_large(uint32_t codes, uint32_t activations,
                                                 uint32_t scales, Sums& sums) const {
    Factors factors;
#pragma unroll
    for (int i = 0; i < 2 * kBoxes; ++i) factors[i / 2][i % 2][0] = Codes::factor(1.f);
#pragma unroll 1
    for (uint32_t lane = 0; lane < 4; ++lane) {
      Sums products = {};
      add_products(codes, t_ == lane ? kAll : 0u, factors, activations, products);
#pragma unroll
      for (int i = 0; i < 2 * kBoxes; ++i) {
        const uint32_t exponent = ptx::load_shared_1(scale_place(scales, i) - t_ + lane);
        constexpr float kUnit = 1.f / (1 << Tile::kShift);
        add_scaled(products, scale_to_float(static_cast<uint8_t>(exponent)) * kUnit, i, sums);
      }
    }
  }

  // Adds the products of row `i` of this lane's four, times their scale.
  __device__ __forceinline__ static void add_scaled(const Sums& products, float scale, int i,
                                                    Sums& sums) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int token = 0; token < 2; ++token) {
        const int place = i % 2 * 2 + token;
        sums[i / 2][tile][place] += products[i / 2][tile][place] * scale;
      }
    }
  }

  __device__ __forceinline__ void finish(const WeightGemmWork& work, const Sums& sums) const {
    if constexpr (Tile::kOnce) {
      finish_once(work, sums);
      return;
    }
    constexpr int kPair = 64;                    // threads of the two warps with the same rows
    ptx::named_barrier_sync(1 + slice_, kPair);  // last tile's are read
#pragma unroll
    for (int i = 0; i < 4 * kBoxes * kTokenTiles; ++i) {
      const int box = i / 4 / kTokenTiles, tile = i / 4 % kTokenTiles, place = i % 4;
      const uint32_t token = tile * 8 + t_ * 2 + place % 2;
      partial_[(half_ * Tile::kTokens + token) * Tile::kSumStride + box * Tile::kBoxRows + row_ +
               place / 2 * 8] = sums[box][tile][place];
    }
    const WeightGemmEpilogue<Tile> epilogue(params_.gemm, work, partial_);
    ptx::named_barrier_sync(1 + slice_, kPair);
    constexpr uint32_t kPairs = 8, kSlices = Tile::kOutColumns / Tile::kBoxRows * kPairs;
    for (uint32_t i = half_ * 32 + threadIdx.x % 32; i < Tile::kTokens * kSlices; i += kPair) {
      const uint32_t pair = i % kSlices;
      epilogue.store_pair(i / kSlices,
                          pair / kPairs * Tile::kBoxRows + slice_ * 16 + pair % kPairs * 2);
    }
  }

  // Adds up the sums of the warps of a CTA that has one tile, and of a cluster where CTAs split k.
  __device__ __forceinline__ void finish_once(const WeightGemmWork& work, const Sums& sums) const {
    const WeightGemmEpilogue<Tile> epilogue(params_.gemm, work, partial_);
    const WeightSplit<Tile> split(shared_);
    __syncwarp();
    leave_sums(sums);
    if (Tile::kSplits > 1) ptx::cluster_wait();  // the barriers of all CTAs exist
    ptx::named_barrier_sync(1 + Tile::kTeams, Tile::kWarps * 32);
    const uint32_t warp_idx = threadIdx.x / 32;
    for (uint32_t i = warp_idx; i < Tile::kBlocks * kTokenTiles; i += Tile::kWarps) {
      const uint32_t block = i / kTokenTiles, tile = i % kTokenTiles;
      float sum[4] = {};
      add_up(block, tile, sum);
      if (Tile::kSplits > 1) {
        split.push(block, tile, sum);
      } else {
        store(epilogue, block * 16, tile, sum);
      }
    }
    if constexpr (Tile::kSplits > 1) {
      for (uint32_t i = warp_idx; i < split.blocks() * kTokenTiles; i += Tile::kWarps) {
        float sum[4] = {};
        split.add_up(i / kTokenTiles, i % kTokenTiles, sum);
        store(epilogue, split.first_row(i / kTokenTiles), i % kTokenTiles, sum);
      }
    }
  }

  static constexpr uint32_t kWarpSumBytes = kBoxes * Tile::kBlockBytes;

  // Leaves a warp's sums where the last stage of its team was, whose other warps have read it then.
  __device__ __forceinline__ void leave_sums(const Sums& sums) const {
    static_assert(Tile::kTeamWarps * kWarpSumBytes <= Tile::kStageBytes);
    ptx::named_barrier_sync(1 + team_, Tile::kTeamWarps * 32);
    const uint32_t own = place_of_sums(team_, half_, slice_);
#pragma unroll
    for (int i = 0; i < kBoxes * kTokenTiles; ++i) {
      const float (&sum)[4] = sums[i / kTokenTiles][i % kTokenTiles];
      ptx::store_shared_16(own + i * 512,
                           make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                      __float_as_uint(sum[2]), __float_as_uint(sum[3])));
    }
  }

  // Adds a lane's sums of 16 rows and eight tokens that all warps with these rows have left.
  __device__ __forceinline__ void add_up(uint32_t block, uint32_t tile, float (&sum)[4]) const {
    const uint32_t slice = block % Tile::kSlices, box = block / Tile::kSlices;
#pragma unroll
    for (int i = 0; i < Tile::kTeams * Tile::kParts; ++i) {
      add_shared(place_of_sums(i / Tile::kParts, i % Tile::kParts, slice) +
                     (box * kTokenTiles + tile) * 512,
                 sum);
    }
  }

  __device__ __forceinline__ uint32_t place_of_sums(uint32_t team, uint32_t part,
                                                    uint32_t slice) const {
    return shared_ + last_stage(team) * Tile::kStageBytes +
           (part * Tile::kSlices + slice) * kWarpSumBytes + threadIdx.x % 32 * 16;
  }

  // Where the last stage of a team was; of one that had none, a place where no other's was.
  __device__ __forceinline__ uint32_t last_stage(uint32_t team) const {
    const uint32_t later = stages_.count > team ? stages_.count - 1 - team : 0;
    return (team + later / Tile::kTeams * Tile::kTeams) % Tile::kStages;
  }

  // Stores a lane's sums of 16 rows from `first_row` of the tile and of eight tokens.
  __device__ __forceinline__ void store(const WeightGemmEpilogue<Tile>& epilogue,
                                        uint32_t first_row, uint32_t tile,
                                        const float (&sum)[4]) const {
    const uint32_t row = first_row + row_ - slice_ * 16;
#pragma unroll
    for (int place = 0; place < 4; ++place) {
      epilogue.store_sum(tile * 8 + t_ * 2 + place % 2, row + place / 2 * 8, sum[place]);
    }
  }

  const WeightStreamParams& params_;
  WeightSchedule<Tile> schedule_;
  const WeightStages<Tile> stages_;
  const uint32_t shared_;
  float* const partial_;
  uint32_t slice_, half_, team_, t_, row_;    // row_: of a box, in the first eight of the slice
  uint32_t codes_, scales_, activations_[2];  // of stage 0, for this lane
  uint32_t factor_, signs_;                   // of integers
};

}  // namespace flashinfer
