// Products of rows sorted by expert with their experts' kernels, for jax.ffi on CPU; the reference is grouped.reference.
//
// Every product is C[m][n] (+)= sum_k A(m, k) B(k, n) with A and B read by strides, cut as in Goto's scheme: kK of the
// sum at a time; kN columns of B and kRows rows of A packed so that the innermost loop reads both in order, and holds
// kM x kW of C in registers. A task is one expert and kN columns; threads take tasks in turn, and no two write the same
// place, so results do not depend on their number.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

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

struct Matrix {  // element (i, j) is data[i * along_i + j * along_j]
  const float* data;
  int64_t along_i, along_j;
};

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
template <int kWidth>
void pack(Matrix x, int64_t count, int64_t k, float* to) {
  int64_t whole = x.along_i == 1 ? count / kWidth * kWidth : 0;
  for (int64_t j = 0; j < k && whole; ++j)  // reads rows from end to end
    for (int64_t i = 0; i < whole; i += kWidth)
      std::memcpy(to + i * k + j * kWidth, x.data + i + j * x.along_j, sizeof(float) * kWidth);
  for (int64_t i = whole; i < count; i += kWidth) {
    int64_t some = std::min<int64_t>(kWidth, count - i);
    const float* from = x.data + i * x.along_i;
    float* strip = to + i * k;
    for (int64_t j = 0; j < k; ++j, strip += kWidth, from += x.along_j) {
      for (int64_t w = 0; w < some; ++w) strip[w] = from[w * x.along_i];
      for (int64_t w = some; w < kWidth; ++w) strip[w] = 0.0f;
    }
  }
}

struct Room {
  std::vector<float> a = std::vector<float>(kRows * kK), b = std::vector<float>(kN * kK);
};

// C[m][n] = A(m, k) B(k, n), n at most kN; `b_turned` is B with its dims exchanged. C is zero if k is.
void multiply(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b_turned, float* c, int64_t c_row, Room& room) {
  if (k == 0)
    for (int64_t i = 0; i < m; ++i) std::memset(c + i * c_row, 0, sizeof(float) * n);
  for (int64_t p = 0; p < k; p += kK) {
    int64_t deep = std::min(kK, k - p);
    pack<kW>({b_turned.data + p * b_turned.along_j, b_turned.along_i, b_turned.along_j}, n, deep, room.b.data());
    for (int64_t i = 0; i < m; i += kRows) {
      int64_t high = std::min(kRows, m - i);
      pack<kM>({a.data + i * a.along_i + p * a.along_j, a.along_i, a.along_j}, high, deep, room.a.data());
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

using Floats2 = ffi::Buffer<ffi::F32, 2>;
using Floats3 = ffi::Buffer<ffi::F32, 3>;
using Sizes = ffi::Buffer<ffi::S32, 1>;

// y[row] = rows[row] kernel[expert of row], or with the kernel's dims exchanged if `turned`.
ffi::Error rows_with_kernels(ffi::ThreadPool pool, Floats2 rows, Floats3 kernels, Sizes sizes, bool turned,
                             ffi::Result<Floats2> out) {
  int64_t count = rows.dimensions()[0], inner = rows.dimensions()[1], outer = out->dimensions()[1];
  int64_t experts = kernels.dimensions()[0], parts = (outer + kN - 1) / kN;
  auto begins = begins_of(sizes.typed_data(), experts, count);
  float* y = out->typed_data();
  all(pool, experts * parts, [&](int64_t number, Room& room) {
    int64_t e = number / parts, j = number % parts * kN, n = std::min(kN, outer - j), m = begins[e + 1] - begins[e];
    const float* kernel = kernels.typed_data() + e * inner * outer;
    Matrix b = turned ? Matrix{kernel + j * inner, inner, 1} : Matrix{kernel + j, 1, outer};
    if (m) multiply(m, n, inner, {rows.typed_data() + begins[e] * inner, inner, 1}, b, y + begins[e] * outer + j, outer, room);
  });
  std::memset(y + begins[experts] * outer, 0, sizeof(float) * (count - begins[experts]) * outer);
  return ffi::Error::Success();
}

// kernel[e] = rows of e, turned, times their gradients.
ffi::Error rows_with_rows(ffi::ThreadPool pool, Floats2 rows, Floats2 gradients, Sizes sizes, ffi::Result<Floats3> out) {
  int64_t count = rows.dimensions()[0], inner = rows.dimensions()[1], outer = gradients.dimensions()[1];
  int64_t experts = out->dimensions()[0], parts = (outer + kN - 1) / kN;
  auto begins = begins_of(sizes.typed_data(), experts, count);
  all(pool, experts * parts, [&](int64_t number, Room& room) {
    int64_t e = number / parts, j = number % parts * kN, n = std::min(kN, outer - j), k = begins[e + 1] - begins[e];
    multiply(inner, n, k, {rows.typed_data() + begins[e] * inner, 1, inner},
             {gradients.typed_data() + begins[e] * outer + j, 1, outer}, out->typed_data() + e * inner * outer + j, outer, room);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_rows_with_kernels, rows_with_kernels,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats2>()
                                  .Arg<Floats3>()
                                  .Arg<Sizes>()
                                  .Attr<bool>("turned")
                                  .Ret<Floats2>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_rows_with_rows, rows_with_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats2>()
                                  .Arg<Floats2>()
                                  .Arg<Sizes>()
                                  .Ret<Floats3>());
