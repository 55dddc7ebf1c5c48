/* Element-wise operators of one tensor: RELU, RELU6, LEAKY_RELU, LOGISTIC, TANH, HARD_SWISH, ELU, and those of float32
 * alone. Where the types are the same, the output may lie over the input. */
#include "../fixed.h"

#include <math.h>

struct unary;
typedef void (*inner_fn)(const struct unary *o, const void *in, void *out, uint32_t count);

/* 52 bytes on a 32-bit chip. */
struct unary {
    inner_fn inner;
    const void *in;
    void *out;
    uint32_t count;
    int32_t in_zero, out_zero;
    int32_t multiplier, alpha_multiplier; /* alpha: LEAKY_RELU below zero */
    int32_t low, high, radius;
    float alpha;
    int8_t shift, alpha_shift;
};

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct unary *o = params;
    (void)m;
    o->inner(o, o->in, o->out, o->count);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status begin(struct mpm_prep *p, struct unary **made, struct mpm_tensor *in,
                                      struct mpm_tensor *out) {
    struct unary *o = mpm_keep(p, sizeof *o);
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    *made = o;
    MPM_TRY(mpm_in(p, 0, in));
    MPM_TRY(mpm_out(p, 0, out));
    MPM_NEED(p, in->type == out->type && in->count == out->count, "input and output differ in type or shape");
    MPM_NEED(p, (in->type != MPM_INT8 && in->type != MPM_INT16) || (in->scale > 0 && out->scale > 0),
             "input or output has no scale");
    o->in = in->data;
    o->out = out->data;
    o->count = in->count;
    o->in_zero = in->zero_point;
    o->out_zero = out->zero_point;
    mpm_may_overlay(p, 0);
    p->run = run;
    p->params = o;
    return MPM_OK;
}

#define INNER(NAME, T, EXPRESSION) \
    static void NAME(const struct unary *o, const void *in, void *out, uint32_t count) { \
        const T *from = in; \
        T *to = out; \
        (void)o; \
        for (; count > 0; count--) { \
            const T x = *from++; \
            *to++ = (T)(EXPRESSION); \
        } \
    }

static int32_t rescaled(const struct unary *o, int32_t x) {
    return mpm_clamp(mpm_wrapping_add(mpm_scaled(x - o->in_zero, o->multiplier, o->shift), o->out_zero), o->low,
                     o->high);
}
static int32_t leaky(const struct unary *o, int32_t x) {
    const int32_t v = x - o->in_zero;
    const int32_t y =
        v >= 0 ? mpm_scaled(v, o->multiplier, o->shift) : mpm_scaled(v, o->alpha_multiplier, o->alpha_shift);
    return mpm_clamp(mpm_wrapping_add(y, o->out_zero), o->low, o->high);
}
static int32_t magnitude(const struct unary *o, int32_t x) {
    x = x < o->in_zero ? o->in_zero - x : x - o->in_zero;
    if (o->multiplier != 0) x = mpm_scaled(x, o->multiplier, o->shift); /* 0: the scales are the same */
    return mpm_clamp(mpm_wrapping_add(x, o->out_zero), o->low, o->high);
}
static int32_t logistic_s8(const struct unary *o, int32_t x) {
    x -= o->in_zero;
    if (x <= -o->radius) return -128;
    if (x >= o->radius) return 127;
    return mpm_clamp(mpm_rounding_shift(mpm_logistic(mpm_scaled(x, o->multiplier, o->shift)), 23) - 128, -128, 127);
}
static int32_t tanh_s8(const struct unary *o, int32_t x) {
    x -= o->in_zero;
    if (x <= -o->radius) return -128;
    if (x >= o->radius) return 127;
    return mpm_clamp(mpm_rounding_shift(mpm_tanh(mpm_scaled(x, o->multiplier, o->shift)), 24), -128, 127);
}

