/* ADD, SUB, MUL, DIV, SQUARED_DIFFERENCE, MAXIMUM, MINIMUM, FLOOR_DIV, FLOOR_MOD, ATAN2. */
#include "binary.h"

#include <math.h>

#define INNER(NAME, T, EXPRESSION) \
    static void NAME(const struct mpm_binary *o, const void *pa, ptrdiff_t step_a, const void *pb, ptrdiff_t step_b, \
                     void *out, uint32_t count) { \
        const T *a = pa, *b = pb; \
        T *to = out; \
        (void)o; \
        for (; count > 0; count--, a += step_a, b += step_b) { \
            const T x = *a, y = *b; \
            *to++ = (T)(EXPRESSION); \
        } \
    }

static float clamp_f32(const struct mpm_binary *o, float x) {
    return x < o->low_f32 ? o->low_f32 : x > o->high_f32 ? o->high_f32 : x;
}
static int32_t clamp_s32(const struct mpm_binary *o, uint32_t x) { return mpm_clamp((int32_t)x, o->low, o->high); }

/* Both inputs in a common, finer unit; the sum or difference of them in the output's. */
static int32_t part_a(const struct mpm_binary *o, int32_t x) {
    return mpm_scaled((int32_t)((uint32_t)(x + o->a_zero) << o->left_shift), o->a_multiplier, o->a_shift);
}
static int32_t part_b(const struct mpm_binary *o, int32_t x) {
    return mpm_scaled((int32_t)((uint32_t)(x + o->b_zero) << o->left_shift), o->b_multiplier, o->b_shift);
}
static int32_t whole(const struct mpm_binary *o, int32_t raw) {
    return mpm_clamp(mpm_wrapping_add(mpm_scaled(raw, o->out_multiplier, o->out_shift), o->out_zero), o->low, o->high);
}
static int32_t product(const struct mpm_binary *o, int32_t x, int32_t y) {
    return whole(o, (x + o->a_zero) * (y + o->b_zero));
}
static int32_t squared(const struct mpm_binary *o, int32_t x, int32_t y) {
    const int32_t d = part_a(o, x) - part_b(o, y);
    return whole(o, (int32_t)((uint32_t)d * (uint32_t)d));
}

INNER(add_s8, int8_t, whole(o, mpm_wrapping_add(part_a(o, x), part_b(o, y))))
INNER(add_s16, int16_t, whole(o, mpm_wrapping_add(part_a(o, x), part_b(o, y))))
INNER(add_s32, int32_t, clamp_s32(o, (uint32_t)x + (uint32_t)y))
INNER(add_f32, float, clamp_f32(o, x + y))
INNER(sub_s8, int8_t, whole(o, mpm_wrapping_add(part_a(o, x), -part_b(o, y))))
INNER(sub_s16, int16_t, whole(o, mpm_wrapping_add(part_a(o, x), -part_b(o, y))))
INNER(sub_s32, int32_t, clamp_s32(o, (uint32_t)x - (uint32_t)y))
INNER(sub_f32, float, clamp_f32(o, x - y))
INNER(mul_s8, int8_t, product(o, x, y))
INNER(mul_s16, int16_t, product(o, x, y))
INNER(mul_s32, int32_t, clamp_s32(o, (uint32_t)x * (uint32_t)y))
INNER(mul_f32, float, clamp_f32(o, x * y))
INNER(div_f32, float, clamp_f32(o, x / y))
/* x / y with the reciprocal of y in fixed point. What is divided by 0 becomes the largest or smallest number. */
static int32_t quotient(const struct mpm_binary *o, int32_t x, int32_t y) {
    int headroom, bits, shift;
    int32_t inverse;
    x += o->a_zero;
    y += o->b_zero;
    if (y < 0) x = -x, y = -y;
    if (y == 0) return x < 0 ? o->low : o->high;
    bits = mpm_leading_zeros((uint32_t)y);
    inverse = mpm_one_over_one_plus((int32_t)(((uint32_t)y << bits) - 0x80000000u));
    headroom = x >= 0 ? mpm_leading_zeros((uint32_t)x) - 1 : mpm_leading_zeros(2u * (uint32_t)-x - 1u);
    shift = o->out_shift - (31 - bits) - headroom;
    x = mpm_high_multiply((int32_t)((uint32_t)x << headroom), inverse);
    /* not mpm_scaled, whose sum would leave int32 here; the reference does not define shifts of more than 31 bits */
    if (shift > 0) x = mpm_high_multiply((int32_t)((uint32_t)x << (shift > 31 ? 31 : shift)), o->out_multiplier);
    else x = shift < -31 ? 0 : mpm_rounding_shift(mpm_high_multiply(x, o->out_multiplier), -shift);
    return mpm_clamp(mpm_wrapping_add(x, o->out_zero), o->low, o->high);
}
static int32_t whole_quotient(const struct mpm_binary *o, int32_t x, int32_t y) {
    if (y == 0) return x < 0 ? o->low : o->high;
    return clamp_s32(o, y == -1 ? 0u - (uint32_t)x : (uint32_t)(x / y));
}

