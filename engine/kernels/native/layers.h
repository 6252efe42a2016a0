// All layers of a decoder in one call: what engine/models/decoder.py writes down as operations, in that order.
#pragma once

#include "attention.h"
#include "linear.h"

struct LinearPart {  // of a LinearCall, what stays the same from step to step
  const Weight* weights;
  int64_t num_weights;
  const float* norm_weight;
  float eps;
  int32_t swiglu;

  int64_t num_rows() const { return num_out_rows(weights, num_weights, swiglu); }
};

struct DecoderLayer {
  LinearPart qkv, o, gated, down;
  void *keys, *values;
};

struct LayerScratch {
  Scratch qkv, mixed, inner;
};

inline LinearCall call_of(const LinearPart& part, int64_t num_tokens, const float* x, const float* residual, float* out) {
  return {part.weights, part.num_weights, x, part.weights[0].num_cols, num_tokens, part.norm_weight, part.eps,
          part.swiglu, residual, out};
}

// What is between the two is rounded once, where both are in bfloat16, and never leaves AMX's order.
inline void run_feed_forward(Context& context, LinearCall gated, LinearCall down, Scratch& inner) {
  const int64_t num_tokens = gated.num_tokens;
#if HAS_BRIEF
  if (is_brief(context, gated) && is_brief(context, down)) {
    const int64_t num_tiles = (num_tokens + 15) / 16 * (down.num_cols() / 32);
    gated.out_tiles = down.x_tiles = reinterpret_cast<uint8_t*>(inner.get(num_tiles * kTileSize / 4));
    run_brief(context, gated);
    return run_brief(context, down);
  }
#endif
  gated.out = inner.get(num_tokens * down.num_cols());
  down.x = gated.out;
  run_linear(context, gated);
  run_linear(context, down);
}

// hidden: [num_tokens, hidden_size], overwritten with the last layer's.
inline void run_layers(Context& context, const DecoderLayer* layers, int64_t num_layers, const AttentionStep& step,
                       float* hidden, LayerScratch& scratch, std::vector<AttentionScratch>& attention) {
  const int64_t n = step.num_tokens;
  for (const DecoderLayer* layer = layers; layer < layers + num_layers; ++layer) {
    float* qkv = scratch.qkv.get(n * layer->qkv.num_rows());
    float* mixed = scratch.mixed.get(n * step.num_heads * step.head_dim);
    run_linear(context, call_of(layer->qkv, n, hidden, nullptr, qkv));
    run_attention(context, step, qkv, layer->keys, layer->values, mixed, attention);
    run_linear(context, call_of(layer->o, n, mixed, hidden, hidden));
    run_feed_forward(context, call_of(layer->gated, n, hidden, nullptr, nullptr),
                     call_of(layer->down, n, nullptr, hidden, hidden), scratch.inner);
  }
}
