// Products in bfloat16, for whoever asks for them: `--matmul-precision medium`.
//
// Weights and activations are rounded to bfloat16, products are added in float32 in AMX's tiles, from the first column
// to the last: nothing leaves the unit in between, which is what the exact sums of integer_products.h pay for. A token's
// bits differ from those of exact products, which few tokens keep getting.
#pragma once

#include "amx.h"
#include "sixteen.h"

#if HAS_TILES

// Columns 4j … 4j + 3 of 16 rows, as pairs: two rows of a tile of weights.
template <bool kSigned>
INLINE void store_pairs(uint8_t* tile, __m512i quants, V scale, V minimum) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 w[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i up = _mm512_slli_epi32(quants, 24 - 8 * i);
    const __m512i q = kSigned ? _mm512_srai_epi32(up, 24) : _mm512_srli_epi32(up, 24);
    w[i] = kSigned ? _mm512_mul_ps(_mm512_cvtepi32_ps(q), scale.v)
                   : _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), scale.v, minimum.v);
  }
  for (int pair = 0; pair < 2; ++pair) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(w[2 * pair + 1], w[2 * pair]);
    _mm512_store_si512(tile + 64 * pair, _mm512_permutexvar_epi16(order, both));
  }
}

// tiles: [num_blocks] of 16 pairs of columns by 16 rows.
template <class I, bool kAll>
inline void fill_brief(const SixteenRows<kAll>& rows, int64_t num_blocks, uint8_t* tiles) {
  const uint8_t* ahead = rows.data + 16 * rows.row_bytes;
  for (int64_t block = 0; block < num_blocks; ++block) {
    Unpacked w;
    I::unpack(rows, block, w);
    for (int64_t i = 0; i < rows.block_bytes; i += 64)
      __builtin_prefetch(ahead + block * rows.block_bytes + i, 0, 2);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) store_pairs<I::kSigned>(tiles + block * 1024 + j * 128, w.quants[j], w.scale, w.minimum);
  }
}

#define MULTIPLY_ADD(sums, activations, weights) \
  asm volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #activations ", %%tmm" #sums ::)
#define CLEAR(sums) asm volatile("tilezero %%tmm" #sums ::)

template <int kTile>
INLINE void store_sums(float* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride * 4), "i"(kTile) : "memory");
}

// out[t * stride + r] of 16 or 32 tokens by 16 or 32 rows. Tiles 0 … 3: sums; 4, 5: activations; 6, 7: weights.
template <bool kTwoTokens, bool kTwoRows>
inline void brief_product(const int8_t* x, const uint8_t* w, int64_t num_blocks, float* out, int64_t stride) {
  const int8_t* other_x = x + num_blocks * 1024;
  const uint8_t* other_w = w + num_blocks * 1024;
  CLEAR(0);
  if (kTwoRows) CLEAR(1);
  if (kTwoTokens) CLEAR(2);
  if (kTwoTokens && kTwoRows) CLEAR(3);
  for (int64_t at = 0; at < num_blocks * 1024; at += 1024) {
    load_tile<4>(x + at, 64);
    load_tile<6>(w + at, 64);
    MULTIPLY_ADD(0, 4, 6);
    if (kTwoRows) {
      load_tile<7>(other_w + at, 64);
      MULTIPLY_ADD(1, 4, 7);
    }
    if (kTwoTokens) {
      load_tile<5>(other_x + at, 64);
      MULTIPLY_ADD(2, 5, 6);
      if (kTwoRows) MULTIPLY_ADD(3, 5, 7);
    }
  }
  store_sums<0>(out, stride);
  if (kTwoRows) store_sums<1>(out + 16, stride);
  if (kTwoTokens) store_sums<2>(out + 16 * stride, stride);
  if (kTwoTokens && kTwoRows) store_sums<3>(out + 16 * stride + 16, stride);
}

// sums[t * stride + i] = (x · Wᵀ)[token + t, first + i]; room for multiples of 16 rows and of 16 tokens.
template <class L>
inline void brief_products(const Weight& w, int64_t first, int64_t end, const Planes& x, int64_t token, int64_t tokens,
                           float* sums, int64_t stride, Scratch& scratch) {
  const int64_t num_blocks = w.num_cols / 32, groups = (end - first + 15) / 16;
  uint8_t* tiles = reinterpret_cast<uint8_t*>(scratch.get(groups * num_blocks * 256));
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t from = first + 16 * g;
    uint8_t* to = tiles + g * num_blocks * 1024;
    if (end - from >= 16) fill_brief<Integers<L>>(SixteenRows<true>(w, from, end), num_blocks, to);
    else fill_brief<Integers<L>>(SixteenRows<false>(w, from, end), num_blocks, to);
  }
  const TileShapes shapes(kBrief);
  for (int64_t t = 0; t < tokens; t += 32) {
    const int8_t* of = x.rows + x.at(0, token + t) * kPlaneBytes[kBrief];
    const bool two = tokens - t > 16;
    for (int64_t g = 0; g < groups; g += 2) {
      const uint8_t* tile = tiles + g * num_blocks * 1024;
      float* out = sums + t * stride + 16 * g;
      if (g + 1 < groups) {
        if (two) brief_product<true, true>(of, tile, num_blocks, out, stride);
        else brief_product<false, true>(of, tile, num_blocks, out, stride);
      } else {
        if (two) brief_product<true, false>(of, tile, num_blocks, out, stride);
        else brief_product<false, false>(of, tile, num_blocks, out, stride);
      }
    }
  }
}

#undef MULTIPLY_ADD
#undef CLEAR
#endif