INNER(relu_s8, int8_t, rescaled(o, x))
INNER(relu_s16, int16_t, rescaled(o, x))
INNER(relu_f32, float, x > 0 ? x : 0)
INNER(relu6_s8, int8_t, mpm_clamp(x, o->low, o->high))
INNER(relu6_s16, int16_t, mpm_clamp(x, o->low, o->high))
INNER(relu6_f32, float, x > 6 ? 6 : x > 0 ? x : 0)
INNER(leaky_relu_s8, int8_t, leaky(o, x))
INNER(leaky_relu_s16, int16_t, leaky(o, x))
INNER(leaky_relu_f32, float, x > 0 ? x : x * o->alpha)
INNER(each_logistic_s8, int8_t, logistic_s8(o, x))
INNER(logistic_s16, int16_t, mpm_logistic16(x, o->multiplier, o->shift))
INNER(logistic_f32, float, 1.0f / (1.0f + expf(-x)))
INNER(each_tanh_s8, int8_t, tanh_s8(o, x))
INNER(tanh_s16, int16_t, mpm_tanh16(x, o->multiplier, o->shift))
INNER(tanh_f32, float, tanhf(x))
INNER(hard_swish_f32, float, x * (x + 3 > 6 ? 6 : x + 3 > 0 ? x + 3 : 0) / 6)
INNER(elu_f32, float, x < 0 ? expm1f(x) : x)
INNER(abs_s8, int8_t, magnitude(o, x))
INNER(abs_s16, int16_t, magnitude(o, x))
INNER(abs_f32, float, fabsf(x))
INNER(neg_f32, float, -x)
INNER(sin_f32, float, sinf(x))
INNER(cos_f32, float, cosf(x))
INNER(log_f32, float, logf(x))
INNER(exp_f32, float, expf(x))
INNER(sqrt_f32, float, sqrtf(x))
INNER(rsqrt_f32, float, 1.0f / sqrtf(x))
INNER(square_f32, float, x * x)
INNER(ceil_f32, float, ceilf(x))
INNER(floor_f32, float, floorf(x))
INNER(round_f32, float, rintf(x))
INNER(not_bool, uint8_t, !x)

#define FLOAT_OPERATOR(NAME, NUMBER) \
    static MPM_ONCE enum mpm_status prepare_##NAME(struct mpm_prep *p) { \
        struct mpm_tensor in, out; \
        struct unary *o; \
        MPM_TRY(begin(p, &o, &in, &out)); \
        o->inner = NAME##_f32; \
        return MPM_OK; \
    } \
    const struct mpm_kernel mpm_##NAME = {NUMBER, MPM_FLOAT32, 0, NULL, prepare_##NAME};

FLOAT_OPERATOR(elu, MPM_OP_ELU)
FLOAT_OPERATOR(neg, MPM_OP_NEG)
FLOAT_OPERATOR(sin, MPM_OP_SIN)
FLOAT_OPERATOR(cos, MPM_OP_COS)
FLOAT_OPERATOR(log, MPM_OP_LOG)
FLOAT_OPERATOR(exp, MPM_OP_EXP)
FLOAT_OPERATOR(sqrt, MPM_OP_SQRT)
FLOAT_OPERATOR(rsqrt, MPM_OP_RSQRT)
FLOAT_OPERATOR(square, MPM_OP_SQUARE)
FLOAT_OPERATOR(ceil, MPM_OP_CEIL)
FLOAT_OPERATOR(floor, MPM_OP_FLOOR)
FLOAT_OPERATOR(round, MPM_OP_ROUND)
FLOAT_OPERATOR(hard_swish, MPM_OP_HARD_SWISH)

static MPM_ONCE enum mpm_status prepare_not(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct unary *o;
    MPM_TRY(begin(p, &o, &in, &out));
    MPM_SUPPORT(p, in.type == MPM_BOOL, "this type is not supported here");
    o->inner = not_bool;
    return MPM_OK;
}
const struct mpm_kernel mpm_logical_not = {MPM_OP_LOGICAL_NOT, MPM_ANY_TYPE, 0, NULL, prepare_not};

