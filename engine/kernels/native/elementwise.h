// What a decoder does to single tokens between its products: norm, SwiGLU, and the order that a layout wants.
#pragma once

#include <cmath>

#include "simd.h"

// out = x / sqrt(mean(x²) + eps) · weight, as engine/kernels/norm.py says.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  V squares = zero();
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) squares = fma(load(x + i), load(x + i), squares);
  if (i < size) {
    V rest = load_partial(x + i, size - i);
    squares = fma(rest, rest, squares);
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
  for (i = 0; i + 16 <= size; i += 16) store(out + i, load(weight + i) * (load(x + i) * splat(scale)));
  for (; i < size; ++i) out[i] = weight[i] * (x[i] * scale);
}

INLINE V silu_times(V gate, V up) { return gate / (splat(1.0f) + exponential(zero() - gate)) * up; }

// gate = silu(gate) · up. Both have room for a multiple of 16.
inline void swiglu(float* gate, const float* up, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) store(gate + i, silu_times(load(gate + i), load(up + i)));
}

// Even columns of each 32, then odd ones. size: a multiple of 32.
inline void interleave(const float* x, int64_t size, float* out) {
  for (int64_t block = 0; block < size; block += 32)
    for (int i = 0; i < 16; ++i) {
      out[block + i] = x[block + 2 * i];
      out[block + 16 + i] = x[block + 2 * i + 1];
    }
}
