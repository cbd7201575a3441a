// The CPU's kernels; cpu_kernels.py declares and calls them. Plain C++ with GCC's vector extensions, compiled for this processor.
//
// A row's result depends on that row alone: not on other rows, their number, or the number of threads. Intermediate results that
// torch would write to memory are rounded to the model's dtype. The build forbids contraction (-ffp-contract=off), so that a
// product is fused with a sum only in `fma`.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint16_t bf16;

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bf16* p) {
  Halves h;
  memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, Bits) << 16);
}

inline Bits to_bf16(Vec v) {  // to the nearest, ties to even
#if defined(__AVX512BF16__)
  return (Bits)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
#endif
  Bits u = (Bits)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return v != v ? Bits{} + 0x7fc0 : rounded;
}

inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

inline void store(bf16* p, Vec v) {
  Halves h = __builtin_convertvector(to_bf16(v), Halves);
  memcpy(p, &h, sizeof h);
}

template <class T>
inline Vec round_to(Vec v) {
  return sizeof(T) == 2 ? (Vec)(to_bf16(v) << 16) : v;
}

// The first n < LANES elements; zeros behind them.
template <class T>
inline Vec load_part(const T* p, int64_t n) {
  T part[LANES] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}

template <class T>
inline void store_part(T* p, Vec v, int64_t n) {
  T part[LANES];
  store(part, v);
  memcpy(p, part, n * sizeof(T));
}

template <class T>
inline Vec load_upto(const T* p, int64_t n) {
  return n >= LANES ? load(p) : load_part(p, n);
}

template <class T>
inline void store_upto(T* p, Vec v, int64_t n) {
  n >= LANES ? store(p, v) : store_part(p, v, n);
}

inline float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[LANES];
  memcpy(lanes, &v, sizeof v);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

// The sums of four vectors.
inline void sum4(const Vec v[4], float* out) {
#if defined(__AVX512F__)
  __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  __m512 quarters = _mm512_add_ps((__m512)low, (__m512)high);
  __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#elif defined(__AVX2__)
  __m256 ab = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), cd = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
  __m256 halves = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#else
  for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
#endif
}

