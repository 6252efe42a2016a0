// Attention whose keys and values are kept in bfloat16: attention_step.h says what it computes.
//
// Tiles are AMX's, of pairs of what it adds up, and suit vectors as well:
//
//   keys     [head_dim / 2 pairs of dimensions][16 positions][2]
//   values   [head_dim / 16][8 pairs of positions][16 dimensions][2]
//
// A task's queries are taken up to 16 at once, the rows of one tile. They and the softmax's exponentials are rounded to
// bfloat16; sums are float32.
#pragma once

#include "attention_step.h"
#include "brief_product.h"

#if HAS_BRIEF

INLINE void round_sixteen(const float* from, uint16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(load(from).v));
}

struct BriefScratch {
  Scratch queries, scores, weights, last, out, inverse_sums;
  std::vector<int64_t> tiles;

  static uint16_t* as_brief(Scratch& scratch, int64_t count) {
    return reinterpret_cast<uint16_t*>(scratch.get((count + 1) / 2));
  }
};

INLINE void prefetch_brief(const uint16_t* tile, int64_t d) {
  for (int64_t i = 0; i < 16 * d; i += 32) __builtin_prefetch(tile + i, 0, 2);
}

// 2ˣ of x ≤ 0 with a relative error of 5·10⁻⁵, a fortieth of what rounding to bfloat16 costs; 0 below −126.
// Taylor polynomial of degree 4 on |r| ≤ 1/2.
INLINE V brief_power_of_two(V x) {
  const __m512 whole = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const V r = x - V{whole};
  V p = splat(9.61812911e-3f);
  p = fma(p, r, splat(5.55041087e-2f));
  p = fma(p, r, splat(2.40226507e-1f));
  p = fma(p, r, splat(6.93147181e-1f));
  p = fma(p, r, splat(1.0f));
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p.v, whole)};
}

// Scores → exponentials of their scaled distance to the largest, rounded; zeros from `limit` to `end`, which is a
// multiple of 16. Returns 1 / their sum.
inline float brief_softmax(float* scores, int64_t limit, int64_t end, float scale, uint16_t* weights) {
  std::fill(scores + limit, scores + end, -INFINITY);
  V largest = load(scores);
  for (int64_t p = 16; p < end; p += 16) largest = max(largest, load(scores + p));
  const V factor = splat(scale * 1.44269504f), top = splat(_mm512_reduce_max_ps(largest.v)) * factor;
  V total = zero();
  for (int64_t p = 0; p < end; p += 16) {
    const V e = brief_power_of_two(load(scores + p) * factor - top);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + p), (__m256i)_mm512_cvtneps_pbh(e.v));
    total = total + e;
  }
  return 1.0f / sum(total);
}

// The first `count` positions of a tile of values, and zeros.
INLINE void copy_values(const uint16_t* tile, int64_t count, int64_t d, uint16_t* to) {
  for (int64_t i = 0; i < d * 16; i += 32) {
    const int64_t position = i / 32 % 8 * 2;
    const __mmask32 mask = position + 1 < count ? 0xFFFFFFFF : position < count ? 0x55555555 : 0;
    _mm512_storeu_si512(to + i, _mm512_maskz_loadu_epi16(mask, tile + i));
  }
}

// A unit makes two products of a task's rows, of which there are as many as it was made for:
//   scores   out[r * stride + p] = queries[r] · key of p, for all positions of the tiles; queries: [rows][d]
//   values   out[r * d + i] = Σ over positions of weights[r * stride + p] · value of p, for kChunks times 16 dimensions
//            from `first` on; the last tile of values is read from `last`
#if HAS_TILES

// AMX: sums 0 … 3 have a row for each query, as have queries (4) and weights (5); 6: keys, 7: values.
struct TileAttention {
  explicit TileAttention(int64_t rows) : shapes(shapes_of(static_cast<uint8_t>(rows))) {}

  static INLINE TileShapes shapes_of(uint8_t rows) {
    const TileShape sums{rows, 64};
    return TileShapes({sums, sums, sums, sums, {rows, 64}, {rows, 32}, {16, 64}, {8, 64}});
  }

