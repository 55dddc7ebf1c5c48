// Embedding bags from tensor-train cores on one CPU core, for jax.ffi; the reference is tensor_train_bag.jax_bag.
//
// The distinct ids are visited in an order that is a walk in depth over the tree of their digits: at each inner node k
// the product P_k of the first k core slices is made once, [columns][R_k], and used by all ids below. So there is one
// product in memory for each level, whatever the batch. Backward walks the same way, makes the products again, and
// hands the gradient of P_k to node k - 1 when it leaves node k. The order is that of the second digit, then the first,
// then the rest: P_1 costs nothing, and the slices of the second core are the large ones, so each comes into the
// processor's cache once, and is turned, and its gradient begun, when it does.
//
// A row is added to its bags as soon as it is made. The rows of a bag are so added in the order of the walk, which
// depends on its own ids alone: results do not vary from run to run, nor with the other bags.
//
// Shapes of a core: [m_k][R_{k-1}][n_k][R_k], float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "tensor_train_math.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kMostCores = 8;

// Division of numbers below 2^31 by one that is not known when compiling, as a multiplication: exact, since the factor is
// above 2^shift / by by less than 2^-31 of itself (Granlund and Montgomery, 1994, doi:10.1145/178243.178249).
struct Divisor {
  int64_t by = 1;
  uint64_t factor = 0;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(int64_t divisor) : by(divisor) {
    while ((int64_t{1} << (shift - 31)) < by) ++shift;
    factor = (uint64_t{1} << shift) / by + 1;
  }
  // The quotient; `n` becomes the remainder.
  uint32_t operator()(uint32_t& n) const {
    uint32_t quotient = static_cast<uint32_t>((n * factor) >> shift);
    n -= quotient * static_cast<uint32_t>(by);
    return quotient;
  }
};

struct Train {  // the shape, and where the cores are
  int d;
  int64_t table_rows, below;  // below = m_3 .. m_d
  int m[kMostCores], n[kMostCores], rank[kMostCores + 1], columns[kMostCores + 1];  // columns[k] = n_1 .. n_k
  Divisor by_m[kMostCores], by_below;
  const float* core[kMostCores];

  int slice(int k) const { return rank[k] * n[k] * rank[k + 1]; }
  int64_t size(int k) const { return static_cast<int64_t>(m[k]) * slice(k); }
  int features() const { return columns[d]; }
  // The place of an id in the order of the walk.
  uint32_t key(uint32_t id) const {
    uint32_t first = by_below(id), second = first;  // `id` is now what the digits from the third on say
    first = by_m[1](second);
    return (second * m[0] + first) * static_cast<uint32_t>(below) + id;
  }
  void digits(uint32_t key, int* out) const {
    uint32_t two = by_below(key);
    for (int k = d - 1; k > 1; --k) {
      uint32_t left = key;
      uint32_t above = by_m[k](left);
      out[k] = static_cast<int>(left), key = above;
    }
    out[1] = static_cast<int>(by_m[0](two));
    out[0] = static_cast<int>(two);
  }
};

// The ids of a call, and the bags that they are in.
struct Bags {
  const int32_t *id, *offset;
  const float* weight;  // none: all are one
  int64_t bags, count;  // count: ids before the padding

  Bags(const int32_t* ids, const int32_t* offsets, const float* weights, int64_t all, int64_t bags)
      : id(ids), offset(offsets), weight(weights), bags(bags), count(std::clamp<int64_t>(offsets[bags], 0, all)) {}
  // Calls use(bag, place) for each id; in offsets that go back, which only a caller's mistake makes, for none twice.
  template <class Use>
  void each(Use use) const {
    int64_t place = 0;
    for (int64_t b = 0; b < bags; ++b) {
      place = std::max<int64_t>(place, offset[b]);
      for (int64_t end = std::min<int64_t>(offset[b + 1], count); place < end; ++place) use(b, place);
    }
  }
};

// Memory for a call, not set to anything: pages that are not written cost nothing.
template <class T>
std::unique_ptr<T[]> room(int64_t size) {
  return std::unique_ptr<T[]>(new T[size]);
}

// An id as it is sorted: its key, and below it its bag, or if there are weights its place. Ids outside the table are not
// among them.
using Entry = uint64_t;
constexpr Entry kNone = ~Entry{0};
inline uint32_t key_of(Entry entry) { return static_cast<uint32_t>(entry >> 32); }

inline int bits_of(uint64_t number) {
  int bits = 0;
  for (; number; number >>= 1) ++bits;
  return bits;
}

