// Products of rows sorted by expert with their experts' kernels, for jax.ffi on CPU; the reference is grouped.reference.
//
// Every product is C[m][n] (+)= sum_k A(m, k) B(k, n) with A and B read by strides, cut as in Goto's scheme: kK of the
// sum at a time; kN columns of B and kRows rows of A packed so that the innermost loop reads both in order, and holds
// kM x kW of C in registers. A task is one expert and kN columns; threads take tasks in turn, and no two write the same
// place, so results do not depend on their number. bfloat16 goes by tiles.h where the processor has it; else it is made
// float32 when packed, and sums are rounded once.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16, kM = 12;  // 24 of 32 registers are sums
#else
constexpr int kLanes = 8, kM = 6;  // 12 of 16
#endif
constexpr int kVectors = 2, kW = kLanes * kVectors;
constexpr int64_t kK = 256, kN = 8 * kW, kRows = 32 * kM;

typedef float V __attribute__((vector_size(4 * kLanes)));

inline V load(const float* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}
inline void store(float* to, V value) { __builtin_memcpy(to, &value, sizeof(V)); }

template <class T>
struct Matrix {  // element (i, j) is data[i * along_i + j * along_j]; a uint16_t is a bfloat16
  const T* data;
  int64_t along_i, along_j;
};

inline float number(float x) { return x; }
inline float number(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// To the nearest bfloat16, ties to even; a NaN stays one.
inline uint16_t rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// C[kM][kW] of a packed strip of A, [k][kM], and one of B, [k][kW].
inline void block(int64_t k, const float* a, const float* b, float* c, int64_t c_row, bool add) {
  V sum[kM][kVectors];
  for (int i = 0; i < kM; ++i)
    for (int v = 0; v < kVectors; ++v) sum[i][v] = add ? load(c + i * c_row + v * kLanes) : V{};
  for (int64_t p = 0; p < k; ++p, a += kM, b += kW) {
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + v * kLanes);
#pragma GCC unroll 12
    for (int i = 0; i < kM; ++i)
      for (int v = 0; v < kVectors; ++v) sum[i][v] += a[i] * right[v];
  }
  for (int i = 0; i < kM; ++i)
    for (int v = 0; v < kVectors; ++v) store(c + i * c_row + v * kLanes, sum[i][v]);
}

// Strips of kWidth of the dim i of x, [k][kWidth] each, filled up with zeros: i from 0 to `count`, j from 0 to `k`.
template <int kWidth, class T>
void pack(Matrix<T> x, int64_t count, int64_t k, float* to) {
  int64_t whole = x.along_i == 1 ? count / kWidth * kWidth : 0;
  for (int64_t j = 0; j < k && whole; ++j)  // reads rows from end to end
    for (int64_t i = 0; i < whole; i += kWidth) {
      const T* from = x.data + i + j * x.along_j;
      float* strip = to + i * k + j * kWidth;
      for (int w = 0; w < kWidth; ++w) strip[w] = number(from[w]);
    }
  for (int64_t i = whole; i < count; i += kWidth) {
    int64_t some = std::min<int64_t>(kWidth, count - i);
    const T* from = x.data + i * x.along_i;
    float* strip = to + i * k;
    for (int64_t j = 0; j < k; ++j, strip += kWidth, from += x.along_j) {
      for (int64_t w = 0; w < some; ++w) strip[w] = number(from[w * x.along_i]);
      for (int64_t w = some; w < kWidth; ++w) strip[w] = 0.0f;
    }
  }
}

struct Room {
  std::vector<float> a = std::vector<float>(kRows * kK), b = std::vector<float>(kN * kK), c;
#ifdef MULTIPOD_TILES
  tiles::Room tiles;
#endif
};

