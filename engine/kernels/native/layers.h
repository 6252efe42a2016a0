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

inline void run_part(Context& context, const LinearPart& part, int64_t num_tokens, const float* x, const float* residual,
                     float* out) {
  run_linear(context, {part.weights, part.num_weights, x, part.weights[0].num_cols, num_tokens, part.norm_weight,
                       part.eps, part.swiglu, residual, out});
}

// hidden: [num_tokens, hidden_size], overwritten with the last layer's.
inline void run_layers(Context& context, const DecoderLayer* layers, int64_t num_layers, const AttentionStep& step,
                       float* hidden, LayerScratch& scratch, std::vector<AttentionScratch>& attention) {
  const int64_t n = step.num_tokens;
  for (const DecoderLayer* layer = layers; layer < layers + num_layers; ++layer) {
    float* qkv = scratch.qkv.get(n * layer->qkv.num_rows());
    float* mixed = scratch.mixed.get(n * step.num_heads * step.head_dim);
    float* inner = scratch.inner.get(n * layer->gated.num_rows());
    run_part(context, layer->qkv, n, hidden, nullptr, qkv);
    run_attention(context, step, qkv, layer->keys, layer->values, mixed, attention);
    run_part(context, layer->o, n, mixed, hidden, hidden);
    run_part(context, layer->gated, n, hidden, nullptr, inner);
    run_part(context, layer->down, n, inner, hidden, hidden);
  }
}
