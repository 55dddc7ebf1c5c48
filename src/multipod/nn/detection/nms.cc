// Greedy non-maximum suppression on one CPU core, for jax.ffi; the reference is nms.py.
//
// Boxes come sorted, the best first. Each that still stands clears those behind it in one pass without branches, which
// the compiler makes into vector instructions. What is cleared is taken out of the arrays now and then, so that later
// passes are shorter.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"

// An IoU is compared with a threshold: it must be rounded as XLA rounds it.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kPassesBetweenPackings = 32;

struct Columns {
  std::vector<float> x0, y0, x1, y1, area;
  std::vector<int32_t> group, place;
  std::vector<int32_t> stands;  // as wide as the others, for the same vectors

  explicit Columns(int64_t n) : x0(n), y0(n), x1(n), y1(n), area(n), group(n), place(n), stands(n) {}

  void move(int64_t to, int64_t from) {
    x0[to] = x0[from], y0[to] = y0[from], x1[to] = x1[from], y1[to] = y1[from], area[to] = area[from];
    group[to] = group[from], place[to] = place[from], stands[to] = stands[from];
  }
};

template <bool kInclusive>
void Clear(Columns& c, int64_t i, int64_t n, float threshold) {
  const float x0 = c.x0[i], y0 = c.y0[i], x1 = c.x1[i], y1 = c.y1[i], area = c.area[i];
  const int32_t group = c.group[i];
  const float *px0 = c.x0.data(), *py0 = c.y0.data(), *px1 = c.x1.data(), *py1 = c.y1.data(), *parea = c.area.data();
  const int32_t* pgroup = c.group.data();
  int32_t* stands = c.stands.data();
  for (int64_t j = i + 1; j < n; ++j) {
    float width = std::min(x1, px1[j]) - std::max(x0, px0[j]);
    float height = std::min(y1, py1[j]) - std::max(y0, py0[j]);
    width = width > 0 ? width : 0;
    height = height > 0 ? height : 0;
    const float shared = width * height;
    const float joined = area + parea[j] - shared;
    const float iou = joined > 0 ? shared / (joined > 0 ? joined : 1) : 0;
    const bool over = kInclusive ? iou >= threshold : iou > threshold;
    stands[j] &= ~static_cast<int32_t>(over & (pgroup[j] == group));
  }
}

// Moves what stands from `first` on to the front of it; returns where it ends.
int64_t Pack(Columns& c, int64_t first, int64_t n) {
  int64_t end = first;
  for (int64_t j = first; j < n; ++j) {
    if (c.stands[j]) c.move(end++, j);
  }
  return end;
}

void Suppress(const float* boxes, const bool* valid, const int32_t* groups, int64_t n, float threshold, bool inclusive,
              Columns& c, int32_t* found, int64_t count) {
  int64_t m = 0;
  for (int64_t k = 0; k < n; ++k) {
    if (!valid[k]) continue;
    const float* box = boxes + 4 * k;
    c.x0[m] = box[0], c.y0[m] = box[1], c.x1[m] = box[2], c.y1[m] = box[3];
    c.area[m] = std::max(box[2] - box[0], 0.0f) * std::max(box[3] - box[1], 0.0f);
    c.group[m] = groups[k], c.place[m] = static_cast<int32_t>(k), c.stands[m] = 1;
    ++m;
  }
  int64_t number = 0;
  for (int64_t i = 0; i < m && number < count; ++i) {
    if (!c.stands[i]) continue;
    found[number++] = c.place[i];
    inclusive ? Clear<true>(c, i, m, threshold) : Clear<false>(c, i, m, threshold);
    if (number % kPassesBetweenPackings == 0) m = Pack(c, i + 1, m);
  }
  std::fill(found + number, found + count, -1);
}

ffi::Error Nms(ffi::Buffer<ffi::F32> boxes, ffi::Buffer<ffi::PRED> valid, ffi::Buffer<ffi::S32> groups,
               ffi::ResultBuffer<ffi::S32> found, float threshold, bool inclusive) {
  const int64_t n = valid.dimensions().back(), count = found->dimensions().back();
  const int64_t images = static_cast<int64_t>(valid.element_count()) / n;  // nms.py calls with one box or more
  Columns columns(n);
  for (int64_t k = 0; k < images; ++k) {
    Suppress(boxes.typed_data() + 4 * n * k, valid.typed_data() + n * k, groups.typed_data() + n * k, n, threshold,
             inclusive, columns, found->typed_data() + count * k, count);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(multipod_nms, Nms,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<float>("threshold")
                                  .Attr<bool>("inclusive"));
