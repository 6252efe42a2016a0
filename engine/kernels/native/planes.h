// Activations as integers, for products whose weights are integers times a block's scale.
//
// A block of 32 activations becomes scale · X with whole X below 2²³, so each is as exact as a float32 beside the
// block's largest. X is kept as planes of int8, which the CPU's integer units multiply and add without rounding:
//
//   kEights  X = 2¹⁶·a + 2⁸·b + c          one row of 32 bytes for each: any weights of 8 bits
//   kPairs   X = 2¹²·(16·a + b) + 16·c + d  two rows of 64 bytes, (a, b) and (c, d), for weights of 4 bits, which are
//            multiplied as 16·q beside q: a third less to take out of the unit again
//
// Both stand for the same X. Blocks below 1e-30 count as zero; one that is not finite has a scale of NaN, so its
// results are.
#pragma once

#include "elementwise.h"
#include "layouts.h"
#include "pool.h"

#if HAS_WIDE && defined(__AVX512BF16__)
#define HAS_BRIEF 1
#else
#define HAS_BRIEF 0
#endif

#if HAS_WIDE && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAS_INTEGERS 1
#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && HAS_BRIEF && defined(__x86_64__)
#define HAS_TILES 1
#endif

constexpr float kLargestPlane = 127.0f * 65536.0f;
enum PlaneKind { kEights, kPairs, kPlaneKinds };
constexpr int64_t kPlaneBytes[] = {96, 128};  // of one block of one token

// The blocks of a group of neighbouring tokens lie together, as they are multiplied at once.
struct Planes {
  int8_t* rows = nullptr;      // [groups][num_blocks][tokens of a group][kPlaneBytes]
  float* scales = nullptr;     // [groups][num_blocks][tokens of a group], and so the others
  float* sums = nullptr;       // of the activations themselves
  int32_t* centres = nullptr;  // four to each, of kEights: −128 · Σ of each plane
  int64_t num_blocks = 0;
  int group_bits = 0;  // log₂ of a group's tokens
  PlaneKind kind = kEights;

  INLINE int64_t at(int64_t block, int64_t token) const {
    const int64_t within = token & ((int64_t{1} << group_bits) - 1);
    return (((token >> group_bits) * num_blocks + block) << group_bits) + within;
  }
};

struct PlaneBuffers {
  Scratch rows, scales, sums, centres;

  Planes get(int64_t num_blocks, int64_t tokens, PlaneKind kind) {
    const int group_bits = tokens <= 4 ? 2 : 4;
    const int64_t count = round_up(tokens, int64_t{1} << group_bits) * num_blocks;
    Planes planes;
    planes.rows = reinterpret_cast<int8_t*>(rows.get(count * kPlaneBytes[kind] / 4));
    planes.scales = scales.get(count);
    planes.sums = sums.get(count);
    if (kind == kEights) planes.centres = reinterpret_cast<int32_t*>(centres.get(count * 4));
    planes.num_blocks = num_blocks;
    planes.group_bits = group_bits;
    planes.kind = kind;
    return planes;
  }
};

// The scale of a block, and its X as int32.
INLINE float to_integers(V low, V high, __m512i* x) {
  const __m512 sizes = _mm512_max_ps(_mm512_abs_ps(low.v), _mm512_abs_ps(high.v));
  const float largest = _mm512_reduce_max_ps(sizes);
  constexpr int kNotFinite = 0x99;  // quiet and signalling NaN, both infinities
  const bool finite = !(_mm512_fpclass_ps_mask(low.v, kNotFinite) | _mm512_fpclass_ps_mask(high.v, kNotFinite));
  const bool counts = finite && largest >= 1e-30f;
  const __m512 inverse = _mm512_set1_ps(counts ? kLargestPlane / largest : 0.0f);
  x[0] = _mm512_cvtps_epi32(_mm512_mul_ps(low.v, inverse));
  x[1] = _mm512_cvtps_epi32(_mm512_mul_ps(high.v, inverse));
  return counts ? largest / kLargestPlane : finite ? 0.0f : NAN;
}

INLINE void store_bytes(int8_t* to, __m512i x) {  // the low byte of each
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}

INLINE __m512i upper(__m512i x, int32_t half, unsigned bits) {  // what is left when the low bits are taken, as signed
  return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(half)), bits);
}

// One block of one token: columns 0 … 15 and 16 … 31.
INLINE void store_planes(const Planes& planes, int64_t block, int64_t token, V low, V high) {
  const int64_t at = planes.at(block, token);
  __m512i x[2];
  planes.scales[at] = to_integers(low, high, x);
  planes.sums[at] = sum(low + high);
  if (planes.kind == kPairs) {
    int8_t* row = planes.rows + at * kPlaneBytes[kPairs];
    const __m512i nibble = _mm512_set1_epi32(15);
    for (int i = 0; i < 2; ++i) {
      const __m512i high12 = upper(x[i], 2048, 12), low12 = _mm512_sub_epi32(x[i], _mm512_slli_epi32(high12, 12));
      store_bytes(row + 16 * i, _mm512_srai_epi32(high12, 4));
      store_bytes(row + 32 + 16 * i, _mm512_and_si512(high12, nibble));
      store_bytes(row + 64 + 16 * i, _mm512_srai_epi32(low12, 4));
      store_bytes(row + 96 + 16 * i, _mm512_and_si512(low12, nibble));
    }
    return;
  }
  int8_t* row = planes.rows + at * kPlaneBytes[kEights];
  for (int i = 0; i < 2; ++i) {
    const __m512i middle = upper(x[i], 128, 8), top = upper(middle, 128, 8);
    store_bytes(row + 16 * i, top);
    store_bytes(row + 32 + 16 * i, middle);
    store_bytes(row + 64 + 16 * i, x[i]);
  }
  for (int plane = 0; plane < 3; ++plane) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 32 * plane));
    const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i quarter = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    planes.centres[at * 4 + plane] = -128 * (_mm_extract_epi32(quarter, 0) + _mm_extract_epi32(quarter, 1));
  }
}

// A token's row of floats, in the order of the weights' columns.
inline void store_row_planes(const Planes& planes, int64_t token, const float* x, int64_t num_cols) {
  for (int64_t block = 0; block < num_cols / 32; ++block)
    store_planes(planes, block, token, load(x + 32 * block), load(x + 32 * block + 16));
}
#else
#define HAS_INTEGERS 0
#endif

#ifndef HAS_TILES
#define HAS_TILES 0
#endif
