// Attention of a step, over caches of either kind.
#pragma once

#include "brief_attention.h"
#include "float_attention.h"

struct AttentionScratch {  // of one thread
  FloatScratch floats;
#if HAS_BRIEF
  BriefScratch brief;
#endif
};

template <class Kind>
inline void attend_all(Context& context, const AttentionStep& step, float* qkv, void* key_cache, void* value_cache,
                       float* out, std::vector<AttentionScratch>& scratch,
                       typename Kind::Scratch AttentionScratch::*kind) {
  auto *keys = static_cast<typename Kind::Element*>(key_cache), *values = static_cast<decltype(keys)>(value_cache);
  const int64_t piece = std::clamp<int64_t>(step.num_tokens / (2 * context.pool.num_threads()), 2, 16);
  context.pool.run((step.num_tokens + piece - 1) / piece, [&](uint32_t i, int) {
    for (int64_t t = i * piece; t < std::min(step.num_tokens, (i + 1) * piece); ++t)
      rotate_and_store<Kind>(step, t, qkv, keys, values);
  });
  const std::vector<AttentionTask> tasks = attention_tasks(step, Kind::query_tile(step));
  const int64_t at_once = Kind::heads_at_once(step, tasks.size(), context.pool.num_threads());
  const int64_t parts = step.num_kv_heads / at_once;  // of a task
  context.pool.run(tasks.size() * parts, [&](uint32_t i, int thread) {
    const AttentionTask& task = tasks[tasks.size() - 1 - i / parts];  // long ones first
    Kind::attend(step, task, i % parts * at_once, at_once, qkv, keys, values, out, scratch[thread].*kind);
  });
}

// qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim], rotated in place; caches: [blocks], as their kind orders
// them; out: [num_tokens, num_heads, head_dim]. head_dim: a multiple of 16, of 32 if the caches are bfloat16, which
// needs AVX-512 BF16 or AMX; block_size: a multiple of 16.
inline void run_attention(Context& context, const AttentionStep& step, float* qkv, void* keys, void* values, float* out,
                          std::vector<AttentionScratch>& scratch) {
  if (step.num_tokens == 0) return;
#if HAS_TILES
  if (step.is_brief && context.units & kTiles)
    return attend_all<BriefAttention<TileAttention>>(context, step, qkv, keys, values, out, scratch,
                                                     &AttentionScratch::brief);
#endif
#if HAS_BRIEF
  if (step.is_brief)
    return attend_all<BriefAttention<VectorAttention>>(context, step, qkv, keys, values, out, scratch,
                                                       &AttentionScratch::brief);
#endif
  attend_all<FloatAttention>(context, step, qkv, keys, values, out, scratch, &AttentionScratch::floats);
}
