// AMX: its tiles, and products of a panel (16 rows of weights taken apart, see integer_products.h), 16 tokens at a time.
//
// A tile of activations has a row for each plane of each token, so a product's rows are the planes' sums, which leave
// the unit after each block of 32 columns. Those of the next block are under way meanwhile. Instructions are written
// as assembly, because the compiler's intrinsics do not say that they read memory.
#pragma once

#include "planes.h"

#if HAS_TILES

#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t kAmxTokens = 16;
constexpr int64_t kChunkBlocks = 24;  // of so many, 16 tokens' planes and 16 rows' tiles nearly fit the nearest cache

// Linux gives a process the tiles' registers when it asks, and its later children and threads with it.
inline bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Groups of 16 rows taken apart: of each, [num_blocks] tiles, and the rows' scales and minima; and what is asked for
// while they are used, `piece` bytes for each block.
struct AmxPanels {
  const uint8_t* tiles;
  const float *scales, *minima;
  int64_t groups, num_blocks;
  const uint8_t* ahead;
  int64_t piece;
};

struct TileShape {
  uint8_t rows = 16;
  uint16_t bytes = 64;  // of a row
};

// The shapes of the eight tiles, for a thread, until it ends.
class TileShapes {
 public:
  explicit TileShapes(const TileShape (&tiles)[8]) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = tiles[tile].rows;
      shapes.bytes[tile] = tiles[tile].bytes;
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
  }
  ~TileShapes() { asm volatile("tilerelease" ::: "memory"); }
};

template <int kTile>
INLINE void load_tile(const void* at, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(row_bytes), "i"(kTile) : "memory");
}

template <int kTile>
INLINE void store_tile(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kTile) : "memory");
}

template <int kTile>
INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// sums += left · right, of pairs of bfloat16.
template <int kSums, int kLeft, int kRight>
INLINE void multiply_brief() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
}

// sums kTile = activations 4 + kTile · weights 7, stored at `to`.
template <int kTile, bool kSigned>
INLINE void multiply_tile(const int8_t* activations, int64_t row_bytes, int32_t* to) {
  load_tile<4 + kTile>(activations, row_bytes);
  clear_tile<kTile>();
  if (kSigned) asm volatile("tdpbssd %%tmm7, %%tmm%c0, %%tmm%c1" ::"i"(4 + kTile), "i"(kTile));
  else asm volatile("tdpbsud %%tmm7, %%tmm%c0, %%tmm%c1" ::"i"(4 + kTile), "i"(kTile));
  store_tile<kTile>(to, 64);
}

template <bool kSigned, bool kIsPairs, int kTokens>
INLINE void multiply_block(const Planes& x, int64_t block, int64_t token, const uint8_t* tile, int32_t* to) {
  constexpr int64_t kRowBytes = kIsPairs ? 64 : 32, kRows = kTokens * (kIsPairs ? 2 : 3);
  const int8_t* rows = x.rows + x.at(block, token) * kPlaneBytes[kIsPairs ? kPairs : kEights];
  load_tile<7>(tile, 64);
  multiply_tile<0, kSigned>(rows, kRowBytes, to);
  if (kRows > 16) multiply_tile<1, kSigned>(rows + 16 * kRowBytes, kRowBytes, to + 256);
  if (kRows > 32) multiply_tile<2, kSigned>(rows + 32 * kRowBytes, kRowBytes, to + 512);
}

