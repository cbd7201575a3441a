// Products with the weight as it lies in memory, for AVX-512 on processors of others than Intel: out = x weight^T + bias.
//
// LANES rows of the weight are transposed on their way, so that a vector has one output a lane, and elements of x are broadcast. No sum
// over lanes is left, which rows as short as a small model's feel, and memory is fetched in the order of need. By products.h, one thread
// of a Zen 5 takes 1.29 / 1.12 / 1.35 times as long for SmolLM2-135M's products of float32 with 1 / 8 / 32 rows of x, and in bfloat16
// 1.47 / 1.13 / 1.06 times; for rows of 2,048 and 8,192 elements 0.99 / 1.16 / 1.16 and 1.26 / 1.14 / 1.06. With 9 to 16 rows, bfloat16 is
// up to 1.1 times slower than there. With vectors of AVX2, 8 rows took 1.4 times as long. Intel's was not measured: of its two ports that
// multiply, one transposes.
#pragma once

#include "products.h"

#if defined(__AVX512F__)
#define HAS_COLUMNS 1

namespace {

constexpr int64_t SIDES = 2, WIDTH = SIDES * LANES;  // vectors of outputs in a block
constexpr int64_t MOST_IN_BLOCK = 12;                // rows of x: with SIDES, as many sums as there are registers for
constexpr int64_t FEW_BROADCAST = 8;                 // as many rows of x, or fewer, multiply the weight while it is in registers
constexpr int64_t PART_BYTES = 1152;                 // of a row at a time: WIDTH of them stay in the L1 cache

// 16 x 16 words of 32 bits.
inline void transpose(Vec v[16]) {
  __m512i r[16], t[16];
  memcpy(r, v, sizeof r);
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
  memcpy(v, r, sizeof r);
}

// The same of rows in memory. Quarters of four rows are put together by loads: few rows of x take 0.9 of the time. With many, whose next
// weights are fetched between, it is no faster.
inline void transpose_quarters(Rows rows, Vec* columns) {
  repeat<4>([&](auto quarter) {
    __m512 v[4], pairs[4];
    repeat<4>([&](auto r) {
      auto words = [&](int64_t row) { return _mm_loadu_ps((const float*)rows.from(row, quarter * 16).at); };
      v[r] = _mm512_mask_broadcast_f32x4(_mm512_castps128_ps512(words(r)), 0x00f0, words(r + 4));
      v[r] = _mm512_mask_broadcast_f32x4(_mm512_mask_broadcast_f32x4(v[r], 0x0f00, words(r + 8)), 0xf000, words(r + 12));
    });
    repeat<2>([&](auto i) {
      pairs[2 * i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
      pairs[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    });
    repeat<2>([&](auto i) {
      columns[quarter * 4 + 2 * i] = (Vec)_mm512_unpacklo_pd((__m512d)pairs[i], (__m512d)pairs[i + 2]);
      columns[quarter * 4 + 2 * i + 1] = (Vec)_mm512_unpackhi_pd((__m512d)pairs[i], (__m512d)pairs[i + 2]);
    });
  });
}

// A step of `count` rows: LANES vectors. Zeros are behind the rows' last bytes.
inline void load_rows(Rows rows, int64_t count, int64_t at, int64_t bytes, Vec* out) {
  if (count >= LANES && bytes - at >= STEP)
    repeat<LANES>([&](auto r) { out[r] = load((const float*)rows.from(r, at).at); });
  else
    for (int64_t r = 0; r < LANES; r++) out[r] = words_at(rows.from(std::min(r, count - 1), at).at, bytes - at);
}

// Columns of at most LANES rows, `stride` floats from each other. Each is written as a whole vector.
inline void pack_columns(Rows rows, int64_t count, int64_t bytes, float* out, int64_t stride) {
  for (int64_t at = 0; at < bytes; at += STEP) {
    Vec columns[LANES];
    load_rows(rows, count, at, bytes, columns);
    transpose(columns);
    repeat<LANES>([&](auto i) { store(out + i * stride, columns[i]); });
    out += LANES * stride;
  }
}

// Rows of the weight that are fetched during a block: with a word of each step, a line of `sides` of them, LANES rows from each other.
struct Fetched {
  Rows rows;
  int64_t sides;
};

// Adds the products of a part of ROWS rows of x, as columns, and WIDTH rows of the weight, as columns, to sums [ROWS][SIDES] of vectors.
template <class P, int ROWS>
void multiply_columns(const float* x, const float* w, int64_t bytes, Fetched next, bool first, float* sums) {
  Vec totals[ROWS * SIDES] = {};
  for (int64_t at = 0; at < bytes; at += STEP) {
    const char* line = next.rows.at + at;
    for (int64_t i = 0; i < LANES; i++, x += ROWS, w += WIDTH, line += next.rows.stride) {
      if (next.sides > 0) __builtin_prefetch(line, 0, 3);
      if (next.sides > 1) __builtin_prefetch(line + LANES * next.rows.stride, 0, 3);
      Vec weights[SIDES];
      repeat<SIDES>([&](auto c) { weights[c] = load(w + c * LANES); });
      repeat<ROWS>([&](auto r) {
        Vec value = (Vec)_mm512_set1_ps(x[r]);
        repeat<SIDES>([&](auto c) { totals[r * SIDES + c] = P::step(&value, weights[c], totals[r * SIDES + c]); });
      });
    }
  }
  repeat<ROWS * SIDES>([&](auto i) { store(sums + i * LANES, (first ? Vec{} : load(sums + i * LANES)) + totals[i]); });
}

// A step of `count` rows as columns. Not `near`: a line could be gone from the L1 cache before its last quarter, so rows are copied.
inline void columns_of(Rows rows, int64_t count, int64_t at, int64_t bytes, bool near, Vec* columns) {
  if (near && count >= LANES && bytes - at >= STEP) return transpose_quarters(rows.from(0, at), columns);
  Vec copied[LANES];
  load_rows(rows, count, at, bytes, copied);
  transpose_quarters({(const char*)copied, STEP}, columns);
}

// Fetches a line of LANES rows, to the L1 cache unless they share a set of it.
inline void fetch_rows(Rows rows, bool near) {
  if (near)
    repeat<LANES>([&](auto r) { __builtin_prefetch(rows.from(r, 0).at, 0, 3); });
  else
    repeat<LANES>([&](auto r) { __builtin_prefetch(rows.from(r, 0).at, 0, 2); });
}

// The same sums of all parts, of LANES rows of the weight as they lie in memory.
template <class P, int ROWS>
void multiply_few(const float* x, Rows w, int64_t count, int64_t bytes, int64_t part_bytes, float* sums) {
  constexpr int64_t SET_BYTES = 4096;
  const bool near = w.stride % SET_BYTES;
  const int64_t ahead = near ? 512 : 1024, next = LANES * w.stride - (bytes + STEP - 1) / STEP * STEP;
  Vec totals[ROWS] = {};
  for (int64_t part = 0; part < bytes; part += part_bytes) {
    Vec products[ROWS] = {};
    for (int64_t at = part; at < std::min(bytes, part + part_bytes); at += STEP, x += LANES * ROWS) {
      fetch_rows(w.from(0, at + ahead < bytes ? at + ahead : next + at + ahead), near);
      Vec columns[LANES];
      columns_of(w, count, at, bytes, near, columns);
      repeat<LANES>([&](auto i) {
        repeat<ROWS>([&](auto r) {
          Vec value = (Vec)_mm512_set1_ps(x[i * ROWS + r]);
          products[r] = P::step(&value, columns[i], products[r]);
        });
      });
    }
    repeat<ROWS>([&](auto r) { totals[r] += products[r]; });
  }
  repeat<ROWS>([&](auto r) { store(sums + r * WIDTH, totals[r]); });
}

using MultiplyColumns = void(const float*, const float*, int64_t, Fetched, bool, float*);
using MultiplyFew = void(const float*, Rows, int64_t, int64_t, int64_t, float*);

template <class P, int ROWS = MOST_IN_BLOCK>
MultiplyColumns* multiply_columns_of(int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_columns_of<P, ROWS - 1>(rows);
  return multiply_columns<P, ROWS>;
}

template <class P, int ROWS = FEW_BROADCAST>
MultiplyFew* multiply_few_of(int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_few_of<P, ROWS - 1>(rows);
  return multiply_few<P, ROWS>;
}

// sums [rows][SIDES] of vectors -> out [rows, n], its first `cols` columns.
template <class T>
void write_columns(const float* sums, const T* bias, T* out, int64_t rows, int64_t n, int64_t cols) {
  for (int64_t c = 0; c < cols; c += LANES) {
    Vec shift = bias ? load_upto(bias + c, cols - c) : Vec{};
    for (int64_t r = 0; r < rows; r++) {
      Vec total = load(sums + r * WIDTH + c);
      store_upto(out + r * n + c, bias ? total + shift : total, cols - c);
    }
  }
}

// All of x, as columns of blocks, with WIDTH rows of the weight.
template <class P>
void multiply_group(const float* x, int64_t rows, int64_t width, Rows w, int64_t cols, int64_t bytes, int64_t part_bytes, float* sums) {
  alignas(64) float columns[PART_BYTES / 4 * WIDTH];
  for (int64_t at = 0; at < bytes; at += part_bytes) {
    int64_t some = std::min(part_bytes, bytes - at);
    for (int64_t c = 0; c < cols; c += LANES) pack_columns(w.from(c, at), cols - c, some, columns + c, WIDTH);
    Rows next = at + some < bytes ? w.from(0, at + some) : w.from(WIDTH, 0);
    int64_t left = SIDES, share = rows > MOST_IN_BLOCK ? 1 : SIDES;
    for_blocks(rows, MOST_IN_BLOCK, [&](int64_t row, int64_t count) {
      Fetched fetched = {next.from((SIDES - left) * LANES, 0), std::min(left, share)};
      multiply_columns_of<P>(count)(x + row * width + at / 4 * count, columns, some, fetched, at == 0, sums + row * WIDTH);
      left -= fetched.sides;
    });
  }
}

// x [m, k], w [n, k], bias [n] -> out [m, n]. An output is a sum over parts of k, each in the order of its elements.
template <class P, class T = typename P::In>
void gemm_columns(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t n, int64_t k, int threads) {
  int64_t row_bytes = k * sizeof(T), steps = (row_bytes + STEP - 1) / STEP, width = steps * LANES;
  int64_t parts = (steps * STEP + PART_BYTES - 1) / PART_BYTES, part_bytes = (steps + parts - 1) / parts * STEP;
  int64_t chunk = std::min(m, std::max(MOST_IN_BLOCK, KEPT_BYTES / 4 / width / MOST_IN_BLOCK * MOST_IN_BLOCK));
  static thread_local std::vector<float> scratch;
  scratch.resize(std::max<int64_t>(scratch.size(), chunk * width + 2 * LANES));
  float* packed = (float*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63);  // so no vector of LANES is in two lines of the cache
  for (int64_t first = 0; first < m; first += chunk) {
    int64_t some = std::min(chunk, m - first), group = some <= FEW_BROADCAST ? LANES : WIDTH;
    for_blocks(some, MOST_IN_BLOCK, [&](int64_t row, int64_t count) {
      pack_columns({(const char*)(x + (first + row) * k), row_bytes}, count, row_bytes, packed + row * width, count);
    });
#pragma omp parallel num_threads(threads) if (some * n * k > 65536)
    {
      std::vector<float> sums(some * WIDTH);
#pragma omp for schedule(static) nowait
      for (int64_t c = 0; c < n; c += group) {
        int64_t cols = std::min(group, n - c);
        Rows from = {(const char*)(w + c * k), row_bytes};
        if (group == LANES)
          multiply_few_of<P>(some)(packed, from, cols, row_bytes, part_bytes, sums.data());
        else
          multiply_group<P>(packed, some, width, from, cols, row_bytes, part_bytes, sums.data());
        write_columns(sums.data(), bias ? bias + c : nullptr, out + first * n + c, some, n, cols);
      }
    }
  }
}

}  // namespace

#endif
