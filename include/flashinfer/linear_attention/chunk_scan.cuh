// Second stage of the gated delta rule in chunks: the state walks over a sequence's chunks. For
// each chunk, with the results of chunk_transform (docs/linear_attention.md derives it),
//   X = V - diag(key factors) K S^T;  D = solve X
//   out = diag(query factors) Q S^T + scores D
//   S = (chunk's decay) S + D^T diag(update factors) K
//
// Value channels are independent, so a warp has 16 rows of S that no other warp needs. All of the
// above is computed transposed: S, X^T and D^T are accumulators of one product and, in the same
// registers, the left operand of the next. The tiles in shared memory are only read, and warps
// synchronise only where tiles change.
//
// Measurements, also of what lost: docs/tuning/linear_attention.md.
#pragma once

#include <cstdint>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/linear_attention/chunk_transform.cuh>
#include <flashinfer/linear_attention/warpgroup_tile.cuh>

namespace flashinfer {

template <typename Traits, int kWarps>
struct ChunkScanShared {
  static constexpr int kRows = 16 * kWarps;  // value channels of a CTA
  using KeyTile = Tile<kChunkSize, Traits::kHeadDimK>;
  using ValueTile = Tile<kChunkSize, kRows>;
  using Square = Tile<kChunkSize, kChunkSize>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kKeyTiles = Traits::kChannelGate ? 3 : 2;
  static constexpr int kFactorBytes = 4 * kChunkSize * 4;
  static constexpr int kStageBytes = kKeyTiles * KeyTile::kBytes + ValueTile::kBytes +
                                     (Traits::kDelta ? 2 : 1) * Square::kBytes + kFactorBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  static_assert(kStageBytes % 1024 == 0);

  KeyTile k, q, updates;  // updates: keys of updates; k unless their decays differ by channel
  ValueTile v;
  Square scores, solve;  // solve is there for the delta rule alone
  uint32_t factors;

  __device__ __forceinline__ explicit ChunkScanShared(uint32_t base)
      : k{base},
        q{base + KeyTile::kBytes},
        updates{Traits::kChannelGate ? base + 2 * KeyTile::kBytes : base},
        v{base + kKeyTiles * KeyTile::kBytes},
        scores{v.base + ValueTile::kBytes},
        solve{scores.base + Square::kBytes},
        factors(Traits::kDelta ? solve.base + Square::kBytes : solve.base) {}
};

// Four warps multiply together where the architecture can.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
using ScanProducts = WarpgroupProducts;
#else
using ScanProducts = WarpProducts;
#endif

template <typename Traits, int kWarps>
struct ChunkScan {
  using T = typename Traits::T;
  using Products = ScanProducts;
  using StateT = typename Traits::StateT;
  using Shared = ChunkScanShared<Traits, kWarps>;
  static constexpr int kDim = Traits::kHeadDimK;
  static constexpr int kTokenBlocks = kChunkSize / 8, kTokenSteps = kChunkSize / 16;
  static constexpr bool kByChannel = Traits::kChannelGate;
  static constexpr int kFactors = kByChannel ? kDim : 4 * kChunkSize;  // of a chunk

  const ChunkDeltaRuleParams& all;
  const DeltaRuleParams& params;
  TokenRange range;
  int64_t sequence, first_slot;
  int head, first_channel;  // of the CTA
  int warp, lane;
  char* shared;
  uint32_t shared_base;
  struct {
    const T *k, *q, *v, *solve, *scores;  // by channel k has the chunk's operands, q nothing
    const float* factors;
  } next;                    // chunk to load
  float state[kDim / 8][4];  // rows lane / 4 and + 8, columns 8 j + lane % 4 * 2 and + 1

  __device__ __forceinline__ int row() const { return first_channel + 16 * warp + lane / 4; }

  // Waits until a chunk is transformed, together with those that share its counter.
  __device__ __forceinline__ void await(int chunk) const {
    const int64_t slot = first_slot + chunk, counter = slot / kSlotsPerCounter;
    if (all.progress == nullptr || (chunk > 0 && slot % kSlotsPerCounter != 0)) return;
    const int64_t slots =
        min(all.num_slots - counter * kSlotsPerCounter, int64_t{kSlotsPerCounter});
    ptx::wait_done(all.progress + counter * params.state_heads + head, slots);
  }

