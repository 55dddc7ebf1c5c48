// The ids of a call to a tensor-train table: their digits, their bags, and their order in the walk of tensor_train_walk.h.
//
// Shapes of a core: [m_k][R_{k-1}][n_k][R_k], float32.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

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

  // Takes d cores of the shapes [k][4]: m_k, R_{k-1}, n_k, R_k. False if there are too many or too few.
  bool set(int cores, int64_t rows, const int32_t (*shape)[4], const float* const* data) {
    d = cores, table_rows = rows;
    if (d < 2 || d > kMostCores) return false;
    columns[0] = below = 1;
    for (int k = 0; k < d; ++k) {
      m[k] = shape[k][0], rank[k] = shape[k][1], n[k] = shape[k][2], rank[k + 1] = shape[k][3];
      columns[k + 1] = columns[k] * n[k];
      by_m[k] = Divisor(m[k]);
      if (k > 1) below *= m[k];
      core[k] = data[k];
    }
    by_below = Divisor(below);
    return true;
  }
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

constexpr int64_t kNoId = std::numeric_limits<int64_t>::min();

// The ids of a call, int32_t or int64_t, and the bags that they are in.
template <class Id>
struct Bags {
  const Id *id, *offset;  // no offsets: there are `wide` ids in each bag
  const float* weight;    // none: all are one
  int64_t count, bags;    // count: ids before the padding
  int64_t offsets = 0;    // how many there are: `bags`, or one more, which is where the last bag ends
  int64_t wide = 0;
  int64_t skip = kNoId;  // an id that is not looked up, and counts as not there

  int64_t end(int64_t bag) const {
    if (!offset) return (bag + 1) * wide;
    return bag + 1 < offsets ? std::min<int64_t>(offset[bag + 1], count) : count;
  }
  // Calls use(bag, place) for each id; in offsets that go back, which only a caller's mistake makes, for none twice.
  template <class Use>
  void each(Use use) const {
    int64_t place = 0;
    for (int64_t b = 0; b < bags; ++b) {
      if (offset) place = std::max<int64_t>(place, offset[b]);
      for (int64_t last = end(b); place < last; ++place)
        if (id[place] != skip) use(b, place);
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

// How many of `all` entries come before the padding.
inline int64_t known_of(const Entry* entries, int64_t all) {
  return std::lower_bound(entries, entries + all, kNone) - entries;
}

inline int bits_of(uint64_t number) {
  int bits = 0;
  for (; number; number >>= 1) ++bits;
  return bits;
}

// Writes the entries in the order of the walk, and returns how many; `unknown(bag, place)` is called for ids outside the
// table. A radix sort, stable: equal ids stay in the order of their places.
template <class Id, class Unknown>
int64_t sorted(const Train& t, const Bags<Id>& in, Entry* to, Unknown unknown) {
  auto second = room<Entry>(in.count);
  Entry* other = second.get();
  int bits = std::max(1, bits_of(t.below * t.m[0] * t.m[1] - 1));
  int most = std::clamp(bits_of(in.count), 6, 11);
  int passes = (bits + most - 1) / most, width = (bits + passes - 1) / passes, buckets = 1 << width;
  std::vector<int32_t> starts(passes * buckets, 0);
  if (passes % 2) std::swap(to, other);
  int64_t found = 0;
  in.each([&](int64_t bag, int64_t place) {
    if (in.id[place] < 0 || in.id[place] >= t.table_rows) return unknown(bag, place);
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

// The entries of a call in the order of the walk, and what their lower halves mean.
struct Ordered {
  const Entry* entries;
  int64_t known = 0;                       // how many there are
  const float *weight = nullptr;           // of a place; none: entries have their bags, and not their places
  const float *scale = nullptr;            // of a bag, where there are no weights; none: one
  std::unique_ptr<int32_t[]> bag_of_place = nullptr;  // where there are weights

  template <class Id>
  void take(const Bags<Id>& in) {
    weight = in.weight;
    if (!weight) return;
    bag_of_place = room<int32_t>(in.count);
    in.each([&](int64_t b, int64_t place) { bag_of_place[place] = static_cast<int32_t>(b); });
  }
  // Calls use(f, g) with the bag and the weight of entries i, as functions of i: a way for each kind of entries.
  template <class Use>
  void as(Use use) const {
    auto low = [e = entries](int64_t i) { return static_cast<uint32_t>(e[i]); };
    auto own = [=](int64_t i) { return static_cast<int64_t>(low(i)); };
    if (weight)
      use([=, b = bag_of_place.get()](int64_t i) { return static_cast<int64_t>(b[low(i)]); },
          [=, w = weight](int64_t i) { return w[low(i)]; });
    else if (scale)
      use(own, [=, s = scale](int64_t i) { return s[low(i)]; });
    else
      use(own, [](int64_t) { return 1.0f; });
  }
};

}  // namespace
