// Embedding bags from tensor-train cores on one CPU core, for jax.ffi; the reference is tensor_train_bag.jax_bag.
//
// The distinct ids are visited in an order that is a walk in depth over the tree of their digits: at each inner node k
// the product P_k of the first k core slices is made once, [columns][R_k], and used by all ids below. So there is one
// product in memory for each level, whatever the batch. Backward walks the same way, makes the products again, and
// hands the gradient of P_k to node k - 1 when it leaves node k. The order is that of the second digit, then the first,
// then the rest: P_1 costs nothing, and the slices of the second core are the large ones, so each comes into the
// processor's cache once.
//
// All arithmetic is one routine, `multiply`: C[m][n] += sum_k X(k, m) Z[k][n], with Z and C contiguous in n (vectors) and
// X read with any strides (broadcast). Bags are added in the order of the ids: results do not vary from run to run.
//
// Shapes of a core: [m_k][R_{k-1}][n_k][R_k], float32. A row is kept as [n_d][n_1 .. n_{d-1}] (columns of the last
// core outermost) until it is in its bag, so that the last product has long vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kMostCores = 8;

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

// A block of C, M rows by N vectors, held in registers over the whole sum.
template <class V, int M, int N>
inline void block(int k, Left x, const float* z, int z_row, float* c, int c_row, bool add) {
  constexpr int W = sizeof(V) / sizeof(float);
  V sum[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) sum[i][j] = add ? load<V>(c + i * c_row + j * W) : V{};
  for (int p = 0; p < k; ++p) {
    V right[N];
    for (int j = 0; j < N; ++j) right[j] = load<V>(z + p * z_row + j * W);
    const float* left = x.data + p * x.along_k;
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) sum[i][j] += left[i * x.along_m] * right[j];
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store<V>(c + i * c_row + j * W, sum[i][j]);
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

struct Train {  // the shape, and where the cores are
  int d;
  int64_t table_rows;
  int m[kMostCores], n[kMostCores], rank[kMostCores + 1], columns[kMostCores + 1];  // columns[k] = n_1 .. n_k
  const float* core[kMostCores];

  int slice(int k) const { return rank[k] * n[k] * rank[k + 1]; }
  int features() const { return columns[d]; }
  int last() const { return columns[d - 1]; }
  void digits(int32_t id, int* out) const {
    for (int k = d - 1; k > 0; --k) out[k] = id % m[k], id /= m[k];
    out[0] = id;
  }
};

// The positions of ids inside the table and before the padding, ordered by id and within an id by position.
struct Ordered {
  std::vector<int32_t> position, scratch;
  std::vector<int32_t> first;     // first[u]: where in `position` the u-th distinct id begins; one more at the end
  std::vector<int32_t> distinct;  // the distinct ids, increasing
  std::vector<int32_t> visit;     // the order in which to visit them: places in `distinct`, by second digit

  void make(const Train& t, const int32_t* ids, int64_t count) {
    int64_t table_rows = t.table_rows;
    position.clear();
    for (auto* held : {&position, &first, &distinct, &visit}) held->reserve(count + 1);  // pages not written cost nothing
    for (int64_t p = 0; p < count; ++p)
      if (ids[p] >= 0 && ids[p] < table_rows) position.push_back(static_cast<int32_t>(p));
    scratch.resize(position.size());
    constexpr int kBits = 11, kBuckets = 1 << kBits;
    for (int shift = 0; shift < 31 && ((table_rows - 1) >> shift) > 0; shift += kBits) {
      int32_t start[kBuckets + 1] = {0};
      for (int32_t p : position) ++start[((ids[p] >> shift) & (kBuckets - 1)) + 1];
      for (int b = 0; b < kBuckets; ++b) start[b + 1] += start[b];
      for (int32_t p : position) scratch[start[(ids[p] >> shift) & (kBuckets - 1)]++] = p;
      position.swap(scratch);
    }
    first.clear();
    distinct.clear();
    for (size_t i = 0; i < position.size(); ++i) {
      int32_t id = ids[position[i]];
      if (distinct.empty() || distinct.back() != id) {
        distinct.push_back(id);
        first.push_back(static_cast<int32_t>(i));
      }
    }
    first.push_back(static_cast<int32_t>(position.size()));
    by_second_digit(t);
  }

  // They are in order of the first digit already, and a counting sort keeps that among those of one second digit.
  void by_second_digit(const Train& t) {
    int32_t below = 1, m = t.m[1];
    for (int k = 2; k < t.d; ++k) below *= t.m[k];
    std::vector<int32_t> start(m + 1, 0);
    for (int32_t id : distinct) ++start[id / below % m + 1];
    for (int i = 0; i < m; ++i) start[i + 1] += start[i];
    visit.resize(distinct.size());
    for (size_t u = 0; u < distinct.size(); ++u) visit[start[distinct[u] / below % m]++] = static_cast<int32_t>(u);
  }
};

// What a call works in. Kept for the next, and not by a thread: XLA runs a call on any of its threads.
struct Work {
  Ordered order;
  std::vector<int32_t> place;  // of each id: forward its row, backward its bag
  std::vector<float> large;    // forward the rows of the distinct ids, backward the turned cores
};

class Borrowed {
 public:
  Borrowed() {
    std::lock_guard<std::mutex> hold(lock());
    if (idle().empty()) {
      work_ = std::make_unique<Work>();
    } else {
      work_ = std::move(idle().back());
      idle().pop_back();
    }
  }
  ~Borrowed() {
    std::lock_guard<std::mutex> hold(lock());
    idle().push_back(std::move(work_));
  }
  Work* operator->() { return work_.get(); }

 private:
  static std::mutex& lock() {
    static std::mutex one;
    return one;
  }
  static std::vector<std::unique_ptr<Work>>& idle() {
    static std::vector<std::unique_ptr<Work>> several;
    return several;
  }
  std::unique_ptr<Work> work_;
};

// The products along the path to the current id.
struct Path {
  const Train& t;
  std::vector<float> product[kMostCores];  // [k]: P_k, [columns[k]][rank[k]], for k = 1 .. d - 1
  std::vector<float> turned;               // P_{d-1} as [rank][columns]
  int digit[kMostCores];
  int valid = 0;  // products 1 .. valid belong to `digit`

  explicit Path(const Train& train) : t(train) {
    for (int k = 2; k < t.d; ++k) product[k].resize(t.columns[k] * t.rank[k]);
    turned.resize(t.columns[t.d - 1] * t.rank[t.d - 1]);
  }
  const float* at(int k) const {  // P_1 is the slice of the first core itself
    return k == 1 ? t.core[0] + static_cast<int64_t>(digit[0]) * t.slice(0) : product[k].data();
  }
  // How many leading digits of `next`, of the first d - 1, are those of the path.
  int shared(const int* next) const {
    int k = 0;
    while (k < valid && next[k] == digit[k]) ++k;
    return k;
  }
  void move(const int* next) {
    int same = shared(next);
    std::copy(next, next + t.d, digit);
    if (same == t.d - 1) return;
    for (int k = std::max(same + 1, 2); k < t.d; ++k) {
      const float* core = t.core[k - 1] + static_cast<int64_t>(digit[k - 1]) * t.slice(k - 1);
      int width = t.n[k - 1] * t.rank[k], before = t.rank[k - 1];
      multiply(t.columns[k - 1], width, before, {at(k - 1), 1, before}, core, width, product[k].data(), width, false);
    }
    valid = t.d - 1;
    transpose(t.columns[t.d - 1], t.rank[t.d - 1], at(t.d - 1), turned.data());
  }
  // The row of the current id, [n_d][columns].
  void row(float* out) const {
    int k = t.d - 1, n = t.n[k], r = t.rank[k];
    const float* core = t.core[k] + static_cast<int64_t>(digit[k]) * t.slice(k);
    multiply(n, t.columns[k], r, {core, n, 1}, turned.data(), t.columns[k], out, t.columns[k], false);
  }
};

ffi::Error read(ffi::RemainingArgs& arguments, int64_t table_rows, Train& t) {
  t.d = static_cast<int>(arguments.size());
  t.table_rows = table_rows;
  if (t.d < 2 || t.d > kMostCores) return ffi::Error::InvalidArgument("tensor train: 2 to 8 cores");
  t.columns[0] = 1;
  for (int k = 0; k < t.d; ++k) {
    auto core = arguments.get<ffi::Buffer<ffi::F32>>(k);
    if (!core.has_value()) return core.error();
    auto dims = core->dimensions();
    t.m[k] = static_cast<int>(dims[0]);
    t.rank[k] = static_cast<int>(dims[1]);
    t.n[k] = static_cast<int>(dims[2]);
    t.rank[k + 1] = static_cast<int>(dims[3]);
    t.columns[k + 1] = t.columns[k] * t.n[k];
    t.core[k] = core->typed_data();
  }
  return ffi::Error::Success();
}

using Ids = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

ffi::Error forward(Ids ids, Ids offsets, Floats weights, ffi::RemainingArgs cores, ffi::Result<Floats> out, int64_t table_rows) {
  Train t;
  if (ffi::Error error = read(cores, table_rows, t); error.failure()) return error;
  const int32_t* id = ids.typed_data();
  const int32_t* offset = offsets.typed_data();
  const float* weight = weights.element_count() ? weights.typed_data() : nullptr;
  int64_t bags = static_cast<int64_t>(offsets.element_count()) - 1;
  int64_t count = std::clamp<int64_t>(offset[bags], 0, static_cast<int64_t>(ids.element_count()));
  int features = t.features(), last = t.last(), n = t.n[t.d - 1];

  Borrowed work;
  Ordered& order = work->order;
  std::vector<float>& row = work->large;
  std::vector<int32_t>& place = work->place;
  std::vector<float> sum(features);
  order.make(t, id, count);
  row.resize(std::max(row.size(), order.distinct.size() * features));
  place.assign(count, -1);
  // Rows are turned into their own order once each, or else the bags are: whichever are fewer.
  bool straight = static_cast<int64_t>(order.distinct.size()) <= bags;
  Path path(t);
  for (int32_t u : order.visit) {
    int digit[kMostCores];
    t.digits(order.distinct[u], digit);
    path.move(digit);
    float* own = row.data() + static_cast<int64_t>(u) * features;
    path.row(straight ? sum.data() : own);
    if (straight) transpose(n, last, sum.data(), own);
    for (int32_t i = order.first[u]; i < order.first[u + 1]; ++i) place[order.position[i]] = u;
  }
  for (int64_t b = 0; b < bags; ++b) {
    float* result = out->typed_data() + b * features;
    float* to = straight ? result : sum.data();
    int64_t begin = std::max(offset[b], 0), end = std::min<int64_t>(offset[b + 1], count);
    if (begin >= end) std::fill(to, to + features, 0.0f);
    for (int64_t p = begin; p < end; ++p) {
      float w = weight ? weight[p] : 1.0f;
      if (place[p] < 0) {
        std::fill(to, to + features, std::numeric_limits<float>::quiet_NaN());
        continue;
      }
      const float* from = row.data() + static_cast<int64_t>(place[p]) * features;
      if (p == begin)
        for (int j = 0; j < features; ++j) to[j] = w * from[j];
      else
        for (int j = 0; j < features; ++j) to[j] += w * from[j];
    }
    if (!straight) transpose(n, last, to, result);
  }
  return ffi::Error::Success();
}

// What backward adds to, beside the walk.
struct Gradients {
  const Train& t;
  Path path;
  std::vector<float> from_above[kMostCores];  // [k]: of P_k, [columns[k]][rank[k]], for k = 2 .. d - 1
  float* turned_core[kMostCores];  // [k]: core k with each slice as [n_k R_k][R_{k-1}], for k = 1 .. d - 1
  float* turned_last;              // gradient of the last core, slices as [n_d][R_{d-1}]
  float* out[kMostCores];

  Gradients(const Train& train, std::vector<float>& large) : t(train), path(train) {
    for (int k = 2; k < t.d; ++k) from_above[k].assign(t.columns[k] * t.rank[k], 0.0f);
    int64_t last = core(t.d - 1), all = last;
    for (int k = 1; k < t.d; ++k) all += core(k);
    large.resize(std::max<size_t>(large.size(), all));
    turned_last = large.data();
    std::memset(turned_last, 0, sizeof(float) * last);
    float* next = turned_last + last;
    for (int k = 1; k < t.d; ++k) {
      int64_t slice = t.slice(k);
      turned_core[k] = next;
      next += core(k);
      for (int i = 0; i < t.m[k]; ++i)
        transpose(t.rank[k], t.n[k] * t.rank[k + 1], t.core[k] + i * slice, turned_core[k] + i * slice);
    }
  }
  int64_t core(int k) const { return static_cast<int64_t>(t.m[k]) * t.slice(k); }
  float* of_product(int k) {  // P_1 is a slice of the first core: its gradient goes straight there
    return k == 1 ? out[0] + static_cast<int64_t>(path.digit[0]) * t.slice(0) : from_above[k].data();
  }
  // Leaves the nodes of the path below the first `kept` digits, the deepest first.
  void leave(int kept) {
    for (int k = path.valid; k > std::max(kept, 1); --k) {
      int before = t.rank[k - 1], width = t.n[k - 1] * t.rank[k], columns = t.columns[k - 1];
      int64_t at = static_cast<int64_t>(path.digit[k - 1]) * t.slice(k - 1);
      float* own = from_above[k].data();  // [columns][width]
      multiply(before, width, columns, {path.at(k - 1), before, 1}, own, width, out[k - 1] + at, width, true);
      multiply(columns, before, width, {own, 1, width}, turned_core[k - 1] + at, before, of_product(k - 1), before, true);
      std::memset(own, 0, sizeof(float) * columns * width);
    }
  }
  void row(const float* gradient) {  // of the current id's row, [columns][n_d]
    int k = t.d - 1, n = t.n[k], r = t.rank[k], columns = t.columns[k];
    int64_t at = static_cast<int64_t>(path.digit[k]) * t.slice(k);
    multiply(columns, r, n, {gradient, 1, n}, turned_core[k] + at, r, of_product(k), r, true);
    multiply(n, r, columns, {gradient, n, 1}, path.at(k), r, turned_last + at, r, true);
  }
  void finish() {
    leave(0);
    int k = t.d - 1;
    int64_t slice = t.slice(k);
    for (int i = 0; i < t.m[k]; ++i) transpose(t.n[k], t.rank[k], turned_last + i * slice, out[k] + i * slice);
  }
};

ffi::Error backward(Ids ids, Ids offsets, Floats weights, Floats above, ffi::RemainingArgs cores, ffi::Result<Floats> weights_out,
                    ffi::RemainingRets cores_out, int64_t table_rows) {
  Train t;
  if (ffi::Error error = read(cores, table_rows, t); error.failure()) return error;
  const int32_t* id = ids.typed_data();
  const int32_t* offset = offsets.typed_data();
  bool weighted = weights.element_count() > 0;
  int64_t bags = static_cast<int64_t>(offsets.element_count()) - 1, all = static_cast<int64_t>(ids.element_count());
  int64_t count = std::clamp<int64_t>(offset[bags], 0, all);
  int features = t.features(), last = t.last(), n = t.n[t.d - 1];

  Borrowed work;
  Ordered& order = work->order;
  std::vector<int32_t>& bag = work->place;
  std::vector<float> sum(features), row(features), straight(features);
  order.make(t, id, count);
  bag.resize(count);
  for (int64_t b = 0; b < bags; ++b)
    for (int64_t p = std::max(offset[b], 0); p < std::min<int64_t>(offset[b + 1], count); ++p) bag[p] = static_cast<int32_t>(b);
  if (weighted) std::memset(weights_out->typed_data(), 0, sizeof(float) * all);
  Gradients g(t, work->large);
  for (int k = 0; k < t.d; ++k) {
    auto core = cores_out.get<Floats>(k);
    if (!core.has_value()) return core.error();
    g.out[k] = (*core)->typed_data();
    std::memset(g.out[k], 0, sizeof(float) * (*core)->element_count());
  }
  for (int32_t u : order.visit) {
    int digit[kMostCores];
    t.digits(order.distinct[u], digit);
    g.leave(g.path.shared(digit));
    g.path.move(digit);
    if (weighted) {
      g.path.row(row.data());
      transpose(n, last, row.data(), straight.data());
    }
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int32_t i = order.first[u]; i < order.first[u + 1]; ++i) {
      int32_t p = order.position[i];
      const float* from = above.typed_data() + static_cast<int64_t>(bag[p]) * features;
      float w = weighted ? weights.typed_data()[p] : 1.0f;
      float* to = sum.data();
      for (int j = 0; j < features; ++j) to[j] += w * from[j];
      if (weighted) {
        float dot = 0.0f;
        for (int j = 0; j < features; ++j) dot += straight[j] * from[j];
        weights_out->typed_data()[p] = dot;
      }
    }
    g.row(sum.data());
  }
  g.finish();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_tt_forward, forward,
                              ffi::Ffi::Bind()
                                  .Arg<Ids>()
                                  .Arg<Ids>()
                                  .Arg<Floats>()
                                  .RemainingArgs()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("table_rows"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_tt_backward, backward,
                              ffi::Ffi::Bind()
                                  .Arg<Ids>()
                                  .Arg<Ids>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .RemainingArgs()
                                  .Ret<Floats>()
                                  .RemainingRets()
                                  .Attr<int64_t>("table_rows"));
