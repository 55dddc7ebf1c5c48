// Embedding bags from tensor-train cores as plain C functions, on several threads; the work is done in
// tensor_train_walk.h. Nothing is held between calls, threads neither, so that a process may fork.
//
// Each thread walks the entries of some values of the second digit. A bag is the sum of the threads' sums, in the order
// of the threads: with one number of threads, results do not vary from run to run.

#include "tensor_train_walk.h"

#include <exception>
#include <new>
#include <system_error>
#include <thread>

extern "C" {

struct multipod_tt_call {
  const int32_t (*shape)[4];  // of each core: m_k, R_{k-1}, n_k, R_k
  const float* const* core;
  int64_t cores, rows;         // rows of the table
  const void *id, *offset;     // int32_t or int64_t; no offsets: there are `wide` ids in each bag
  const float* weight;         // [ids]; none: all are one
  int64_t ids, bags, offsets;  // offsets: `bags`, or one more, which is where the last bag ends
  int64_t wide, skip;          // skip: an id that counts as not there; INT64_MIN: none
  int32_t wide_ids, mean;      // 1: ids and offsets are int64_t; 1: the means of bags, without weights
  int64_t threads;             // at most so many
};

}  // extern "C"

namespace {

// What functions return, if not the place of an id outside the table.
enum : int64_t { kDone = -1, kNoMemory = -2, kWrongCores = -3, kWrongOffsets = -4 };

// So many multiplications are worth a thread: 1.2 to 2.5 ms. To begin and end one, and to add what it has summed, takes up
// to 0.15 (two cores of an EPYC of the fourth generation, 2026-11-23).
constexpr double kWorthOfThread = 24e6;

template <class Id>
bool fits(const Bags<Id>& in, int64_t ids) {
  if (std::max(ids, in.bags) > std::numeric_limits<int32_t>::max()) return false;
  if (!in.offset) return in.bags * in.wide <= ids;
  if (in.offsets && in.offset[0]) return false;
  for (int64_t i = 1; i < in.offsets; ++i)
    if (in.offset[i] < in.offset[i - 1]) return false;
  return !in.offsets || in.offset[in.offsets - 1] <= ids;
}

template <class Id>
Bags<Id> bags_of(const multipod_tt_call& call) {
  Bags<Id> in;
  in.id = static_cast<const Id*>(call.id), in.offset = static_cast<const Id*>(call.offset), in.weight = call.weight;
  in.bags = call.bags, in.offsets = call.offsets, in.wide = call.wide, in.skip = call.skip;
  in.count = in.offset && in.offsets > in.bags ? static_cast<int64_t>(in.offset[in.bags]) : call.ids;
  return in;
}

// One over the number of ids of each bag.
template <class Id>
std::unique_ptr<float[]> shares(const Bags<Id>& in) {
  auto share = room<float>(in.bags);
  if (in.skip == kNoId) {
    for (int64_t b = 0; b < in.bags; ++b)
      share[b] = static_cast<float>(in.end(b) - (!in.offset ? b * in.wide : static_cast<int64_t>(in.offset[b])));
  } else {
    std::fill_n(share.get(), in.bags, 0.0f);
    in.each([&](int64_t bag, int64_t) { share[bag] += 1.0f; });
  }
  for (int64_t b = 0; b < in.bags; ++b) share[b] = 1.0f / std::max(share[b], 1.0f);
  return share;
}

// Multiplications of the entries of a walk, and its parts.
struct Work {
  static constexpr int64_t kBlock = 512;  // entries whose work is counted together

  const Train& t;
  const Entry* entries;
  int64_t known;
  double of_row, of_entry;  // of each distinct id, and of each entry

