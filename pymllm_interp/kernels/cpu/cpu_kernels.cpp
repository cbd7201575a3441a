// The CPU's kernels; cpu_kernels.py declares and calls them. Plain C++ with GCC's vector extensions, compiled for this processor.
//
// A row's result depends on that row alone: not on other rows, their number, or the number of threads. Intermediate results that
// torch would write to memory are rounded to the model's dtype. The build forbids contraction (-ffp-contract=off), so that a
// product is fused with a sum only in `fma`.

#include "attention.h"
#include "columns.h"
#include "products.h"
#include "rows.h"
#include "tiles.h"

namespace {

#if HAS_COLUMNS
bool by_columns;  // products of float32, and of bfloat16 by AVX-512 BF16
#endif

void gemm(const float* x, const float* w, const float* bias, float* out, int64_t m, int64_t n, int64_t k, int threads) {
#if HAS_COLUMNS
  if (by_columns) return gemm_columns<Singles>(x, w, bias, out, m, n, k, threads);
#endif
  gemm_rows<Singles>(x, w, bias, out, m, n, k, threads);
}

#if HAS_HALVES
// The instructions that products of bfloat16 take, from the fewest.
enum Isa { AVX2, AVX512, AVX512_BF16, AMX } bf16_isa;

void gemm(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t m, int64_t n, int64_t k, int threads) {
#if HAS_AMX
  if (bf16_isa == AMX) return gemm_amx(x, w, bias, out, m, n, k, threads);
#endif
#if HAS_PAIRS
  if (bf16_isa == AVX512_BF16 && by_columns) return gemm_columns<Pairs>(x, w, bias, out, m, n, k, threads);
  if (bf16_isa == AVX512_BF16) return gemm_rows<Pairs>(x, w, bias, out, m, n, k, threads);
#endif
  gemm_rows<Widened>(x, w, bias, out, m, n, k, threads);
}
#endif

// -- a layer ------------------------------------------------------------------------------------

// total = h + delta, or h; out = what the MLP adds to the sum after attention, which is written to total.
template <class T>
void decode_layer(const T* h, const T* delta, T* total, T* out, const T* cos, const T* signed_sin, T* k_cache, T* v_cache,
                  const int64_t* slots, const int32_t* table, const int64_t* table_rows, const int32_t* lens, const T* norm1,
                  const T* q_norm, const T* k_norm, const T* norm2, const T* qkv_w, const T* qkv_b, const T* o_w, const T* o_b,
                  const T* gate_up_w, const T* gate_up_b, const T* down_w, const T* down_b, int64_t requests, int64_t hidden,
                  int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t width, int64_t turn_stride, int64_t table_stride,
                  int64_t window, float eps, float scale, float cap, int threads) {
  int64_t q_width = heads * head_dim, qkv_width = q_width + 2 * kv_heads * head_dim, t = threads;
  static thread_local std::vector<T> scratch;
  scratch.resize(requests * (hidden + qkv_width + 2 * q_width + 3 * width));
  T *normed = scratch.data(), *qkv = normed + requests * hidden, *q = qkv + requests * qkv_width;
  T *z = q + requests * q_width, *gate_up = z + requests * q_width, *act = gate_up + requests * 2 * width;
  rms_norm(h, delta, norm1, total, normed, requests, hidden, 1, hidden, 0, eps, 0, t);
  gemm(normed, qkv_w, qkv_b, qkv, requests, qkv_width, hidden, t);
  if (q_norm) {
    T* keys = qkv + q_width;
    rms_norm<T>(qkv, nullptr, q_norm, nullptr, qkv, requests * heads, head_dim, heads, qkv_width, head_dim, eps, 0, t);
    rms_norm<T>(keys, nullptr, k_norm, nullptr, keys, requests * kv_heads, head_dim, kv_heads, qkv_width, head_dim, eps, 0, t);
  }
  rope(qkv, cos, signed_sin, q, k_cache, v_cache, slots, requests, heads, kv_heads, head_dim, head_dim, qkv_width, head_dim,
       turn_stride, 0, t);
  decode_attention(q, k_cache, v_cache, table, table_rows, lens, z, requests, heads, kv_heads, head_dim, table_stride, window,
                   scale, cap, nullptr, t);
  gemm(z, o_w, o_b, out, requests, hidden, q_width, t);
  rms_norm(delta ? total : h, out, norm2, total, normed, requests, hidden, 1, hidden, 0, eps, 0, t);
  gemm(normed, gate_up_w, gate_up_b, gate_up, requests, 2 * width, hidden, t);
  silu(gate_up, act, requests, width, 1, t);
  gemm(act, down_w, down_b, out, requests, hidden, width, t);
}

}  // namespace

