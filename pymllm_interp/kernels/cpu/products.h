// Products with the weight as it lies in memory: out = x weight^T + bias.
//
// Rows of x and of the weight are multiplied vector by vector. The sums of a block of both are registers: one vector for each output,
// which is summed over its lanes at the end. Thus an output is the same sum in every block.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define HAS_HALVES 1  // products of bfloat16
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_PAIRS 1  // by an instruction of their own
#endif

namespace {

constexpr int64_t STEP = sizeof(Vec);               // bytes of a row of the weight that a step multiplies
constexpr int64_t COLS = 4, GROUP = 8;              // rows of the weight in a block, and in blocks that share rows of x
constexpr int64_t MOST_ROWS = LANES == 16 ? 6 : 3;  // of x in a block: as many sums as there are registers for
constexpr int64_t FEW = 4;                          // with fewer rows of x the weight takes longer to arrive than to be multiplied
constexpr int64_t DEPTH_BYTES = 40 * 64;            // of a row at a time: GROUP + MOST_ROWS of them stay in the L1 cache
constexpr int64_t KEPT_BYTES = 1 << 19;             // of x at a time: they stay in the L2 cache while the weight passes

// Rows in memory, `stride` bytes from each other.
struct Rows {
  const char* at;
  int64_t stride;
  Rows from(int64_t row, int64_t byte) const { return {at + row * stride + byte, stride}; }
};

inline Vec even(Vec words) { return (Vec)((Bits)words << 16); }
inline Vec odd(Vec words) { return (Vec)((Bits)words & 0xffff0000u); }

// Keeps a vector in a register. The compiler would load it again for each product, and loads would take longer than products.
inline Vec in_register(Vec v) {
#if defined(__AVX2__)
  asm("" : "+x"(v));
#endif
  return v;
}

inline Vec words_at(const char* at, int64_t bytes) { return bytes >= STEP ? load((const float*)at) : load_bytes(at, bytes); }

// -- a step --------------------------------------------------------------------------------------
// In: the type of x and weight. VECS: vectors that a step takes of a row of x. expand: makes them of a vector of its elements.

struct Singles {
  typedef float In;
  static constexpr int VECS = 1;
  static void expand(Vec words, Vec* x) { x[0] = words; }
  static Vec step(const Vec* x, Vec w, Vec sum) { return fma(x[0], w, sum); }
};

#if HAS_PAIRS
struct Pairs {  // of bfloat16: two products and their sum
  typedef bf16 In;
  static constexpr int VECS = 1;
  static void expand(Vec words, Vec* x) { x[0] = words; }
  static Vec step(const Vec* x, Vec w, Vec sum) { return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x[0], (__m512bh)w); }
};
#endif

struct Widened {  // bfloat16 in float32: the elements at even places, then those at odd places
  typedef bf16 In;
  static constexpr int VECS = 2;
  static void expand(Vec words, Vec* x) { x[0] = even(words), x[1] = odd(words); }
  static Vec step(const Vec* x, Vec w, Vec sum) { return fma(x[1], odd(w), fma(x[0], even(w), sum)); }
};

// Rows as steps take them: [steps][VECS][count] of vectors, with zeros behind the last elements.
template <class P>
void pack(Rows rows, int64_t count, int64_t bytes, char* out) {
  for (int64_t at = 0; at < bytes; at += STEP, out += P::VECS * count * STEP)
    for (int64_t r = 0; r < count; r++) {
      Vec x[P::VECS];
      P::expand(words_at(rows.from(r, at).at, bytes - at), x);
      for (int v = 0; v < P::VECS; v++) store((float*)(out + (v * count + r) * STEP), x[v]);
    }
}

// -- a block -------------------------------------------------------------------------------------

// What is fetched during a block: with each step, a line of each of `count` rows. `shift`: steps are that much longer than theirs.
struct Ahead {
  Rows rows;
  int64_t count;
  int shift;
};