INNER(div_s8, int8_t, quotient(o, x, y))
INNER(div_s32, int32_t, whole_quotient(o, x, y))
INNER(squared_s8, int8_t, squared(o, x, y))
INNER(squared_s16, int16_t, squared(o, x, y))
INNER(squared_s32, int32_t, (int32_t)(((uint32_t)x - (uint32_t)y) * ((uint32_t)x - (uint32_t)y)))
INNER(squared_f32, float, (x - y) * (x - y))
INNER(max_s8, int8_t, x > y ? x : y)
INNER(max_s16, int16_t, x > y ? x : y)
INNER(max_s32, int32_t, x > y ? x : y)
INNER(max_s64, mpm_int64, x > y ? x : y)
INNER(max_f32, float, x > y ? x : y)
INNER(min_s8, int8_t, x < y ? x : y)
INNER(min_s16, int16_t, x < y ? x : y)
INNER(min_s32, int32_t, x < y ? x : y)
INNER(min_s64, mpm_int64, x < y ? x : y)
INNER(min_f32, float, x < y ? x : y)
INNER(floor_div_f32, float, floorf(x / y))

static float floor_mod(float x, float y) {
    const float rest = fmodf(x, y);
    return rest != 0.0f && (y < 0.0f) != (rest < 0.0f) ? rest + y : rest;
}
INNER(floor_mod_f32, float, floor_mod(x, y))
INNER(atan2_f32, float, atan2f(x, y))

struct forms {
    mpm_binary_fn s8, s16, s32, s64, f32;
};

static mpm_binary_fn form_of(const struct forms *f, uint32_t type) {
    switch (type) {
        case MPM_INT8: return f->s8;
        case MPM_INT16: return f->s16;
        case MPM_INT32: return f->s32;
        case MPM_INT64: return f->s64;
        case MPM_FLOAT32: return f->f32;
        default: return NULL;
    }
}

static void into(struct mpm_multiplier m, int32_t *value, int8_t *shift) {
    *value = m.value;
    *shift = (int8_t)m.shift;
}

static void common_unit(struct mpm_binary *o, float a, float b, float out, int square) {
    const float twice = 2 * (a > b ? a : b);
    float unit = (float)(1u << o->left_shift);
    into(mpm_multiplier_of(a, 1.0f, twice), &o->a_multiplier, &o->a_shift);
    into(mpm_multiplier_of(b, 1.0f, twice), &o->b_multiplier, &o->b_shift);
    if (square)
        into(mpm_multiplier_of_double((double)twice * (double)twice /
                                      ((double)(1 << (2 * o->left_shift)) * (double)out)),
             &o->out_multiplier, &o->out_shift);
    else into(mpm_multiplier_of(twice, 1.0f, unit * out), &o->out_multiplier, &o->out_shift);
}