  // Where the first chunk's tiles come from.
  __device__ __forceinline__ void begin_at_first_chunk() {
    const int64_t index = first_slot * params.state_heads + head;
    if constexpr (kByChannel) {
      next.k = static_cast<const T*>(all.workspace.operands) + index * 3 * kChunkSize * kDim;
    } else {
      next.k = token_address<const T>(params.k, 0, range.first, params.k_group.divide(head));
      next.q = token_address<const T>(params.q, 0, range.first, params.q_group.divide(head));
    }
    next.v = token_address<const T>(params.v, 0, range.first, params.v_group.divide(head)) +
             first_channel;
    constexpr int kSquare = kChunkSize * kChunkSize;
    next.solve = static_cast<const T*>(all.workspace.solve) + index * kSquare;
    next.scores = static_cast<const T*>(all.workspace.scores) + index * kSquare;
    next.factors = all.workspace.factors + index * kFactors;
  }

  __device__ __forceinline__ void load_keys(const Shared& to, int tokens) {
    constexpr int kThreads = Shared::kThreads;
    if constexpr (kByChannel) {
      copy_tile<kThreads>(to.k, next.k, kDim, kChunkSize);
      copy_tile<kThreads>(to.q, next.k + kChunkSize * kDim, kDim, kChunkSize);
      copy_tile<kThreads>(to.updates, next.k + 2 * kChunkSize * kDim, kDim, kChunkSize);
      next.k += int64_t{params.state_heads} * 3 * kChunkSize * kDim;
    } else {
      copy_tile<kThreads>(to.k, next.k, params.k.token_stride, tokens);
      copy_tile<kThreads>(to.q, next.q, params.q.token_stride, tokens);
      next.k += kChunkSize * params.k.token_stride;
      next.q += kChunkSize * params.q.token_stride;
    }
  }

  // Copies the next chunk's tiles to a stage, as one group of copies. Chunks come in order.
  __device__ __forceinline__ void load(int chunk) {
    constexpr int kThreads = Shared::kThreads;
    const int tokens = range.count - chunk * kChunkSize;
    if (tokens > 0) {
      await(chunk);
      const Shared to(shared_base + chunk % Shared::kStages * Shared::kStageBytes);
      load_keys(to, tokens);
      copy_tile<kThreads>(to.v, next.v, params.v.token_stride, tokens);
      if constexpr (Traits::kDelta) {
        copy_tile<kThreads>(to.solve, next.solve, kChunkSize, kChunkSize);
      }
      copy_tile<kThreads>(to.scores, next.scores, kChunkSize, kChunkSize);
      for (int i = threadIdx.x; i < kFactors / 4; i += kThreads) {
        ptx::cp_async_16(to.factors + i * 16, next.factors + i * 4, true);
      }
      next.v += kChunkSize * params.v.token_stride;
      const int64_t square = int64_t{params.state_heads} * kChunkSize * kChunkSize;
      next.solve += square;
      next.scores += square;
      next.factors += int64_t{params.state_heads} * kFactors;
    }
    ptx::cp_async_commit();
  }

  // The state of element i of block j: two neighbouring columns.
  __device__ __forceinline__ StateT* address(const StatePool& pool, int64_t slot, int j,
                                             int half) const {
    return static_cast<StateT*>(pool.data) + slot * pool.slot_stride + head * pool.head_stride +
           static_cast<int64_t>(row() + 8 * half) * kDim + 8 * j + lane % 4 * 2;
  }