  INLINE void scores(const uint16_t* queries, const uint16_t* keys, const std::vector<int64_t>& tiles, int64_t d,
                     float* out, int64_t stride) const {
    for (size_t t = 0; t < tiles.size(); ++t) {
      if (t + kTilesAhead < tiles.size()) prefetch_brief(keys + tiles[t + kTilesAhead], d);
      clear_tile<0>();
      for (int64_t i = 0; i < d; i += 32) {
        load_tile<4>(queries + i, d * 2);
        load_tile<6>(keys + tiles[t] + i * 16, 64);
        multiply_brief<0, 4, 6>();
      }
      store_tile<0>(out + t * 16, stride * 4);
    }
  }

  template <int kChunks>
  INLINE void values(const uint16_t* weights, int64_t stride, const uint16_t* from, const uint16_t* last,
                     const std::vector<int64_t>& tiles, int64_t d, int64_t first, float* out) const {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (size_t t = 0; t < tiles.size(); ++t) {
      if (first == 0 && t + kTilesAhead < tiles.size()) prefetch_brief(from + tiles[t + kTilesAhead], d);
      const uint16_t* tile = (t + 1 < tiles.size() ? from + tiles[t] : last) + first * 16;
      load_tile<5>(weights + t * 16, stride * 2);
      load_tile<7>(tile, 64);
      multiply_brief<0, 5, 7>();
      load_tile<7>(tile + 256, 64);
      multiply_brief<1, 5, 7>();
      if (kChunks == 2) continue;
      load_tile<7>(tile + 512, 64);
      multiply_brief<2, 5, 7>();
      load_tile<7>(tile + 768, 64);
      multiply_brief<3, 5, 7>();
    }
    store_tile<0>(out + first, d * 4);
    store_tile<1>(out + first + 16, d * 4);
    if (kChunks == 2) return;
    store_tile<2>(out + first + 32, d * 4);
    store_tile<3>(out + first + 48, d * 4);
  }

  const TileShapes shapes;
};
#endif

// Vectors: a lane is a position of scores, and a dimension of values.
struct VectorAttention {
  explicit VectorAttention(int64_t rows) : rows(rows) {}

  INLINE void scores(const uint16_t* queries, const uint16_t* keys, const std::vector<int64_t>& tiles, int64_t d,
                     float* out, int64_t stride) const {
    for (size_t t = 0; t < tiles.size(); ++t) {
      if (t + kTilesAhead < tiles.size()) prefetch_brief(keys + tiles[t + kTilesAhead], d);
      const uint16_t* tile = keys + tiles[t];
      by_four_rows(rows, [&](int64_t first, auto count) {
        constexpr int kRows = decltype(count)::value;
        V sums[kRows][2];  // of even and of odd pairs
        for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = zero();
        for (int64_t i = 0; i < d; i += 4)
          for (int odd = 0; odd < 2; ++odd) {
            const __m512i key = _mm512_loadu_si512(tile + 16 * (i + 2 * odd));
            for (int r = 0; r < kRows; ++r)
              sums[r][odd] = multiply_pairs(sums[r][odd], splat_pair(queries + (first + r) * d + i + 2 * odd), key);
          }
        for (int r = 0; r < kRows; ++r) store(out + (first + r) * stride + t * 16, sums[r][0] + sums[r][1]);
      });
    }
  }

  template <int kChunks>
  INLINE void values(const uint16_t* weights, int64_t stride, const uint16_t* from, const uint16_t* last,
                     const std::vector<int64_t>& tiles, int64_t d, int64_t first, float* out) const {
    by_four_rows(rows, [&](int64_t row, auto count) {
      constexpr int kRows = decltype(count)::value;
      V sums[kRows][kChunks];
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kChunks; ++c) sums[r][c] = zero();
      for (size_t t = 0; t < tiles.size(); ++t) {
        if (first == 0 && row == 0 && t + kTilesAhead < tiles.size()) prefetch_brief(from + tiles[t + kTilesAhead], d);
        const uint16_t* tile = (t + 1 < tiles.size() ? from + tiles[t] : last) + first * 16;
        for (int64_t pair = 0; pair < 8; ++pair) {
          __m512i value[kChunks];
          for (int c = 0; c < kChunks; ++c) value[c] = _mm512_loadu_si512(tile + 256 * c + 32 * pair);
          for (int r = 0; r < kRows; ++r) {
            const __m512i weight = splat_pair(weights + (row + r) * stride + t * 16 + 2 * pair);
            for (int c = 0; c < kChunks; ++c) sums[r][c] = multiply_pairs(sums[r][c], weight, value[c]);
          }
        }
      }
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kChunks; ++c) store(out + (row + r) * d + first + 16 * c, sums[r][c]);
    });
  }

  const int64_t rows;
};