enum kind { ADD, SUB, MUL, DIV, SQUARED, PLAIN };

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p, const struct forms *forms, enum kind kind,
                                        int has_activation) {
    struct mpm_tensor a, b, out;
    struct mpm_binary *o;
    const uint32_t activation = has_activation ? mpm_field_u8(&p->m->file, p->options, 0, 0) : 0;
    MPM_TRY(mpm_prepare_binary(p, MPM_SAME_TYPE, &o, &a, &b, &out));
    o->inner = form_of(forms, a.type);
    MPM_SUPPORT(p, o->inner != NULL, "this type is not supported here");
    if (a.type == MPM_FLOAT32) return mpm_activation_range_f32(p, activation, &o->low_f32, &o->high_f32);
    o->low = INT32_MIN;
    o->high = INT32_MAX;
    if (a.type == MPM_INT32) {
        if (activation != 0) o->low = activation == 2 ? -1 : 0;
        if (activation >= 2) o->high = activation == 2 ? 1 : 6;
    }
    if ((a.type != MPM_INT8 && a.type != MPM_INT16) || kind == PLAIN) return MPM_OK;
    MPM_NEED(p, a.scale > 0 && b.scale > 0 && out.scale > 0, "an input or the output has no scale");
    MPM_TRY(mpm_activation_range(p, activation, &out, &o->low, &o->high));
    o->a_zero = -a.zero_point;
    o->b_zero = -b.zero_point;
    o->out_zero = out.zero_point;
    MPM_SUPPORT(p, a.type == MPM_INT8 || (a.zero_point == 0 && b.zero_point == 0 && out.zero_point == 0),
                "int16 needs zero points of 0");
    if (kind == MUL) {
        into(mpm_multiplier_of(a.scale, b.scale, out.scale), &o->out_multiplier, &o->out_shift);
        return MPM_OK;
    }
    if (kind == DIV) {
        const float real = a.scale / (b.scale * out.scale); /* in float32, so in the reference */
        MPM_SUPPORT(p, real > 1e-9f && real < 1e9f, "the scales do not fit together");
        into(mpm_multiplier_of_double((double)real), &o->out_multiplier, &o->out_shift);
        return MPM_OK;
    }
    o->left_shift = kind == SQUARED ? (a.type == MPM_INT16 ? 0 : 7) : a.type == MPM_INT16 ? 15 : 20;
    common_unit(o, a.scale, b.scale, out.scale, kind == SQUARED);
    return MPM_OK;
}

#define OPERATOR(NAME, NUMBER, KIND, ACTIVATION, ...) \
    static MPM_ONCE enum mpm_status prepare_##NAME(struct mpm_prep *p) { \
        static const struct forms forms = {__VA_ARGS__}; \
        return prepare(p, &forms, KIND, ACTIVATION); \
    } \
    const struct mpm_kernel mpm_##NAME = {NUMBER, MPM_ANY_TYPE, 0, NULL, prepare_##NAME};

OPERATOR(add, MPM_OP_ADD, ADD, 1, add_s8, add_s16, add_s32, NULL, add_f32)
OPERATOR(sub, MPM_OP_SUB, SUB, 1, sub_s8, sub_s16, sub_s32, NULL, sub_f32)
OPERATOR(mul, MPM_OP_MUL, MUL, 1, mul_s8, mul_s16, mul_s32, NULL, mul_f32)
OPERATOR(div, MPM_OP_DIV, DIV, 1, div_s8, NULL, div_s32, NULL, div_f32)
OPERATOR(squared_difference, MPM_OP_SQUARED_DIFFERENCE, SQUARED, 0, squared_s8, squared_s16, squared_s32, NULL,
         squared_f32)
OPERATOR(maximum, MPM_OP_MAXIMUM, PLAIN, 0, max_s8, max_s16, max_s32, max_s64, max_f32)
OPERATOR(minimum, MPM_OP_MINIMUM, PLAIN, 0, min_s8, min_s16, min_s32, min_s64, min_f32)
OPERATOR(floor_div, MPM_OP_FLOOR_DIV, PLAIN, 0, NULL, NULL, NULL, NULL, floor_div_f32)
OPERATOR(floor_mod, MPM_OP_FLOOR_MOD, PLAIN, 0, NULL, NULL, NULL, NULL, floor_mod_f32)
OPERATOR(atan2, MPM_OP_ATAN2, PLAIN, 0, NULL, NULL, NULL, NULL, atan2_f32)
