// One token from each row of logits; engine/core/sampler.py is the specification of what is drawn, noise.py of the
// noise.
//
// Greedy rows: the first largest. Others: the largest of x + noise, x = (logit − largest) / temperature, over what
// min-p, top-k and top-p leave. Two logarithms for each token of a vocabulary would be most of the work, so the noise
// is bounded first: −log(−log(1 − u)) ≤ −log u, and log₂ u is not below what its bits say. Only a token whose bound
// reaches the best one so far is computed, a few in each row.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"

struct SamplingCall {
  const float* logits;  // [num_rows, num_tokens]
  int64_t stride, num_rows, num_tokens;
  const float *temperature, *log_min_p, *top_p;  // [num_rows]; 0 = greedy, −∞ = off, 1 = off
  const int64_t *top_k, *seeds, *positions;      // [num_rows]; 0 = off
  const int32_t* token_hashes;                   // [num_tokens]
  float* largest;                                // [num_rows]; NaN if one of the row's logits is
  int64_t* tokens;                               // [num_rows]
};

typedef uint32_t Words __attribute__((vector_size(64)));

INLINE uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

template <class T>
INLINE T fmix32(T h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

constexpr float kMinUniform = 4.66e-10f, kMaxUniform = 1.0f - 5.9604644775390625e-8f, kUniformStep = 4.656612873077393e-10f;

struct Noise {
  uint32_t low, high;
  explicit Noise(int64_t seed, int64_t position) {
    const uint64_t key = splitmix64(splitmix64(seed) + position);
    low = static_cast<uint32_t>(key);
    high = key >> 32;
  }
  template <class T>
  INLINE T bits(T token_hash) const {
    return fmix32<T>(fmix32<T>(token_hash ^ low) + high) & 0x7FFFFFFFu;
  }
  float of(uint32_t token_hash) const {
    const float h = static_cast<float>(static_cast<int32_t>(bits<uint32_t>(token_hash)));
    const double u = std::min(std::max(h * kUniformStep, kMinUniform), kMaxUniform);
    const float exponential = -static_cast<float>(std::log1p(-u));
    return -static_cast<float>(std::log(static_cast<double>(exponential)));
  }
  // Not below the noise of 16 tokens.
  INLINE V bound(const int32_t* token_hashes) const {
    typedef int32_t Ints __attribute__((vector_size(64)));
    typedef float Floats __attribute__((vector_size(64)));
    const Floats h = __builtin_convertvector((Ints)bits<Words>(read<Words>(token_hashes)), Floats);
    const V u = max(V{load(reinterpret_cast<const float*>(&h))} * splat(kUniformStep), splat(kMinUniform));
    Ints exponent_and_mantissa;
    store(reinterpret_cast<float*>(&exponent_and_mantissa), u);
    const Floats steps = __builtin_convertvector(exponent_and_mantissa, Floats);  // 2²³ to an octave
    return fma(load(reinterpret_cast<const float*>(&steps)), splat(-0.6931472f / 8388608.0f), splat(127 * 0.6931472f));
  }
};

// A row that can be read in whole vectors: its last ones are copied, with −∞ behind them.
struct LogitRow {
  const float* data;
  int64_t size;
  float tail[16];
  LogitRow(const float* row, int64_t count) : data(row), size(count) {
    std::fill(tail, tail + 16, -INFINITY);
    std::copy(row + count / 16 * 16, row + count, tail);
  }
  INLINE V at(int64_t i) const { return load(i + 16 <= size ? data + i : tail); }
};

// The first largest; NaN, and its token 0, if there is a NaN.
inline float largest_logit(const LogitRow& row, int64_t& token) {
  V top = splat(-INFINITY);
  uint32_t numbers = 0xFFFF;
  for (int64_t i = 0; i < row.size; i += 16) {
    const V x = row.at(i);
    numbers &= not_below(x, -INFINITY);
    top = max(top, x);
  }
  float lanes[16];
  store(lanes, top);
  const float largest = *std::max_element(lanes, lanes + 16);
  token = 0;
  if (numbers != 0xFFFF) return NAN;
  for (int64_t i = 0; i < row.size; i += 16)
    if (const uint32_t bits = not_below(row.at(i), largest)) {
      token = i + __builtin_ctz(bits);
      break;
    }
  return largest;
}

struct Weighted {
  float x, mass;
};

// The x of the last of the heaviest entries that are needed to reach `target`, at least one.
inline float nucleus_floor(std::vector<Weighted>& entries, double target) {
  double before = 0;
  auto begin = entries.begin(), end = entries.end();
  while (end - begin > 64) {
    float a = begin->x, b = begin[(end - begin) / 2].x, c = end[-1].x;
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    auto middle = std::partition(begin, end, [&](const Weighted& e) { return e.x > pivot; });
    if (middle == begin) middle = std::partition(begin, end, [&](const Weighted& e) { return e.x >= pivot; });
    if (middle == end) return pivot;  // all the rest are equal
    double mass = 0;
    for (auto at = begin; at != middle; ++at) mass += at->mass;
    if (before + mass >= target) {
      end = middle;
    } else {
      before += mass;
      begin = middle;
    }
  }
  std::sort(begin, end, [](const Weighted& a, const Weighted& b) { return a.x > b.x; });
  float floor = begin->x;
  for (; begin != end && before < target; ++begin) {
    floor = begin->x;
    before += begin->mass;
  }
  return floor;
}

struct SamplingScratch {
  std::vector<float> kept;
  std::vector<Weighted> entries;
};

// The smallest x that min-p, top-k and top-p leave. x: a function of a position, 16 lanes.
template <class Scaled>
inline float truncation_floor(const Scaled& x, int64_t size, float log_min_p, int64_t top_k, float top_p,
                              SamplingScratch& scratch) {
  const bool has_top_k = top_k > 0 && top_k < size;
  if (!has_top_k && top_p >= 1) return log_min_p;
  double total = 0;
  if (!has_top_k) {
    for (int64_t begin = 0; begin < size; begin += 1024) {
      V part = zero();
      for (int64_t i = begin; i < std::min(begin + 1024, size); i += 16)
        part = part + zero_below(x(i), log_min_p, exponential(x(i)));
      total += sum(part);
    }
  }
  scratch.kept.resize(size + 32);
  float* const values = scratch.kept.data();
  int64_t count = 0;
  for (const float reach : {4.0f, 10.0f, 24.0f, INFINITY}) {  // most rows are decided among few
    const float bound = std::max(-reach, log_min_p);
    float* end = values;
    for (int64_t i = 0; i < size; i += 16) {
      const V at = x(i);
      const uint32_t bits = not_below(at, bound) & (i + 16 <= size ? 0xFFFF : (1u << (size - i)) - 1);
      if (bits) end = append_lanes(end, at, bits);
    }
    count = end - values;
    if (bound == log_min_p || (has_top_k && count >= top_k)) break;
    double mass = 0;
    for (int64_t i = 0; i < count && !has_top_k; ++i) mass += std::exp(values[i]);
    if (!has_top_k && mass >= top_p * total) break;
  }
  float floor = log_min_p;
  if (has_top_k && top_k <= count) {
    std::nth_element(values, values + top_k - 1, values + count, [](float a, float b) { return a > b; });
    floor = values[top_k - 1];
  }
  if (top_p >= 1) return floor;
  scratch.entries.clear();
  double among = 0;
  for (int64_t i = 0; i < count; ++i)
    if (values[i] >= floor) {
      scratch.entries.push_back({values[i], std::exp(values[i])});
      among += scratch.entries.back().mass;
    }
  return std::max(floor, nucleus_floor(scratch.entries, (has_top_k ? among : total) * top_p));
}

inline void sample_row(const SamplingCall& call, int64_t r, SamplingScratch& scratch) {
  const LogitRow row(call.logits + r * call.stride, call.num_tokens);
  int64_t best_token;
  const float largest = call.largest[r] = largest_logit(row, best_token);
  call.tokens[r] = best_token;
  const float temperature = call.temperature[r];
  if (temperature == 0 || !std::isfinite(largest)) return;
  auto exact = [&](int64_t i) { return (row.at(i) - splat(largest)) / splat(temperature); };
  const float floor = truncation_floor(exact, row.size, call.log_min_p[r], call.top_k[r], call.top_p[r], scratch);
  const Noise noise(call.seeds[r], call.positions[r]);
  float best = noise.of(call.token_hashes[best_token]);
  constexpr float kMargin = 1e-3f;  // of the bounds' rounding
  for (int64_t i = 0; i < row.size; i += 16) {
    int32_t padded[16] = {};
    const int32_t* hashes = call.token_hashes + i;
    if (i + 16 > row.size) hashes = std::copy(hashes, hashes + (row.size - i), padded) - (row.size - i);
    const V bound = fma(row.at(i) - splat(largest), splat(1 / temperature), noise.bound(hashes));
    for (uint32_t bits = not_below(bound, best - kMargin); bits; bits &= bits - 1) {
      const int64_t token = i + __builtin_ctz(bits);
      if (token >= row.size) break;
      const float x = (row.data[token] - largest) / temperature;
      if (x < floor) continue;
      const float value = x + noise.of(call.token_hashes[token]);
      if (value > best || (value == best && token < best_token)) {
        best = value;
        best_token = token;
      }
    }
  }
  call.tokens[r] = best_token;
}

inline void run_sampling(Pool& pool, const SamplingCall& call, std::vector<SamplingScratch>& scratch) {
  pool.run(call.num_rows, [&](uint32_t row, int thread) { sample_row(call, row, scratch[thread]); });
}
