/* PRELU: below zero the input times a weight of its own; the weights may be spread. */
#include "binary.h"

#define INNER(NAME, T, A, EXPRESSION) \
    static void NAME(const struct mpm_binary *o, const void *pa, ptrdiff_t step_a, const void *pb, ptrdiff_t step_b, \
                     void *out, uint32_t count) { \
        const T *a = pa; \
        const A *b = pb; \
        T *to = out; \
        (void)o; \
        for (; count > 0; count--, a += step_a, b += step_b) { \
            const T x = *a; \
            const A alpha = *b; \
            *to++ = (T)(EXPRESSION); \
        } \
    }

/* a_multiplier: of the input; b_multiplier: of input times weight. */
static int32_t integer(const struct mpm_binary *o, int32_t x, int32_t alpha) {
    x += o->a_zero;
    x = x >= 0 ? mpm_scaled(x, o->a_multiplier, o->a_shift)
               : mpm_scaled(x * (alpha + o->b_zero), o->b_multiplier, o->b_shift);
    return mpm_clamp(mpm_wrapping_add(x, o->out_zero), o->low, o->high);
}

INNER(prelu_s8, int8_t, int8_t, integer(o, x, alpha))
INNER(prelu_s16, int16_t, int8_t, integer(o, x, alpha))
INNER(prelu_f32, float, float, x >= 0.0f ? x : x * alpha)

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, alpha, out;
    struct mpm_binary *o;
    struct mpm_multiplier m;
    MPM_TRY(mpm_prepare_binary(p, MPM_OWN_TYPES, &o, &in, &alpha, &out));
    MPM_NEED(p, in.type == out.type && in.count == out.count, "input and output differ in type or shape");
    MPM_SUPPORT(p, alpha.type == (in.type == MPM_INT16 ? MPM_INT8 : in.type),
                "the weights must have the input's type, int8 for int16");
    o->inner = in.type == MPM_INT8      ? prelu_s8
               : in.type == MPM_INT16   ? prelu_s16
               : in.type == MPM_FLOAT32 ? prelu_f32
                                        : NULL;
    MPM_SUPPORT(p, o->inner != NULL, "this type is not supported here");
    mpm_may_overlay(p, 0);
    if (in.type == MPM_FLOAT32) return MPM_OK;
    MPM_NEED(p, in.scale > 0 && alpha.scale > 0 && out.scale > 0, "an input or the output has no scale");
    m = mpm_multiplier_of(in.scale, 1.0f, out.scale);
    o->a_multiplier = m.value;
    o->a_shift = (int8_t)m.shift;
    m = mpm_multiplier_of(in.scale, alpha.scale, out.scale);
    o->b_multiplier = m.value;
    o->b_shift = (int8_t)m.shift;
    o->a_zero = -in.zero_point;
    o->b_zero = -alpha.zero_point;
    o->out_zero = out.zero_point;
    o->low = in.type == MPM_INT8 ? -128 : -32768;
    o->high = -o->low - 1;
    return MPM_OK;
}

const struct mpm_kernel mpm_prelu = {MPM_OP_PRELU, MPM_ANY_TYPE, 0, NULL, prepare};
