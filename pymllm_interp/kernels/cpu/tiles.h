// Products of bfloat16 in AMX tiles, with the weight as it lies in memory.
#pragma once

#include <algorithm>
#include <vector>

#include "columns.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// out^T = weight x^T in tiles: 16 rows of the weight as they lie in memory, times 16 rows of x, packed in pairs.
constexpr int TILE = 16, DEPTH = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// x [m, k] -> tiles [m / 16][k / 32][16 pairs][16 rows][2], zeros outside.
void pack(const bf16* x, bf16* packed, int64_t m, int64_t k) {
  for (int64_t row = 0; row < m; row += TILE)
    for (int64_t i = 0; i < k; i += DEPTH, packed += TILE * DEPTH) {
      Vec words[16];
      for (int r = 0; r < TILE; r++) {
        __mmask32 mask = row + r < m ? (k - i >= DEPTH ? ~0u : (1u << (k - i)) - 1) : 0;
        words[r] = (Vec)_mm512_maskz_loadu_epi16(mask, x + (row + r) * k + i);
      }
      transpose(words);
      memcpy(packed, words, sizeof words);
    }
}

// Writes a tile of sums [16 outputs][16 rows] to out [rows, n].
inline void write_tile(const float* sums, const bf16* bias, bf16* out, int64_t rows, int64_t cols, int64_t n) {
  Vec words[16];
  memcpy(words, sums, sizeof words);
  transpose(words);
  Vec shift = bias ? load_upto(bias, cols) : Vec{};
  __mmask16 mask = (1u << cols) - 1;
  for (int64_t r = 0; r < rows; r++) {
    Vec value = bias ? words[r] + shift : words[r];
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
  for (int64_t first = 0; first < m; first += ROWS) {
    int64_t rows = std::min(ROWS, m - first);
    pack(x + first * k, packed, rows, k);
#pragma omp parallel num_threads(threads) if (n * k > 65536)
    {
      alignas(64) float sums[1024];
      std::vector<bf16> tail;
      TileConfig config;
      _tile_loadconfig(&config);
#pragma omp for schedule(static) nowait
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
      _tile_release();
    }
  }
}

// The process asks Linux for the tiles' registers once.
bool tiles_are_granted() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

}  // namespace

#endif
