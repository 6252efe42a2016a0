// Sixteen rows of weights by one block of 32 columns, taken apart into integers: lane r of every vector is row r.
//
// A layout here has the same name and bytes as in layouts.h. `unpack` leaves in quants[j] the columns 4j … 4j + 3 of
// the block, a byte each (in the layout's own order of columns), and in `scale` and `minimum` the rows' numbers.
// kSigned: bytes are int8 and there is no minimum; else they are uint8. kNibbles: they are below 16.
#pragma once

#include "layouts.h"
#include "planes.h"

#if HAS_INTEGERS

struct Unpacked {
  __m512i quants[8];
  V scale, minimum;
};

template <bool kAll>  // whether there are 16: if not, the last is repeated
struct SixteenRows {
  const uint8_t* data;  // of the first row
  const float *scale, *minimum;
  int64_t row_bytes, groups, block_bytes;  // of the 16 rows together
  int32_t last;
  __m512i numbers;  // 0 … last, last …

  SixteenRows(const Weight& w, int64_t first, int64_t end) {
    const Row row = row_of(w, first);
    data = row.data;
    groups = w.num_cols / 32;
    row_bytes = w.row_bytes;
    block_bytes = 16 * row_bytes / groups;
    scale = w.layout == kInt8PerChannel ? w.scale + first : row.scale;
    minimum = row.minimum;
    last = static_cast<int32_t>(std::min<int64_t>(end - first, 16) - 1);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    numbers = _mm512_min_epi32(lanes, _mm512_set1_epi32(last));
  }

  INLINE const uint8_t* row(int r) const { return data + (kAll ? r : std::min(r, last)) * row_bytes; }
  // Four bytes of each row, `at` bytes from its beginning.
  INLINE __m512i words(int64_t at) const {
    const __m512i offsets = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(static_cast<int32_t>(row_bytes)));
    return _mm512_i32gather_epi32(offsets, data + at, 1);
  }
  // One float of each row, of tables with `groups` to a row.
  INLINE V floats(const float* table, int64_t at) const {
    const __m512i offsets = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(static_cast<int32_t>(groups)));
    return {_mm512_i32gather_ps(offsets, table + at, 4)};
  }
};

// out[j] = bytes 4j … 4j + 3 of the 16 bytes that each row has at `at`.
template <bool kAll>
INLINE void transpose16(const SixteenRows<kAll>& rows, int64_t at, __m512i* out) {
  __m512i z[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    auto bytes = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.row(r) + at)); };
    z[i] = _mm512_inserti32x4(_mm512_castsi128_si512(bytes(i)), bytes(4 + i), 1);
    z[i] = _mm512_inserti32x4(_mm512_inserti32x4(z[i], bytes(8 + i), 2), bytes(12 + i), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
  const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  out[0] = _mm512_unpacklo_epi64(a, c);
  out[1] = _mm512_unpackhi_epi64(a, c);
  out[2] = _mm512_unpacklo_epi64(b, d);
  out[3] = _mm512_unpackhi_epi64(b, d);
}

template <bool kAll>
INLINE void transpose_nibbles(const SixteenRows<kAll>& rows, int64_t at, __m512i* quants) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512i packed[4];
  transpose16(rows, at, packed);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    quants[j] = _mm512_and_si512(packed[j], low);
    quants[4 + j] = _mm512_and_si512(_mm512_srli_epi32(packed[j], 4), low);
  }
}

INLINE V low_halves(__m512i words) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))}; }

template <class L>
struct Integers {
  static constexpr bool kIs = false;
};

template <>
struct Integers<Q4_0> {
  static constexpr bool kIs = true, kSigned = false, kNibbles = true;
  template <bool kAll>
  static INLINE void unpack(const SixteenRows<kAll>& rows, int64_t block, Unpacked& out) {
    transpose_nibbles(rows, block * 18 + 2, out.quants);
    out.scale = low_halves(rows.words(block * 18));
    out.minimum = out.scale * splat(-8.0f);
  }
};

template <>
struct Integers<Q4_1> {
  static constexpr bool kIs = true, kSigned = false, kNibbles = true;
  template <bool kAll>
  static INLINE void unpack(const SixteenRows<kAll>& rows, int64_t block, Unpacked& out) {
    transpose_nibbles(rows, block * 20 + 4, out.quants);
    const __m512i both = rows.words(block * 20);
    out.scale = low_halves(both);
    out.minimum = low_halves(_mm512_srli_epi32(both, 16));
  }
};

template <>
struct Integers<Int4Group32> {
  static constexpr bool kIs = true, kSigned = false, kNibbles = true;
  template <bool kAll>
  static INLINE void unpack(const SixteenRows<kAll>& rows, int64_t block, Unpacked& out) {
    transpose_nibbles(rows, block * 16, out.quants);
    out.scale = rows.floats(rows.scale, block);
    out.minimum = rows.floats(rows.minimum, block);
  }
};

template <>
struct Integers<Q8_0> {
  static constexpr bool kIs = true, kSigned = true, kNibbles = false;
  template <bool kAll>
  static INLINE void unpack(const SixteenRows<kAll>& rows, int64_t block, Unpacked& out) {
    transpose16(rows, block * 34 + 2, out.quants);
    transpose16(rows, block * 34 + 18, out.quants + 4);
    out.scale = low_halves(rows.words(block * 34));
  }
};

template <>
struct Integers<Int8PerChannel> {
  static constexpr bool kIs = true, kSigned = true, kNibbles = false;
  template <bool kAll>
  static INLINE void unpack(const SixteenRows<kAll>& rows, int64_t block, Unpacked& out) {
    transpose16(rows, block * 32, out.quants);
    transpose16(rows, block * 32 + 16, out.quants + 4);
    out.scale = {_mm512_permutexvar_ps(rows.numbers, _mm512_maskz_loadu_ps((2u << rows.last) - 1, rows.scale))};
  }
};

#endif
