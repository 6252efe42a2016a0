// Products x · Wᵀ over any layout, with what surrounds them in a decoder: norm before, SwiGLU or residual after.
//
// Two ways, the same bits. A few tokens: decode and multiply in registers, so the weight's bytes are read once and
// never stored. More: rows are decoded into a tile that stays in the core's cache and multiplied by all tokens of a
// block from there. In both, one accumulator of 16 lanes per (token, row) takes the columns in order.
#pragma once

#include <cmath>

#include "integer_products.h"

// Measured on SmolLM2's shapes (Q4_1, one thread): eight tokens take 170 µs in registers and 206 by a tile; beyond
// eight their accumulators leave the registers, and the tile wins.
constexpr int64_t kFewTokens = HAS_WIDE ? 8 : 4;
// Tokens multiplied by rows that were taken apart once: 256 of 576 columns, or 128 of 1536, stay in the L2 cache.
inline int64_t token_block(int64_t num_cols) { return num_cols <= 1024 ? 256 : 128; }
constexpr int64_t kTileBytes = 256 << 10;
// How far ahead of its use a weight is asked for. Hardware does not look beyond a page, and rows are shorter than one:
// with 110 MB of weights, 4 to 16 KiB take 67 µs where none take 116.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int kTileRows = 4;             // rows of a microkernel call; results come four at a time

struct Activations {
  const float* plain;        // rows of at least round_up(cols, 16) floats if is_padded
  const float* interleaved;  // even columns of each 32 first; null if no layout asks for it
  int64_t stride;
#if HAS_INTEGERS
  Planes planes[2][kPlaneKinds];  // [interleaved], of what some weight asks for
  bool use_tiles;
#endif
};

// The last num_cols % kColumns weights of a dense row, followed by zeros.
template <class L>
INLINE V decode_tail(Row row, int64_t num_cols) {
  const int64_t done = num_cols / L::kColumns;
  uint8_t padded[64] = {};
  const int64_t bytes = (num_cols % L::kColumns) * L::kBytes / L::kColumns;
  std::memcpy(padded, row.data + done * L::kBytes, bytes);
  V result = zero();
  L::decode({padded, nullptr, nullptr}, 0, [&](int, V w) { result = w; });
  return result;
}

// out[t * out_stride + i] = dot(x row t, weight row first + i), t < kTokens, i < 4; rows at or beyond `end` repeat
// the last one, and so do tokens at or beyond `num_tokens`, which are not stored. kRows rows share a pass over x, as
// many as leave the accumulators in registers.
template <class L, int kTokens, int kRows>
inline void few_tokens(const Weight& w, int64_t first, int64_t end, const float* x, int64_t x_stride,
                       int64_t num_tokens, float* out, int64_t out_stride) {
  const float* tokens[kTokens];
  for (int t = 0; t < kTokens; ++t) tokens[t] = x + std::min<int64_t>(t, num_tokens - 1) * x_stride;
  const int64_t blocks = w.num_cols / L::kColumns;
  for (int part = 0; part < kTileRows; part += kRows) {
    Row rows[kRows];
    V sums[kTokens][4];
    for (int r = 0; r < kRows; ++r) rows[r] = row_of(w, std::min(first + part + r, end - 1));
    for (int t = 0; t < kTokens; ++t)
      for (int r = 0; r < 4; ++r) sums[t][r] = zero();
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = block * L::kColumns;
      const uint8_t* ahead = rows[0].data + block * L::kBytes * kRows + kPrefetchBytes;
#pragma GCC unroll 16
      for (int line = 0; line < L::kBytes * kRows; line += 64) __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        L::decode(rows[r], block, [&](int v, V weights) {
#pragma GCC unroll 8
          for (int t = 0; t < kTokens; ++t) sums[t][r] = fma(weights, load(tokens[t] + at + v * 16), sums[t][r]);
        });
    }
    if (L::kColumns == 16 && w.num_cols % 16)
      for (int r = 0; r < kRows; ++r) {
        V weights = decode_tail<L>(rows[r], w.num_cols);
        for (int t = 0; t < kTokens; ++t) sums[t][r] = fma(weights, load(tokens[t] + blocks * 16), sums[t][r]);
      }
    for (int t = 0; t < num_tokens; ++t) {
      float four[4];
      sum4(sums[t][0], sums[t][1], sums[t][2], sums[t][3], four);
      for (int r = 0; r < kRows; ++r) out[t * out_stride + part + r] = four[r];
    }
  }
}

