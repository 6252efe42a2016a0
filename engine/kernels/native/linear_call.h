// One linear operation of a decoder, and what a session computes it with.
//
//   out = product(norm(x), W₀ … Wₙ₋₁), one weight beside the other        (norm_weight: null = x as it is)
//   out = silu(x · W₀ᵀ) · (x · W₁ᵀ)                                        (swiglu)
//   out = residual + x · W₀ᵀ                                              (residual: null = none; out may be it)
#pragma once

#include <mutex>

#include "amx.h"

// Which units of the CPU a session may use beyond vectors of floats; numbers shared with native/library.py. Results of
// kIntegers differ from those without in their last bits, those of kTiles do not. kBfloat16 rounds to it what more than
// `exact_tokens` tokens are multiplied with, by tiles or else by vectors, for whoever wants speed more than accuracy; rows
// that are no whole blocks of 32 columns stay exact.
enum Units : int32_t { kIntegers = 1, kTiles = 2, kBfloat16 = 4 };

inline int32_t available_units() {
  int32_t units = 0;
#if HAS_INTEGERS
  units |= kIntegers;
#endif
#if HAS_TILES
  if (may_use_tiles()) units |= kTiles;
#endif
#if HAS_BRIEF
  units |= kBfloat16;
#endif
  return units;
}

struct Context {
  Context(int num_threads, int32_t allowed_units)
      : units(allowed_units & available_units()), pool(num_threads), tiles(num_threads), sums(num_threads) {}
  // So many are multiplied exactly whatever the precision: rounding their weights takes longer than it saves.
  int64_t exact_tokens() const { return units & kTiles ? 4 : 8; }

  const int32_t units;
  Pool pool;
  std::vector<Scratch> tiles, sums;  // one per thread
  Scratch normed, interleaved;
#if HAS_INTEGERS
  PlaneBuffers planes[2][kPlaneKinds];
#endif
  Scratch brief;
  std::mutex mutex;  // one call at a time
};

inline int64_t num_out_rows(const Weight* weights, int64_t num_weights, int32_t swiglu) {
  int64_t rows = 0;
  for (int64_t i = 0; i < (swiglu ? 1 : num_weights); ++i) rows += weights[i].num_rows;
  return rows;
}

struct LinearCall {
  const Weight* weights;
  int64_t num_weights;
  const float* x;
  int64_t x_stride, num_tokens;
  const float* norm_weight;
  float eps;
  int32_t swiglu;
  const float* residual;
  float* out;            // contiguous
  int32_t is_exact = 0;  // whatever units there are
  // Between two operations in bfloat16 (brief_linear.h), instead of x and of out.
  uint8_t *x_tiles = nullptr, *out_tiles = nullptr;

  int64_t num_cols() const { return weights[0].num_cols; }
  int64_t out_stride() const { return num_out_rows(weights, num_weights, swiglu); }
};
