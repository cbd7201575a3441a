// Vectors of float32 in GCC's vector extensions, as wide as the processor's registers, and conversions from and to bfloat16.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
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
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t FourBits __attribute__((vector_size(16)));
typedef uint16_t FourHalves __attribute__((vector_size(8)));

// f(0), f(1), ... f(N - 1): unrolled, with constants as arguments, so that what is indexed by them stays in registers.
template <class F, int... I>
inline __attribute__((always_inline)) void repeat(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

template <int N, class F>
inline __attribute__((always_inline)) void repeat(F f) {
  repeat(f, std::make_integer_sequence<int, N>{});
}

// a * b + c, rounded once where the processor can.
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

template <class Lanes, class Words>
inline Words nearest_bf16(Lanes v) {  // ties to even
  Words u = (Words)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return v != v ? Words{} + 0x7fc0 : rounded;
}

inline Bits to_bf16(Vec v) {
#if defined(__AVX512BF16__)
  return (Bits)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  return nearest_bf16<Vec, Bits>(v);
#endif
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

inline void store4(float* p, Four v) { memcpy(p, &v, sizeof v); }

inline void store4(bf16* p, Four v) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  FourHalves h = (FourHalves)_mm_cvtsi128_si64((__m128i)_mm_cvtneps_pbh((__m128)v));
#else
  FourHalves h = __builtin_convertvector((nearest_bf16<Four, FourBits>(v)), FourHalves);
#endif
  memcpy(p, &h, sizeof h);
}

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

// The first `bytes` of a vector; zeros behind them.
inline Vec load_bytes(const char* p, int64_t bytes) {
  Vec v = {};
  memcpy(&v, p, bytes);
  return v;
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
inline Four sum4(const Vec* v) {
#if defined(__AVX512F__)
  __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  __m512 quarters = _mm512_add_ps((__m512)low, (__m512)high);
  __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
#elif defined(__AVX2__)
  __m256 ab = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), cd = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
  __m256 halves = _mm256_hadd_ps(ab, cd);
  return (Four)_mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
#else
  return Four{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])};
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

}  // namespace