inline Vec exp(Vec x) {  // within 1 ulp; Cephes' polynomial
  x = x < -104.0f ? Vec{} - 104.0f : x;
  x = x > 89.0f ? Vec{} + 89.0f : x;
  const Vec magic = Vec{} + 12582912.0f;
  Vec shifted = fma(x, Vec{} + 1.44269504088896341f, magic), n = shifted - magic;
  Ints power = (Ints)shifted - (Ints)magic;
  Vec r = fma(n, Vec{} - 0.693359375f, x);
  r = fma(n, Vec{} + 2.12194440e-4f, r);
  Vec p = Vec{} + 1.9875691500e-4f;
  p = fma(p, r, Vec{} + 1.3981999507e-3f);
  p = fma(p, r, Vec{} + 8.3334519073e-3f);
  p = fma(p, r, Vec{} + 4.1665795894e-2f);
  p = fma(p, r, Vec{} + 1.6666665459e-1f);
  p = fma(p, r, Vec{} + 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  Ints half = power >> 1;  // in two steps: 2^128 and denormals
  return p * (Vec)((half + 127) << 23) * (Vec)((power - half + 127) << 23);
}

// -- norm ---------------------------------------------------------------------------------------

// Row r of x, delta and total is at r / inner * outer_stride + r % inner * inner_stride; of out, too, if it is x.
// `kind`: 0 rounds before the weight multiplies, 1 has a weight that is stored less 1, 3 rounds once.
template <class T>
void rms_norm(const T* x, const T* delta, const T* weight, T* total, T* out, int64_t rows, int64_t size, int64_t inner,
              int64_t outer_stride, int64_t inner_stride, float eps, int kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
  for (int64_t row = 0; row < rows; row++) {
    int64_t at = row / inner * outer_stride + row % inner * inner_stride;
    const T* from = x + at;
    Vec squares[4] = {};
    for (int64_t i = 0, part = 0; i < size; i += LANES, part = (part + 1) % 4) {
      Vec value = load_upto(from + i, size - i);
      if (delta) {
        value = round_to<T>(value + load_upto(delta + at + i, size - i));
        store_upto(total + at + i, value, size - i);
      }
      squares[part] = fma(value, value, squares[part]);
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
    Vec scale = Vec{} + 1.0f / sqrtf(mean + eps);
    if (delta) from = total + at;
    T* to = out == x ? out + at : out + row * size;
    for (int64_t i = 0; i < size; i += LANES) {
      Vec normed = load_upto(from + i, size - i) * scale, factor = load_upto(weight + i, size - i);
      store_upto(to + i, kind == 0 ? factor * round_to<T>(normed) : normed * (kind == 1 ? factor + 1.0f : factor), size - i);
    }
  }
}

// -- rope ---------------------------------------------------------------------------------------

template <class T>
inline void turn(const T* x, const T* cos, const T* signed_sin, T* out, int64_t turned, int64_t head_dim) {
  int64_t half = turned / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    int64_t n = half - i;
    Vec first = load_upto(x + i, n), second = load_upto(x + half + i, n);
    Vec cos1 = load_upto(cos + i, n), cos2 = load_upto(cos + half + i, n);
    Vec sin1 = load_upto(signed_sin + i, n), sin2 = load_upto(signed_sin + half + i, n);
    store_upto(out + i, round_to<T>(first * cos1) + round_to<T>(second * sin1), n);
    store_upto(out + half + i, round_to<T>(second * cos2) + round_to<T>(first * sin2), n);
  }
  if (turned < head_dim) memcpy(out + turned, x + turned, (head_dim - turned) * sizeof(T));
}

// Rotates `heads` heads into out and, if kv_heads > 0, the next kv_heads into k_cache; copies the last kv_heads to v_cache.
// Of each head the first `turned` channels are rotated. by_head: q, k and v of each head follow each other.
template <class T>
void rope(const T* x, const T* cos, const T* signed_sin, T* out, T* k_cache, T* v_cache, const int64_t* slots, int64_t tokens,
          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t turned, int64_t stride, int64_t head_stride,
          int64_t turn_stride, int by_head, int threads) {
  int64_t step = head_stride * (by_head ? 3 : 1);
  int64_t keys = by_head ? head_stride : heads * head_stride, values = by_head ? 2 * keys : keys + kv_heads * head_stride;
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > 16384)
  for (int64_t t = 0; t < tokens; t++) {
    const T *row = x + t * stride, *c = cos + t * turn_stride, *s = signed_sin + t * turn_stride;
    for (int64_t h = 0; h < heads; h++) turn(row + h * step, c, s, out + (t * heads + h) * head_dim, turned, head_dim);
    for (int64_t h = 0; h < kv_heads; h++) {
      int64_t at = (slots[t] * kv_heads + h) * head_dim;
      turn(row + keys + h * step, c, s, k_cache + at, turned, head_dim);
      memcpy(v_cache + at, row + values + h * step, head_dim * sizeof(T));
    }
  }
}

// -- activation ---------------------------------------------------------------------------------

// x [rows, size], or if gated [rows, 2 * size]: gates, then what they multiply.
template <class T>
void silu(const T* x, T* out, int64_t rows, int64_t size, int gated, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 8192)
  for (int64_t row = 0; row < rows; row++) {
    const T *gate = x + row * size * (gated ? 2 : 1), *up = gate + size;
    for (int64_t i = 0; i < size; i += LANES) {
      Vec g = load_upto(gate + i, size - i);
      Vec value = round_to<T>(g / (exp(-g) + 1.0f));
      if (gated) value = value * load_upto(up + i, size - i);
      store_upto(out + row * size + i, value, size - i);
    }
  }
}

