// How each resident layout turns bytes into floats. The bytes are explained in engine/quantization.
//
// A layout is a struct: kColumns consecutive columns make a block, `decode` hands a block's weights to `emit`, 16 at
// a time in the order of the columns (kInterleaved: even columns of 32, then odd ones; the activations are put in the
// same order). kRowScale: a row's sum is multiplied by its scale at the end. Weights come out rounded once from their
// exact value, as the torch reference rounds them.
#pragma once

#include "simd.h"

// Numbers shared with native/library.py.
enum LayoutId : int32_t {
  kDenseFloat32, kDenseBfloat16, kDenseFloat16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K,
  kInt8PerChannel, kInt4Group32, kNumLayouts,
};

struct Weight {
  const uint8_t* data;
  const float* scale;
  const float* minimum;
  const float* bias;  // or null
  int64_t num_rows, num_cols, row_bytes;
  int32_t layout;
};

struct Row {
  const uint8_t* data;
  const float* scale;
  const float* minimum;
};

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

INLINE Row row_of(const Weight& w, int64_t row) {
  const int64_t groups = w.num_cols / 32;
  return {w.data + row * w.row_bytes, w.scale ? w.scale + row * groups : nullptr,
          w.minimum ? w.minimum + row * groups : nullptr};
}

INLINE bool is_interleaved(int32_t layout) { return layout == kInt4Group32; }

struct Plain {
  static constexpr bool kInterleaved = false, kRowScale = false;
};

struct DenseFloat32 : Plain {
  static constexpr int kColumns = 16, kBytes = 64;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    emit(0, load(reinterpret_cast<const float*>(row.data) + block * 16));
  }
};

struct DenseBfloat16 : Plain {
  static constexpr int kColumns = 16, kBytes = 32;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    emit(0, from_bfloat16(reinterpret_cast<const uint16_t*>(row.data) + block * 16));
  }
};

struct DenseFloat16 : Plain {
  static constexpr int kColumns = 16, kBytes = 32;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    emit(0, from_half(reinterpret_cast<const uint16_t*>(row.data) + block * 16));
  }
};

struct Int8PerChannel {
  static constexpr bool kInterleaved = false, kRowScale = true;
  static constexpr int kColumns = 16, kBytes = 16;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    emit(0, from_i8(load_bytes(row.data + block * 16)));
  }
};

struct Int4Group32 {
  static constexpr bool kInterleaved = true, kRowScale = false;
  static constexpr int kColumns = 32, kBytes = 16;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    V low, high;
    auto table = nibble_table(splat(row.scale[block]), splat(row.minimum[block]));
    lookup_nibbles(table, load_bytes(row.data + block * 16), low, high);
    emit(0, low);
    emit(1, high);
  }
};

struct Q4_0 : Plain {
  static constexpr int kColumns = 32, kBytes = 18;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    float d = half_at(at);
    V low, high;
    lookup_nibbles(nibble_table(splat(d), splat(-8 * d)), load_bytes(at + 2), low, high);
    emit(0, low);
    emit(1, high);
  }
};

struct Q4_1 : Plain {
  static constexpr int kColumns = 32, kBytes = 20;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    V d, m, low, high;
    splat_halves(at, d, m);
    lookup_nibbles(nibble_table(d, m), load_bytes(at + 4), low, high);
    emit(0, low);
    emit(1, high);
  }
};

// 16 where the bit of a lane is set.
INLINE Bytes fifth_bits(const uint8_t* two_bytes) {
  Bytes a = Bytes{} + two_bytes[0], b = Bytes{} + two_bytes[1];
  const Bytes first = {255, 255, 255, 255, 255, 255, 255, 255}, bit = {1, 2, 4, 8, 16, 32, 64, 128,
                                                                     1, 2, 4, 8, 16, 32, 64, 128};
  Bytes mixed = (a & first) | (b & ~first);
  return (Bytes)((mixed & bit) == bit) & 16;
}

INLINE void five_bit_halves(const uint8_t* qh, const uint8_t* qs, V& low, V& high) {
  Bytes q = load_bytes(qs);
  low = from_u8(low_nibbles(q) | fifth_bits(qh));
  high = from_u8(high_nibbles(q) | fifth_bits(qh + 2));
}

struct Q5_0 : Plain {
  static constexpr int kColumns = 32, kBytes = 22;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    float d = half_at(at);
    V low, high;
    five_bit_halves(at + 2, at + 6, low, high);
    emit(0, fma(low, splat(d), splat(-16 * d)));
    emit(1, fma(high, splat(d), splat(-16 * d)));
  }
};