  __device__ __forceinline__ void read_state(int64_t slot) {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state[j][2 * half] = state[j][2 * half + 1] = 0.f;
        if (params.state.data == nullptr) continue;
        Vector<StateT, 2> pair;
        pair.load(address(params.state, slot, j, half));
        state[j][2 * half] = pair[0];
        state[j][2 * half + 1] = pair[1];
      }
    }
  }

  __device__ __forceinline__ void write_state(const StatePool& pool, int64_t slot) const {
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float values[2] = {state[j][2 * half], state[j][2 * half + 1]};
        Vector<StateT, 2> pair;
        pair.from_floats(values);
        pair.store(address(pool, slot, j, half));
      }
    }
  }

  // X^T: the values minus the state's values for their keys.
  __device__ __forceinline__ void subtract_from_values(float (&sums)[kTokenBlocks][4],
                                                       const Shared& in,
                                                       const float2* key_factors) const {
#pragma unroll
    for (int j = 0; j < kTokenBlocks; j += 2) {
      uint32_t values[4];  // channels 0-7 and 8-15 of block j, then of j + 1
      ptx::ldmatrix_x4_trans(
          values, in.v.address(8 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 factor = {1.f, 1.f};
        if constexpr (!kByChannel) factor = key_factors[4 * (j + i / 2) + lane % 4];
        float* sum = sums[j + i / 2] + i % 2 * 2;
        sum[0] = low_of(values[i]) - factor.x * sum[0];
        sum[1] = high_of(values[i]) - factor.y * sum[1];
      }
    }
  }

  // V^T as fragments, as it is and with a factor per token.
  template <typename Factor>
  __device__ __forceinline__ void values_as_fragments(uint32_t (&plain)[kTokenSteps][4],
                                                      uint32_t (&weighted)[kTokenSteps][4],
                                                      const Shared& in,
                                                      const Factor& factor) const {
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      ptx::ldmatrix_x4_trans(
          plain[step], in.v.address(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 2 * step + i / 2;
        weighted[step][i] = PackedPair<T>::pack(low_of(plain[step][i]) * factor(j, 0),
                                                high_of(plain[step][i]) * factor(j, 1));
      }
    }
  }

  __device__ __forceinline__ static float low_of(uint32_t pair) {
    return to_float(T{static_cast<uint16_t>(pair)});
  }
  __device__ __forceinline__ static float high_of(uint32_t pair) {
    return to_float(T{static_cast<uint16_t>(pair >> 16)});
  }

  __device__ __forceinline__ void decay_state(const float* factors) {
    float2 decay;
    if constexpr (!kByChannel) decay.x = decay.y = factors[kChunkDecay * kChunkSize];
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      if constexpr (kByChannel) decay = reinterpret_cast<const float2*>(factors)[4 * j + lane % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) state[j][i] *= i % 2 == 0 ? decay.x : decay.y;
    }
  }

  __device__ __forceinline__ void weight_output(float (&out)[kTokenBlocks][4],
                                                const float2* query_factors) const {
#pragma unroll
    for (int j = 0; j < kTokenBlocks; ++j) {
      const float2 factor = query_factors[4 * j + lane % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] *= i % 2 == 0 ? factor.x : factor.y;
    }
  }

  // The pair of channels times silu(z).
  __device__ __forceinline__ uint32_t gated(uint32_t pair, const T* z) const {
    const uint32_t gate = *reinterpret_cast<const uint32_t*>(z);
    const float low = low_of(gate), high = high_of(gate);
    return PackedPair<T>::pack(low_of(pair) * low * sigmoid(low),
                               high_of(pair) * high * sigmoid(high));
  }

  __device__ __forceinline__ void write_output(const float (&sums)[kTokenBlocks][4],
                                               int chunk) const {
    const int64_t first = range.first + int64_t{chunk} * kChunkSize;
    const int tokens = min(range.count - chunk * kChunkSize, kChunkSize);
    T* out = token_address<T>(params.out, 0, first, head) + first_channel + 16 * warp;
#pragma unroll
    for (int j = 0; j < kTokenBlocks; ++j) {
      const int token = 8 * j + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pair =
            ptx::movmatrix_trans(PackedPair<T>::pack(sums[j][2 * half], sums[j][2 * half + 1]));
        if (token < tokens) {
          if constexpr (!Traits::kDelta) {
            if (all.ssd.z.data != nullptr) {
              const T* z = token_address<const T>(all.ssd.z, 0, first + token, head);
              pair = gated(pair, z + first_channel + 16 * warp + 8 * half + lane % 4 * 2);
            }
          }
          *reinterpret_cast<uint32_t*>(out + token * params.out.token_stride + 8 * half +
                                       lane % 4 * 2) = pair;
        }
      }
    }
  }

  // The copies of the next chunk begin while the first products run.
  __device__ __forceinline__ void walk(int chunk) {
    const Shared in(shared_base + chunk % Shared::kStages * Shared::kStageBytes);
    const float* factors = reinterpret_cast<const float*>(shared + (in.factors - shared_base));
    const auto* key_factors = reinterpret_cast<const float2*>(factors + kKeyFactor * kChunkSize);
    const auto* query_factors =
        reinterpret_cast<const float2*>(factors + kQueryFactor * kChunkSize);
    const auto* update_factors =
        reinterpret_cast<const float2*>(factors + kUpdateFactor * kChunkSize);
    const auto one = [](int, int) { return 1.f; };

    uint32_t state_a[kDim / 16][4];
    to_fragments<T>(state_a, state, one);
    float out[kTokenBlocks][4] = {};
    uint32_t delta_a[kTokenSteps][4], update_a[kTokenSteps][4];
    const auto update_factor = [&](int j, int i) {
      const float2 factor = update_factors[4 * j + lane % 4];
      return i == 0 ? factor.x : factor.y;
    };
    if constexpr (Traits::kDelta) {
      float x[kTokenBlocks][4] = {};
      Products::begin(x, out);
      Products::template rows<T>(x, state_a, in.k);
      Products::commit();
      Products::template rows<T>(out, state_a, in.q);
      Products::commit();
      load(chunk + 1);
      if constexpr (!kByChannel) decay_state(factors);
      Products::template wait<1>(x);
      subtract_from_values(x, in, key_factors);
      uint32_t x_a[kTokenSteps][4];
      to_fragments<T>(x_a, x, one);
      float delta[kTokenBlocks][4] = {};
      Products::begin(delta);
      Products::template rows<T>(delta, x_a, in.solve);
      Products::commit();
      Products::template wait<1>(out);
      if constexpr (kByChannel) {
        decay_state(factors);  // only now are there registers for so many factors
      } else {
        weight_output(out, query_factors);
      }
      Products::template wait<0>(delta);
      to_fragments<T>(delta_a, delta, one);
      if constexpr (!kByChannel) to_fragments<T>(update_a, delta, update_factor);
    } else {
      Products::begin(out);
      Products::template rows<T>(out, state_a, in.q);
      Products::commit();
      load(chunk + 1);
      decay_state(factors);
      values_as_fragments(delta_a, update_a, in, update_factor);
      Products::template wait<0>(out);
      weight_output(out, query_factors);
    }

    Products::begin(out, state);
    Products::template rows<T>(out, delta_a, in.scores);
    Products::commit();
    if constexpr (kByChannel) {
      Products::template columns<T>(state, delta_a, in.updates);
    } else {
      Products::template columns<T>(state, update_a, in.k);
    }
    Products::commit();
    Products::template wait<1>(out);
    write_output(out, chunk);
    Products::template wait<0>(state);
  }

  // A sequence that is padding has outputs of zero.
  __device__ __forceinline__ void zero_outputs() const {
    constexpr int kPairs = Shared::kRows / 2;
    T* out = token_address<T>(params.out, 0, range.first, head) + first_channel;
    for (int64_t i = threadIdx.x; i < int64_t{range.count} * kPairs; i += Shared::kThreads) {
      *reinterpret_cast<uint32_t*>(out + i / kPairs * params.out.token_stride + i % kPairs * 2) = 0;
    }
  }

  __device__ __forceinline__ void run() {
    const int64_t read_slot = params.read_slot.at(sequence, 0);
    if (!params.state.has(read_slot)) return zero_outputs();
    const int num_chunks = ceil_div(range.count, kChunkSize);
    begin_at_first_chunk();
    load(0);
    read_state(read_slot);
    int64_t snapshot = 0;
    if (params.snapshots.data != nullptr) snapshot = params.snapshot_starts[sequence];
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      ptx::cp_async_wait<0>();
      Products::fence_copies();
      __syncthreads();  // all have left the chunk before, whose tiles the next one overwrites
      walk(chunk);
      const int64_t done = int64_t{chunk + 1} * kChunkSize;
      if (params.snapshots.data != nullptr && done <= range.count &&
          done % params.snapshot_every == 0) {
        if (params.snapshots.has(snapshot)) write_state(params.snapshots, snapshot);
        ++snapshot;
      }
    }
    ptx::cp_async_wait<0>();
    const int64_t write_slot = params.write_slot.at(sequence, 0);
    if (params.state_out.data != nullptr && params.state_out.has(write_slot)) {
      write_state(params.state_out, write_slot);
    }
  }
};