// -- argmax -------------------------------------------------------------------------------------

// The first of the largest elements of each row; a NaN counts as largest.
template <class T>
void argmax(const T* x, int32_t* out, int64_t rows, int64_t size, int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 65536)
  for (int64_t row = 0; row < rows; row++) {
    const T* from = x + row * stride;
    Vec peaks = Vec{} - INFINITY;
    Ints nans = {};
    for (int64_t i = 0; i + LANES <= size; i += LANES) {
      Vec value = load(from + i);
      peaks = value > peaks ? value : peaks;
      nans |= value != value;
    }
    float peak = -INFINITY;
    bool nan = false;
    for (int i = 0; i < LANES; i++) peak = std::max(peak, peaks[i]), nan = nan || nans[i];
    for (int64_t i = size / LANES * LANES; i < size; i++) {
      float value = load_part(from + i, 1)[0];
      peak = std::max(peak, value), nan = nan || value != value;
    }
    for (int64_t i = 0; i < size; i += LANES) {
      Vec value = load_upto(from + i, size - i);
      Ints found = nan ? value != value : value == peak;
      int64_t lane = 0, lanes = std::min<int64_t>(LANES, size - i);
      for (; lane < lanes && !found[lane]; lane++) {
      }
      if (lane < lanes) {
        out[row] = (int32_t)(i + lane);
        break;
      }
    }
  }
}

// -- attention ----------------------------------------------------------------------------------

constexpr int64_t AHEAD = 16;  // positions whose keys are on their way to the cache

// Attention of HEADS queries of one KV head over `count` slots: out [HEADS, head_dim]. `weights` [HEADS, padded] is scratch.
// `sinks` [HEADS]: exp(sink) is in the sum of a softmax. nullptr: none.
template <int HEADS, class T>
void attend(const T* queries, const T* keys, const T* values, const int32_t* slots, float* weights, T* out, int64_t count,
            int64_t padded, int64_t slot_stride, int64_t head_dim, float scale, float cap, const float* sinks) {
  for (int64_t p = 0; p < count; p += 4) {  // up to three positions too many: the last one again
    const T* at[4];
    for (int64_t i = 0; i < 4; i++) {
      int64_t now = slots[std::min(p + i, count - 1)] * slot_stride;
      int64_t later = slots[std::min(p + i + AHEAD, count - 1)] * slot_stride;
      at[i] = keys + now;
      for (int64_t j = 0; j < head_dim; j += 64 / sizeof(T)) {
        __builtin_prefetch(keys + later + j);
        __builtin_prefetch(values + now + j);
      }
    }
    Vec dots[HEADS][4] = {};
    for (int64_t i = 0; i < head_dim; i += LANES) {
      Vec key[4];
      for (int j = 0; j < 4; j++) key[j] = load(at[j] + i);
      for (int g = 0; g < HEADS; g++) {
        Vec query = load(queries + g * head_dim + i);
        for (int j = 0; j < 4; j++) dots[g][j] = fma(query, key[j], dots[g][j]);
      }
    }
    for (int g = 0; g < HEADS; g++) sum4(dots[g], weights + g * padded + p);
  }
  for (int g = 0; g < HEADS; g++) {
    float *row = weights + g * padded, peak = sinks ? sinks[g] : -INFINITY;
    for (int64_t p = 0; p < count; p++) row[p] = cap > 0 ? cap * tanhf(row[p] * scale / cap) : row[p] * scale;
    for (int64_t p = 0; p < count; p++) peak = std::max(peak, row[p]);
    Vec total = {};
    for (int64_t p = 0; p < padded; p += LANES) {
      Vec weight = exp(load(row + p) - peak);
      for (int64_t i = std::max<int64_t>(0, count - p); i < LANES; i++) weight[i] = 0;
      total += weight;
      store(row + p, weight);
    }
    Vec inverse = Vec{} + 1.0f / (sum(total) + (sinks ? expf(sinks[g] - peak) : 0.0f));
    for (int64_t p = 0; p < padded; p += LANES) store(row + p, load(row + p) * inverse);
  }
  for (int64_t i = 0; i < head_dim; i += LANES) {
    Vec sums[HEADS] = {};
    for (int64_t p = 0; p < count; p++) {
      Vec value = load(values + slots[p] * slot_stride + i);
      for (int g = 0; g < HEADS; g++) sums[g] = fma(Vec{} + weights[g * padded + p], value, sums[g]);
    }
    for (int g = 0; g < HEADS; g++) store(out + g * head_dim + i, sums[g]);
  }
}