// Writes the entries in the order of the walk, and returns how many; `unknown(bag)` is called for ids outside the table.
// A radix sort, stable: equal ids stay in the order of their places.
template <class Unknown>
int64_t sorted(const Train& t, const Bags& in, Entry* to, Unknown unknown) {
  auto second = room<Entry>(in.count);
  Entry* other = second.get();
  int bits = std::max(1, bits_of(t.below * t.m[0] * t.m[1] - 1));
  int most = std::clamp(bits_of(in.count), 6, 11);
  int passes = (bits + most - 1) / most, width = (bits + passes - 1) / passes, buckets = 1 << width;
  std::vector<int32_t> starts(passes * buckets, 0);
  if (passes % 2) std::swap(to, other);
  int64_t found = 0;
  in.each([&](int64_t bag, int64_t place) {
    if (in.id[place] < 0 || in.id[place] >= t.table_rows) return unknown(bag);
    uint32_t key = t.key(static_cast<uint32_t>(in.id[place]));
    to[found++] = Entry{key} << 32 | static_cast<uint32_t>(in.weight ? place : bag);
    for (int pass = 0; pass < passes; ++pass) ++starts[pass * buckets + ((key >> (pass * width)) & (buckets - 1))];
  });
  for (int pass = 0; pass < passes; ++pass, std::swap(to, other)) {
    int32_t *start = starts.data() + pass * buckets, next = 0, shift = 32 + pass * width;
    for (int b = 0; b < buckets; ++b) next += std::exchange(start[b], next);
    for (int64_t i = 0; i < found; ++i) other[start[(to[i] >> shift) & (buckets - 1)]++] = to[i];
  }
  return found;
}

// The products along the path to the current id.
struct Path {
  const Train& t;
  std::vector<float> product[kMostCores];  // [k]: P_k, [columns[k]][rank[k]], for k = 2 .. d - 1
  int digit[kMostCores];
  int valid = 0;  // products 1 .. valid belong to `digit`

  explicit Path(const Train& train) : t(train) {
    for (int k = 2; k < t.d; ++k) product[k].resize(t.columns[k] * t.rank[k]);
  }
  const float* slice(int k) const { return t.core[k] + static_cast<int64_t>(digit[k]) * t.slice(k); }
  const float* at(int k) const { return k == 1 ? slice(0) : product[k].data(); }  // P_1 is in the first core itself
  // How many leading digits of `next`, of the first d - 1, are those of the path.
  int shared(const int* next) const {
    int k = 0;
    while (k < valid && next[k] == digit[k]) ++k;
    return k;
  }
  void move(const int* next) {
    int same = shared(next);
    std::copy(next, next + t.d, digit);
    for (int k = std::max(same + 1, 2); k < t.d; ++k) times(k - 1, at(k - 1), product[k].data());
    valid = t.d - 1;
  }
  void row(float* out) const { times(t.d - 1, at(t.d - 1), out); }  // of the current id, [columns][n_d]

 private:
  void times(int k, const float* before, float* out) const {
    int width = t.n[k] * t.rank[k + 1], inner = t.rank[k];
    multiply(t.columns[k], width, inner, {before, 1, inner}, slice(k), width, out, width, false);
  }
};

ffi::Error read(ffi::RemainingArgs& arguments, int64_t table_rows, Train& t) {
  t.d = static_cast<int>(arguments.size());
  t.table_rows = table_rows;
  if (t.d < 2 || t.d > kMostCores) return ffi::Error::InvalidArgument("tensor train: 2 to 8 cores");
  t.columns[0] = t.below = 1;
  for (int k = 0; k < t.d; ++k) {
    auto core = arguments.get<ffi::Buffer<ffi::F32>>(k);
    if (!core.has_value()) return core.error();
    auto dims = core->dimensions();
    t.m[k] = static_cast<int>(dims[0]);
    t.rank[k] = static_cast<int>(dims[1]);
    t.n[k] = static_cast<int>(dims[2]);
    t.rank[k + 1] = static_cast<int>(dims[3]);
    t.columns[k + 1] = t.columns[k] * t.n[k];
    t.by_m[k] = Divisor(t.m[k]);
    if (k > 1) t.below *= t.m[k];
    t.core[k] = core->typed_data();
  }
  t.by_below = Divisor(t.below);
  return ffi::Error::Success();
}

// Calls visit(digits, first, last) for each distinct id, whose entries those from `first` to before `last` are.
template <class Visit>
inline void walk(const Train& t, const Entry* entries, int64_t count, Visit visit) {
  int digit[kMostCores];
  for (int64_t first = 0, last; first < count; first = last) {
    uint32_t key = key_of(entries[first]);
    for (last = first + 1; last < count && key_of(entries[last]) == key;) ++last;
    t.digits(key, digit);
    visit(digit, first, last);
  }
}

