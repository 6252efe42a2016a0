// A linear operation (linear_call.h), shared among the threads.
#pragma once

#include <algorithm>
#include <memory>

#include "brief_linear.h"
#include "elementwise.h"
#include "products.h"

// Planes that the call's weights want, and whether one of them wants floats: then in what order.
inline void choose_forms(Context& context, const LinearCall& call, Activations& x, bool* wants_floats) {
#if HAS_INTEGERS
  x.use_tiles = context.units & kTiles && call.num_tokens > kVnniTokens;
#endif
  for (int64_t i = 0; i < call.num_weights; ++i) {
    const Weight& w = call.weights[i];
    const bool interleaved = is_interleaved(w.layout);
#if HAS_INTEGERS
    if (context.units & kIntegers && has_integers(w)) {
      const PlaneKind kind = plane_kind(w, x.use_tiles);
      Planes& planes = x.planes[interleaved][kind];
      if (!planes.rows) planes = context.planes[interleaved][kind].get(w.num_cols / 32, call.num_tokens, kind);
      continue;
    }
#endif
    wants_floats[interleaved] = true;
  }
}

// Activations as the kernels read them. Copies only for a norm, for an interleaved layout, and for ragged columns.
inline Activations prepare(Context& context, const LinearCall& call) {
  const int64_t cols = call.weights[0].num_cols, padded = round_up(cols, 16);
  Activations x{call.x, nullptr, call.x_stride};
  bool wants_floats[2] = {};
  choose_forms(context, call, x, wants_floats);
  const bool copies = call.norm_weight || cols % 16;
  bool wants_interleaved = wants_floats[1], wants_planes = false;
#if HAS_INTEGERS
  for (int kind = 0; kind < kPlaneKinds; ++kind) {
    wants_interleaved |= x.planes[1][kind].rows != nullptr;
    wants_planes |= x.planes[0][kind].rows || x.planes[1][kind].rows;
  }
#endif
  if (!copies && !wants_interleaved && !wants_planes) return x;
  float* normed = copies ? context.normed.get(call.num_tokens * padded) : nullptr;
  float* interleaved = wants_interleaved ? context.interleaved.get(call.num_tokens * padded) : nullptr;
  auto one = [&](int64_t t) {
    const float* row = call.x + t * call.x_stride;
    if (copies) {
      float* to = normed + t * padded;
      if (call.norm_weight) rms_norm(row, call.norm_weight, call.eps, cols, to);
      else std::memcpy(to, row, cols * sizeof(float));
      std::fill(to + cols, to + padded, 0.0f);
      row = to;
    }
    if (wants_interleaved) interleave(row, cols, interleaved + t * padded);
#if HAS_INTEGERS
    for (int order = 0; order < 2; ++order)
      for (const Planes& planes : x.planes[order])
        if (planes.rows) store_row_planes(planes, t, order ? interleaved + t * padded : row, cols);
#endif
  };
  if (call.num_tokens <= 8) {  // less work than waking a thread
    for (int64_t t = 0; t < call.num_tokens; ++t) one(t);
  } else {
    const int64_t piece = 16;
    context.pool.run((call.num_tokens + piece - 1) / piece, [&](uint32_t i, int) {
      for (int64_t t = i * piece; t < std::min(call.num_tokens, (i + 1) * piece); ++t) one(t);
    });
  }
  if (copies) x.plain = normed;
  x.interleaved = interleaved;
  x.stride = padded;
  return x;
}

// Rows of a task: enough that claiming it costs nothing beside it, few enough that threads end together, and, with
// many tokens, that the tile stays in the cache.
inline int64_t rows_per_task(const Context& context, const LinearCall& call, int64_t total_rows) {
  if (call.num_tokens <= kFewTokens) {
    int64_t share = total_rows / (context.pool.num_threads() * 6);
    return std::clamp<int64_t>(share / 16 * 16, 16, 256);
  }
  int64_t fitting = kTileBytes / (round_up(call.weights[0].num_cols, 16) * 4);
  return std::clamp<int64_t>(fitting / 16 * 16, 16, 64);
}

inline void run_linear(Context& context, const LinearCall& call) {
  if (call.num_tokens == 0) return;
#if HAS_BRIEF
  if (is_brief(context, call)) return run_brief(context, call);
#endif
  int64_t total_rows = 0;
  for (int64_t i = 0; i < call.num_weights; ++i) total_rows += call.weights[i].num_rows;
  const int64_t out_stride = call.out_stride();
  const int64_t rows = rows_per_task(context, call, total_rows);
  const Activations x = prepare(context, call);
  const int64_t num_columns = call.swiglu ? 1 : call.num_weights;  // of the output, one weight (or pair) each
  std::vector<int64_t> first_task(num_columns + 1, 0);
  for (int64_t i = 0; i < num_columns; ++i)
    first_task[i + 1] = first_task[i] + (call.weights[i].num_rows + rows - 1) / rows;
  const int64_t per_block = first_task[num_columns];
  const int64_t at_once = token_block(call.weights[0].num_cols);
  const int64_t blocks = (call.num_tokens + at_once - 1) / at_once;
  context.pool.run(per_block * blocks, [&](uint32_t task, int thread) {
    const int64_t token = task / per_block * at_once, within = task % per_block;
    const int64_t tokens = std::min(at_once, call.num_tokens - token);
    int64_t index = 0, offset = 0;
    while (within >= first_task[index + 1]) offset += call.weights[index++].num_rows;
    const Weight& w = call.weights[index];
    const int64_t first = (within - first_task[index]) * rows, end = std::min(first + rows, w.num_rows);
    float* sums = context.sums[thread].get((1 + call.swiglu) * at_once * rows);
    any_rows_product(w, first, end, x, token, tokens, sums, rows, context.tiles[thread]);
    if (call.swiglu) {
      float* up = sums + at_once * rows;
      any_rows_product(call.weights[1], first, end, x, token, tokens, up, rows, context.tiles[thread]);
      for (int64_t t = 0; t < tokens; ++t) swiglu(sums + t * rows, up + t * rows, end - first);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = (token + t) * out_stride + offset + first;
      const float* from = sums + t * rows;
      if (call.residual)
        for (int64_t i = 0; i < end - first; ++i) call.out[at + i] = call.residual[at + i] + from[i];
      else std::memcpy(call.out + at, from, (end - first) * sizeof(float));
    }
  });
}
