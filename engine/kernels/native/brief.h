// What products in bfloat16 are made of, for whoever asks for them: `--matmul-precision medium`.
//
// Weights and activations are rounded to bfloat16, products are added in float32, from the first column to the last:
// nothing is scaled in between, which is what the exact sums of integer_products.h pay for. A token's bits differ from
// those of exact products, which few tokens keep getting. The order of both is AMX's, which suits vectors as well.
//
// A tile of weights is 16 rows by 32 columns, each row as its layout decodes it. A tile of activations is 16 pairs of
// columns by 16 tokens, so those are turned when they are rounded, once for all weights; a product is 16 rows by 16
// tokens, and is turned back when it leaves the unit.
#pragma once

#include "layouts.h"
#include "planes.h"

#if HAS_BRIEF

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

// A row of weights, rounded: 32 columns to every `kTileSize` bytes. Asks for what is `ahead` bytes further on. Any layout.
template <class L>
struct BriefRow {
  static INLINE void fill(Row row, int64_t num_cols, int64_t ahead, uint8_t* to) {
    for (int64_t block = 0; block < num_cols / L::kColumns; ++block) {
      const uint8_t* next = row.data + block * L::kBytes + ahead;
      for (int line = 0; line < L::kBytes; line += 64) __builtin_prefetch(next + line, 0, 2);
      L::decode(row, block, [&](int v, V weights) {
        const int64_t column = block * (L::kColumns / 16) + v;  // in sixteens
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + column / 2 * kTileSize + column % 2 * 32),
                           (__m256i)_mm512_cvtneps_pbh(weights.v));
      });
    }
  }
};

// Weights of 4 bits have 16 values to a block: rounded once, then looked up, 32 at a time. Twice the table, so that the
// fifth bit of an index says nothing.
INLINE void store_looked_up(V values, __m512i indices, uint8_t* to) {
  const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(values.v, values.v);
  _mm512_store_si512(to, _mm512_permutexvar_epi16(indices, table));
}

INLINE __m128i load_nibbles(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

// Low nibbles first, then high ones.
INLINE void store_nibbles(V values, const uint8_t* nibbles, uint8_t* to) {
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(load_nibbles(nibbles)));
  store_looked_up(values, _mm512_srlv_epi16(twice, shifts), to);
}

// Rows of blocks that begin with halves and end with nibbles: `values` makes a block's 16 of the halves, as floats.
// Those of 16 blocks are read together: broadcast from memory, they cost the unit that permutes nothing.
template <int kBytes, class Values>
INLINE void fill_nibbles(Row row, int64_t num_cols, int64_t ahead, uint8_t* to, Values&& values) {
  constexpr int kHalves = (kBytes - 16) / 2;
  const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i offsets = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(kBytes));
  alignas(64) float floats[32];
  for (int64_t left = num_cols / 32; left > 0; left -= 16, row.data += 16 * kBytes, to += 16 * kTileSize) {
    const int64_t count = std::min<int64_t>(16, left);
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    const __m512i words = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, offsets, row.data, 1);
    _mm512_store_ps(floats, _mm512_cvtph_ps(_mm512_castsi512_si256(words)));
    _mm512_store_ps(floats + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1)));
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* block = row.data + i * kBytes;
      __builtin_prefetch(block + ahead, 0, 2);
      store_nibbles(values(floats + 2 * i), block + 2 * kHalves, to + i * kTileSize);
    }
  }
}

template <>
struct BriefRow<Q4_0> {
  static INLINE void fill(Row row, int64_t num_cols, int64_t ahead, uint8_t* to) {
    fill_nibbles<Q4_0::kBytes>(row, num_cols, ahead, to,
                               [](const float* d) { return nibble_table(splat(d[0]), splat(-8 * d[0])); });
  }
};

template <>
struct BriefRow<Q4_1> {
  static INLINE void fill(Row row, int64_t num_cols, int64_t ahead, uint8_t* to) {
    fill_nibbles<Q4_1::kBytes>(row, num_cols, ahead, to,
                               [](const float* dm) { return nibble_table(splat(dm[0]), splat(dm[1])); });
  }
};

template <>
struct BriefRow<DenseBfloat16> {
  static INLINE void fill(Row row, int64_t num_cols, int64_t ahead, uint8_t* to) {
    for (int64_t at = 0; at < num_cols * 2; at += 64, to += kTileSize) {
      __builtin_prefetch(row.data + at + ahead, 0, 2);
      _mm512_store_si512(to, _mm512_loadu_si512(row.data + at));
    }
  }
};

template <>
struct BriefRow<Int4Group32> {
  static INLINE void fill(Row row, int64_t num_cols, int64_t ahead, uint8_t* to) {  // a byte's nibbles are neighbours
    for (int64_t block = 0; block < num_cols / 32; ++block) {
      const uint8_t* nibbles = row.data + block * Int4Group32::kBytes;
      __builtin_prefetch(nibbles + ahead, 0, 2);
      const __m512i words = _mm512_cvtepu8_epi32(load_nibbles(nibbles));
      const __m512i high = _mm512_slli_epi32(_mm512_srli_epi32(words, 4), 16);
      const V values = nibble_table(splat(row.scale[block]), splat(row.minimum[block]));
      store_looked_up(values, _mm512_or_si512(words, high), to + block * kTileSize);
    }
  }
};

template <>
struct BriefRow<Q8_0> {
  static INLINE void fill(Row row, int64_t num_cols, int64_t ahead, uint8_t* to) {
    for (int64_t block = 0; block < num_cols / 32; ++block) {
      const uint8_t* at = row.data + block * Q8_0::kBytes;
      __builtin_prefetch(at + ahead, 0, 2);
      V halves[2];
      Q8_0::decode(row, block, [&](int v, V weights) { halves[v] = weights; });
      _mm512_store_si512(to + block * kTileSize, (__m512i)_mm512_cvtne2ps_pbh(halves[1].v, halves[0].v));
    }
  }
};

// One row of tiles[num_blocks], of 16 rows by 32 columns each.
INLINE void fill_row(const Weight& w, int64_t row, int64_t ahead, uint8_t* to) {
  with_layout(w.layout,
              [&](auto layout) { BriefRow<decltype(layout)>::fill(row_of(w, row), w.num_cols, ahead, to); });
}
#endif