// C[m][n] = A(m, k) B(k, n), n at most kN; `b_turned` is B with its dims exchanged. C is zero if k is.
template <class T>
void multiply(int64_t m, int64_t n, int64_t k, Matrix<T> a, Matrix<T> b_turned, float* c, int64_t c_row, Room& room) {
  if (k == 0)
    for (int64_t i = 0; i < m; ++i) std::memset(c + i * c_row, 0, sizeof(float) * n);
  for (int64_t p = 0; p < k; p += kK) {
    int64_t deep = std::min(kK, k - p);
    pack<kW, T>({b_turned.data + p * b_turned.along_j, b_turned.along_i, b_turned.along_j}, n, deep, room.b.data());
    for (int64_t i = 0; i < m; i += kRows) {
      int64_t high = std::min(kRows, m - i);
      pack<kM, T>({a.data + i * a.along_i + p * a.along_j, a.along_i, a.along_j}, high, deep, room.a.data());
      for (int64_t j = 0; j < n; j += kW)
        for (int64_t r = 0; r < high; r += kM) {
          const float *left = room.a.data() + r * deep, *right = room.b.data() + j * deep;
          float* to = c + (i + r) * c_row + j;
          if (r + kM <= high && j + kW <= n) {
            block(deep, left, right, to, c_row, p > 0);
            continue;
          }
          float edge[kM * kW];
          int64_t rows = std::min<int64_t>(kM, high - r), columns = std::min<int64_t>(kW, n - j);
          block(deep, left, right, edge, kW, false);
          for (int64_t y = 0; y < rows; ++y)
            for (int64_t x = 0; x < columns; ++x)
              to[y * c_row + x] = edge[y * kW + x] + (p > 0 ? to[y * c_row + x] : 0.0f);
        }
    }
  }
}

void product(int64_t m, int64_t n, int64_t k, Matrix<float> a, Matrix<float> b_turned, float* c, int64_t c_row, Room& room,
             bool) {
  multiply(m, n, k, a, b_turned, c, c_row, room);
}

void product(int64_t m, int64_t n, int64_t k, Matrix<uint16_t> a, Matrix<uint16_t> b_turned, uint16_t* c, int64_t c_row,
             Room& room, bool with_tiles) {
#ifdef MULTIPOD_TILES
  if (with_tiles && tiles::granted())
    return tiles::multiply(m, n, k, {a.data, a.along_i, a.along_j}, {b_turned.data, b_turned.along_i, b_turned.along_j}, c,
                           c_row, room.tiles);
#endif
  room.c.resize(m * n);
  multiply(m, n, k, a, b_turned, room.c.data(), n, room);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) c[i * c_row + j] = rounded(room.c[i * n + j]);
}