// One query for each request, over the KV slots of its positions [begin, len). head_dim is a multiple of LANES.
template <class T>
void decode_attention(const T* q, const T* k_cache, const T* v_cache, const int32_t* table, const int64_t* table_rows,
                      const int32_t* lens, T* out, int64_t requests, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      int64_t table_stride, int64_t window, float scale, float cap, const float* sinks, int threads) {
  int64_t group = heads / kv_heads, work = 0;
  for (int64_t r = 0; r < requests; r++) work += lens[r];
#pragma omp parallel num_threads(threads) if (work * heads * head_dim > 32768)
  {
    std::vector<float> weights;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < requests * kv_heads; task++) {
      int64_t request = task / kv_heads, head = task % kv_heads, len = lens[request];
      int64_t begin = window > 0 ? std::max<int64_t>(0, len - window) : 0, count = len - begin;
      int64_t padded = (count + LANES - 1) / LANES * LANES, stride = kv_heads * head_dim;
      const int32_t* slots = table + table_rows[request] * table_stride + begin;
      const T *keys = k_cache + head * head_dim, *values = v_cache + head * head_dim;
      weights.resize(std::min<int64_t>(4, group) * padded);
      for (int64_t g = 0; g < group; g += 4) {
        int64_t first = (request * heads + head * group + g) * head_dim;
        auto run = std::min<int64_t>(4, group - g) == 1   ? attend<1, T>
                   : std::min<int64_t>(4, group - g) == 2 ? attend<2, T>
                   : std::min<int64_t>(4, group - g) == 3 ? attend<3, T>
                                                          : attend<4, T>;
        run(q + first, keys, values, slots, weights.data(), out + first, count, padded, stride, head_dim, scale, cap,
            sinks ? sinks + head * group + g : nullptr);
      }
    }
  }
}

// -- products -----------------------------------------------------------------------------------

// The rows [0, ROWS) of x times COLS rows of the weight. Every output is one sum over lanes, whatever the block.
template <int ROWS, int COLS>
inline void dot_block(const float* x, const float* w, const float* bias, float* out, int64_t n, int64_t k, const float* ahead,
                      int64_t lines) {
  Vec sums[ROWS][COLS] = {};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    for (int64_t line = 0; line < lines; line++) __builtin_prefetch(ahead + i * lines + line * LANES, 0, 2);
    Vec ws[COLS];
    for (int c = 0; c < COLS; c++) ws[c] = load(w + c * k + i);
    for (int r = 0; r < ROWS; r++) {
      Vec value = load(x + r * k + i);
      for (int c = 0; c < COLS; c++) sums[r][c] = fma(value, ws[c], sums[r][c]);
    }
  }
  if (i < k)
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLS; c++) sums[r][c] = fma(load_part(x + r * k + i, k - i), load_part(w + c * k + i, k - i), sums[r][c]);
  for (int r = 0; r < ROWS; r++) {
    float totals[COLS];
    if constexpr (COLS == 4)
      sum4(sums[r], totals);
    else
      totals[0] = sum(sums[r][0]);
    for (int c = 0; c < COLS; c++) out[r * n + c] = totals[c] + (bias ? bias[c] : 0.0f);
  }
}

