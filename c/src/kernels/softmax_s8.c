/* SOFTMAX of int8, to int8 or int16, along the last dim. */
#include "../fixed.h"

#define SCALED_BITS 5 /* integer bits of the scaled difference */
#define SUM_BITS 12   /* integer bits of the sum of exponentials */

/* 28 bytes on a 32-bit chip. */
struct softmax {
    const int8_t *in;
    void *out;
    uint32_t rows, depth;
    int32_t multiplier; /* beta * scale of the input, as Q5.26 */
    int32_t least;      /* differences below this come out as 0 */
    int8_t shift;
    uint8_t to_16;
};

static int32_t exp_of(const struct softmax *s, int32_t difference) {
    return mpm_exp_negative(mpm_high_multiply((int32_t)((uint32_t)difference << s->shift), s->multiplier), SCALED_BITS);
}

static void row(const struct softmax *s, const int8_t *in, size_t at) {
    const int32_t bits = s->to_16 ? 16 : 8, low = -(1 << (bits - 1)), high = -low - 1;
    int32_t max = -128, sum = 0, scale, exponent, headroom;
    uint32_t i;
    for (i = 0; i < s->depth; i++) max = in[i] > max ? in[i] : max;
    for (i = 0; i < s->depth; i++)
        if (in[i] - max >= s->least) sum = mpm_wrapping_add(sum, mpm_rounding_shift(exp_of(s, in[i] - max), SUM_BITS));
    headroom = mpm_leading_zeros((uint32_t)sum);
    exponent = mpm_clamp(SUM_BITS - headroom + 31 - bits, 0, 31);
    scale = mpm_one_over_one_plus(headroom >= 32 ? 0 : (int32_t)(((uint32_t)sum << headroom) - 0x80000000u));
    for (i = 0; i < s->depth; i++) {
        int32_t value = low;
        if (in[i] - max >= s->least) {
            value += mpm_rounding_shift(mpm_high_multiply(scale, exp_of(s, in[i] - max)), exponent);
            value = mpm_clamp(value, low, high);
        }
        if (s->to_16) ((int16_t *)s->out)[at + i] = (int16_t)value;
        else ((int8_t *)s->out)[at + i] = (int8_t)value;
    }
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct softmax *s = params;
    uint32_t r;
    (void)m;
    for (r = 0; r < s->rows; r++) row(s, s->in + (size_t)r * s->depth, (size_t)r * s->depth);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_multiplier scaled;
    struct softmax *s = mpm_keep(p, sizeof *s);
    double real;
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.rank >= 1 && in.count == out.count, "input and output differ in shape");
    MPM_SUPPORT(p, out.type == MPM_INT8 || out.type == MPM_INT16, "int8 goes to int8 or int16");
    MPM_NEED(p, in.scale > 0, "the input has no scale");
    s->to_16 = out.type == MPM_INT16;
    MPM_SUPPORT(p,
                s->to_16 ? out.zero_point == -32768
                         : out.zero_point == -128 && out.scale >= 1.0f / 256 && out.scale <= 1.0f / 256,
                "the output must have scale 1/256 and zero point -128 (int16: 1/65536 and -32768)");
    real =
        (double)mpm_field_f32(&p->m->file, p->options, 0, 0.0f) * (double)in.scale * (double)(1 << (31 - SCALED_BITS));
    if (real > 2147483647.0) real = 2147483647.0;
    MPM_SUPPORT(p, real > 1.0, "beta times the input's scale is too small");
    scaled = mpm_multiplier_of_double(real);
    s->multiplier = scaled.value;
    s->shift = (int8_t)scaled.shift;
    s->least = -(int32_t)((((1u << SCALED_BITS) - 1) << (31 - SCALED_BITS)) >> scaled.shift);
    s->depth = (uint32_t)in.dims[in.rank - 1];
    s->rows = s->depth == 0 ? 0 : in.count / s->depth;
    s->in = in.data;
    s->out = out.data;
    if (!s->to_16) mpm_may_overlay(p, 0);
    p->run = run;
    p->params = s;
    return MPM_OK;
}

const struct mpm_kernel mpm_softmax_s8 = {MPM_OP_SOFTMAX, MPM_INT8, 0, NULL, prepare};
