// Attention whose keys and values are kept in float32, by vectors: attention_step.h says what it computes.
//
// Tiles are ordered for vectors of 16:
//
//   keys     [head_dim][16]: a vector is one dimension of 16 neighbouring positions, so that scores of 16 positions are
//            sums of vectors, and no lanes are added up
//   values   [16][head_dim]
#pragma once

#include "attention_step.h"

constexpr int64_t kValueTiles = 4;  // values of so many stay in the nearest cache

// Scores of kRows queries over kTiles times 16 positions. Even and odd dimensions are summed apart.
template <int kRows, int kTiles>
INLINE void tile_scores(const float* const* queries, const float* keys, const int64_t* tiles, int64_t d, float scale,
                        float* scores, int64_t stride) {
  V sums[kRows][kTiles][2];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t) sums[r][t][0] = sums[r][t][1] = zero();
  for (int64_t i = 0; i < d; i += 2)
    for (int odd = 0; odd < 2; ++odd) {
      V key[kTiles];
      for (int t = 0; t < kTiles; ++t) key[t] = load(keys + tiles[t] + 16 * (i + odd));
      for (int r = 0; r < kRows; ++r) {
        const V query = splat(queries[r][i + odd]);
        for (int t = 0; t < kTiles; ++t) sums[r][t][odd] = fma(query, key[t], sums[r][t][odd]);
      }
    }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t)
      store(scores + r * stride + 16 * t, (sums[r][t][0] + sums[r][t][1]) * splat(scale));
}

// Scores → exponentials of their distance to the largest, zeros from `limit` to `end`; returns 1 / their sum.
inline float softmax(float* scores, int64_t limit, int64_t end) {
  std::fill(scores + limit, scores + round_up(limit, 16), -INFINITY);
  V largest = load(scores);
  for (int64_t p = 16; p < limit; p += 16) largest = max(largest, load(scores + p));
  float lanes[16];
  store(lanes, largest);
  const float top = *std::max_element(lanes, lanes + 16);
  V total = zero();
  for (int64_t p = 0; p < limit; p += 16) {
    V e = exponential(load(scores + p) - splat(top));
    store(scores + p, e);
    total = total + e;
  }
  std::fill(scores + limit, scores + end, 0.0f);
  return 1.0f / sum(total);
}

// out row += Σ over `count` positions of weight · value, for kRows rows of weights and kChunks vectors of a value.
template <int kChunks, int kRows>
INLINE void weighted_values(const float* weights, int64_t stride, const float* values, int64_t d, int64_t count,
                            float* const* out) {
  V sums[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) sums[r][c] = load(out[r] + 16 * c);
  for (int64_t p = 0; p < count; ++p) {
    V value[kChunks];
    for (int c = 0; c < kChunks; ++c) value[c] = load(values + p * d + 16 * c);
    for (int r = 0; r < kRows; ++r) {
      const V weight = splat(weights[r * stride + p]);
      for (int c = 0; c < kChunks; ++c) sums[r][c] = fma(weight, value[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) store(out[r] + 16 * c, sums[r][c]);
}

// Asks for a tile's beginning. Blocks lie anywhere, where hardware cannot guess; the rest of one it can.
INLINE void prefetch_tile(const float* tile) {
  for (int64_t i = 0; i < 64; i += 16) __builtin_prefetch(tile + i, 0, 2);
}

struct FloatScratch {
  Scratch scores;
  std::vector<int64_t> tiles;
  std::vector<const float*> queries;
  std::vector<float*> out;
  std::vector<float> inverse_sums;
};

template <int kChunks>
inline void attend_by_chunks(const AttentionStep& step, const AttentionTask& task, int64_t kv_head, const float* qkv,
                             const float* keys, const float* values, float* out, FloatScratch& scratch) {
  const int64_t d = step.head_dim, group = step.group(), rows = task.count * group;
  const int64_t longest = task.limit + task.count - 1, stride = round_up(longest, 16), num_tiles = stride / 16;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  float* scores = scratch.scores.get(rows * stride);
  find_tiles(step, task.request, longest, scratch.tiles);
  const int64_t* tiles = scratch.tiles.data();
  keys += kv_head * step.head_size();
  values += kv_head * step.head_size();
  scratch.queries.resize(rows);
  scratch.out.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = task.token + r / group, head = kv_head * group + r % group;
    scratch.queries[r] = qkv + token * step.row_size() + head * d;
    scratch.out[r] = out + (token * step.num_heads + head) * d;
    std::fill(scratch.out[r], scratch.out[r] + d, 0.0f);
  }

  for (int64_t t = 0; t < num_tiles; t += 2) {
    for (int64_t i = t + kTilesAhead; i < std::min(t + kTilesAhead + 2, num_tiles); ++i)
      prefetch_tile(keys + tiles[i]);
    by_four_rows(rows, [&](int64_t r, auto count) {
      constexpr int kRows = decltype(count)::value;
      const float* const* queries = scratch.queries.data() + r;
      float* to = scores + r * stride + 16 * t;
      if (t + 1 < num_tiles) tile_scores<kRows, 2>(queries, keys, tiles + t, d, scale, to, stride);
      else tile_scores<kRows, 1>(queries, keys, tiles + t, d, scale, to, stride);
    });
  }

  scratch.inverse_sums.resize(rows);
  for (int64_t r = 0; r < rows; ++r)
    scratch.inverse_sums[r] = softmax(scores + r * stride, task.limit + r / group, stride);

  constexpr int kPass = kChunks == 0 ? 1 : kChunks > 4 ? 4 : kChunks;  // four rows of four vectors fit the registers
  for (int64_t first = 0; first < num_tiles; first += kValueTiles)
    for (int64_t c = 0; c < d / 16; c += kPass)
      by_four_rows(rows, [&](int64_t r, auto count) {
        float* to[4];
        for (int i = 0; i < decltype(count)::value; ++i) to[i] = scratch.out[r + i] + 16 * c;
        for (int64_t t = first; t < std::min(first + kValueTiles, num_tiles); ++t) {
          if (r == 0 && t + kTilesAhead < num_tiles) prefetch_tile(values + tiles[t + kTilesAhead] + 16 * c);
          weighted_values<kPass, decltype(count)::value>(scores + r * stride + 16 * t, stride,
                                                         values + tiles[t] + 16 * c, d,
                                                         std::min<int64_t>(16, longest - 16 * t), to);
        }
      });
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < d; i += 16)
      store(scratch.out[r] + i, load(scratch.out[r] + i) * splat(scratch.inverse_sums[r]));
}

struct FloatAttention {
  using Element = float;
  using Scratch = FloatScratch;

  static INLINE int64_t query_tile(const AttentionStep&) { return 8; }

  static INLINE void store_position(const float* key, const float* value, int64_t lane, int64_t d, float* keys, float* values) {
    for (int64_t i = 0; i < d; ++i) keys[16 * i + lane] = key[i];
    std::memcpy(values + lane * d, value, d * sizeof(float));
  }

  static int64_t heads_at_once(const AttentionStep&, int64_t, int) { return 1; }

  static void attend(const AttentionStep& step, const AttentionTask& task, int64_t kv_head, int64_t, const float* qkv,
                     const float* keys, const float* values, float* out, FloatScratch& scratch) {
    switch (step.head_dim) {
      case 64: return attend_by_chunks<4>(step, task, kv_head, qkv, keys, values, out, scratch);
      case 128: return attend_by_chunks<8>(step, task, kv_head, qkv, keys, values, out, scratch);
      default: return attend_by_chunks<0>(step, task, kv_head, qkv, keys, values, out, scratch);
    }
  }
};