struct Q5_1 : Plain {
  static constexpr int kColumns = 32, kBytes = 24;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    V d, m, low, high;
    splat_halves(at, d, m);
    five_bit_halves(at + 4, at + 8, low, high);
    emit(0, fma(low, d, m));
    emit(1, fma(high, d, m));
  }
};

struct Q8_0 : Plain {
  static constexpr int kColumns = 32, kBytes = 34;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    V d = splat(half_at(at));
    emit(0, from_i8(load_bytes(at + 2)) * d);
    emit(1, from_i8(load_bytes(at + 18)) * d);
  }
};

// Group g's six-bit scale and minimum of Q4_K and Q5_K, times the block's own.
INLINE void group_scale(const uint8_t* at, int g, float d, float dmin, V& scale, V& minimum) {
  const uint8_t* packed = at + 4;
  int sc, mn;
  if (g < 4) {
    sc = packed[g] & 63;
    mn = packed[g + 4] & 63;
  } else {
    sc = (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
    mn = packed[g + 4] >> 4 | (packed[g] >> 6) << 4;
  }
  scale = splat(d * sc);
  minimum = splat(-dmin * mn);
}

struct Q4_K : Plain {
  static constexpr int kColumns = 256, kBytes = 144;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    const float d = half_at(at), dmin = half_at(at + 2);
    for (int k = 0; k < 4; ++k) {
      V s0, m0, s1, m1, low[2], high[2], unused;
      group_scale(at, 2 * k, d, dmin, s0, m0);
      group_scale(at, 2 * k + 1, d, dmin, s1, m1);
      auto first = nibble_table(s0, m0), second = nibble_table(s1, m1);
      for (int i = 0; i < 2; ++i) {
        Bytes q = load_bytes(at + 16 + 32 * k + 16 * i);
        lookup_nibbles(first, q, low[i], unused);
        lookup_nibbles(second, q, unused, high[i]);
      }
      emit(4 * k, low[0]);
      emit(4 * k + 1, low[1]);
      emit(4 * k + 2, high[0]);
      emit(4 * k + 3, high[1]);
    }
  }
};

INLINE Bytes shifted(Bytes b, int count) { return (Bytes)((Shorts)b >> count); }

struct Q5_K : Plain {
  static constexpr int kColumns = 256, kBytes = 176;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    const float d = half_at(at), dmin = half_at(at + 2);
    const Bytes fifth[2] = {load_bytes(at + 16), load_bytes(at + 32)};
    for (int g = 0; g < 8; ++g) {
      V scale, minimum;
      group_scale(at, g, d, dmin, scale, minimum);
      for (int i = 0; i < 2; ++i) {
        Bytes q = shifted(load_bytes(at + 48 + 32 * (g / 2) + 16 * i), g % 2 * 4) & 15;
        q |= (shifted(fifth[i], g) & 1) << 4;
        emit(2 * g + i, fma(from_u8(q), scale, minimum));
      }
    }
  }
};

struct Q6_K : Plain {
  static constexpr int kColumns = 256, kBytes = 210;
  template <class Emit>
  static INLINE void decode(Row row, int64_t block, Emit&& emit) {
    const uint8_t* at = row.data + block * kBytes;
    const float d = half_at(at + 208);
    for (int g = 0; g < 8; ++g) {  // 32 weights each; four groups to a half
      const int half = g / 4, k = g % 4;
      for (int i = 0; i < 2; ++i) {
        Bytes q = shifted(load_bytes(at + 64 * half + 32 * (k % 2) + 16 * i), k / 2 * 4) & 15;
        q |= (shifted(load_bytes(at + 128 + 32 * half + 16 * i), 2 * k) & 3) << 4;
        float scale = d * static_cast<int8_t>(at[192 + 2 * g + i]);
        emit(2 * g + i, fma(from_u8(q), splat(scale), splat(-32 * scale)));
      }
    }
  }
};

// Calls visit(Layout{}) with the layout of that number.
template <class Visit>
INLINE void with_layout(int32_t layout, Visit&& visit) {
  switch (layout) {
    case kDenseFloat32: return visit(DenseFloat32{});
    case kDenseBfloat16: return visit(DenseBfloat16{});
    case kDenseFloat16: return visit(DenseFloat16{});
    case kQ4_0: return visit(Q4_0{});
    case kQ4_1: return visit(Q4_1{});
    case kQ5_0: return visit(Q5_0{});
    case kQ5_1: return visit(Q5_1{});
    case kQ8_0: return visit(Q8_0{});
    case kQ4_K: return visit(Q4_K{});
    case kQ5_K: return visit(Q5_K{});
    case kQ6_K: return visit(Q6_K{});
    case kInt8PerChannel: return visit(Int8PerChannel{});
    case kInt4Group32: return visit(Int4Group32{});
  }
}
