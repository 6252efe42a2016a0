// The C interface, called through ctypes by native/library.py. Pointers are to float32 unless their type says more;
// weights are read-only and never written. A session is one engine's threads and scratch; calls on it take turns.
#include "layers.h"
#include "sampling.h"

struct Session {
  Session(int num_threads, int32_t units)
      : context(num_threads, units), attention(num_threads), sampling(num_threads) {}
  Context context;
  std::vector<AttentionScratch> attention;
  LayerScratch layers;
  std::vector<SamplingScratch> sampling;
};

extern "C" {

int32_t preload_has_wide_vectors() { return HAS_WIDE; }

int32_t preload_available_units() { return available_units(); }

// units: those that the session may use; it uses what is available of them.
Session* preload_open(int32_t num_threads, int32_t units) { return new Session(num_threads, units); }

// Calls of at most so many tokens are exact even where others are in bfloat16.
int64_t preload_exact_tokens(const Session* session) { return session->context.exact_tokens(); }

void preload_linear(Session* session, const Weight* weights, int64_t num_weights, const float* x, int64_t x_stride,
                    int64_t num_tokens, const float* norm_weight, float eps, int32_t swiglu, const float* residual,
                    float* out, int32_t is_exact) {
  std::lock_guard<std::mutex> lock(session->context.mutex);
  run_linear(session->context, {weights, num_weights, x, x_stride, num_tokens, norm_weight, eps, swiglu, residual, out,
                                is_exact});
}

void preload_attention(Session* session, const AttentionStep* step, float* qkv, void* keys, void* values,
                       float* out) {
  std::lock_guard<std::mutex> lock(session->context.mutex);
  run_attention(session->context, *step, qkv, keys, values, out, session->attention);
}

void preload_layers(Session* session, const DecoderLayer* layers, int64_t num_layers, const AttentionStep* step,
                    float* hidden) {
  std::lock_guard<std::mutex> lock(session->context.mutex);
  run_layers(session->context, layers, num_layers, *step, hidden, session->layers, session->attention);
}

void preload_sample(Session* session, const SamplingCall* call) {
  std::lock_guard<std::mutex> lock(session->context.mutex);
  run_sampling(session->context.pool, *call, session->sampling);
}

}  // extern "C"