// Calls use(f) with the bag and the weight of entries i, as functions of i: one way for ids with weights, one without.
template <class Use>
inline void entries_as(const Bags& in, const Entry* entries, Use use) {
  if (in.weight) {
    auto bags = room<int32_t>(in.count);
    int32_t* bag = bags.get();
    in.each([&](int64_t b, int64_t place) { bag[place] = static_cast<int32_t>(b); });
    use([=](int64_t i) { return static_cast<int64_t>(bag[static_cast<uint32_t>(entries[i])]); },
        [=](int64_t i) { return in.weight[static_cast<uint32_t>(entries[i])]; });
  } else {
    use([=](int64_t i) { return static_cast<int64_t>(static_cast<uint32_t>(entries[i])); }, [](int64_t) { return 1.0f; });
  }
}

// The sums of bags into out [bags][features]. The entries are left in `handed`, if there is room for `all` of them.
void sums(const Train& t, const Bags& in, float* out, Entry* handed, int64_t all) {
  int features = t.features();
  auto own = room<Entry>(handed ? 0 : in.count);
  Entry* entries = handed ? handed : own.get();
  std::memset(out, 0, sizeof(float) * in.bags * features);
  int64_t known = sorted(t, in, entries, [&](int64_t bag) {
    std::fill_n(out + bag * features, features, std::numeric_limits<float>::quiet_NaN());
  });
  if (handed) std::fill(handed + known, handed + all, kNone);
  Path path(t);
  std::vector<float> row(features);
  entries_as(in, entries, [&](auto bag, auto weight) {
    walk(t, entries, known, [&](const int* digit, int64_t first, int64_t last) {
      path.move(digit);
      path.row(row.data());
      scatter(row.data(), features, last - first, [&](int64_t i) { return out + bag(first + i) * features; },
              [&](int64_t i) { return weight(first + i); });
    });
  });
}

// What backward adds to, beside the walk.
struct Gradients {
  const Train& t;
  Path path;
  std::vector<float> from_above[kMostCores];  // [k]: of P_k, [columns[k]][rank[k]], for k = 2 .. d - 1
  std::vector<float> second;                  // the turned slice of the second core, if it is not the last
  std::unique_ptr<float[]> held;              // where the next two lie
  float* turned[kMostCores];                  // [k]: core k with each slice as [n_k R_k][R_{k-1}], for k = 2 .. d - 1
  float* of_last;                             // gradient of the last core, slices as [n_d][R_{d-1}]
  float* out[kMostCores];
  int begun = 0;  // slices of the second core whose gradients have been begun: those before are zero or done

  Gradients(const Train& train, float* const* outs) : t(train), path(train), second(t.d > 2 ? t.slice(1) : 0) {
    std::copy(outs, outs + t.d, out);
    for (int k = 2; k < t.d; ++k) from_above[k].assign(t.columns[k] * t.rank[k], 0.0f);
    int turned_from = std::min(2, t.d - 1);
    int64_t all = t.size(t.d - 1);
    for (int k = turned_from; k < t.d; ++k) all += t.size(k);
    held = room<float>(all);
    float* next = held.get();
    of_last = std::exchange(next, next + t.size(t.d - 1));
    std::memset(of_last, 0, sizeof(float) * t.size(t.d - 1));
    for (int k = turned_from; k < t.d; ++k) {
      turned[k] = std::exchange(next, next + t.size(k));
      for (int i = 0; i < t.m[k]; ++i) turn(k, i, turned[k] + static_cast<int64_t>(i) * t.slice(k));
    }
    for (int k = 0; k < t.d - 1; ++k)
      if (k != 1) std::memset(out[k], 0, sizeof(float) * t.size(k));
  }
  void turn(int k, int digit, float* to) const {
    transpose(t.rank[k], t.n[k] * t.rank[k + 1], t.core[k] + static_cast<int64_t>(digit) * t.slice(k), to);
  }
  // Begins the gradients of the second core's slices up to this one: all others would come into the cache twice.
  void begin(int before) {
    if (t.d == 2 || before <= begun) return;
    std::memset(out[1] + static_cast<int64_t>(begun) * t.slice(1), 0, sizeof(float) * (before - begun) * t.slice(1));
    begun = before;
  }
  void move(const int* digit) {
    leave(path.shared(digit));
    if (t.d > 2 && digit[1] >= begun) {
      begin(digit[1] + 1);
      turn(1, digit[1], second.data());
    }
    path.move(digit);
  }
  const float* turned_slice(int k) const {
    return k == 1 && t.d > 2 ? second.data() : turned[k] + static_cast<int64_t>(path.digit[k]) * t.slice(k);
  }
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
      multiply(columns, before, width, {own, 1, width}, turned_slice(k - 1), before, of_product(k - 1), before, true);
      std::memset(own, 0, sizeof(float) * columns * width);
    }
  }
  void row(const float* gradient) {  // of the current id's row, [columns][n_d]
    int k = t.d - 1, n = t.n[k], r = t.rank[k], columns = t.columns[k];
    multiply(columns, r, n, {gradient, 1, n}, turned_slice(k), r, of_product(k), r, true);
    multiply(n, r, columns, {gradient, n, 1}, path.at(k), r, of_last + static_cast<int64_t>(path.digit[k]) * t.slice(k), r, true);
  }
  void finish() {
    leave(0);
    begin(t.m[1]);
    int k = t.d - 1;
    for (int64_t i = 0; i < t.m[k]; ++i) transpose(t.n[k], t.rank[k], of_last + i * t.slice(k), out[k] + i * t.slice(k));
  }
};