// Adds the blocks begin … end − 1 to out[t * out_stride + r], which holds what the blocks before gave.
template <bool kSigned, bool kIsPairs, int kTokens>
inline void amx_product16(const AmxPanels& panels, int64_t group, int64_t begin, int64_t end, const Planes& x,
                          int64_t token, float* out, int64_t out_stride) {
  constexpr int64_t kTileSize = kIsPairs ? 1024 : 512;
  const uint8_t* tiles = panels.tiles + group * panels.num_blocks * kTileSize;
  const float* scales = panels.scales + group * panels.num_blocks * 16;
  alignas(64) int32_t products[2][768];
  V sums[kTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) sums[t] = begin ? load(out + t * out_stride) : zero();
  multiply_block<kSigned, kIsPairs, kTokens>(x, begin, token, tiles + begin * kTileSize, products[begin % 2]);
  for (int64_t block = begin; block < end; ++block) {
    if (const int64_t next = block + 1; next < end)
      multiply_block<kSigned, kIsPairs, kTokens>(x, next, token, tiles + next * kTileSize, products[next % 2]);
    for (int64_t i = 0; i < panels.piece; i += 64)
      __builtin_prefetch(panels.ahead + block * panels.piece + i, 0, 2);
    const int32_t* of = products[block % 2];
    const float* x_scales = x.scales + x.at(block, token);
    const V scale = load(scales + block * 16);
    auto integers = [&](int row) { return _mm512_load_si512(of + 16 * row); };
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      V f;
      if (kIsPairs) {
        f = fma(V{_mm512_cvtepi32_ps(integers(2 * t))}, splat(4096.0f), V{_mm512_cvtepi32_ps(integers(2 * t + 1))});
      } else {
        const __m512i low = _mm512_add_epi32(_mm512_slli_epi32(integers(3 * t + 1), 8), integers(3 * t + 2));
        f = fma(V{_mm512_cvtepi32_ps(integers(3 * t))}, splat(65536.0f), V{_mm512_cvtepi32_ps(low)});
      }
      sums[t] = fma(f * splat(x_scales[t]), scale, sums[t]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) store(out + t * out_stride, sums[t]);
}

// out[t * out_stride + r] += Σ over blocks of minimum · Σ x.
template <int kTokens>
inline void add_minima(const float* minima, int64_t num_blocks, const Planes& x, int64_t token, float* out,
                       int64_t out_stride) {
  V sums[kTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) sums[t] = zero();
  for (int64_t block = 0; block < num_blocks; ++block) {
    const V minimum = load(minima + block * 16);
    const float* x_sums = x.sums + x.at(block, token);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) sums[t] = fma(minimum, splat(x_sums[t]), sums[t]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) store(out + t * out_stride, load(out + t * out_stride) + sums[t]);
}

// The above, for all groups, and up to 16 tokens, of which a multiple of four is computed.
template <bool kSigned, bool kIsPairs, int kTokens>
inline void amx_products16(const AmxPanels& panels, int64_t begin, int64_t end, const Planes& x, int64_t token,
                           float* out, int64_t out_stride) {
  for (int64_t g = 0; g < panels.groups; ++g) {
    float* to = out + 16 * g;
    amx_product16<kSigned, kIsPairs, kTokens>(panels, g, begin, end, x, token, to, out_stride);
    if (!kSigned && end == panels.num_blocks)
      add_minima<kTokens>(panels.minima + g * end * 16, end, x, token, to, out_stride);
  }
}

// out[t * out_stride + r] for all rows of the panels. `out` has room for a multiple of four tokens.
template <bool kSigned, bool kIsPairs>
inline void amx_products(const AmxPanels& panels, const Planes& x, int64_t token, int64_t tokens, float* out,
                         int64_t out_stride) {
  constexpr TileShape kSums, kTokens{16, kIsPairs ? 64 : 32}, kRows{kIsPairs ? 16 : 8, 64};
  const TileShapes shapes({kSums, kSums, kSums, kSums, kTokens, kTokens, kTokens, kRows});
  for (int64_t begin = 0; begin < panels.num_blocks; begin += kChunkBlocks) {
    const int64_t end = std::min(begin + kChunkBlocks, panels.num_blocks);
    for (int64_t t = 0; t < tokens; t += kAmxTokens) {
      auto compute = [&](auto count) {
        amx_products16<kSigned, kIsPairs, decltype(count)::value>(panels, begin, end, x, token + t,
                                                                out + t * out_stride, out_stride);
      };
      switch ((std::min(kAmxTokens, tokens - t) + 3) / 4) {
        case 1: compute(std::integral_constant<int, 4>{}); break;
        case 2: compute(std::integral_constant<int, 8>{}); break;
        case 3: compute(std::integral_constant<int, 12>{}); break;
        case 4: compute(std::integral_constant<int, 16>{}); break;
      }
    }
  }
}
#endif