template <class L, int kTokens>
inline void few_tokens_rows(const Weight& w, int64_t first, int64_t end, const float* x, int64_t x_stride,
                            int64_t num_tokens, float* out, int64_t out_stride) {
  constexpr int kRows = HAS_WIDE ? (kTokens > 6 ? 2 : 4) : (kTokens == 1 ? 4 : kTokens == 2 ? 2 : 1);
  for (int64_t row = first; row < end; row += kTileRows)
    few_tokens<L, kTokens, kRows>(w, row, end, x, x_stride, num_tokens, out + row - first, out_stride);
}

// Rows first … end − 1 as floats: tile[i * stride + column], zeros up to a multiple of 16 columns.
template <class L>
inline void decode_tile(const Weight& w, int64_t first, int64_t end, float* tile, int64_t stride) {
  const int64_t blocks = w.num_cols / L::kColumns;
  for (int64_t row = first; row < end; ++row) {
    const Row source = row_of(w, row);
    float* at = tile + (row - first) * stride;
    for (int64_t block = 0; block < blocks; ++block) {
      const uint8_t* ahead = source.data + block * L::kBytes + kPrefetchBytes;
      for (int line = 0; line < L::kBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
      L::decode(source, block, [&](int v, V weights) { store(at + block * L::kColumns + v * 16, weights); });
    }
    if (L::kColumns == 16 && w.num_cols % 16) store(at + blocks * 16, decode_tail<L>(source, w.num_cols));
  }
}

// out[t * out_stride + i] = dot(x row t, tile row i), t < kTokens, i < 4, over columns in whole vectors.
#if HAS_WIDE
constexpr int kTileTokens = 6;  // 24 accumulators, four rows and no more fit the 32 registers

template <int kTokens>
inline void tile_product(const float* x, int64_t x_stride, const float* tile, int64_t tile_stride, int64_t columns,
                         float* out, int64_t out_stride) {
  V sums[kTokens][4];
  for (int t = 0; t < kTokens; ++t)
    for (int r = 0; r < 4; ++r) sums[t][r] = zero();
  for (int64_t k = 0; k < columns; k += 16) {
    V rows[4];
    for (int r = 0; r < 4; ++r) rows[r] = load(tile + r * tile_stride + k);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      V token = load(x + t * x_stride + k);
      for (int r = 0; r < 4; ++r) sums[t][r] = fma(rows[r], token, sums[t][r]);
    }
  }
  for (int t = 0; t < kTokens; ++t) sum4(sums[t][0], sums[t][1], sums[t][2], sums[t][3], out + t * out_stride);
}
#else
constexpr int kTileTokens = 3;  // 12 accumulators of eight lanes and three tokens in 16 registers

INLINE F8 fma8(F8 a, F8 b, F8 c) {
#if defined(__FMA__)
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

template <int kTokens>
inline void tile_product(const float* x, int64_t x_stride, const float* tile, int64_t tile_stride, int64_t columns,
                         float* out, int64_t out_stride) {
  V sums[kTokens][4];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    F8 part[kTokens][4] = {};
    for (int64_t k = half * 8; k < columns; k += 16) {
      F8 tokens[kTokens];
      for (int t = 0; t < kTokens; ++t) tokens[t] = read<F8>(x + t * x_stride + k);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        F8 row = read<F8>(tile + r * tile_stride + k);
        for (int t = 0; t < kTokens; ++t) part[t][r] = fma8(row, tokens[t], part[t][r]);
      }
    }
    for (int t = 0; t < kTokens; ++t)
      for (int r = 0; r < 4; ++r) (half ? sums[t][r].hi : sums[t][r].lo) = part[t][r];
  }
  for (int t = 0; t < kTokens; ++t) sum4(sums[t][0], sums[t][1], sums[t][2], sums[t][3], out + t * out_stride);
}
#endif

