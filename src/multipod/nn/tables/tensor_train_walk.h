// The walk over the ids of tensor-train bags in depth, forward and backward; the reference is tensor_train_bag.jax_bag.
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

#pragma once

#include "tensor_train_ids.h"
#include "tensor_train_math.h"

#include <cstring>

namespace {

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

// Calls visit(digits, first, last) for each distinct id of the entries from `first` to before `end`; those with this id
// are the entries from its `first` to before its `last`.
template <class Visit>
inline void walk(const Train& t, const Entry* entries, int64_t first, int64_t end, Visit visit) {
  int digit[kMostCores];
  for (int64_t last; first < end; first = last) {
    uint32_t key = key_of(entries[first]);
    for (last = first + 1; last < end && key_of(entries[last]) == key;) ++last;
    t.digits(key, digit);
    visit(digit, first, last);
  }
}

// Adds the rows of the entries from `first` to before `last` to their bags in out [bags][features].
void add_sums(const Train& t, const Ordered& in, int64_t first, int64_t last, float* out) {
  int features = t.features();
  Path path(t);
  std::vector<float> row(features);
  in.as([&](auto bag, auto weight) {
    walk(t, in.entries, first, last, [&](const int* digit, int64_t from, int64_t to) {
      path.move(digit);
      path.row(row.data());
      scatter(row.data(), features, to - from, [&](int64_t i) { return out + bag(from + i) * features; },
              [&](int64_t i) { return weight(from + i); });
    });
  });
}

// Where the gradients of cores lie: those of all slices, or of some, in the order of their digits.
struct Places {
  const int32_t* of[kMostCores] = {};  // [k][digit]: the slice's place among those; none: all are there
  int slices[kMostCores];              // how many there are

  explicit Places(const Train& t) { std::copy(t.m, t.m + t.d, slices); }
  int at(int k, int digit) const { return of[k] ? of[k][digit] : digit; }
};

// Core k with each slice as [n_k R_k][R_{k-1}], for those that are turned once for the whole walk: the last, and all from
// the third on. Slices of the second core, if it is not the last, are turned when the walk comes to them.
struct Turned {
  const Train& t;
  std::unique_ptr<float[]> held;
  float* core[kMostCores];

  explicit Turned(const Train& train) : t(train) {
    int first = std::min(2, t.d - 1);
    int64_t all = 0;
    for (int k = first; k < t.d; ++k) all += t.size(k);
    held = room<float>(all);
    float* next = held.get();
    for (int k = first; k < t.d; ++k) {
      core[k] = std::exchange(next, next + t.size(k));
      for (int i = 0; i < t.m[k]; ++i) turn(k, i, core[k] + static_cast<int64_t>(i) * t.slice(k));
    }
  }
  void turn(int k, int digit, float* to) const {
    transpose(t.rank[k], t.n[k] * t.rank[k + 1], t.core[k] + static_cast<int64_t>(digit) * t.slice(k), to);
  }
};

// A walk's gradients, or those of a part of it: the entries of some values of the second digit. Gradients of the second
// core are begun when the walk comes to them, if that core is not the last; all others are added to what is there. That
// of the last core is kept with its slices as [n_d][R_{d-1}].
struct Gradients {
  const Train& t;
  const Turned& turned;
  const Places& places;
  Path path;
  std::vector<float> from_above[kMostCores];  // [k]: of P_k, [columns[k]][rank[k]], for k = 2 .. d - 1
  std::vector<float> second;                  // the turned slice of the second core, if it is not the last
  float* out[kMostCores];
  int begun;  // the first of the second core's slices whose gradient has not been begun

