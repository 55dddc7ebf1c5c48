// Products of bfloat16 matrices on AMX tiles, summed in float32 and rounded once. Linux on x86 alone, where MULTIPOD_TILES is.
//
// A tile is 16 rows of 16 words, a word two bfloat16 that lie behind each other in the sum. A step multiplies 32 rows of A
// by 32 columns of B over 32 terms of the sum: four tiles of sums, two of each operand. Both are packed in that order.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#define MULTIPOD_TILES

namespace tiles {

constexpr int64_t kSide = 16, kDeep = 32, kStep = 32;   // words of a tile's row, terms of the sum in it, rows of a step
constexpr int64_t kPacked = 1 << 19;                    // elements of B packed at a time: 1 MiB stays in the cache

// Whether the system lets this process use tiles; asked once. A later thread may use them too.
inline bool granted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool answer = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return answer;
}

struct Half {  // element (x, k) is data[x * along_x + k * along_k]; one of the two is 1
  const uint16_t* data;
  int64_t along_x, along_k;
};

struct Words {  // a row of a tile
  __m512i all;
};

struct Room {
  std::vector<Words> a, b;
};

// The compiler does not know that tile instructions read memory: what was written before must be there.
inline void written() { __asm__ volatile("" ::: "memory"); }

// Exchanges rows and columns of 16 x 16 words.
inline void turn(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {  // r[4 g + c] has, in its quarter q, column 4 q + c of rows 4 g and following
    __m512i even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), even_below = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    __m512i odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), odd_below = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even, even_below, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even, even_below, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(odd, odd_below, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(odd, odd_below, 0xdd);
  }
  std::copy(t, t + 16, r);
}

// One tile: `wide` of x and `deep` of k from the beginning of `from`, zeros behind them. Its rows are x's if `by_x`, else
// words of k.
inline void pack_tile(Half from, int64_t wide, int64_t deep, bool by_x, Words* to) {
  __m512i row[kSide];
  if (from.along_k == 1) {
    __mmask32 mask = deep >= kDeep ? ~__mmask32(0) : (__mmask32(1) << deep) - 1;
    for (int64_t x = 0; x < kSide; ++x)
      row[x] = x < wide ? _mm512_maskz_loadu_epi16(mask, from.data + x * from.along_x) : _mm512_setzero_si512();
  } else {
    __mmask16 mask = wide >= kSide ? ~__mmask16(0) : (__mmask16(1) << wide) - 1;
    auto one = [&](int64_t k) {
      return k < deep ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.data + k * from.along_k))
                      : _mm512_setzero_si512();
    };
    for (int64_t word = 0; word < kSide; ++word)
      row[word] = _mm512_or_si512(one(2 * word), _mm512_slli_epi32(one(2 * word + 1), 16));
  }
  if (by_x != (from.along_k == 1)) turn(row);
  for (int64_t i = 0; i < kSide; ++i) to[i].all = row[i];
}

// 32 of x, over the whole sum: two tiles for each 32 terms.
inline void pack_strip(Half from, int64_t wide, int64_t k, bool by_x, Words* to) {
  for (int64_t p = 0; p < k; p += kDeep)
    for (int64_t half = 0; half < kStep; half += kSide, to += kSide)
      pack_tile({from.data + half * from.along_x + p * from.along_k, from.along_x, from.along_k}, std::clamp<int64_t>(wide - half, 0, kSide),
                std::min(kDeep, k - p), by_x, to);
}

// c[32][32] of a packed strip of A and one of B, `steps` times 32 terms.
inline void block(int64_t steps, const Words* a, const Words* b, float* c) {
  written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t p = 0; p < steps; ++p, a += 2 * kSide, b += 2 * kSide) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(5, a + kSide, 64);
    _tile_loadd(7, b + kSide, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  constexpr int64_t kRow = kStep * sizeof(float);
  _tile_stored(0, c, kRow);
  _tile_stored(1, c + kSide, kRow);
  _tile_stored(2, c + kSide * kStep, kRow);
  _tile_stored(3, c + kSide * kStep + kSide, kRow);
}

inline void rounded(const float* from, int64_t rows, int64_t columns, uint16_t* c, int64_t c_row) {
  for (int64_t y = 0; y < rows; ++y)
    for (int64_t x = 0; x < columns; x += kSide) {
      __mmask16 mask = columns - x >= kSide ? ~__mmask16(0) : (__mmask16(1) << (columns - x)) - 1;
      __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + y * kStep + x));
      _mm256_mask_storeu_epi16(c + y * c_row + x, mask, (__m256i)half);
    }
}

// C[m][n] = A(m, k) B(k, n); `b_turned` is B with its dims exchanged. C is zero if k is.
inline void multiply(int64_t m, int64_t n, int64_t k, Half a, Half b_turned, uint16_t* c, int64_t c_row, Room& room) {
  struct {
    uint8_t palette = 1, begin = 0, none[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  int64_t steps = (k + kDeep - 1) / kDeep, strip = steps * 2 * kSide;
  int64_t whole = (n + kStep - 1) / kStep * kStep;
  int64_t wide = std::clamp(kPacked / std::max<int64_t>(k, 1) / kStep * kStep, kStep, whole);
  room.a.resize(strip);
  room.b.resize(strip * (wide / kStep));
  alignas(64) float sums[kStep * kStep];
  written();
  _tile_loadconfig(&shape);
  for (int64_t j = 0; j < n; j += wide) {
    int64_t columns = std::min(wide, n - j);
    for (int64_t x = 0; x < columns; x += kStep)
      pack_strip({b_turned.data + (j + x) * b_turned.along_x, b_turned.along_x, b_turned.along_k},
                 std::min(kStep, columns - x), k, false, room.b.data() + x / kStep * strip);
    for (int64_t i = 0; i < m; i += kStep) {
      int64_t rows = std::min(kStep, m - i);
      pack_strip({a.data + i * a.along_x, a.along_x, a.along_k}, rows, k, true, room.a.data());
      for (int64_t x = 0; x < columns; x += kStep) {
        block(steps, room.a.data(), room.b.data() + x / kStep * strip, sums);
        rounded(sums, rows, std::min(kStep, columns - x), c + i * c_row + j + x, c_row);
      }
    }
  }
  _tile_release();
}

}  // namespace tiles

#endif
