// Products of tiles of bfloat16 (brief.h), by either unit that has them.
//
// A unit's `multiply` makes the sums of 32 rows by 32 tokens, or by the first 16: products[4][16 rows][16 tokens], of
// (rows, tokens), (other rows, tokens), (rows, other tokens), (other rows, other tokens). It calls meanwhile(block) once
// for each block of 32 columns, and free() before it writes to `products`. A thread makes a unit, and keeps it while it
// multiplies.
#pragma once

#include "amx.h"
#include "brief.h"

#if HAS_TILES

// AMX: tiles 0 … 3 are the products; 4, 5: weights; 6, 7: activations. It works on its own, if it is not asked for much
// more at once than it has room for: blocks are under way while `meanwhile` runs.
struct BriefTiles {
  template <bool kTwoTokens, class Meanwhile, class Free>
  INLINE void multiply(const uint8_t* x, const uint8_t* w, int64_t num_blocks, float* products, Meanwhile&& meanwhile,
                       Free&& free) const {
    const uint8_t *other_x = x + num_blocks * kTileSize, *other_w = w + num_blocks * kTileSize;
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t at = block * kTileSize;
      load_tile<4>(w + at, 64);
      load_tile<6>(x + at, 64);
      multiply_brief<0, 4, 6>();
      load_tile<5>(other_w + at, 64);
      multiply_brief<1, 5, 6>();
      if (kTwoTokens) {
        load_tile<7>(other_x + at, 64);
        multiply_brief<2, 4, 7>();
        multiply_brief<3, 5, 7>();
      }
      for (int64_t i = at + kTileSize; i < at + 2 * kTileSize; i += 64) {  // of the next block
        __builtin_prefetch(x + i, 0, 3);
        if (kTwoTokens) __builtin_prefetch(other_x + i, 0, 3);
      }
      meanwhile(block);
    }
    free();
    store_tile<0>(products, 64);
    store_tile<1>(products + 256, 64);
    store_tile<2>(products + 512, 64);
    store_tile<3>(products + 768, 64);
  }

  const TileShapes shapes = TileShapes({});
};
#endif

#if HAS_BRIEF

// sums += pairs · pairs, in every lane.
INLINE V multiply_pairs(V sums, __m512i a, __m512i b) {
  return {_mm512_dpbf16_ps(sums.v, (__m512bh)a, (__m512bh)b)};
}

INLINE __m512i splat_pair(const void* at) { return _mm512_set1_epi32(read<int32_t>(at)); }

// Vectors of AVX-512: a lane is a token, and 16 of them are added to at once.
struct BriefVectors {
  template <bool kTwoTokens, class Meanwhile, class Free>
  INLINE void multiply(const uint8_t* x, const uint8_t* w, int64_t num_blocks, float* products, Meanwhile&& meanwhile,
                       Free&& free) const {
    constexpr int kVectors = kTwoTokens ? 2 : 1, kRows = 16 / kVectors, kParts = 32 / kRows;
    free();
    for (int part = 0; part < kParts; ++part) {
      const int row = part * kRows;
      multiply_rows<kVectors, kRows>(x, w + row / 16 * num_blocks * kTileSize + row % 16 * 64, num_blocks,
                                     products + row / 16 * 256 + row % 16 * 16);
      for (int64_t block = part; block < num_blocks; block += kParts) meanwhile(block);
    }
  }

 private:
  template <int kVectors, int kRows>
  static INLINE void multiply_rows(const uint8_t* x, const uint8_t* w, int64_t num_blocks, float* products) {
    V sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
    for (int64_t block = 0; block < num_blocks; ++block)
#pragma GCC unroll 4
      for (int64_t at = block * kTileSize, pair = 0; pair < 16; ++pair) {
        __m512i tokens[kVectors];
        for (int v = 0; v < kVectors; ++v)
          tokens[v] = _mm512_load_si512(x + v * num_blocks * kTileSize + at + 64 * pair);
        for (int r = 0; r < kRows; ++r) {
          const __m512i weights = splat_pair(w + at + 64 * r + 4 * pair);
          for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_pairs(sums[r][v], weights, tokens[v]);
        }
      }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) store(products + v * 512 + r * 16, sums[r][v]);
  }
};
#endif
