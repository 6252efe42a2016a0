// Causal grouped-query attention over the paged KV cache, read in place; engine/kernels/attention.py is the
// specification and explains blocks and slots.
//
// A task is one key-value head of up to kQueryTile neighbouring tokens of one sequence (one token when decoding).
// Scores of a query over all positions are kept, so the softmax is the plain one: maximum, exponentials, sum. Every
// query's arithmetic is the same whatever shares its task, so a token gets the same bits decoded or prefilled.
// Positions at or beyond a sequence's length are never read.
#pragma once

#include <algorithm>

#include "linear.h"

constexpr int64_t kQueryTile = 8;
constexpr int64_t kPositionsAhead = 32;           // how far ahead of their use keys and values are asked for
constexpr int64_t kPrefetchedFloats = 128 << 10;  // values asked for while scores are computed; more leave the cache

struct AttentionStep {  // what all layers of one step share
  const float *cos, *sin;  // [num_tokens, head_dim / 2]
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const int64_t* slot_mapping;
  int64_t table_stride, num_requests, num_tokens;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
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
  const float* key = row + step.num_heads * d;
  std::memcpy(keys + slot * kv_size, key, kv_size * sizeof(float));
  std::memcpy(values + slot * kv_size, key + kv_size, kv_size * sizeof(float));
}