// -- what Python calls: tensors by address, with strides in elements ------------------------------

#define EXPORT(T, SUFFIX)                                                                                                   \
  void rms_norm_##SUFFIX(const T* x, const T* delta, const T* weight, T* total, T* out, int64_t rows, int64_t size,         \
                         int64_t inner, int64_t outer_stride, int64_t inner_stride, float eps, int kind, int threads) {     \
    rms_norm(x, delta, weight, total, out, rows, size, inner, outer_stride, inner_stride, eps, kind, threads);              \
  }                                                                                                                         \
  void rope_##SUFFIX(const T* x, const T* cos, const T* signed_sin, T* out, T* k_cache, T* v_cache, const int64_t* slots,   \
                     int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t turned, int64_t stride,     \
                     int64_t head_stride, int64_t turn_stride, int by_head, int threads) {                                  \
    rope(x, cos, signed_sin, out, k_cache, v_cache, slots, tokens, heads, kv_heads, head_dim, turned, stride, head_stride,  \
         turn_stride, by_head, threads);                                                                                    \
  }                                                                                                                         \
  void argmax_##SUFFIX(const T* x, int32_t* out, int64_t rows, int64_t size, int64_t stride, int threads) {                 \
    argmax(x, out, rows, size, stride, threads);                                                                            \
  }                                                                                                                         \
  void silu_##SUFFIX(const T* x, T* out, int64_t rows, int64_t size, int gated, int threads) {                              \
    silu(x, out, rows, size, gated, threads);                                                                               \
  }                                                                                                                         \
  void decode_attention_##SUFFIX(const T* q, const T* k_cache, const T* v_cache, const int32_t* table,                      \
                                 const int64_t* table_rows, const int32_t* lens, T* out, int64_t requests, int64_t heads,   \
                                 int64_t kv_heads, int64_t head_dim, int64_t table_stride, int64_t window, float scale,     \
                                 float cap, const float* sinks, int threads) {                                              \
    decode_attention(q, k_cache, v_cache, table, table_rows, lens, out, requests, heads, kv_heads, head_dim, table_stride,  \
                     window, scale, cap, sinks, threads);                                                                   \
  }

#define EXPORT_GEMM(T, SUFFIX)                                                                                              \
  void gemm_##SUFFIX(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t n, int64_t k, int threads) {         \
    gemm(x, w, bias, out, m, n, k, threads);                                                                                \
  }                                                                                                                         \
  void decode_layer_##SUFFIX(const T* h, const T* delta, T* total, T* out, const T* cos, const T* signed_sin, T*            \
      k_cache, T* v_cache, const int64_t* slots, const int32_t* table, const int64_t* table_rows, const int32_t* lens,      \
      const T* norm1, const T* q_norm, const T* k_norm, const T* norm2, const T* qkv_w, const T* qkv_b, const T* o_w,       \
      const T* o_b, const T* gate_up_w, const T* gate_up_b, const T* down_w, const T* down_b, int64_t requests,             \
      int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t width, int64_t turn_stride, int64_t        \
      table_stride, int64_t window, float eps, float scale, float cap, int threads) {                                       \
    decode_layer(h, delta, total, out, cos, signed_sin, k_cache, v_cache, slots, table, table_rows, lens, norm1,            \
        q_norm, k_norm, norm2, qkv_w, qkv_b, o_w, o_b, gate_up_w, gate_up_b, down_w, down_b, requests, hidden,              \
        heads, kv_heads, head_dim, width, turn_stride, table_stride, window, eps, scale, cap, threads);                     \
  }

extern "C" {

EXPORT(float, f32)
EXPORT(bf16, bf16)

EXPORT_GEMM(float, f32)
#if HAS_HALVES
EXPORT_GEMM(bf16, bf16)
#endif

// Called once, before all others. Selects the way of products, and the instructions of bfloat16's, of those up to `most` in Isa. -1: there
// are none.
int init(int most) {
#if HAS_COLUMNS
  by_columns = !__builtin_cpu_is("intel");
#endif
#if HAS_HALVES
#if HAS_AMX
  if (most >= AMX && tiles_are_granted()) return bf16_isa = AMX;
#endif
#if HAS_PAIRS
  if (most == AVX512_BF16 || (most > AVX512_BF16 && !__builtin_cpu_is("intel"))) return bf16_isa = AVX512_BF16;
#endif
  return bf16_isa = LANES == 16 ? AVX512 : AVX2;
#else
  return -1;
#endif
}
}
