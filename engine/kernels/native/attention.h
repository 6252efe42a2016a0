// Causal grouped-query attention over the paged KV cache, read in place; engine/kernels/attention.py is the
// specification and explains blocks and slots.
//
// Within a block, the caches are ordered for vectors of 16. One key-value head comes after the other, and of each head
//
//   keys     [block_size / 16][head_dim][16]: a vector is one dimension of 16 neighbouring positions, so that scores
//            of 16 positions are sums of vectors, and no lanes are added up
//   values   [block_size][head_dim]
//
// A task is one key-value head of up to kQueryTile neighbouring tokens of one sequence (one token when decoding).
// Scores of a query over all positions are kept, so the softmax is the plain one: maximum, exponentials, sum. Every
// query's arithmetic is the same whatever shares its task, so a token gets the same bits decoded or prefilled.
// What lies beyond a sequence's length may be read where it shares a vector, and reaches nothing.
#pragma once

#include <algorithm>

#include "linear.h"

constexpr int64_t kQueryTile = 8;
constexpr int64_t kTilesAhead = 2;  // how far ahead of their use keys and values are asked for
constexpr int64_t kValueTiles = 4;  // values of so many stay in the nearest cache

struct AttentionStep {  // what all layers of one step share
  const float *cos, *sin;  // [num_tokens, head_dim / 2]
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const int64_t* slot_mapping;
  int64_t table_stride, num_requests, num_tokens;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_stride;  // floats from one block of a cache to the next

  // Of the 16 positions from `offset` on in a block, for its first head: in both caches.
  INLINE int64_t tile(int64_t block, int64_t offset) const { return block * block_stride + offset * head_dim; }
  INLINE int64_t head_size() const { return block_size * head_dim; }
};

struct AttentionTask {
  int64_t request, token, count, limit;  // the first token sees `limit` positions, each next one more
};

// Rotates pairs (x[i], x[i + half]), as engine/kernels/rotary.py says.
INLINE void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

// Rotates a token's queries and keys in place and stores its keys and values in its slot, if it has one.
inline void rotate_and_store(const AttentionStep& step, int64_t token, float* qkv, float* keys, float* values) {
  const int64_t d = step.head_dim, half = d / 2, kv_size = step.num_kv_heads * d;
  float* row = qkv + token * (step.num_heads * d + 2 * kv_size);
  for (int64_t head = 0; head < step.num_heads + step.num_kv_heads; ++head)
    rotate(row + head * d, step.cos + token * half, step.sin + token * half, half);
  const int64_t slot = step.slot_mapping[token];
  if (slot < 0) return;
  const int64_t offset = slot % step.block_size, lane = offset % 16;
  const int64_t at = step.tile(slot / step.block_size, offset - lane);
  for (int64_t head = 0; head < step.num_kv_heads; ++head) {
    const float *key = row + (step.num_heads + head) * d, *value = key + kv_size;
    float* to = keys + at + head * step.head_size() + lane;
    for (int64_t i = 0; i < d; ++i) to[16 * i] = key[i];
    std::memcpy(values + at + head * step.head_size() + lane * d, value, d * sizeof(float));
  }
}

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

// Calls visit(first row, number of rows as a constant): four at a time, as many as leave the sums in registers.
template <class Visit>
INLINE void by_four_rows(int64_t rows, Visit&& visit) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) visit(r, std::integral_constant<int, 4>{});
  switch (rows - r) {
    case 1: visit(r, std::integral_constant<int, 1>{}); break;
    case 2: visit(r, std::integral_constant<int, 2>{}); break;
    case 3: visit(r, std::integral_constant<int, 3>{}); break;
  }
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

struct AttentionScratch {
  Scratch scores;
  std::vector<int64_t> tiles;
  std::vector<const float*> queries;
  std::vector<float*> out;
  std::vector<float> inverse_sums;
};

// Where the tiles of a sequence's positions lie in the caches, for the first head.
inline void find_tiles(const AttentionStep& step, int64_t request, int64_t longest, std::vector<int64_t>& tiles) {
  const int32_t* block = step.block_table + request * step.table_stride;
  tiles.clear();
  for (int64_t p = 0; p < longest; ++block)
    for (int64_t offset = 0; offset < step.block_size && p < longest; offset += 16, p += 16)
      tiles.push_back(step.tile(*block, offset));
}

template <int kChunks>
inline void attend(const AttentionStep& step, const AttentionTask& task, int64_t kv_head, const float* qkv,
                   const float* keys, const float* values, float* out, AttentionScratch& scratch) {
  const int64_t d = step.head_dim, group = step.num_heads / step.num_kv_heads, rows = task.count * group;
  const int64_t longest = task.limit + task.count - 1, stride = round_up(longest, 16), num_tiles = stride / 16;
  const int64_t token_stride = (step.num_heads + 2 * step.num_kv_heads) * d;
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
    scratch.queries[r] = qkv + token * token_stride + head * d;
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

inline std::vector<AttentionTask> attention_tasks(const AttentionStep& step) {
  std::vector<AttentionTask> tasks;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t start = step.query_start_loc[r], count = step.query_start_loc[r + 1] - start;
    const int64_t computed = step.seq_lens[r] - count;
    for (int64_t t = 0; t < count; t += kQueryTile)
      tasks.push_back({r, start + t, std::min(kQueryTile, count - t), computed + t + 1});
  }
  return tasks;
}

// qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim], rotated in place; caches: [blocks], ordered as above;
// out: [num_tokens, num_heads, head_dim]. head_dim and block_size: multiples of 16.
inline void run_attention(Context& context, const AttentionStep& step, float* qkv, float* keys, float* values,
                          float* out, std::vector<AttentionScratch>& scratch) {
  const int64_t piece = step.num_tokens <= 8 ? step.num_tokens : 16;
  if (step.num_tokens == 0) return;
  context.pool.run((step.num_tokens + piece - 1) / piece, [&](uint32_t i, int) {
    for (int64_t t = i * piece; t < std::min(step.num_tokens, (i + 1) * piece); ++t)
      rotate_and_store(step, t, qkv, keys, values);
  });
  const std::vector<AttentionTask> tasks = attention_tasks(step);
  context.pool.run(tasks.size() * step.num_kv_heads, [&](uint32_t i, int thread) {
    const AttentionTask& task = tasks[tasks.size() - 1 - i / step.num_kv_heads];  // long ones first
    const int64_t head = i % step.num_kv_heads;
    switch (step.head_dim) {
      case 64: attend<4>(step, task, head, qkv, keys, values, out, scratch[thread]); break;
      case 128: attend<8>(step, task, head, qkv, keys, values, out, scratch[thread]); break;
      default: attend<0>(step, task, head, qkv, keys, values, out, scratch[thread]);
    }
  });
}