// out[j] = scale · dot(query, key at offsets[j]), j < 16. kChunks · 16 = head_dim, or 0: `chunks` says.
template <int kChunks>
INLINE void sixteen_scores(const float* query, const float* keys, const int64_t* offsets, int64_t chunks, float scale,
                           float* out) {
  const int64_t n = kChunks ? kChunks : chunks;
  for (int j = 0; j < 16; j += 4) {
    V sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = zero();
    for (int64_t c = 0; c < n; ++c) {
      V q = load(query + 16 * c);
      for (int i = 0; i < 4; ++i) sums[i] = fma(q, load(keys + offsets[j + i] + 16 * c), sums[i]);
    }
    sum4(sums[0], sums[1], sums[2], sums[3], out + j);
  }
  store(out, load(out) * splat(scale));
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

// out row = Σ over positions of weight · value, for kRows rows of weights.
template <int kChunks, int kRows>
INLINE void weighted_values(const float* weights, int64_t stride, const float* values, const int64_t* offsets,
                            int64_t limit, bool prefetches, const float* inverse_sums, float* const* out) {
  V sums[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) sums[r][c] = zero();
  for (int64_t p = 0; p < limit; ++p) {
    const float* value = values + offsets[p];
    if (prefetches && p + kPositionsAhead < limit)
      for (int c = 0; c < kChunks; ++c) __builtin_prefetch(values + offsets[p + kPositionsAhead] + 16 * c, 0, 2);
    V w[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = splat(weights[r * stride + p]);
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; ++c) {
      V v = load(value + 16 * c);
      for (int r = 0; r < kRows; ++r) sums[r][c] = fma(w[r], v, sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) store(out[r] + 16 * c, sums[r][c] * splat(inverse_sums[r]));
}

// Rows of weights in passes of four, over `kChunks` vectors of each value at a time.
template <int kChunks>
INLINE void all_weighted_values(int64_t rows, const float* weights, int64_t stride, const float* values,
                                const int64_t* offsets, int64_t limit, bool prefetches, const float* inverse_sums,
                                float* const* out) {
  for (int64_t r = 0; r < rows; r += 4) {
    const float* w = weights + r * stride;
    const bool ahead = prefetches && r == 0;
    switch (std::min<int64_t>(4, rows - r)) {
      case 1: weighted_values<kChunks, 1>(w, stride, values, offsets, limit, ahead, inverse_sums + r, out + r); break;
      case 2: weighted_values<kChunks, 2>(w, stride, values, offsets, limit, ahead, inverse_sums + r, out + r); break;
      case 3: weighted_values<kChunks, 3>(w, stride, values, offsets, limit, ahead, inverse_sums + r, out + r); break;
      case 4: weighted_values<kChunks, 4>(w, stride, values, offsets, limit, ahead, inverse_sums + r, out + r); break;
    }
  }
}

// Asks for the 16 vectors of positions first … first + 15, as far as there are any.
INLINE void prefetch_rows(const float* rows, const int64_t* offsets, int64_t first, int64_t end, int64_t d) {
  if (first + 16 > end) return;
  for (int j = 0; j < 16; ++j)
    for (int64_t i = 0; i < d; i += 16) __builtin_prefetch(rows + offsets[first + j] + i, 0, 2);
}

struct AttentionScratch {
  Scratch scores;
  std::vector<int64_t> offsets;
  std::vector<float> inverse_sums;
  std::vector<float*> out;
};

// Where the positions of a sequence lie in the caches, up to a multiple of 16: those beyond `longest` repeat its last.
inline const int64_t* position_offsets(const AttentionStep& step, int64_t request, int64_t longest,
                                       AttentionScratch& scratch) {
  const int64_t end = round_up(longest, 16), slot_size = step.num_kv_heads * step.head_dim;
  scratch.offsets.resize(end);
  int64_t* offsets = scratch.offsets.data();
  const int32_t* block = step.block_table + request * step.table_stride;
  for (int64_t p = 0; p < longest; ++block)
    for (int64_t i = 0; i < step.block_size && p < longest; ++i)
      offsets[p++] = (*block * step.block_size + i) * slot_size;
  std::fill(offsets + longest, offsets + end, offsets[longest - 1]);  // something that may be read
  return offsets;
}

template <int kChunks>
inline void attend(const AttentionStep& step, const AttentionTask& task, int64_t kv_head, const float* qkv,
                   const float* keys, const float* values, float* out, AttentionScratch& scratch) {
  const int64_t d = step.head_dim, group = step.num_heads / step.num_kv_heads, rows = task.count * group;
  const int64_t longest = task.limit + task.count - 1, stride = round_up(longest, 16);
  float* scores = scratch.scores.get(rows * stride);
  const int64_t* offsets = position_offsets(step, task.request, longest, scratch);
  scratch.inverse_sums.resize(rows);
  scratch.out.resize(rows);
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  const int64_t token_stride = (step.num_heads + 2 * step.num_kv_heads) * d;
  const float* queries = qkv + task.token * token_stride + kv_head * group * d;
  keys += kv_head * d;
  values += kv_head * d;
  const bool values_fit = longest * d <= kPrefetchedFloats;
  for (int64_t p = 0; p < longest; p += 16) {
    prefetch_rows(keys, offsets, p + kPositionsAhead, stride, d);  // blocks lie anywhere: hardware cannot guess
    if (values_fit) prefetch_rows(values, offsets, p, stride, d);
    for (int64_t r = 0; r < rows; ++r)
      if (p < task.limit + r / group)
        sixteen_scores<kChunks>(queries + r / group * token_stride + r % group * d, keys, offsets + p, d / 16, scale,
                                scores + r * stride + p);
  }
  for (int64_t r = 0; r < rows; ++r) {
    scratch.inverse_sums[r] = softmax(scores + r * stride, task.limit + r / group, stride);
    scratch.out[r] = out + ((task.token + r / group) * step.num_heads + kv_head * group + r % group) * d;
  }
  constexpr int kPass = kChunks == 0 ? 1 : kChunks > 4 ? 4 : kChunks;  // four rows of four vectors fit the registers
  for (int64_t c = 0; c < d / 16; c += kPass) {
    all_weighted_values<kPass>(rows, scores, stride, values + 16 * c, offsets, longest, !values_fit,
                               scratch.inverse_sums.data(), scratch.out.data());
    for (float*& row : scratch.out) row += 16 * kPass;
  }
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

// qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim], rotated in place; caches: [slots, num_kv_heads,
// head_dim]; out: [num_tokens, num_heads, head_dim]. head_dim: a multiple of 16.
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
