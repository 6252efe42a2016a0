// A linear operation in bfloat16 (brief.h), shared among the threads.
//
// A task is 32 rows of the products: of one weight, or 16 of each of the two that SwiGLU takes. What surrounds a product
// is done when it leaves the unit, while its rows are vectors of 16 tokens; then it is turned and stored.
#pragma once

#include <algorithm>

#include "brief.h"
#include "elementwise.h"
#include "linear_call.h"

#if HAS_TILES

INLINE bool is_brief(const Context& context, const LinearCall& call) {
  return context.units & kBfloat16 && call.num_tokens > kExactTokens && call.num_cols() % 32 == 0;
}

// Activations, normed if the call says so, as tiles[groups of 16 tokens][num_blocks].
inline const uint8_t* prepare_brief(Context& context, const LinearCall& call) {
  const int64_t cols = call.num_cols(), num_blocks = cols / 32, groups = (call.num_tokens + 15) / 16;
  uint8_t* tiles = reinterpret_cast<uint8_t*>(context.brief.get(groups * num_blocks * kTileSize / 4));
  auto group = [&](int64_t g, int thread) {
    const int64_t count = std::min<int64_t>(16, call.num_tokens - 16 * g);
    const float* x = call.x + 16 * g * call.x_stride;
    int64_t stride = call.x_stride;
    if (call.norm_weight) {
      float* normed = context.sums[thread].get(16 * cols);
      for (int64_t t = 0; t < count; ++t) rms_norm(x + t * stride, call.norm_weight, call.eps, cols, normed + t * cols);
      x = normed;
      stride = cols;
    }
    store_brief(x, stride, count, num_blocks, tiles + g * num_blocks * kTileSize);
  };
  context.pool.run(groups, group);
  return tiles;
}

// Rows of a product, of vectors of 16 tokens.
struct BriefRows {
  V rows[16];

  // Those of `w` from `first` on, from one of the tiles of sums.
  template <int kTile>
  INLINE void take(const Weight& w, int64_t first, int64_t end) {
    alignas(64) float product[256];
    store_tile<kTile>(product, 64);
    for (int r = 0; r < 16; ++r) rows[r] = load(product + 16 * r);
    if (w.layout == kInt8PerChannel)
      for (int r = 0; r < 16; ++r) rows[r] = rows[r] * splat(w.scale[std::min(first + r, end - 1)]);
    if (w.bias)
      for (int r = 0; r < 16; ++r) rows[r] = rows[r] + splat(w.bias[std::min(first + r, end - 1)]);
  }

  // out[t * stride + r] (+ residual), of up to 16 rows and tokens.
  INLINE void store_turned(int64_t num_rows, int64_t num_tokens, const float* residual, float* out, int64_t stride) {
    __m512i turned[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) turned[r] = (__m512i)rows[r].v;
    transpose_words(turned);
    const __mmask16 mask = static_cast<__mmask16>((1u << num_rows) - 1);
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
      if (t >= num_tokens) break;
      __m512 values = (__m512)turned[t];
      if (residual) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, residual + t * stride));
      _mm512_mask_storeu_ps(out + t * stride, mask, values);
    }
  }
};

INLINE V silu_times(V gate, V up) { return gate / (splat(1.0f) + exponential(zero() - gate)) * up; }

// Of one weight: rows first … end − 1, up to 32, at `column` of the output; or of both, 16, if the call is SwiGLU.
struct BriefTask {
  int64_t weight, first, end, column;
};

// One pair of groups of tokens, the first of which is `token`, whose sums are in the tiles.
template <bool kTwoTokens>
inline void finish_brief(const LinearCall& call, const BriefTask& task, int64_t token, int64_t stride) {
  const Weight& w = call.weights[task.weight];
  auto store = [&](BriefRows& rows, int64_t row, int64_t t) {
    const int64_t at = t * stride + task.column + row, num_rows = std::min<int64_t>(16, task.end - task.first - row);
    rows.store_turned(num_rows, std::min<int64_t>(16, call.num_tokens - t), call.residual ? call.residual + at : nullptr,
                      call.out + at, stride);
  };
  BriefRows first, second;
  auto finish = [&](int64_t t) {
    if (!call.swiglu) {
      store(first, 0, t);
      if (task.end - task.first > 16) store(second, 16, t);
      return;
    }
    for (int r = 0; r < 16; ++r) first.rows[r] = silu_times(first.rows[r], second.rows[r]);
    store(first, 0, t);
  };
  const Weight& other = call.swiglu ? call.weights[1] : w;
  const int64_t from = call.swiglu ? task.first : task.first + 16;
  first.take<0>(w, task.first, task.end);
  second.take<1>(other, from, task.end);
  finish(token);
  if (!kTwoTokens) return;
  first.take<2>(w, task.first, task.end);
  second.take<3>(other, from, task.end);
  finish(token + 16);
}

inline void run_brief_task(const LinearCall& call, const BriefTask& task, const uint8_t* x, int64_t token, int64_t end,
                           int64_t stride, Scratch& scratch) {
  const int64_t num_blocks = call.num_cols() / 32, size = num_blocks * kTileSize;  // of a group
  uint8_t* tiles = reinterpret_cast<uint8_t*>(scratch.get(2 * size / 4));
  fill_brief(call.weights[task.weight], task.first, task.end, tiles);
  if (call.swiglu) fill_brief(call.weights[1], task.first, task.end, tiles + size);
  else if (task.end - task.first > 16) fill_brief(call.weights[task.weight], task.first + 16, task.end, tiles + size);
  const TileShapes shapes({});
  for (; token < end; token += 32) {
    const uint8_t* of = x + token / 16 * size;
    for (int64_t t = token; t < std::min(token + 32, end); ++t) {
      const float* to = call.out + t * stride + task.column;
      __builtin_prefetch(to, 1, 3);
      if (!call.swiglu) __builtin_prefetch(to + 16, 1, 3);
    }
    if (end - token > 16) {
      brief_product<true>(of, tiles, num_blocks);
      finish_brief<true>(call, task, token, stride);
    } else {
      brief_product<false>(of, tiles, num_blocks);
      finish_brief<false>(call, task, token, stride);
    }
  }
}

// Tokens multiplied by rows that were rounded once: they stay in the L2 cache.
inline int64_t brief_token_block(int64_t num_cols) { return num_cols <= 1024 ? 512 : 256; }

inline void run_brief(Context& context, const LinearCall& call) {
  const int64_t num_columns = call.swiglu ? 1 : call.num_weights, rows = call.swiglu ? 16 : 32;
  std::vector<BriefTask> tasks;
  int64_t column = 0;
  for (int64_t i = 0; i < num_columns; ++i) {
    const int64_t num_rows = call.weights[i].num_rows;
    for (int64_t first = 0; first < num_rows; first += rows)
      tasks.push_back({i, first, std::min(first + rows, num_rows), column + first});
    column += num_rows;
  }
  const uint8_t* x = prepare_brief(context, call);
  const int64_t at_once = brief_token_block(call.num_cols()), blocks = (call.num_tokens + at_once - 1) / at_once;
  context.pool.run(tasks.size() * blocks, [&](uint32_t i, int thread) {
    const int64_t token = i / tasks.size() * at_once;
    run_brief_task(call, tasks[i % tasks.size()], x, token, std::min(token + at_once, call.num_tokens), column,
                   context.tiles[thread]);
  });
}
#endif