template <typename Traits, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    chunk_scan_kernel(const __grid_constant__ ChunkDeltaRuleParams all) {
  using Shared = ChunkScanShared<Traits, kWarps>;
  extern __shared__ __align__(1024) char dynamic_shared[];
  const DeltaRuleParams& params = all.recurrence;
  const int num_blocks = params.head_dim_v / Shared::kRows;
  const int64_t sequence = blockIdx.x / num_blocks / params.state_heads;
  // Where the stages run at once, counters take the wait's place, and the first stage has waited
  // for earlier kernels before it let this one begin.
  if (all.progress == nullptr) ptx::grid_dependency_wait();
  ChunkScan<Traits, kWarps> scan{all,
                                 params,
                                 Chunk::range(params, sequence),
                                 sequence,
                                 Chunk::first_slot(params, sequence),
                                 static_cast<int>(blockIdx.x / num_blocks % params.state_heads),
                                 static_cast<int>(blockIdx.x % num_blocks) * Shared::kRows,
                                 static_cast<int>(threadIdx.x / 32),
                                 static_cast<int>(threadIdx.x % 32),
                                 dynamic_shared,
                                 ptx::shared_address(dynamic_shared)};
  scan.run();
  // The first stage has ended as well when this one ends: its workspace may be used again.
  ptx::grid_dependency_wait();
}

}  // namespace flashinfer