// Adds the products of a part of ROWS packed rows of x and WIDTH rows of the weight to sums [ROWS][WIDTH] of vectors, or if `first` to
// zeros. The last part writes to out [ROWS, n]; for others, out is nullptr.
template <class P, int ROWS, int WIDTH, class T>
void multiply(const char* x, Rows w, int64_t bytes, Ahead ahead, bool first, float* sums, const T* bias, T* out, int64_t n) {
  Vec totals[ROWS * WIDTH];
  repeat<ROWS * WIDTH>([&](auto i) { totals[i] = first ? Vec{} : load(sums + i * LANES); });
  auto add = [&](auto weights) __attribute__((always_inline)) {
    if constexpr (LANES == 8 && P::VECS == 1 && ROWS > 1) {  // all 16 registers: the sums, x, and one vector of the weight
      Vec row[ROWS];
      repeat<ROWS>([&](auto r) { row[r] = in_register(load((const float*)x + r * LANES)); });
      repeat<WIDTH>([&](auto c) {
        Vec words = in_register(weights(c));
        repeat<ROWS>([&](auto r) { totals[r * WIDTH + c] = P::step(row + r, words, totals[r * WIDTH + c]); });
      });
    } else {
      Vec words[WIDTH];
      repeat<WIDTH>([&](auto c) { words[c] = weights(c); });
      repeat<ROWS>([&](auto r) {
        Vec row[P::VECS];
        repeat<P::VECS>([&](auto v) { row[v] = load((const float*)x + (v * ROWS + r) * LANES); });
        repeat<WIDTH>([&](auto c) { totals[r * WIDTH + c] = P::step(row, words[c], totals[r * WIDTH + c]); });
      });
    }
    x += ROWS * P::VECS * STEP;
  };
  int64_t at = 0;
  for (; at + STEP <= bytes; at += STEP) {
    for (int64_t row = 0; row < ahead.count; row++)
      __builtin_prefetch(ahead.rows.at + row * ahead.rows.stride + (at >> ahead.shift), 0, 2);
    add([&](auto c) { return load((const float*)(w.at + c * w.stride + at)); });
  }
  if (at < bytes) add([&](auto c) { return load_bytes(w.at + c * w.stride + at, bytes - at); });
  if (!out) return repeat<ROWS * WIDTH>([&](auto i) { store(sums + i * LANES, totals[i]); });
  Four shift = {};
  for (int c = 0; c < WIDTH && bias; c++) shift[c] = to_float(bias[c]);
  repeat<ROWS>([&](auto r) {
    if constexpr (WIDTH == 4) {
      store4(out + r * n, sum4(totals + r * WIDTH) + shift);
    } else {
      T rounded[4];
      store4(rounded, Four{sum(totals[r])} + shift);
      out[r * n] = rounded[0];
    }
  });
}

template <class T>
using Multiply = void(const char*, Rows, int64_t, Ahead, bool, float*, const T*, T*, int64_t);

template <class P, int WIDTH, class T, int ROWS = MOST_ROWS>
Multiply<T>* multiply_of(int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_of<P, WIDTH, T, ROWS - 1>(rows);
  return multiply<P, ROWS, WIDTH, T>;
}

// Calls f(first row, rows) of each block of x, with at most `most` rows.
template <class F>
inline void for_blocks(int64_t rows, int64_t most, F f) {
  int64_t blocks = (rows + most - 1) / most;
  for (int64_t b = 0, row = 0, some; b < blocks; b++, row += some) f(row, some = (rows - row + blocks - b - 1) / (blocks - b));
}

// A group of the weight with all rows of x.
template <class T>
struct Group {
  const char* x;         // packed
  int64_t rows, stride;  // of x; the bytes of each
  int64_t cols;          // rows of the weight
  Rows next;             // of the weight: what is multiplied after this group
  float* sums;           // [rows][GROUP] of vectors
  const T* bias;         // of the group; nullptr: none
  T* out;                // [rows, n], the group's first output
  int64_t n;