  Gradients(const Turned& cores, const Places& where, float* const* outs, int begin_at)
      : t(cores.t), turned(cores), places(where), path(t), second(t.d > 2 ? t.slice(1) : 0), begun(begin_at) {
    std::copy(outs, outs + t.d, out);
    for (int k = 2; k < t.d; ++k) from_above[k].assign(t.columns[k] * t.rank[k], 0.0f);
  }
  float* of_slice(int k) const {  // on the path
    return out[k] + static_cast<int64_t>(places.at(k, path.digit[k])) * t.slice(k);
  }
  // Begins the gradients of the second core's slices up to this one: all others would come into the cache twice.
  void begin(int before) {
    if (t.d == 2 || before <= begun) return;
    std::memset(out[1] + static_cast<int64_t>(begun) * t.slice(1), 0, sizeof(float) * (before - begun) * t.slice(1));
    begun = before;
  }
  void move(const int* digit) {
    leave(path.shared(digit));
    if (t.d > 2 && (!path.valid || digit[1] != path.digit[1])) {
      begin(places.at(1, digit[1]) + 1);
      turned.turn(1, digit[1], second.data());
    }
    path.move(digit);
  }
  const float* turned_slice(int k) const {
    return k == 1 && t.d > 2 ? second.data() : turned.core[k] + static_cast<int64_t>(path.digit[k]) * t.slice(k);
  }
  float* of_product(int k) const { return k == 1 ? of_slice(0) : const_cast<float*>(from_above[k].data()); }
  // Leaves the nodes of the path below the first `kept` digits, the deepest first.
  void leave(int kept) {
    for (int k = path.valid; k > std::max(kept, 1); --k) {
      int before = t.rank[k - 1], width = t.n[k - 1] * t.rank[k], columns = t.columns[k - 1];
      float* own = from_above[k].data();  // [columns][width]
      multiply(before, width, columns, {path.at(k - 1), before, 1}, own, width, of_slice(k - 1), width, true);
      multiply(columns, before, width, {own, 1, width}, turned_slice(k - 1), before, of_product(k - 1), before, true);
      std::memset(own, 0, sizeof(float) * columns * width);
    }
  }
  void row(const float* gradient) {  // of the current id's row, [columns][n_d]
    int k = t.d - 1, n = t.n[k], r = t.rank[k], columns = t.columns[k];
    multiply(columns, r, n, {gradient, 1, n}, turned_slice(k), r, of_product(k), r, true);
    multiply(n, r, columns, {gradient, n, 1}, path.at(k), r, of_slice(k), r, true);
  }
  void finish(int end) {  // `end`: begins the second core's slices up to here
    leave(0);
    begin(end);
  }
};

// Adds the gradients of the entries from `first` to before `last`, from `above` [bags][features], to g, and writes those
// of the weights, if there are any.
void add_gradients(Gradients& g, const Ordered& in, int64_t first, int64_t last, const float* above, float* of_weights) {
  int features = g.t.features();
  std::vector<float> sum(features), row(features);
  in.as([&](auto bag, auto weight) {
    walk(g.t, in.entries, first, last, [&](const int* digit, int64_t from, int64_t to) {
      g.move(digit);
      gather(sum.data(), features, to - from, [&](int64_t i) { return above + bag(from + i) * features; },
             [&](int64_t i) { return weight(from + i); });
      g.row(sum.data());
      if (!of_weights) return;
      g.path.row(row.data());
      for (int64_t i = from; i < to; ++i) {
        float dot = 0.0f;
        for (int j = 0; j < features; ++j) dot += row[j] * above[bag(i) * features + j];
        of_weights[static_cast<uint32_t>(in.entries[i])] = dot;
      }
    });
  });
}

// A part of a walk: entries, and places of the second core's slices.
struct Part {
  int64_t first, last;
  int begin, end;
};

// The gradients of the cores, and of the weights if there are any, of a walk whose parts `run` does, each by a call of
// its argument with the part's number: one after the other or at the same time. Parts have slices of the second core of
// their own; of the other cores each has a sum, and they are added in the order of the parts.
template <class Run>
void gradients(const Train& t, const Ordered& in, const Places& places, const std::vector<Part>& parts,
               const float* above, float* of_weights, float* const* outs, Run run) {
  int last = t.d - 1;
  int64_t sizes[kMostCores], own = 0;  // of gradients; `own`: of those that each part has a sum of
  for (int k = 0; k < t.d; ++k) {
    sizes[k] = static_cast<int64_t>(places.slices[k]) * t.slice(k);
    if (k != 1) own += sizes[k];
  }
  Turned turned(t);
  int64_t extra = static_cast<int64_t>(parts.size()) - 1;
  auto held = room<float>(sizes[last] + own * extra);
  std::memset(held.get(), 0, sizeof(float) * sizes[last]);  // the others' when they begin, in their own caches
  for (int k = 0; k < last; ++k)
    if (k != 1) std::memset(outs[k], 0, sizeof(float) * sizes[k]);
  auto sums_of = [&](int64_t part, float** to) {
    float* next = held.get() + sizes[last] + own * (part - 1);
    for (int k = 0; k < t.d; ++k) {
      if (k == 1 || part == 0)
        to[k] = k == last ? held.get() : outs[k];
      else
        to[k] = std::exchange(next, next + sizes[k]);
    }
  };
  run([&](int64_t part) {
    float* to[kMostCores];
    sums_of(part, to);
    if (part) std::memset(to[0], 0, sizeof(float) * own);
    Gradients g(turned, places, to, parts[part].begin);
    add_gradients(g, in, parts[part].first, parts[part].last, above, of_weights);
    g.finish(parts[part].end);
  });
  float *sum[kMostCores], *to[kMostCores];
  sums_of(0, sum);
  for (int64_t part = 1; part <= extra; ++part) {
    sums_of(part, to);
    for (int k = 0; k < t.d; ++k)
      for (int64_t i = 0; k != 1 && i < sizes[k]; ++i) sum[k][i] += to[k][i];
  }
  for (int64_t i = 0; i < places.slices[last]; ++i)
    transpose(t.n[last], t.rank[last], sum[last] + i * t.slice(last), outs[last] + i * t.slice(last));
}

}  // namespace