static MPM_ONCE enum mpm_status choose(struct mpm_prep *p, struct unary *o, uint32_t type, inner_fn s8, inner_fn s16,
                                       inner_fn f32) {
    o->inner = type == MPM_INT8 ? s8 : type == MPM_INT16 ? s16 : type == MPM_FLOAT32 ? f32 : NULL;
    MPM_SUPPORT(p, o->inner != NULL, "this type is not supported here");
    o->low = type == MPM_INT16 ? -32768 : -128;
    o->high = type == MPM_INT16 ? 32767 : 127;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_relu(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct unary *o;
    struct mpm_multiplier m;
    MPM_TRY(begin(p, &o, &in, &out));
    MPM_TRY(choose(p, o, in.type, relu_s8, relu_s16, relu_f32));
    if (in.type == MPM_FLOAT32) return MPM_OK;
    m = mpm_multiplier_of_double((double)in.scale / (double)out.scale);
    o->multiplier = m.value;
    o->shift = (int8_t)m.shift;
    if (out.zero_point > o->low) o->low = out.zero_point;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_abs(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct unary *o;
    MPM_TRY(begin(p, &o, &in, &out));
    MPM_TRY(choose(p, o, in.type, abs_s8, abs_s16, abs_f32));
    MPM_SUPPORT(p, in.type != MPM_INT16 || (in.zero_point == 0 && out.zero_point == 0), "int16 needs zero points of 0");
    if (in.type != MPM_FLOAT32 && (in.scale < out.scale || in.scale > out.scale)) {
        const struct mpm_multiplier m = mpm_multiplier_of_double((double)in.scale / (double)out.scale);
        o->multiplier = m.value;
        o->shift = (int8_t)m.shift;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_relu6(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct unary *o;
    MPM_TRY(begin(p, &o, &in, &out));
    MPM_TRY(choose(p, o, in.type, relu6_s8, relu6_s16, relu6_f32));
    if (in.type == MPM_FLOAT32) return MPM_OK;
    o->high = mpm_clamp(in.zero_point + mpm_quantised(6.0f, in.scale), o->low, o->high);
    o->low = mpm_clamp(in.zero_point, o->low, o->high);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_leaky_relu(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct unary *o;
    struct mpm_multiplier m;
    double alpha;
    MPM_TRY(begin(p, &o, &in, &out));
    MPM_TRY(choose(p, o, in.type, leaky_relu_s8, leaky_relu_s16, leaky_relu_f32));
    o->alpha = mpm_field_f32(&p->m->file, p->options, 0, 0.0f);
    if (in.type == MPM_FLOAT32) return MPM_OK;
    m = mpm_multiplier_of(in.scale, 1.0f, out.scale);
    o->multiplier = m.value;
    o->shift = (int8_t)m.shift;
    alpha = (double)in.scale * (double)o->alpha / (double)out.scale;
    MPM_SUPPORT(p, fabs(alpha) < 1e9, "alpha is too large");
    m.value = m.shift = 0;
    if (fabs(alpha) > 1e-9) m = mpm_multiplier_of_double(fabs(alpha));
    o->alpha_multiplier = alpha < 0 ? -m.value : m.value;
    o->alpha_shift = (int8_t)m.shift;
    return MPM_OK;
}

/* The input in Q4.27 for int8; for int16 in units of 1 / (3 * 4096), or of a power of two of it. */
static MPM_ONCE enum mpm_status sigmoid_input(struct mpm_prep *p, struct unary *o, const struct mpm_tensor *in,
                                              int powers) {
    if (in->type == MPM_INT8) {
        const struct mpm_multiplier m = mpm_multiplier_of(in->scale, 134217728.0f, 1.0f); /* 2^27 */
        o->multiplier = m.value;
        o->shift = (int8_t)m.shift;
        MPM_SUPPORT(p, m.shift >= 0, "the input's scale is too small");
        o->radius = (int32_t)((15u << 27) >> m.shift);
    } else if (in->type == MPM_INT16) {
        const float unit = in->scale * 4096.0f; /* 2^shift where that is a power of two */
        double multiplier = (double)in->scale * 4096.0 * 3.0;
        int32_t shift = 0, k;
        MPM_SUPPORT(p, in->zero_point == 0, "int16 needs zero points of 0");
        for (k = 0; k < powers; k++)
            if (unit > (float)(1 << k) * 0.9993f && unit < (float)(1 << k) * 1.0007f) {
                o->shift = (int8_t)k;
                return MPM_OK;
            }
        MPM_SUPPORT(p, multiplier < 32768.0, "the input's scale is too large");
        for (; multiplier <= 32767.0 / 2.0 && shift <= 30; shift++) multiplier *= 2.0;
        o->multiplier = (int32_t)multiplier;
        o->shift = (int8_t)(shift > 31 ? 31 : shift);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_logistic(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct unary *o;
    MPM_TRY(begin(p, &o, &in, &out));
    MPM_TRY(choose(p, o, in.type, each_logistic_s8, logistic_s16, logistic_f32));
    MPM_SUPPORT(p, in.type != MPM_INT8 || out.zero_point == -128, "the output's zero point must be -128");
    return sigmoid_input(p, o, &in, 1);
}

static MPM_ONCE enum mpm_status prepare_tanh(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct unary *o;
    MPM_TRY(begin(p, &o, &in, &out));
    MPM_TRY(choose(p, o, in.type, each_tanh_s8, tanh_s16, tanh_f32));
    return sigmoid_input(p, o, &in, 2);
}

const struct mpm_kernel mpm_abs = {MPM_OP_ABS, MPM_ANY_TYPE, 0, NULL, prepare_abs};
const struct mpm_kernel mpm_relu = {MPM_OP_RELU, MPM_ANY_TYPE, 0, NULL, prepare_relu};
const struct mpm_kernel mpm_relu6 = {MPM_OP_RELU6, MPM_ANY_TYPE, 0, NULL, prepare_relu6};
const struct mpm_kernel mpm_leaky_relu = {MPM_OP_LEAKY_RELU, MPM_ANY_TYPE, 0, NULL, prepare_leaky_relu};
const struct mpm_kernel mpm_logistic_op = {MPM_OP_LOGISTIC, MPM_ANY_TYPE, 0, NULL, prepare_logistic};
const struct mpm_kernel mpm_tanh_op = {MPM_OP_TANH, MPM_ANY_TYPE, 0, NULL, prepare_tanh};
