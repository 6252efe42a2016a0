// A linear operation in bfloat16 (brief_product.h), shared among the threads.
//
// Rows are taken 32 at a time, a chunk: of one weight, or 16 of each of the two that SwiGLU takes. What surrounds a
// product is done when it has left the unit, while its rows are vectors of 16 tokens; then it is turned and stored.
// AMX works on its own, so a thread does two other things meanwhile: it finishes the product before, and rounds the
// weights of the next chunk. (By vectors it does the same, between them.)
#pragma once

#include <algorithm>
#include <atomic>

#include "brief_product.h"
#include "elementwise.h"
#include "linear_call.h"

#if HAS_BRIEF

constexpr int64_t kOwnTokens = 128;  // of a thread, from which on it rounds all weights for them

INLINE bool is_brief(const Context& context, const LinearCall& call) {
  return context.units & kBfloat16 && !call.is_exact && call.num_tokens > context.exact_tokens() &&
         call.num_cols() % 32 == 0;
}

// The activations of 16 tokens, normed if the call says so, as tiles[num_blocks].
inline void prepare_sixteen(const LinearCall& call, int64_t first, Scratch& scratch, uint8_t* tiles) {
  const int64_t cols = call.num_cols(), count = std::min<int64_t>(16, call.num_tokens - first);
  const float* x = call.x + first * call.x_stride;
  int64_t stride = call.x_stride;
  if (call.norm_weight) {
    float* normed = scratch.get(16 * cols);
    for (int64_t t = 0; t < count; ++t) rms_norm(x + t * stride, call.norm_weight, call.eps, cols, normed + t * cols);
    x = normed;
    stride = cols;
  }
  store_brief(x, stride, count, cols / 32, tiles);
}

// Rows of a product, of vectors of 16 tokens.
struct BriefRows {
  V rows[16];

  // Rows of `w` from `first` on.
  INLINE void take(const Weight& w, int64_t first, int64_t end, const float* product) {
    for (int r = 0; r < 16; ++r) rows[r] = load(product + 16 * r);
    if (w.layout == kInt8PerChannel)
      for (int r = 0; r < 16; ++r) rows[r] = rows[r] * splat(w.scale[std::min(first + r, end - 1)]);
    if (w.bias)
      for (int r = 0; r < 16; ++r) rows[r] = rows[r] + splat(w.bias[std::min(first + r, end - 1)]);
  }

  // As the next operation's activations: pairs of rows are pairs of its columns. `tile`: of these 16 tokens, and the
  // first row's pair.
  INLINE void store_tile(uint8_t* tile) const {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int j = 0; j < 8; ++j) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(rows[2 * j + 1].v, rows[2 * j].v);
      _mm512_store_si512(tile + 64 * j, _mm512_permutexvar_epi16(order, both));
    }
  }

  // out[t * stride + r] (+ residual), of up to 16 rows and tokens.
  INLINE void store_turned(int64_t num_rows, int64_t num_tokens, const float* residual, float* out, int64_t stride) {
    __m512i turned[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) turned[r] = (__m512i)rows[r].v;
    transpose_words(turned);
    const __mmask16 mask = static_cast<__mmask16>((1u << num_rows) - 1);
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
      if (t >= num_tokens) break;
      __m512 values = (__m512)turned[t];
      if (residual) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, residual + t * stride));
      _mm512_mask_storeu_ps(out + t * stride, mask, values);
    }
  }
};

// 32 rows of products, first … end − 1 of a weight (of both, if the call is SwiGLU) times tokens token … token_end − 1.
struct BriefChunk {
  int64_t weight, first, end, column, token, token_end;  // column: where its rows are in the output
};

// One thread's work on a call, by a unit of brief_product.h.
template <class Unit>
class BriefWorker {
 public:
  BriefWorker(const LinearCall& call, const uint8_t* x, int num_workers, Scratch& scratch)
      : call_(call), x_(x), num_workers_(num_workers), stride_(call.out_stride()), num_blocks_(call.num_cols() / 32),
        size_(num_blocks_ * kTileSize), weights_(reinterpret_cast<uint8_t*>(scratch.get(4 * size_ / 4))) {}

  // claim(ahead): → the next chunk, null when there is none, or, ahead of its turn, when others should have it.
  template <class Claim>
  void run(Claim&& claim) {
    while (const BriefChunk* chunk = claim(false)) run_from(chunk, claim);
  }

