// Products in bfloat16, for whoever asks for them: `--matmul-precision medium`.
//
// Weights and activations are rounded to bfloat16, products are added in float32 in AMX's tiles, from the first column
// to the last: nothing leaves the unit in between, which is what the exact sums of integer_products.h pay for. A token's
// bits differ from those of exact products, which few tokens keep getting.
//
// A tile of weights is 16 rows by 32 columns, each row as its layout decodes it. A tile of activations is 16 pairs of
// columns by 16 tokens, so those are turned when they are rounded, once for all weights; a product is 16 rows by 16
// tokens, and is turned back when it leaves the unit.
#pragma once

#include "amx.h"
#include "layouts.h"

#if HAS_TILES

constexpr int64_t kTileSize = 1024;

// Lane i of out[j] = lane j of rows[i].
INLINE void transpose_words(__m512i* rows) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    a[j] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88);
    a[j + 4] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xDD);
    a[j + 8] = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
    a[j + 12] = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xDD);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0xDD);
    rows[j + 4] = _mm512_shuffle_i32x4(a[j + 4], a[j + 12], 0x88);
    rows[j + 12] = _mm512_shuffle_i32x4(a[j + 4], a[j + 12], 0xDD);
  }
}

// The activations of up to 16 tokens as tiles[num_blocks]; what is missing to 16 is zero.
inline void store_brief(const float* x, int64_t stride, int64_t count, int64_t num_blocks, uint8_t* tiles) {
  for (int64_t block = 0; block < num_blocks; ++block, tiles += kTileSize) {
    __m512i pairs[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
      const float* from = x + std::min<int64_t>(t, count - 1) * stride + block * 32;
      pairs[t] = (__m512i)_mm512_cvtne2ps_pbh(load(from + 16).v, load(from).v);
      if (t >= count) pairs[t] = _mm512_setzero_si512();
    }
    transpose_words(pairs);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) _mm512_store_si512(tiles + j * 64, pairs[j]);
  }
}

// A row of weights, rounded: 32 columns to every `kTileSize` bytes. Any layout.
template <class L>
struct BriefRow {
  static INLINE void fill(Row row, int64_t block, uint8_t* to) {
    L::decode(row, block, [&](int v, V weights) {
      const int64_t column = block * (L::kColumns / 16) + v;  // in sixteens
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + column / 2 * kTileSize + column % 2 * 32),
                         (__m256i)_mm512_cvtneps_pbh(weights.v));
    });
  }
};

// Weights of 4 bits have 16 values to a block: rounded once, then looked up, 32 at a time. Twice the table, so that the
// fifth bit of an index says nothing.
INLINE __m512i brief_table(V values) {
  return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values.v));
}

INLINE void store_looked_up(__m512i table, __m512i indices, int64_t block, uint8_t* to) {
  _mm512_store_si512(to + block * kTileSize, _mm512_permutexvar_epi16(indices, table));
}

// Low nibbles first, then high ones.
INLINE void store_nibbles(V values, const uint8_t* nibbles, int64_t block, uint8_t* to) {
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles)));
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
  store_looked_up(brief_table(values), both, block, to);
}

template <>
struct BriefRow<Q4_0> {
  static INLINE void fill(Row row, int64_t block, uint8_t* to) {
    const uint8_t* at = row.data + block * Q4_0::kBytes;
    const float d = half_at(at);
    store_nibbles(nibble_table(splat(d), splat(-8 * d)), at + 2, block, to);
  }
};

template <>
struct BriefRow<Q4_1> {
  static INLINE void fill(Row row, int64_t block, uint8_t* to) {
    const uint8_t* at = row.data + block * Q4_1::kBytes;
    V d, m;
    splat_halves(at, d, m);
    store_nibbles(nibble_table(d, m), at + 4, block, to);
  }
};

template <>
struct BriefRow<Int4Group32> {
  static INLINE void fill(Row row, int64_t block, uint8_t* to) {  // a byte's nibbles are neighbours
    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row.data) + block));
    const __m512i high = _mm512_slli_epi32(_mm512_srli_epi32(words, 4), 16);
    const V values = nibble_table(splat(row.scale[block]), splat(row.minimum[block]));
    store_looked_up(brief_table(values), _mm512_or_si512(words, high), block, to);
  }
};

// tiles: of the 16 rows from `first` on, [num_blocks] of 16 rows by 32 columns; a row at or beyond `end` repeats the
// last.
inline void fill_brief(const Weight& w, int64_t first, int64_t end, uint8_t* tiles) {
  with_layout(w.layout, [&](auto layout) {
    using L = decltype(layout);
    for (int64_t r = 0; r < 16; ++r) {
      const Row row = row_of(w, std::min(first + r, end - 1));
      const uint8_t* ahead = row.data + 16 * w.row_bytes;
      for (int64_t block = 0; block < w.num_cols / L::kColumns; ++block) {
        for (int line = 0; line < L::kBytes; line += 64) __builtin_prefetch(ahead + block * L::kBytes + line, 0, 2);
        BriefRow<L>::fill(row, block, tiles + r * 64);
      }
    }
  });
}

// Sums of 32 rows by 32 tokens, or by the first 16, in tiles 0 … 3: (rows, tokens), (other rows, tokens), (rows, other
// tokens), (other rows, other tokens). 4, 5: weights; 6, 7: activations.
template <bool kTwoTokens>
INLINE void brief_product(const uint8_t* x, const uint8_t* w, int64_t num_blocks) {
  const uint8_t *other_x = x + num_blocks * kTileSize, *other_w = w + num_blocks * kTileSize;
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
  for (int64_t at = 0; at < num_blocks * kTileSize; at += kTileSize) {
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
  }
}
#endif