  // The product of a part of k. `at`: its place in each row of packed x. `bytes`: of each row of w. `shift`: see Ahead.
  template <class P>
  void multiply(Rows w, int64_t at, int64_t bytes, int shift, bool last) const {
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, share = (COLS + blocks - 1) / blocks, fetched = 0;
    if (rows < FEW && sizeof(T) == sizeof(float)) share = 0;
    for_blocks(rows, MOST_ROWS, [&](int64_t row, int64_t some) {
      for (int64_t c = 0, width; c < cols; c += width) {
        width = cols - c >= COLS ? COLS : 1;
        auto run = width == COLS ? multiply_of<P, COLS, T>(some) : multiply_of<P, 1, T>(some);
        Ahead ahead = {next.from(c + fetched, 0), width == COLS && fetched < COLS ? share : 0, shift};
        run(x + row * stride + some * at, w.from(c, 0), bytes, ahead, at == 0, sums + (row * GROUP + c * some) * LANES,
            bias ? bias + c : nullptr, last ? out + row * n + c : nullptr, n);
      }
      fetched += share;
    });
  }
};

// x [m, k], w [n, k], bias [n] -> out [m, n]. x is packed once for all threads. With some rows of x, bfloat16 of the weight is widened
// once for all of them.
template <class P, class T = typename P::In>
void gemm_rows(const T* x, const T* w, const T* bias, T* out, int64_t m, int64_t n, int64_t k, int threads) {
  constexpr bool WIDENS = P::VECS > 1;
  int64_t row_bytes = k * sizeof(T), stride = (row_bytes + STEP - 1) / STEP * P::VECS * STEP, groups = (n + GROUP - 1) / GROUP;
  int64_t chunk = std::min(m, std::max(MOST_ROWS, KEPT_BYTES / stride / MOST_ROWS * MOST_ROWS));
  int64_t parts = m < FEW ? 1 : (stride + DEPTH_BYTES - 1) / DEPTH_BYTES;
  int64_t part_bytes = (row_bytes + parts * STEP - 1) / (parts * STEP) * STEP;
  static thread_local std::vector<char> scratch;
  scratch.resize(std::max<int64_t>(scratch.size(), chunk * stride + 64));
  char* packed = (char*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63);  // so no vector is in two lines of the cache
  for (int64_t first = 0; first < m; first += chunk) {
    int64_t some = std::min(chunk, m - first);
    for_blocks(some, MOST_ROWS, [&](int64_t row, int64_t count) {
      pack<P>({(const char*)(x + (first + row) * k), row_bytes}, count, row_bytes, packed + row * stride);
    });
#pragma omp parallel num_threads(threads) if (some * n * k > 65536)
    {
      std::vector<float> sums(parts > 1 ? some * GROUP * LANES : 0);
      alignas(64) char wide[WIDENS ? GROUP * (DEPTH_BYTES + 2 * STEP) : 1];
#pragma omp for schedule(static) nowait
      for (int64_t g = 0; g < groups; g++) {
        int64_t c = g * GROUP, cols = std::min(GROUP, n - c);
        for (int64_t at = 0; at < row_bytes; at += part_bytes) {
          int64_t bytes = std::min(part_bytes, row_bytes - at), at_x = at * P::VECS;
          bool last = at + bytes == row_bytes;
          Rows from = Rows{(const char*)w, row_bytes}.from(c, at);
          Group<T> group = {packed, some, stride, cols, from.from(GROUP, 0), sums.data(), bias ? bias + c : nullptr,
                            out + first * n + c, n};
          if (WIDENS && some >= FEW) {
            int64_t wide_bytes = (bytes + STEP - 1) / STEP * STEP * P::VECS;
            for (int64_t i = 0; i < cols; i++) pack<P>(from.from(i, 0), 1, bytes, wide + i * wide_bytes);
            group.template multiply<Singles>({wide, wide_bytes}, at_x, wide_bytes, 1, last);
          } else {
            group.template multiply<P>(from, at_x, bytes, 0, last);
          }
        }
      }
    }
  }
}

}  // namespace