inline void tile_products(int64_t tokens, const float* x, int64_t x_stride, const float* tile, int64_t tile_stride,
                          int64_t rows, int64_t columns, float* out, int64_t out_stride) {
  const int64_t groups = (tokens + kTileTokens - 1) / kTileTokens;
  for (int64_t g = 0; g < groups; ++g) {  // groups of nearly equal size: seven tokens are 4 + 3, not 6 + 1
    const int64_t t = tokens * g / groups, count = tokens * (g + 1) / groups - t;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const float *xs = x + t * x_stride, *ws = tile + r * tile_stride;
      float* to = out + t * out_stride + r;
      switch (count) {
        case 1: tile_product<1>(xs, x_stride, ws, tile_stride, columns, to, out_stride); break;
        case 2: tile_product<2>(xs, x_stride, ws, tile_stride, columns, to, out_stride); break;
        case 3: tile_product<3>(xs, x_stride, ws, tile_stride, columns, to, out_stride); break;
#if HAS_WIDE
        case 4: tile_product<4>(xs, x_stride, ws, tile_stride, columns, to, out_stride); break;
        case 5: tile_product<5>(xs, x_stride, ws, tile_stride, columns, to, out_stride); break;
        case 6: tile_product<6>(xs, x_stride, ws, tile_stride, columns, to, out_stride); break;
#endif
      }
    }
  }
}

inline void add_bias(const Weight& w, int64_t first, int64_t end, int64_t tokens, float* sums, int64_t stride) {
  if (!w.bias) return;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t row = first; row < end; ++row) sums[t * stride + row - first] += w.bias[row];
}

// sums[t * stride + i] = (x · Wᵀ + bias)[t, first + i]. `sums` has room for a multiple of four rows.
template <class L>
inline void rows_product(const Weight& w, int64_t first, int64_t end, const float* x, int64_t x_stride,
                         int64_t tokens, float* sums, int64_t stride, Scratch& tiles) {
  if (tokens == 1) few_tokens_rows<L, 1>(w, first, end, x, x_stride, tokens, sums, stride);
  else if (tokens == 2) few_tokens_rows<L, 2>(w, first, end, x, x_stride, tokens, sums, stride);
  else if (tokens <= 4) few_tokens_rows<L, 4>(w, first, end, x, x_stride, tokens, sums, stride);
#if HAS_WIDE
  else if (tokens <= 6) few_tokens_rows<L, 6>(w, first, end, x, x_stride, tokens, sums, stride);
  else if (tokens <= 8) few_tokens_rows<L, 8>(w, first, end, x, x_stride, tokens, sums, stride);
#endif
  else {
    const int64_t columns = round_up(w.num_cols, 16), rows = round_up(end - first, kTileRows);
    float* tile = tiles.get(rows * columns);
    decode_tile<L>(w, first, end, tile, columns);
    std::memset(tile + (end - first) * columns, 0, (rows - (end - first)) * columns * sizeof(float));
    tile_products(tokens, x, x_stride, tile, columns, rows, columns, sums, stride);
  }
  if (L::kRowScale)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t row = first; row < end; ++row) sums[t * stride + row - first] *= w.scale[row];
  add_bias(w, first, end, tokens, sums, stride);
}

inline void any_rows_product(const Weight& w, int64_t first, int64_t end, const Activations& x, int64_t token,
                             int64_t tokens, float* sums, int64_t stride, Scratch& tiles) {
  with_layout(w.layout, [&](auto layout) {
    using L = decltype(layout);
#if HAS_INTEGERS
    if constexpr (Integers<L>::kIs) {
      const Planes& used = x.planes[L::kInterleaved][plane_kind(w, x.use_tiles)];
      if (used.rows && w.num_cols % 32 == 0) {
        integer_product<L>(w, first, end, used, token, tokens, x.use_tiles, sums, stride, tiles);
        return add_bias(w, first, end, tokens, sums, stride);
      }
    }
#endif
    const float* rows = (L::kInterleaved ? x.interleaved : x.plain) + token * x.stride;
    rows_product<L>(w, first, end, rows, x.stride, tokens, sums, stride, tiles);
  });
}