// Calls task(number, room) for all numbers below `count`, on this thread and on those of the pool that have time. It
// waits for no thread that has not begun: programs of several devices may hold the whole pool.
template <class Task>
void all(ffi::ThreadPool& pool, int64_t count, const Task& task) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count, &task] {
    static thread_local Room room;
    for (int64_t number; (number = shared->next.fetch_add(1)) < count;) {
      task(number, room);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule(decltype(work)(work));
  work();
  while (shared->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

std::vector<int64_t> begins_of(const int32_t* sizes, int64_t experts, int64_t rows) {
  std::vector<int64_t> begins(experts + 1, 0);
  for (int64_t e = 0; e < experts; ++e) begins[e + 1] = std::min(rows, begins[e] + std::max(sizes[e], 0));
  return begins;
}

// Asks for large pages under a result that has just been allocated: writing to small ones for the first time costs as much
// as the product of an expert with a hundred rows.
void large_pages(void* begin, int64_t bytes) {
#ifdef __linux__
  constexpr int64_t kPage = 2 << 20;
  auto from = (reinterpret_cast<intptr_t>(begin) + kPage - 1) / kPage * kPage;
  int64_t left = (reinterpret_cast<intptr_t>(begin) + bytes - from) / kPage * kPage;
  if (left > 0) madvise(reinterpret_cast<void*>(from), left, MADV_HUGEPAGE);  // a wish: that it is refused does no harm
#endif
}

using Sizes = ffi::Buffer<ffi::S32, 1>;
template <ffi::DataType kType>
using Rows = ffi::Buffer<kType, 2>;
template <ffi::DataType kType>
using Kernels = ffi::Buffer<kType, 3>;

// y[row] = rows[row] kernel[expert of row], or with the kernel's dims exchanged if `turned`.
template <ffi::DataType kType>
ffi::Error rows_with_kernels(ffi::ThreadPool pool, Rows<kType> rows, Kernels<kType> kernels, Sizes sizes, bool turned,
                             bool with_tiles, ffi::Result<Rows<kType>> out) {
  using T = ffi::NativeType<kType>;
  int64_t count = rows.dimensions()[0], inner = rows.dimensions()[1], outer = out->dimensions()[1];
  int64_t experts = kernels.dimensions()[0], parts = (outer + kN - 1) / kN;
  auto begins = begins_of(sizes.typed_data(), experts, count);
  T* y = out->typed_data();
  large_pages(y, out->size_bytes());
  all(pool, experts * parts, [&](int64_t number, Room& room) {
    int64_t e = number / parts, j = number % parts * kN, n = std::min(kN, outer - j), m = begins[e + 1] - begins[e];
    const T* kernel = kernels.typed_data() + e * inner * outer;
    Matrix<T> b = turned ? Matrix<T>{kernel + j * inner, inner, 1} : Matrix<T>{kernel + j, 1, outer};
    if (m)
      product(m, n, inner, {rows.typed_data() + begins[e] * inner, inner, 1}, b, y + begins[e] * outer + j, outer, room,
              with_tiles);
  });
  std::memset(y + begins[experts] * outer, 0, sizeof(T) * (count - begins[experts]) * outer);
  return ffi::Error::Success();
}

// kernel[e] = rows of e, turned, times their gradients.
template <ffi::DataType kType>
ffi::Error rows_with_rows(ffi::ThreadPool pool, Rows<kType> rows, Rows<kType> gradients, Sizes sizes, bool with_tiles,
                          ffi::Result<Kernels<kType>> out) {
  int64_t count = rows.dimensions()[0], inner = rows.dimensions()[1], outer = gradients.dimensions()[1];
  int64_t experts = out->dimensions()[0], parts = (outer + kN - 1) / kN;
  auto begins = begins_of(sizes.typed_data(), experts, count);
  large_pages(out->untyped_data(), out->size_bytes());
  all(pool, experts * parts, [&](int64_t number, Room& room) {
    int64_t e = number / parts, j = number % parts * kN, n = std::min(kN, outer - j), k = begins[e + 1] - begins[e];
    product(inner, n, k, {rows.typed_data() + begins[e] * inner, 1, inner},
            {gradients.typed_data() + begins[e] * outer + j, 1, outer}, out->typed_data() + e * inner * outer + j, outer,
            room, with_tiles);
  });
  return ffi::Error::Success();
}

template <ffi::DataType kType>
auto rows_with_kernels_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<Rows<kType>>()
      .template Arg<Kernels<kType>>()
      .template Arg<Sizes>()
      .template Attr<bool>("turned")
      .template Attr<bool>("tiles")
      .template Ret<Rows<kType>>();
}

template <ffi::DataType kType>
auto rows_with_rows_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<Rows<kType>>()
      .template Arg<Rows<kType>>()
      .template Arg<Sizes>()
      .template Attr<bool>("tiles")
      .template Ret<Kernels<kType>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_rows_with_kernels_float32, rows_with_kernels<ffi::F32>,
                              rows_with_kernels_binding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_rows_with_kernels_bfloat16, rows_with_kernels<ffi::BF16>,
                              rows_with_kernels_binding<ffi::BF16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_rows_with_rows_float32, rows_with_rows<ffi::F32>, rows_with_rows_binding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_rows_with_rows_bfloat16, rows_with_rows<ffi::BF16>,
                              rows_with_rows_binding<ffi::BF16>());
