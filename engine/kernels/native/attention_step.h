// What all kinds of attention share: a step, its tasks, and how keys and values get into the cache.
//
// Causal grouped-query attention over the paged KV cache, read in place; engine/kernels/attention.py is the
// specification and explains blocks and slots. Within a block of a cache, one key-value head comes after the other, and
// every 16 positions of a head are a tile, of the order that its kernel reads: see float_attention.h and
// brief_attention.h.
//
// A task is one key-value head of a few neighbouring tokens of one sequence (one token when decoding). Scores of a query
// over all positions are kept, so the softmax is the plain one: maximum, exponentials, sum. Every query's arithmetic is
// the same whatever shares its task, so a token gets the same bits decoded or prefilled. What lies beyond a sequence's
// length may be read where it shares a tile, and reaches nothing.
#pragma once

#include <algorithm>

#include "linear_call.h"

constexpr int64_t kTilesAhead = 2;  // how far ahead of their use keys and values are asked for

struct AttentionStep {  // what all layers of one step share
  const float *cos, *sin;  // [num_tokens, head_dim / 2]
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const int64_t* slot_mapping;
  int64_t table_stride, num_requests, num_tokens;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_stride;  // elements from one block of a cache to the next
  int32_t is_brief;      // whether those are bfloat16, not float32

  // Of the 16 positions from `offset` on in a block, for its first head: in both caches.
  INLINE int64_t tile(int64_t block, int64_t offset) const { return block * block_stride + offset * head_dim; }
  INLINE int64_t head_size() const { return block_size * head_dim; }
  INLINE int64_t group() const { return num_heads / num_kv_heads; }
  INLINE int64_t row_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }  // of qkv
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
template <class Kind, class Element = typename Kind::Element>
inline void rotate_and_store(const AttentionStep& step, int64_t token, float* qkv, Element* keys, Element* values) {
  const int64_t d = step.head_dim, half = d / 2;
  float* row = qkv + token * step.row_size();
  for (int64_t head = 0; head < step.num_heads + step.num_kv_heads; ++head)
    rotate(row + head * d, step.cos + token * half, step.sin + token * half, half);
  const int64_t slot = step.slot_mapping[token];
  if (slot < 0) return;
  const int64_t offset = slot % step.block_size, lane = offset % 16;
  const int64_t at = step.tile(slot / step.block_size, offset - lane);
  for (int64_t head = 0; head < step.num_kv_heads; ++head) {
    const float* key = row + (step.num_heads + head) * d;
    const int64_t tile = at + head * step.head_size();
    Kind::store_position(key, key + step.num_kv_heads * d, lane, d, keys + tile, values + tile);
  }
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

// Where the tiles of a sequence's positions lie in the caches, for the first head.
inline void find_tiles(const AttentionStep& step, int64_t request, int64_t longest, std::vector<int64_t>& tiles) {
  const int32_t* block = step.block_table + request * step.table_stride;
  tiles.clear();
  for (int64_t p = 0; p < longest; ++block)
    for (int64_t offset = 0; offset < step.block_size && p < longest; offset += 16, p += 16)
      tiles.push_back(step.tile(*block, offset));
}

inline std::vector<AttentionTask> attention_tasks(const AttentionStep& step, int64_t tile) {
  std::vector<AttentionTask> tasks;
  for (int64_t r = 0; r < step.num_requests; ++r) {
    const int64_t start = step.query_start_loc[r], count = step.query_start_loc[r + 1] - start;
    const int64_t computed = step.seq_lens[r] - count;
    for (int64_t t = 0; t < count; t += tile)
      tasks.push_back({r, start + t, std::min(tile, count - t), computed + t + 1});
  }
  return tasks;
}
