// Kernels over rows: norms, rotations of heads, activations, and the largest element.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

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

}  // namespace