 private:
  // From a chunk on, as long as there is a next one to make ready.
  template <class Claim>
  INLINE void run_from(const BriefChunk* chunk, Claim&& claim) {
    uint8_t *w = weights_, *next_w = weights_ + 2 * size_;
    fill(*chunk, w, 0, 32);
    while (chunk) {
      const BriefChunk* next = claim(true);
      const int64_t num_steps = (chunk->token_end - chunk->token + 31) / 32 * num_blocks_;
      int64_t filled = 0, step = 0;
      auto meanwhile = [&](int64_t) {
        if (num_unfinished_ > 0) finish_one();
        if (!next) return;
        const int64_t due = 32 * ++step / num_steps;
        if (filled < due) fill(*next, next_w, filled, due);
        filled = due;
      };
      for (int64_t token = chunk->token; token < chunk->token_end; token += 32) {
        const uint8_t* x = x_ + token / 16 * size_;
        if (call_.residual) ask_for_output(*chunk, token);
        const bool is_two = chunk->token_end - token > 16;
        auto free = [&] { finish_all(); };
        if (is_two) unit_.template multiply<true>(x, w, num_blocks_, products_, meanwhile, free);
        else unit_.template multiply<false>(x, w, num_blocks_, products_, meanwhile, free);
        done_ = chunk;
        token_ = token;
        num_unfinished_ = is_two ? 2 : 1;
      }
      chunk = next;
      std::swap(w, next_w);
    }
    finish_all();
  }

  // A residual is read and written again where another thread may have written last.
  INLINE void ask_for_output(const BriefChunk& chunk, int64_t token) {
    for (int64_t t = token; t < std::min(token + 32, chunk.token_end); ++t)
      for (int64_t i = 0; i < 32; i += 16) __builtin_prefetch(call_.out + t * stride_ + chunk.column + i, 1, 3);
  }

  INLINE void finish_all() {
    while (num_unfinished_ > 0) finish_one();
  }

  // Rows from … to − 1 of a chunk's 32; those at or beyond its end repeat the last.
  void fill(const BriefChunk& chunk, uint8_t* tiles, int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      const bool is_second = call_.swiglu && r >= 16;
      const Weight& w = call_.weights[is_second ? 1 : chunk.weight];
      const int64_t row = std::min(chunk.first + (is_second ? r - 16 : r), chunk.end - 1);
      fill_row(w, row, num_workers_ * (call_.swiglu ? 16 : 32) * w.row_bytes, tiles + r / 16 * size_ + r % 16 * 64);
    }
  }

  // The last 16 tokens of what is unfinished.
  void finish_one() {
    const int64_t half = --num_unfinished_, token = token_ + 16 * half;
    const Weight& w = call_.weights[done_->weight];
    const float* product = products_ + 512 * half;
    BriefRows first, second;
    first.take(w, done_->first, done_->end, product);
    if (call_.swiglu) {
      second.take(call_.weights[1], done_->first, done_->end, product + 256);
      for (int r = 0; r < 16; ++r) first.rows[r] = silu_times(first.rows[r], second.rows[r]);
      return store(first, 0, token);
    }
    store(first, 0, token);
    if (done_->end - done_->first <= 16) return;
    second.take(w, done_->first + 16, done_->end, product + 256);
    store(second, 16, token);
  }

  INLINE void store(BriefRows& rows, int64_t row, int64_t token) {
    if (call_.out_tiles) {
      const int64_t column = done_->column + row, of_tokens = token / 16 * (stride_ / 32) * kTileSize;
      return rows.store_tile(call_.out_tiles + of_tokens + column / 32 * kTileSize + column % 32 * 32);
    }
    const int64_t at = token * stride_ + done_->column + row;
    const int64_t num_rows = std::min<int64_t>(16, done_->end - done_->first - row);
    rows.store_turned(num_rows, std::min<int64_t>(16, done_->token_end - token),
                      call_.residual ? call_.residual + at : nullptr, call_.out + at, stride_);
  }

  const Unit unit_{};
  const LinearCall& call_;
  const uint8_t* x_;
  const int num_workers_;                     // who take chunks in turn
  const int64_t stride_, num_blocks_, size_;  // of the output's tokens; of a group of 16 rows or tokens
  uint8_t* weights_;                          // of two chunks, of two groups each
  alignas(64) float products_[1024];
  const BriefChunk* done_ = nullptr;  // whose products those are
  int64_t token_ = 0;
  int num_unfinished_ = 0;  // of their halves, of 16 tokens each
};

