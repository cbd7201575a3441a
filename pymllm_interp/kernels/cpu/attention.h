// Attention of decode passes: one query for each request.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t AHEAD = 16;  // positions whose keys are on their way to the cache

// Attention of HEADS queries of one KV head over `count` slots: out [HEADS, head_dim]. `weights` [HEADS, padded] is scratch.
// `sinks` [HEADS]: exp(sink) is in the sum of a softmax. nullptr: none.
template <int HEADS, class T>
void attend(const T* queries, const T* keys, const T* values, const int32_t* slots, float* weights, T* out, int64_t count,
            int64_t padded, int64_t slot_stride, int64_t head_dim, float scale, float cap, const float* sinks) {
  int64_t whole = head_dim / LANES * LANES;
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
    auto multiply = [&](int64_t i, auto read) {
      Vec key[4];
      for (int j = 0; j < 4; j++) key[j] = read(at[j] + i);
      for (int g = 0; g < HEADS; g++) {
        Vec query = read(queries + g * head_dim + i);
        for (int j = 0; j < 4; j++) dots[g][j] = fma(query, key[j], dots[g][j]);
      }
    };
    for (int64_t i = 0; i < whole; i += LANES) multiply(i, [](const T* from) { return load(from); });
    if (whole < head_dim) multiply(whole, [&](const T* from) { return load_upto(from, head_dim - whole); });
    for (int g = 0; g < HEADS; g++) store4(weights + g * padded + p, sum4(dots[g]));
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
  auto weigh = [&](int64_t i, auto read, auto write) {
    Vec sums[HEADS] = {};
    for (int64_t p = 0; p < count; p++) {
      Vec value = read(values + slots[p] * slot_stride + i);
      for (int g = 0; g < HEADS; g++) sums[g] = fma(Vec{} + weights[g * padded + p], value, sums[g]);
    }
    for (int g = 0; g < HEADS; g++) write(out + g * head_dim + i, sums[g]);
  };
  for (int64_t i = 0; i < whole; i += LANES)
    weigh(i, [](const T* from) { return load(from); }, [](T* to, Vec value) { store(to, value); });
  if (whole < head_dim)
    weigh(whole, [&](const T* from) { return load_upto(from, head_dim - whole); },
          [&](T* to, Vec value) { store_upto(to, value, head_dim - whole); });
}

// One query for each request, over the KV slots of its positions [begin, len).
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

}  // namespace