  Work(const Train& train, const Ordered& in, double times) : t(train), entries(in.entries), known(in.known) {
    double last = static_cast<double>(t.features()) * t.rank[t.d - 1];
    double before = t.d > 2 ? static_cast<double>(t.columns[t.d - 1]) * t.rank[t.d - 1] * t.rank[t.d - 2] : 0;
    of_row = times * (last + before), of_entry = t.features();
  }
  // Parts of about equal work, as many as there are threads and as are worth one.
  std::vector<Part> parts(int64_t threads, const Places& places) const {
    std::vector<Part> found{{0, known, 0, places.slices[1]}};
    if (threads < 2 || (of_row + of_entry) * known < 2 * kWorthOfThread) return found;
    std::vector<double> done{0};  // before each block
    for (int64_t first = 0; first < known; first += kBlock) done.push_back(done.back() + of_block(first));
    int64_t count = std::min({threads, static_cast<int64_t>(done.back() / kWorthOfThread), int64_t{t.m[1]}});
    for (int64_t part = 1; part < count; ++part) {
      int64_t block = std::lower_bound(done.begin(), done.end(), done.back() * part / count) - done.begin();
      int64_t cut = next_second(std::min(block * kBlock, known) - 1);
      if (cut == known) break;
      if (cut == found.back().first) continue;
      int place = places.at(1, second(cut));
      found.back().last = cut, found.back().end = place;
      found.push_back({cut, known, place, places.slices[1]});
    }
    return found;
  }