typedef void DotBlock(const float*, const float*, const float*, float*, int64_t, int64_t, const float*, int64_t);
constexpr int MOST_ROWS = LANES == 16 ? 6 : 3;  // as many sums as there are registers for

template <int COLS>
DotBlock* dot_block_of(int64_t rows) {
  switch (rows) {
    case 1: return dot_block<1, COLS>;
    case 2: return dot_block<2, COLS>;
    case 3: return dot_block<3, COLS>;
    case 4: return dot_block<4, COLS>;
    case 5: return dot_block<5, COLS>;
    default: return dot_block<6, COLS>;
  }
}

void gemm_dot(const float* x, const float* w, const float* bias, float* out, int64_t m, int64_t n, int64_t k, int threads) {
  constexpr int64_t COLS = 4, GROUP = 8;  // products with a group of the weight fetch the next one
  constexpr int64_t KEPT = 1 << 17;       // elements of x that stay in the L2 cache while the weight passes
  int64_t groups = (n + GROUP - 1) / GROUP, chunk = std::max<int64_t>(MOST_ROWS, KEPT / k / MOST_ROWS * MOST_ROWS);
#pragma omp parallel num_threads(threads) if (m * n * k > 65536)
  for (int64_t first = 0; first < m; first += chunk) {
    int64_t some = std::min(chunk, m - first), blocks = (some + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp for schedule(static) nowait
    for (int64_t g = 0; g < groups; g++) {
      int64_t end = std::min(n, (g + 1) * GROUP), row = 0;
      for (int64_t b = 0; b < blocks; b++) {
        int64_t rows = (some - row + blocks - b - 1) / (blocks - b), c = g * GROUP;
        const float* from = x + (first + row) * k;
        float* to = out + (first + row) * n;
        int64_t lines = m < 4 ? 0 : b >= COLS ? 0 : (COLS + blocks - 1) / blocks;  // a share of the next group's weights
        for (; c + COLS <= end; c += COLS)
          dot_block_of<COLS>(rows)(from, w + c * k, bias ? bias + c : nullptr, to + c, n, k, w + (c + GROUP + b * lines) * k, lines);
        for (; c < end; c++)
          dot_block_of<1>(rows)(from, w + c * k, bias ? bias + c : nullptr, to + c, n, k, nullptr, 0);
        row += rows;
      }
    }
  }
}

#if HAS_AMX

// out^T = weight x^T in tiles: 16 rows of the weight as they lie in memory, times 16 rows of x, packed in pairs.
constexpr int TILE = 16, DEPTH = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void transpose(__m512i r[16]) {  // 16 x 16 words of 32 bits
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
  }
}

// x [m, k] -> tiles [m / 16][k / 32][16 pairs][16 rows][2], zeros outside.
void pack(const bf16* x, bf16* packed, int64_t m, int64_t k) {
  for (int64_t row = 0; row < m; row += TILE)
    for (int64_t i = 0; i < k; i += DEPTH, packed += TILE * DEPTH) {
      __m512i words[16];
      for (int r = 0; r < TILE; r++) {
        __mmask32 mask = row + r < m ? (k - i >= DEPTH ? ~0u : (1u << (k - i)) - 1) : 0;
        words[r] = _mm512_maskz_loadu_epi16(mask, x + (row + r) * k + i);
      }
      transpose(words);
      memcpy(packed, words, sizeof words);
    }
}

// Writes a tile of sums [16 outputs][16 rows] to out [rows, n].
inline void write_tile(const float* sums, const bf16* bias, bf16* out, int64_t rows, int64_t cols, int64_t n) {
  __m512i words[16];
  memcpy(words, sums, sizeof words);
  transpose(words);
  Vec shift = bias ? load_upto(bias, cols) : Vec{};
  __mmask16 mask = (1u << cols) - 1;
  for (int64_t r = 0; r < rows; r++) {
    Vec value = bias ? (Vec)words[r] + shift : (Vec)words[r];
    _mm256_mask_storeu_epi16(out + r * n, mask, (__m256i)_mm512_cvtneps_pbh((__m512)value));
  }
}