template <class Unit>
struct BriefAttention {
  using Element = uint16_t;
  using Scratch = BriefScratch;

  static INLINE int64_t query_tile(const AttentionStep& step) {
    return std::max<int64_t>(1, 16 / step.group());
  }

  static INLINE void store_position(const float* key, const float* value, int64_t lane, int64_t d, uint16_t* keys,
                             uint16_t* values) {
    uint16_t rounded[16];
    for (int64_t i = 0; i < d; i += 16) {
      round_sixteen(key + i, rounded);
      for (int64_t j = 0; j < 16; ++j) keys[(i + j) / 2 * 32 + lane * 2 + j % 2] = rounded[j];
      round_sixteen(value + i, rounded);
      for (int64_t j = 0; j < 16; ++j) values[i * 16 + lane / 2 * 32 + j * 2 + lane % 2] = rounded[j];
    }
  }

  // All heads at once, if there are tasks enough: what one waits for hides behind another's work.
  static int64_t heads_at_once(const AttentionStep& step, int64_t num_tasks, int num_threads) {
    return num_tasks >= 4 * num_threads ? step.num_kv_heads : 1;
  }

  static void attend(const AttentionStep& step, const AttentionTask& task, int64_t first_head, int64_t num_heads,
                     const float* qkv, const uint16_t* keys, const uint16_t* values, float* out,
                     BriefScratch& scratch) {
    const int64_t d = step.head_dim, group = step.group(), all_rows = task.count * group, tile = 16 * d;
    const int64_t longest = task.limit + task.count - 1, end = round_up(longest, 16);
    const int64_t stride = end + 32;  // so that rows of a power of two do not share their places in the cache
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const int64_t most_rows = std::min<int64_t>(16, all_rows), size = most_rows * stride;  // of a head
    find_tiles(step, task.request, longest, scratch.tiles);
    keys += first_head * step.head_size();
    values += first_head * step.head_size();
    uint16_t* queries = BriefScratch::as_brief(scratch.queries, num_heads * tile);
    uint16_t* weights = BriefScratch::as_brief(scratch.weights, num_heads * size);
    uint16_t* last = BriefScratch::as_brief(scratch.last, num_heads * tile);
    float *scores = scratch.scores.get(num_heads * size), *sums = scratch.out.get(num_heads * tile);
    float* inverse_sums = scratch.inverse_sums.get(num_heads * 16);
    for (int64_t h = 0; h < num_heads; ++h)
      copy_values(values + h * step.head_size() + scratch.tiles.back(), longest - end + 16, d, last + h * tile);
    for (int64_t from = 0; from < all_rows; from += 16) {
      const int64_t rows = std::min<int64_t>(16, all_rows - from);
      const Unit unit(rows);
      auto token = [&](int64_t r) { return task.token + (from + r) / group; };
      auto head = [&](int64_t h, int64_t r) { return (first_head + h) * group + (from + r) % group; };
      for (int64_t h = 0; h < num_heads; ++h) {
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < d; i += 16)
            round_sixteen(qkv + token(r) * step.row_size() + head(h, r) * d + i, queries + h * tile + r * d + i);
        unit.scores(queries + h * tile, keys + h * step.head_size(), scratch.tiles, d, scores + h * size, stride);
      }
      for (int64_t h = 0; h < num_heads; ++h)
        for (int64_t r = 0; r < rows; ++r)
          inverse_sums[h * 16 + r] = brief_softmax(scores + h * size + r * stride, task.limit + (from + r) / group, end,
                                                   scale, weights + h * size + r * stride);
      for (int64_t h = 0; h < num_heads; ++h) {
        auto add = [&](int64_t i, auto chunks) {
          unit.template values<decltype(chunks)::value>(weights + h * size, stride, values + h * step.head_size(),
                                                        last + h * tile, scratch.tiles, d, i, sums + h * tile);
        };
        int64_t i = 0;
        for (; i + 64 <= d; i += 64) add(i, std::integral_constant<int, 4>{});
        if (i < d) add(i, std::integral_constant<int, 2>{});
      }
      for (int64_t h = 0; h < num_heads; ++h)
        for (int64_t r = 0; r < rows; ++r) {
          float* to = out + (token(r) * step.num_heads + head(h, r)) * d;
          for (int64_t i = 0; i < d; i += 16)
            store(to + i, load(sums + h * tile + r * d + i) * splat(inverse_sums[h * 16 + r]));
        }
    }
  }
};
#endif