 private:
  double of_block(int64_t first) const {
    int64_t last = std::min(first + kBlock, known);
    int32_t distinct = first == 0;
    for (int64_t i = std::max<int64_t>(first, 1); i < last; ++i) distinct += key_of(entries[i]) != key_of(entries[i - 1]);
    return of_row * distinct + of_entry * static_cast<double>(last - first);
  }
  int second(int64_t entry) const {
    int digit[kMostCores];
    t.digits(key_of(entries[entry]), digit);
    return digit[1];
  }
  // The first entry behind this one that has another second digit.
  int64_t next_second(int64_t entry) const {
    Entry next = (static_cast<Entry>(second(entry)) + 1) * static_cast<Entry>(t.below) * t.m[0] << 32;
    return std::lower_bound(entries + entry, entries + known, next) - entries;
  }
};

// Calls call(0), call(1), .. at the same time, the first on this thread; what they throw is thrown again.
template <class Call>
void together(int64_t count, Call call) {
  std::vector<std::exception_ptr> thrown(count);
  auto caught = [&](int64_t part) {
    try {
      call(part);
    } catch (...) {
      thrown[part] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(count);
  std::vector<int64_t> left{0};
  left.reserve(count);
  for (int64_t part = 1; part < count; ++part) {
    try {
      threads.emplace_back(caught, part);
    } catch (const std::system_error&) {  // the system gives no more threads
      left.push_back(part);
    }
  }
  for (int64_t part : left) caught(part);
  for (auto& thread : threads) thread.join();
  for (auto& error : thrown)
    if (error) std::rethrow_exception(error);
}

bool read(const multipod_tt_call& call, Train& t) {
  return t.set(static_cast<int>(call.cores), call.rows, call.shape, call.core);
}

template <class Id>
int64_t forward(const multipod_tt_call& call, float* out, Entry* handed) {
  Train t;
  if (!read(call, t)) return kWrongCores;
  Bags<Id> in = bags_of<Id>(call);
  if (!fits(in, call.ids)) return kWrongOffsets;
  auto own = room<Entry>(handed ? 0 : in.count);
  Entry* entries = handed ? handed : own.get();
  int64_t wrong = kDone;
  Ordered ordered{entries};
  ordered.known = sorted(t, in, entries, [&](int64_t, int64_t place) {
    if (wrong == kDone) wrong = place;
  });
  if (wrong != kDone) return wrong;
  if (handed) std::fill(handed + ordered.known, handed + call.ids, kNone);
  ordered.take(in);
  auto scale = call.mean ? shares(in) : nullptr;
  ordered.scale = scale.get();
  int64_t size = in.bags * t.features();
  auto parts = Work(t, ordered, 1).parts(call.threads, Places(t));
  int64_t extra = static_cast<int64_t>(parts.size()) - 1;
  auto held = room<float>(size * extra);
  together(extra + 1, [&](int64_t part) {
    float* to = part ? held.get() + size * (part - 1) : out;
    std::memset(to, 0, sizeof(float) * size);
    add_sums(t, ordered, parts[part].first, parts[part].last, to);
  });
  for (int64_t part = 0; part < extra; ++part)
    for (int64_t i = 0; i < size; ++i) out[i] += held[size * part + i];
  return kDone;
}

template <class Id>
int64_t backward(const multipod_tt_call& call, const Entry* entries, const float* above, float* of_weights,
                 const int32_t* place, const int64_t* slices, float* const* outs) {
  Train t;
  if (!read(call, t)) return kWrongCores;
  Bags<Id> in = bags_of<Id>(call);
  Ordered ordered{entries, known_of(entries, call.ids)};
  ordered.take(in);
  auto scale = call.mean ? shares(in) : nullptr;
  ordered.scale = scale.get();
  if (of_weights) std::memset(of_weights, 0, sizeof(float) * call.ids);
  Places places(t);
  for (int k = 0; place && k < t.d; place += t.m[k++]) places.of[k] = place, places.slices[k] = static_cast<int>(slices[k]);
  auto parts = Work(t, ordered, 3).parts(call.threads, places);
  gradients(t, ordered, places, parts, above, of_weights, outs,
            [&](auto part) { together(static_cast<int64_t>(parts.size()), part); });
  return kDone;
}

template <class Use>
int64_t guarded(Use use) {
  try {
    return use();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace

extern "C" {

// Writes the bags to out [bags][features]. `order` [ids], for backward, may be none. Returns kDone, or what is wrong; of
// ids outside the table the place of the first.
int64_t multipod_tt_bag(const multipod_tt_call* call, float* out, uint64_t* order) {
  return guarded([&] { return call->wide_ids ? forward<int64_t>(*call, out, order) : forward<int32_t>(*call, out, order); });
}

// Which slices of the cores the ids of `order` read: their places among these [m_1 + .. + m_d], or -1; their digits, those
// of core k from m_1 + .. + m_{k-1} on; and how many they are, slices [d].
int64_t multipod_tt_touched(const multipod_tt_call* call, const uint64_t* order, int32_t* places, int64_t* digits,
                            int64_t* slices) {
  return guarded([&] {
    Train t;
    if (!read(*call, t)) return kWrongCores;
    int64_t begin[kMostCores + 1] = {0};
    for (int k = 0; k < t.d; ++k) begin[k + 1] = begin[k] + t.m[k];
    std::fill_n(places, begin[t.d], -1);
    walk(t, order, 0, known_of(order, call->ids), [&](const int* digit, int64_t, int64_t) {
      for (int k = 0; k < t.d; ++k) places[begin[k] + digit[k]] = 0;
    });
    for (int k = 0; k < t.d; ++k) {
      slices[k] = 0;
      for (int i = 0; i < t.m[k]; ++i) {
        if (places[begin[k] + i] < 0) continue;
        digits[begin[k] + slices[k]] = i;
        places[begin[k] + i] = static_cast<int32_t>(slices[k]++);
      }
    }
    return kDone;
  });
}

// Writes the gradients of the cores to outs, and of the weights to of_weights [ids] if there are any, from `above`
// [bags][features]. With `places` and `slices` of multipod_tt_touched, the gradients of the slices that were read alone.
int64_t multipod_tt_bag_backward(const multipod_tt_call* call, const uint64_t* order, const float* above,
                                 float* of_weights, const int32_t* places, const int64_t* slices, float* const* outs) {
  return guarded([&] {
    auto run = call->wide_ids ? backward<int64_t> : backward<int32_t>;
    return run(*call, order, above, of_weights, places, slices, outs);
  });
}

}  // extern "C"
