// The arithmetic of tensor_train.cc: products of small matrices, transposes, sums of rows. Vectors of sixteen numbers are
// GCC's and Clang's; where a processor has shorter ones, the compiler takes several.

#pragma once

#include <cstdint>

namespace {

typedef float V16 __attribute__((vector_size(64)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));

// Addresses are aligned to 4 bytes only; compilers make one unaligned vector instruction of this.
template <class V>
inline V load(const float* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}
template <class V>
inline void store(float* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

struct Left {  // X(k, m) = data[k * along_k + m * along_m]
  const float* data;
  int along_k, along_m;
};

// A block of C, M rows by N vectors, held in registers over the whole sum. Of a small one there are S sums, of every S-th
// term each: a processor begins eight additions in the time in which one ends.
template <class V, int M, int N>
inline void block(int k, Left x, const float* z, int z_row, float* c, int c_row, bool add) {
  constexpr int W = sizeof(V) / sizeof(float), S = M * N >= 8 ? 1 : M * N >= 4 ? 2 : 4;
  V sum[S][M][N] = {};
  if (add)
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) sum[0][i][j] = load<V>(c + i * c_row + j * W);
  auto term = [&](int p, V(&to)[M][N]) {
    V right[N];
    for (int j = 0; j < N; ++j) right[j] = load<V>(z + p * z_row + j * W);
    const float* left = x.data + p * x.along_k;
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) to[i][j] += left[i * x.along_m] * right[j];
  };
  int p = 0;
  for (; p + S <= k; p += S)
    for (int s = 0; s < S; ++s) term(p + s, sum[s]);
  for (; p < k; ++p) term(p, sum[0]);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) {
      for (int s = 1; s < S; ++s) sum[0][i][j] += sum[s][i][j];
      store<V>(c + i * c_row + j * W, sum[0][i][j]);
    }
}

// All rows of C, as many at a time as M, then half as many, and so on.
template <class V, int M, int N>
inline void rows(int m, int k, Left x, const float* z, int z_row, float* c, int c_row, bool add) {
  int i = 0;
  for (; i + M <= m; i += M) block<V, M, N>(k, {x.data + i * x.along_m, x.along_k, x.along_m}, z, z_row, c + i * c_row, c_row, add);
  if constexpr (M > 1)
    if (i < m) rows<V, M / 2, N>(m - i, k, {x.data + i * x.along_m, x.along_k, x.along_m}, z, z_row, c + i * c_row, c_row, add);
}

// C[m][n] (+)= sum over k of X(k, m) Z[k][n].
void multiply(int m, int n, int k, Left x, const float* z, int z_row, float* c, int c_row, bool add) {
  int j = 0;
#ifdef __AVX512F__
  for (; j + 64 <= n; j += 64) rows<V16, 4, 4>(m, k, x, z + j, z_row, c + j, c_row, add);
  for (; j + 32 <= n; j += 32) rows<V16, 8, 2>(m, k, x, z + j, z_row, c + j, c_row, add);
  for (; j + 16 <= n; j += 16) rows<V16, 8, 1>(m, k, x, z + j, z_row, c + j, c_row, add);
#else
  for (; j + 16 <= n; j += 16) rows<V8, 4, 2>(m, k, x, z + j, z_row, c + j, c_row, add);
#endif
  for (; j + 8 <= n; j += 8) rows<V8, 8, 1>(m, k, x, z + j, z_row, c + j, c_row, add);
  for (; j + 4 <= n; j += 4) rows<V4, 8, 1>(m, k, x, z + j, z_row, c + j, c_row, add);
  for (; j < n; ++j)
    for (int i = 0; i < m; ++i) {
      float sum = add ? c[i * c_row + j] : 0.0f;
      for (int p = 0; p < k; ++p) sum += x.data[p * x.along_k + i * x.along_m] * z[p * z_row + j];
      c[i * c_row + j] = sum;
    }
}

template <int A, int B, int C, int D>
inline V4 mix(V4 x, V4 y) {  // four of the eight numbers of x and y
#ifdef __clang__
  return __builtin_shufflevector(x, y, A, B, C, D);
#else
  typedef int I4 __attribute__((vector_size(16)));
  return __builtin_shuffle(x, y, (I4){A, B, C, D});
#endif
}

void transpose(int rows, int columns, const float* from, float* to) {  // from [rows][columns] to [columns][rows]
  int i = 0;
  for (; i + 4 <= rows; i += 4) {
    int j = 0;
    for (; j + 4 <= columns; j += 4) {
      V4 a = load<V4>(from + i * columns + j), b = load<V4>(from + (i + 1) * columns + j);
      V4 c = load<V4>(from + (i + 2) * columns + j), d = load<V4>(from + (i + 3) * columns + j);
      V4 e = mix<0, 4, 1, 5>(a, b), f = mix<0, 4, 1, 5>(c, d), g = mix<2, 6, 3, 7>(a, b), h = mix<2, 6, 3, 7>(c, d);
      store<V4>(to + j * rows + i, mix<0, 1, 4, 5>(e, f));
      store<V4>(to + (j + 1) * rows + i, mix<2, 3, 6, 7>(e, f));
      store<V4>(to + (j + 2) * rows + i, mix<0, 1, 4, 5>(g, h));
      store<V4>(to + (j + 3) * rows + i, mix<2, 3, 6, 7>(g, h));
    }
    for (; j < columns; ++j)
      for (int p = i; p < i + 4; ++p) to[j * rows + p] = from[p * columns + j];
  }
  for (; i < rows; ++i)
    for (int j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// to[n] += w from[n] for each of the rows to(0), to(1), .. to(count - 1), with the weights w(i); `from` stays in registers.
template <class To, class Weight>
inline void scatter(const float* from, int n, int64_t count, To to, Weight w) {
  int j = 0;
  for (; j + 64 <= n; j += 64) {
    V16 own[4];
    for (int v = 0; v < 4; ++v) own[v] = load<V16>(from + j + 16 * v);
    for (int64_t i = 0; i < count; ++i) {
      float* out = to(i) + j;
      for (int v = 0; v < 4; ++v) store<V16>(out + 16 * v, load<V16>(out + 16 * v) + w(i) * own[v]);
    }
  }
  for (; j + 16 <= n; j += 16) {
    V16 own = load<V16>(from + j);
    for (int64_t i = 0; i < count; ++i) store<V16>(to(i) + j, load<V16>(to(i) + j) + w(i) * own);
  }
  if (j < n)
    for (int64_t i = 0; i < count; ++i)
      for (int tail = j; tail < n; ++tail) to(i)[tail] += w(i) * from[tail];
}

// to[n] = the sum of w(i) from(i)[n] over i below `count`.
template <class From, class Weight>
inline void gather(float* to, int n, int64_t count, From from, Weight w) {
  int j = 0;
  for (; j + 64 <= n; j += 64) {
    V16 sum[4] = {};
    for (int64_t i = 0; i < count; ++i)
      for (int v = 0; v < 4; ++v) sum[v] += w(i) * load<V16>(from(i) + j + 16 * v);
    for (int v = 0; v < 4; ++v) store<V16>(to + j + 16 * v, sum[v]);
  }
  for (; j + 16 <= n; j += 16) {
    V16 sum = {};
    for (int64_t i = 0; i < count; ++i) sum += w(i) * load<V16>(from(i) + j);
    store<V16>(to + j, sum);
  }
  for (; j < n; ++j) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += w(i) * from(i)[j];
    to[j] = sum;
  }
}

}  // namespace
