// Products by the CPU's integer units, as exact as float32 ones and several times faster.
//
// Of every row n, token t and block of 32 columns, whole numbers are multiplied and added, without rounding:
//
//   f(n, t, block)  = Σ q · X, rounded once or twice to float32            X: see planes.h
//   product(n, t)   = Σ over blocks of (f · scale of X) · scale of q  +  Σ over blocks of minimum · Σ x
//
// Whichever unit adds q · X gives the same integer, so all ways here give the same bits, and the floats are added block
// by block. Few tokens: VPDPBUSD on weights taken apart in registers. More: 16 rows are taken apart once into a panel
// that stays in the cache, and AMX multiplies it by 16 tokens at a time; or VPDPBUSD, where there is no AMX.
#pragma once

#include "amx.h"
#include "sixteen.h"

#if HAS_INTEGERS

constexpr int64_t kVnniTokens = 4;  // their accumulators, two each, and three in the making stay in registers

// Σ q · X of 16 rows by one token's block of eights.
template <bool kSigned>
INLINE V block_product(const __m512i* quants, const int8_t* x, const int32_t* centres) {
  __m512i sums[3];
#pragma GCC unroll 3
  for (int plane = 0; plane < 3; ++plane) {
    sums[plane] = kSigned ? _mm512_set1_epi32(centres[plane]) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      sums[plane] = _mm512_dpbusd_epi32(sums[plane], quants[j], _mm512_set1_epi32(read<int32_t>(x + 32 * plane + 4 * j)));
  }
  const __m512i low = _mm512_add_epi32(_mm512_slli_epi32(sums[1], 8), sums[2]);
  return fma(V{_mm512_cvtepi32_ps(sums[0])}, splat(65536.0f), V{_mm512_cvtepi32_ps(low)});
}

template <bool kSigned>
INLINE void make_unsigned(__m512i* quants) {  // int8 → uint8, 128 more; the centres take it off again
  if (!kSigned) return;
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) quants[j] = _mm512_xor_si512(quants[j], _mm512_set1_epi8(-128));
}

// out[t * out_stride + r] for kTokens tokens and 16 rows; `weights(block, unpacked)` tells the blocks' contents.
template <class I, int kTokens, class Source>
INLINE void vnni_product(Source&& weights, int64_t num_blocks, const Planes& x, int64_t token, float* out,
                         int64_t out_stride) {
  V sums[kTokens], minima[kTokens];
  for (int t = 0; t < kTokens; ++t) sums[t] = minima[t] = zero();
  for (int64_t block = 0; block < num_blocks; ++block) {
    Unpacked w;
    weights(block, w);
    make_unsigned<I::kSigned>(w.quants);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      const int64_t at = x.at(block, token + t);
      const V f = block_product<I::kSigned>(w.quants, x.rows + at * kPlaneBytes[kEights], x.centres + at * 4);
      sums[t] = fma(f * splat(x.scales[at]), w.scale, sums[t]);
      if (!I::kSigned) minima[t] = fma(w.minimum, splat(x.sums[at]), minima[t]);
    }
  }
  for (int t = 0; t < kTokens; ++t) store(out + t * out_stride, sums[t] + minima[t]);
}

template <class I, class Source>
inline void vnni_products(Source&& weights, int64_t num_blocks, const Planes& x, int64_t token, int64_t tokens,
                          float* out, int64_t out_stride) {
  for (int64_t t = 0; t < tokens; t += kVnniTokens) {
    float* to = out + t * out_stride;
    switch (std::min(kVnniTokens, tokens - t)) {
      case 1: vnni_product<I, 1>(weights, num_blocks, x, token + t, to, out_stride); break;
      case 2: vnni_product<I, 2>(weights, num_blocks, x, token + t, to, out_stride); break;
      case 3: vnni_product<I, 3>(weights, num_blocks, x, token + t, to, out_stride); break;
      case 4: vnni_product<I, 4>(weights, num_blocks, x, token + t, to, out_stride); break;
    }
  }
}

// How far ahead of their use weights are asked for: rows are shorter than a page, beyond which hardware does not look.
constexpr int64_t kBytesAhead = 16 << 10;

// Asks for `bytes` from `from` on.
INLINE void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Rows taken apart: of each group of 16, [num_blocks] tiles of the planes' kind, and the rows' scales and minima.
struct Panels {
  uint8_t* tiles;
  float *scales, *minima;
};

// Asks meanwhile for the next rows: `piece` bytes for each block.
template <class I, bool kAll>
inline void fill_panel(const SixteenRows<kAll>& rows, int64_t num_blocks, bool is_pairs, int64_t piece,
                       const Panels& to) {
  const uint8_t* ahead = rows.data + 16 * rows.row_bytes;
  for (int64_t block = 0; block < num_blocks; ++block) {
    Unpacked w;
    I::unpack(rows, block, w);
    prefetch(ahead + block * piece, piece);
    uint8_t* tile = to.tiles + block * (is_pairs ? 1024 : 512);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      if (is_pairs) _mm512_store_si512(tile + j * 64, _mm512_slli_epi32(w.quants[j], 4));
      _mm512_store_si512(tile + (is_pairs ? 512 : 0) + j * 64, w.quants[j]);
    }
    store(to.scales + block * 16, w.scale);
    if (!I::kSigned) store(to.minima + block * 16, w.minimum);
  }
}

