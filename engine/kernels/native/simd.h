// A vector of 16 floats, the one width that all kernels are written in: one AVX-512 register, or two halves of
// eight that the compiler maps to AVX2 (or to whatever the machine has).
//
// Invariant: every reduction adds lanes in one order (i and i+8, i and i+4, i and i+2, i and i+1) and every product
// is a fused multiply-add, so on one machine results are the same bits whatever kernel, batch or number of threads
// computed them. (Products in bfloat16, brief_linear.h, are exempt: those of a few tokens are not rounded.)
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 0) {  // zero or subnormal: mantissa · 2⁻²⁴
    float value = mantissa * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | ((exponent == 31 ? 255u : exponent + 112) << 23) | (mantissa << 13);
  }
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
#endif
}

template <class T>
INLINE T read(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

INLINE float half_at(const uint8_t* at) { return half_to_float(read<uint16_t>(at)); }

typedef uint8_t Bytes __attribute__((vector_size(16)));  // 16 small integers, before they are widened
typedef uint16_t Shorts __attribute__((vector_size(16)));

INLINE Bytes load_bytes(const uint8_t* p) { return read<Bytes>(p); }
INLINE Bytes low_nibbles(Bytes b) { return b & 15; }
INLINE Bytes high_nibbles(Bytes b) { return (Bytes)((Shorts)b >> 4) & 15; }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define HAS_WIDE 1

struct V {
  __m512 v;
};

INLINE V zero() { return {_mm512_setzero_ps()}; }
INLINE V splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
INLINE V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE V zero_below(V x, float bound, V y) {  // x < bound ? 0 : y
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_NLT_UQ), y.v)};
}
INLINE V power_of_two(V n) {  // 2ⁿ of whole n in −126 … 127
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
INLINE V from_u8(Bytes b) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)b))}; }
INLINE V from_i8(Bytes b) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b))}; }
INLINE V from_bfloat16(const uint16_t* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
INLINE V from_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// The 16 values scale·q + minimum, and a lookup of 16 of them: cheaper than converting 4-bit integers one by one.
INLINE V nibble_table(V scale, V minimum) {
  const __m512 q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_fmadd_ps(q, scale.v, minimum.v)};
}
INLINE void lookup_nibbles(V table, Bytes b, V& low, V& high) {
  __m512i q = _mm512_cvtepu8_epi32((__m128i)b);  // vpermps reads the low four bits of an index only
  low = {_mm512_permutexvar_ps(q, table.v)};
  high = {_mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), table.v)};
}
// Two float16 at p, each in all lanes.
INLINE void splat_halves(const uint8_t* p, V& first, V& second) {
  __m512 both = _mm512_cvtph_ps(_mm256_set1_epi32(read<int32_t>(p)));
  first = {_mm512_moveldup_ps(both)};
  second = {_mm512_movehdup_ps(both)};
}
// A bit for each lane that is at least `bound`; never for a NaN.
INLINE uint32_t not_below(V a, float bound) { return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(bound), _CMP_GE_OQ); }
// Appends the lanes whose bit is set; room for 16. Returns the new end.
INLINE float* append_lanes(float* end, V a, uint32_t bits) {
  _mm512_storeu_ps(end, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), a.v));
  return end + __builtin_popcount(bits);
}
INLINE V fold_halves(V a, V b) {  // [a.lo + a.hi, b.lo + b.hi]
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE))};
}
INLINE V fold_quarters(V a, V b) {  // quarters a0+a1, a2+a3, b0+b1, b2+b3
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xDD))};
}
// Sums of the lanes of four vectors.
INLINE void sum4(V a, V b, V c, V d, float* out) {
  __m512 u = fold_quarters(fold_halves(a, b), fold_halves(c, d)).v;
  u = _mm512_add_ps(u, _mm512_permute_ps(u, 0x4E));
  u = _mm512_add_ps(u, _mm512_permute_ps(u, 0xB1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, u)));
}
#else
#define HAS_WIDE 0

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef uint8_t U8x8 __attribute__((vector_size(8)));
typedef int8_t S8x8 __attribute__((vector_size(8)));

struct V {
  F8 lo, hi;
};