// The gradients of the cores, and of the weights if there are any, from `above` [bags][features].
void gradients(const Train& t, const Bags& in, const Entry* entries, int64_t known, const float* above,
               float* of_weights, float* const* outs) {
  int features = t.features();
  std::vector<float> sum(features), row(features);
  Gradients g(t, outs);
  entries_as(in, entries, [&](auto bag, auto weight) {
    walk(t, entries, known, [&](const int* digit, int64_t first, int64_t last) {
      g.move(digit);
      gather(sum.data(), features, last - first, [&](int64_t i) { return above + bag(first + i) * features; },
             [&](int64_t i) { return weight(first + i); });
      g.row(sum.data());
      if (!in.weight) return;
      g.path.row(row.data());
      for (int64_t i = first; i < last; ++i) {
        float dot = 0.0f;
        for (int j = 0; j < features; ++j) dot += row[j] * above[bag(i) * features + j];
        of_weights[static_cast<uint32_t>(entries[i])] = dot;
      }
    });
  });
  g.finish();
}

using Ids = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Entries = ffi::Buffer<ffi::U32>;  // [ids][2], or empty

Bags bags_of(const Ids& ids, const Ids& offsets, const Floats& weights) {
  return Bags(ids.typed_data(), offsets.typed_data(), weights.element_count() ? weights.typed_data() : nullptr,
              static_cast<int64_t>(ids.element_count()), static_cast<int64_t>(offsets.element_count()) - 1);
}

ffi::Error forward(Ids ids, Ids offsets, Floats weights, ffi::RemainingArgs cores, ffi::Result<Floats> out,
                   ffi::Result<Entries> entries, int64_t table_rows) {
  Train t;
  if (ffi::Error error = read(cores, table_rows, t); error.failure()) return error;
  int64_t room = static_cast<int64_t>(entries->element_count()) / 2;
  Entry* handed = room ? static_cast<Entry*>(entries->untyped_data()) : nullptr;
  sums(t, bags_of(ids, offsets, weights), out->typed_data(), handed, room);
  return ffi::Error::Success();
}

ffi::Error backward(Ids ids, Ids offsets, Floats weights, Entries entries, Floats above, ffi::RemainingArgs cores,
                    ffi::Result<Floats> weights_out, ffi::RemainingRets cores_out, int64_t table_rows) {
  Train t;
  if (ffi::Error error = read(cores, table_rows, t); error.failure()) return error;
  float* outs[kMostCores];
  for (int k = 0; k < t.d; ++k) {
    auto core = cores_out.get<Floats>(k);
    if (!core.has_value()) return core.error();
    outs[k] = (*core)->typed_data();
  }
  if (weights.element_count()) std::memset(weights_out->typed_data(), 0, sizeof(float) * weights.element_count());
  const Entry* given = static_cast<const Entry*>(entries.untyped_data());
  int64_t known = std::lower_bound(given, given + entries.element_count() / 2, kNone) - given;
  gradients(t, bags_of(ids, offsets, weights), given, known, above.typed_data(), weights_out->typed_data(), outs);
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
                                  .Ret<Entries>()
                                  .Attr<int64_t>("table_rows"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_tt_backward, backward,
                              ffi::Ffi::Bind()
                                  .Arg<Ids>()
                                  .Arg<Ids>()
                                  .Arg<Floats>()
                                  .Arg<Entries>()
                                  .Arg<Floats>()
                                  .RemainingArgs()
                                  .Ret<Floats>()
                                  .RemainingRets()
                                  .Attr<int64_t>("table_rows"));