inline bool has_integers(const Weight& w) {
  bool result = false;
  with_layout(w.layout, [&](auto layout) { result = Integers<decltype(layout)>::kIs; });
  return result && w.num_cols % 32 == 0;
}

inline bool has_nibbles(const Weight& w) {
  return w.layout == kQ4_0 || w.layout == kQ4_1 || w.layout == kInt4Group32;
}

inline PlaneKind plane_kind(const Weight& w, bool use_tiles) {
  return use_tiles && has_nibbles(w) ? kPairs : kEights;
}

template <class Visit>
INLINE void with_rows(const Weight& w, int64_t first, int64_t end, Visit&& visit) {
  if (end - first >= 16) visit(SixteenRows<true>(w, first, end));
  else visit(SixteenRows<false>(w, first, end));
}

// The panels of `groups` times 16 rows, from `first` on, times the tokens, as `integer_product` below.
template <class L>
inline void panel_product(const Weight& w, int64_t first, int64_t end, int64_t groups, const Planes& x, int64_t token,
                          int64_t tokens, bool use_tiles, float* sums, int64_t stride, Scratch& scratch) {
  using I = Integers<L>;
  const bool is_pairs = x.kind == kPairs;
  const int64_t num_blocks = w.num_cols / 32, tile_floats = is_pairs ? 256 : 128, all = groups * num_blocks;
  float* at = scratch.get(all * (tile_floats + 32));
  auto panels_of = [&](int64_t g) {
    const int64_t block = g * num_blocks;
    return Panels{reinterpret_cast<uint8_t*>(at + all * 32 + block * tile_floats), at + block * 16,
                  at + (all + block) * 16};
  };
  // Where a panel is used once, the next rows are asked for evenly: half while it is filled, half while it is used.
  const int64_t bytes = 16 * w.row_bytes / num_blocks, piece = use_tiles && tokens <= 16 ? bytes / 2 : bytes;
  for (int64_t g = 0; g < groups; ++g)
    with_rows(w, first + 16 * g, end,
              [&](const auto& rows) { fill_panel<I>(rows, num_blocks, is_pairs, piece, panels_of(g)); });
#if HAS_TILES
  if (use_tiles) {
    const Panels p = panels_of(0);
    const uint8_t* ahead = row_of(w, first).data + 16 * w.row_bytes + piece * num_blocks;
    const AmxPanels panels{p.tiles, p.scales, p.minima, groups, num_blocks, ahead, bytes - piece};
    if constexpr (I::kNibbles)
      if (is_pairs) return amx_products<false, true>(panels, x, token, tokens, sums, stride);
    return amx_products<I::kSigned, false>(panels, x, token, tokens, sums, stride);
  }
#endif
  for (int64_t g = 0; g < groups; ++g) {
    const Panels p = panels_of(g);
    auto kept = [&](int64_t block, Unpacked& out) {
      for (int j = 0; j < 8; ++j) out.quants[j] = _mm512_load_si512(p.tiles + block * 512 + j * 64);
      out.scale = load(p.scales + block * 16);
      if (!I::kSigned) out.minimum = load(p.minima + block * 16);
    };
    vnni_products<I>(kept, num_blocks, x, token, tokens, sums + 16 * g, stride);
  }
}

// sums[t * stride + i] = (x · Wᵀ)[token + t, first + i]; room for a multiple of 16 rows and of four tokens.
template <class L>
inline void integer_product(const Weight& w, int64_t first, int64_t end, const Planes& x, int64_t token,
                            int64_t tokens, bool use_tiles, float* sums, int64_t stride, Scratch& scratch) {
  using I = Integers<L>;
  const int64_t num_blocks = w.num_cols / 32, groups = (end - first + 15) / 16;
  if (tokens <= kVnniTokens && !use_tiles) {
    for (int64_t g = 0; g < groups; ++g)
      with_rows(w, first + 16 * g, end, [&](const auto& rows) {
        const uint8_t* ahead = rows.data + std::max(16 * rows.row_bytes, kBytesAhead);
        auto direct = [&](int64_t block, Unpacked& out) {
          I::unpack(rows, block, out);
          prefetch(ahead + block * rows.block_bytes, rows.block_bytes);
        };
        vnni_products<I>(direct, num_blocks, x, token, tokens, sums + 16 * g, stride);
      });
    return;
  }
  // Activations that are used once need no panels beside each other, and one stays in the nearest cache.
  const int64_t at_once = tokens <= 16 ? 1 : groups;
  for (int64_t g = 0; g < groups; g += at_once)
    panel_product<L>(w, first + 16 * g, end, at_once, x, token, tokens, use_tiles, sums + 16 * g, stride, scratch);
}
#endif