// `tail` [2][16][k rounded up]: the weight's last rows, padded with zeros. Two tiles of outputs times two tiles of x.
inline void tile_block(const bf16* packed, const bf16* w, int64_t stride, int64_t steps, int64_t x_tiles, float* sums) {
  const bf16 *low = w, *high = w + TILE * stride, *second = packed + steps * TILE * DEPTH;
  _tile_zero(0);
  _tile_zero(1);
  if (x_tiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; s++) {
      _tile_loadd(4, low + s * DEPTH, stride * 2);
      _tile_loadd(6, packed + s * TILE * DEPTH, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, high + s * DEPTH, stride * 2);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(7, second + s * TILE * DEPTH, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  } else {
    for (int64_t s = 0; s < steps; s++) {
      _tile_loadd(4, low + s * DEPTH, stride * 2);
      _tile_loadd(6, packed + s * TILE * DEPTH, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, high + s * DEPTH, stride * 2);
      _tile_dpbf16ps(1, 5, 6);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
}

void gemm_amx(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t m, int64_t n, int64_t k, int threads) {
  constexpr int64_t ROWS = 256;  // of x at a time: packed, they stay in the L2 cache
  int64_t blocks = (n + 2 * TILE - 1) / (2 * TILE), steps = (k + DEPTH - 1) / DEPTH;
  int64_t packed_rows = (std::min(m, ROWS) + TILE - 1) / TILE * TILE;
  std::vector<bf16> buffer(packed_rows * steps * DEPTH + 32);
  bf16* packed = (bf16*)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63);
#pragma omp parallel num_threads(threads) if (n * k > 65536)
  {
    alignas(64) float sums[1024];
    std::vector<bf16> tail;
    TileConfig config;
    _tile_loadconfig(&config);
    for (int64_t first = 0; first < m; first += ROWS) {
      int64_t rows = std::min(ROWS, m - first);
#pragma omp single
      pack(x + first * k, packed, rows, k);
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks; b++) {
        int64_t c = b * 2 * TILE, cols = std::min<int64_t>(2 * TILE, n - c), stride = k;
        const bf16* from = w + c * k;
        if (cols < 2 * TILE || k % DEPTH) {
          stride = steps * DEPTH;
          tail.assign(2 * TILE * stride, 0);
          for (int64_t i = 0; i < cols; i++) memcpy(tail.data() + i * stride, from + i * k, k * 2);
          from = tail.data();
        }
        for (int64_t row = 0; row < rows; row += 2 * TILE) {
          tile_block(packed + row * steps * DEPTH, from, stride, steps, row + TILE < rows ? 2 : 1, sums);
          for (int part = 0; part < 4; part++) {
            int64_t r = row + part / 2 * TILE, col = c + part % 2 * TILE;
            if (r < rows && col < n)
              write_tile(sums + part * 256, bias ? bias + col : nullptr, out + (first + r) * n + col,
                         std::min<int64_t>(TILE, rows - r), std::min<int64_t>(TILE, n - col), n);
          }
        }
      }
    }
    _tile_release();
  }
}

#endif

void gemm(const float* x, const float* w, const float* bias, float* out, int64_t m, int64_t n, int64_t k, int threads) {
  gemm_dot(x, w, bias, out, m, n, k, threads);
}

#if HAS_AMX
void gemm(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t m, int64_t n, int64_t k, int threads) {
  gemm_amx(x, w, bias, out, m, n, k, threads);
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
#if HAS_AMX
EXPORT_GEMM(bf16, bf16)
#endif

// Whether gemm_bf16 can be called: the process asks Linux for the tiles' registers once.
int init(void) {
#if HAS_AMX
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return 0;
#endif
}
}
