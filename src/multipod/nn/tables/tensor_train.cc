// Embedding bags from tensor-train cores on one CPU core, for jax.ffi; the reference is tensor_train_bag.jax_bag, the work
// is done in tensor_train_walk.h.

#include "tensor_train_walk.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error read(ffi::RemainingArgs& arguments, int64_t table_rows, Train& t) {
  int d = static_cast<int>(arguments.size());
  int32_t shape[kMostCores][4];
  const float* data[kMostCores];
  for (int k = 0; k < std::min(d, kMostCores); ++k) {
    auto core = arguments.get<ffi::Buffer<ffi::F32>>(k);
    if (!core.has_value()) return core.error();
    std::copy(core->dimensions().begin(), core->dimensions().end(), shape[k]);
    data[k] = core->typed_data();
  }
  if (!t.set(d, table_rows, shape, data)) return ffi::Error::InvalidArgument("tensor train: 2 to 8 cores");
  return ffi::Error::Success();
}

using Ids = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Entries = ffi::Buffer<ffi::U32>;  // [ids][2], or empty

Bags<int32_t> bags_of(const Ids& ids, const Ids& offsets, const Floats& weights) {
  Bags<int32_t> in;
  in.id = ids.typed_data(), in.offset = offsets.typed_data();
  in.weight = weights.element_count() ? weights.typed_data() : nullptr;
  in.offsets = static_cast<int64_t>(offsets.element_count()), in.bags = in.offsets - 1;
  in.count = std::clamp<int64_t>(in.offset[in.bags], 0, static_cast<int64_t>(ids.element_count()));
  return in;
}

// The sums of bags into out [bags][features]. The entries are left in `handed`, if there is room for `all` of them.
void sums(const Train& t, const Bags<int32_t>& in, float* out, Entry* handed, int64_t all) {
  int features = t.features();
  auto own = room<Entry>(handed ? 0 : in.count);
  Entry* entries = handed ? handed : own.get();
  std::memset(out, 0, sizeof(float) * in.bags * features);
  Ordered ordered{entries};
  ordered.known = sorted(t, in, entries, [&](int64_t bag, int64_t) {
    std::fill_n(out + bag * features, features, std::numeric_limits<float>::quiet_NaN());
  });
  if (handed) std::fill(handed + ordered.known, handed + all, kNone);
  ordered.take(in);
  add_sums(t, ordered, 0, ordered.known, out);
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
  float* of_weights = weights.element_count() ? weights_out->typed_data() : nullptr;
  if (of_weights) std::memset(of_weights, 0, sizeof(float) * weights.element_count());
  const Entry* given = static_cast<const Entry*>(entries.untyped_data());
  Ordered ordered{given, known_of(given, static_cast<int64_t>(entries.element_count()) / 2)};
  ordered.take(bags_of(ids, offsets, weights));
  gradients(t, ordered, Places(t), {{0, ordered.known, 0, t.m[1]}}, above.typed_data(), of_weights, outs,
            [](auto part) { part(0); });
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