// Tokens multiplied by rows that were rounded once: as many as stay in the L2 cache.
inline int64_t brief_token_block(int64_t num_cols) {
  constexpr int64_t kBytes = 768 << 10;
  return std::clamp<int64_t>(kBytes / (2 * num_cols) / 32 * 32, 64, 512);
}

// Of the tokens from `token` on.
inline void append_chunks(const LinearCall& call, int64_t token, int64_t end, std::vector<BriefChunk>& chunks) {
  const int64_t num_columns = call.swiglu ? 1 : call.num_weights, rows = call.swiglu ? 16 : 32;
  int64_t column = 0;
  for (int64_t i = 0; i < num_columns; column += call.weights[i++].num_rows)
    for (int64_t first = 0; first < call.weights[i].num_rows; first += rows)
      chunks.push_back({i, first, std::min(first + rows, call.weights[i].num_rows), column + first, token, end});
}

// Few tokens: each weight is rounded once, by whoever takes its chunk.
template <class Unit>
inline void run_by_rows(Context& context, const LinearCall& call, uint8_t* x) {
  const int64_t size = call.num_cols() / 32 * kTileSize, at_once = brief_token_block(call.num_cols());
  if (!call.x_tiles)
    context.pool.run((call.num_tokens + 15) / 16, [&](uint32_t group, int thread) {
      prepare_sixteen(call, 16 * group, context.sums[thread], x + group * size);
    });
  std::vector<BriefChunk> chunks;
  for (int64_t token = 0; token < call.num_tokens; token += at_once)
    append_chunks(call, token, std::min(token + at_once, call.num_tokens), chunks);
  std::atomic<size_t> claimed{0};
  const int num_workers = std::min<int>(context.pool.num_threads(), chunks.size());
  auto claim = [&](bool ahead) -> const BriefChunk* {
    if (ahead && claimed.load() + num_workers > chunks.size()) return nullptr;
    const size_t i = claimed.fetch_add(1);
    return i < chunks.size() ? &chunks[i] : nullptr;
  };
  context.pool.run(num_workers, [&](uint32_t, int thread) {
    BriefWorker<Unit>(call, x, num_workers, context.tiles[thread]).run(claim);
  });
}

// Many tokens: a thread rounds all weights for its own, since a line that another core has written takes longer to get
// than weights to round. Threads keep to the same tokens from call to call, and help each other at the end.
template <class Unit>
inline void run_by_tokens(Context& context, const LinearCall& call, uint8_t* x) {
  const int64_t size = call.num_cols() / 32 * kTileSize, threads = context.pool.num_threads();
  const int64_t share = round_up((call.num_tokens + 2 * threads - 1) / (2 * threads), 32);
  const int64_t at_once = std::min(share, brief_token_block(call.num_cols()));
  const int64_t num_ranges = (call.num_tokens + at_once - 1) / at_once;
  std::vector<std::atomic<bool>> is_taken(num_ranges);
  context.pool.run(num_ranges, [&](uint32_t, int thread) {
    int64_t range = thread * num_ranges / threads;
    while (is_taken[range].exchange(true)) range = (range + 1) % num_ranges;
    const int64_t token = range * at_once, end = std::min(token + at_once, call.num_tokens);
    for (int64_t first = token; first < end; first += 16)
      if (!call.x_tiles) prepare_sixteen(call, first, context.sums[thread], x + first / 16 * size);
    std::vector<BriefChunk> chunks;
    append_chunks(call, token, end, chunks);
    size_t next = 0;
    auto claim = [&](bool) { return next < chunks.size() ? &chunks[next++] : nullptr; };
    BriefWorker<Unit>(call, x, 1, context.tiles[thread]).run(claim);
  });
}

template <class T>
struct Named {
  using Type = T;
};

inline void run_brief(Context& context, const LinearCall& call) {
  const int64_t groups = (call.num_tokens + 15) / 16, size = call.num_cols() / 32 * kTileSize;
  uint8_t* x = call.x_tiles ? call.x_tiles : reinterpret_cast<uint8_t*>(context.brief.get(groups * size / 4));
  auto run = [&](auto unit) {
    using Unit = typename decltype(unit)::Type;
    if (call.num_tokens >= kOwnTokens * context.pool.num_threads()) run_by_tokens<Unit>(context, call, x);
    else run_by_rows<Unit>(context, call, x);
  };
#if HAS_TILES
  if (context.units & kTiles) return run(Named<BriefTiles>{});
#endif
  run(Named<BriefVectors>{});
}
#endif