INLINE F8 splat8(float x) { return F8{x, x, x, x, x, x, x, x}; }
INLINE V zero() { return {F8{}, F8{}}; }
INLINE V splat(float x) { return {splat8(x), splat8(x)}; }
INLINE V load(const float* p) { return {read<F8>(p), read<F8>(p + 8)}; }
INLINE void store(float* p, V a) {
  std::memcpy(p, &a.lo, 32);
  std::memcpy(p + 8, &a.hi, 32);
}
INLINE V operator+(V a, V b) { return {a.lo + b.lo, a.hi + b.hi}; }
INLINE V operator-(V a, V b) { return {a.lo - b.lo, a.hi - b.hi}; }
INLINE V operator*(V a, V b) { return {a.lo * b.lo, a.hi * b.hi}; }
INLINE V operator/(V a, V b) { return {a.lo / b.lo, a.hi / b.hi}; }
#if defined(__FMA__)
INLINE V fma(V a, V b, V c) {
  return {(F8)_mm256_fmadd_ps((__m256)a.lo, (__m256)b.lo, (__m256)c.lo),
          (F8)_mm256_fmadd_ps((__m256)a.hi, (__m256)b.hi, (__m256)c.hi)};
}
#else
INLINE V fma(V a, V b, V c) { return {a.lo * b.lo + c.lo, a.hi * b.hi + c.hi}; }
#endif
INLINE F8 select8(I8 mask, F8 a, F8 b) { return (F8)((mask & (I8)a) | (~mask & (I8)b)); }
INLINE V max(V a, V b) { return {select8(a.lo > b.lo, a.lo, b.lo), select8(a.hi > b.hi, a.hi, b.hi)}; }
INLINE V min(V a, V b) { return {select8(a.lo < b.lo, a.lo, b.lo), select8(a.hi < b.hi, a.hi, b.hi)}; }
INLINE V zero_below(V x, float bound, V y) {
  return {select8(x.lo < splat8(bound), F8{}, y.lo), select8(x.hi < splat8(bound), F8{}, y.hi)};
}
INLINE F8 power_of_two8(F8 n) { return (F8)((__builtin_convertvector(n, I8) + 127) << 23); }
INLINE V power_of_two(V n) { return {power_of_two8(n.lo), power_of_two8(n.hi)}; }
#if defined(__AVX2__)
INLINE V from_u8(Bytes b) {
  __m128i x = (__m128i)b;
  return {(F8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
          (F8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x)))};
}
INLINE V from_i8(Bytes b) {
  __m128i x = (__m128i)b;
  return {(F8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
          (F8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)))};
}
INLINE F8 widen_bfloat16(const uint16_t* p) {
  __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (F8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
}
INLINE V from_bfloat16(const uint16_t* p) { return {widen_bfloat16(p), widen_bfloat16(p + 8)}; }
#else
template <class Narrow>
INLINE V widen_bytes(Bytes b) {
  Narrow halves[2];
  std::memcpy(halves, &b, 16);
  return {__builtin_convertvector(halves[0], F8), __builtin_convertvector(halves[1], F8)};
}
INLINE V from_u8(Bytes b) { return widen_bytes<U8x8>(b); }
INLINE V from_i8(Bytes b) { return widen_bytes<S8x8>(b); }
INLINE V from_bfloat16(const uint16_t* p) {
  float wide[16];
  for (int i = 0; i < 16; ++i) {
    uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    std::memcpy(wide + i, &bits, 4);
  }
  return load(wide);
}
#endif
INLINE V from_half(const uint16_t* p) {
#if defined(__F16C__)
  auto half = [](const uint16_t* at) {
    return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  };
  return {half(p), half(p + 8)};
#else
  float wide[16];
  for (int i = 0; i < 16; ++i) wide[i] = half_to_float(p[i]);
  return load(wide);
#endif
}
INLINE uint32_t not_below(V a, float bound) {
  uint32_t bits = 0;
#if defined(__AVX2__)
  const __m256 at = _mm256_set1_ps(bound);
  bits = _mm256_movemask_ps(_mm256_cmp_ps((__m256)a.lo, at, _CMP_GE_OQ));
  bits |= _mm256_movemask_ps(_mm256_cmp_ps((__m256)a.hi, at, _CMP_GE_OQ)) << 8;
#else
  for (int i = 0; i < 8; ++i) bits |= (a.lo[i] >= bound) << i | (a.hi[i] >= bound) << (i + 8);
#endif
  return bits;
}
INLINE float* append_lanes(float* end, V a, uint32_t bits) {
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    *end++ = lane < 8 ? a.lo[lane] : a.hi[lane - 8];
  }
  return end;
}
struct Affine {
  V scale, minimum;
};
INLINE Affine nibble_table(V scale, V minimum) { return {scale, minimum}; }
INLINE void lookup_nibbles(Affine t, Bytes b, V& low, V& high) {
  low = fma(from_u8(low_nibbles(b)), t.scale, t.minimum);
  high = fma(from_u8(high_nibbles(b)), t.scale, t.minimum);
}
INLINE void splat_halves(const uint8_t* p, V& first, V& second) {
  first = splat(half_at(p));
  second = splat(half_at(p + 2));
}
INLINE F4 quarter(V a) {  // lanes i + i+8 + (i+4 + i+12), i < 4
  F8 x = a.lo + a.hi;
  F4 parts[2];
  std::memcpy(parts, &x, 32);
  return parts[0] + parts[1];
}
INLINE void sum4(V a, V b, V c, V d, float* out) {
  F4 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
  typedef int32_t I4 __attribute__((vector_size(16)));
  F4 pq = __builtin_shuffle(p, q, I4{0, 1, 4, 5}) + __builtin_shuffle(p, q, I4{2, 3, 6, 7});
  F4 rs = __builtin_shuffle(r, s, I4{0, 1, 4, 5}) + __builtin_shuffle(r, s, I4{2, 3, 6, 7});
  F4 sums = __builtin_shuffle(pq, rs, I4{0, 2, 4, 6}) + __builtin_shuffle(pq, rs, I4{1, 3, 5, 7});
  std::memcpy(out, &sums, 16);
}
#endif

INLINE float sum(V a) {
  float out[4];
  sum4(a, a, a, a, out);
  return out[0];
}

INLINE V load_partial(const float* p, int64_t count) {  // lanes beyond count are 0
  float padded[16] = {};
  std::memcpy(padded, p, count * sizeof(float));
  return load(padded);
}

// eˣ with a relative error of 2·10⁻⁷; 0 below −87.3, the largest normal power above 88.
// Cody-Waite reduction by ln 2, then the Taylor polynomial of degree 7 on |r| ≤ ln 2 / 2.
INLINE V exponential(V x) {
  V bounded = min(max(x, splat(-87.3f)), splat(88.0f));
  V magic = splat(12582912.0f);  // 1.5·2²³: adding it rounds to a whole number
  V n = fma(bounded, splat(1.44269504088896341f), magic) - magic;
  V r = fma(n, splat(-0.693359375f), bounded);
  r = fma(n, splat(2.12194440e-4f), r);
  V p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return zero_below(x, -87.3f, p * power_of_two(n));
}
