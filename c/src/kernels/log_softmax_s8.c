/* LOG_SOFTMAX of int8, along the last dim. */
#include "../fixed.h"

#define SCALED_BITS 5 /* integer bits of the scaled difference and of the logarithm */
#define SUM_BITS 12   /* integer bits of the sum of exponentials */
#define WIDE_BITS 6   /* integer bits of the logarithm while it is worked out */

/* 36 bytes on a 32-bit chip. */
struct log_softmax {
    const int8_t *in;
    int8_t *out;
    uint32_t rows, depth;
    int32_t multiplier, shift;         /* of a difference, to Q5.26 */
    int32_t back_multiplier, back_shift; /* the other way */
    int32_t least;                     /* exponentials of differences below this are 0 */
};

static int32_t difference_of(const struct log_softmax *s, int32_t steps) {
    return mpm_high_multiply((int32_t)((uint32_t)steps << s->shift), s->multiplier);
}

/* log(x) for x >= 1, from Q12.19 to Q5.26.
 *
 * x = r * 2^n in two ways, one of them with sqrt(1/2) in front, so that r is near 2^(-1/4), where a quotient of
 * polynomials in q = 2 (r - 2^(-1/4)) gives log(r) + 1/4 log(2). The way with the smaller r is taken. */
static int32_t log_of(int32_t x) {
    const int32_t sqrt_half = 1518500250, fourth_root = 1805811301, log_2 = 1488522236, quarter = 1 << (29 - WIDE_BITS);
    const int zeros = mpm_leading_zeros((uint32_t)x);
    const int zeros_b = mpm_leading_zeros((uint32_t)mpm_high_multiply(x, sqrt_half)) - 1;
    const int32_t r_a = mpm_saturating_left(mpm_high_multiply(mpm_saturating_left(x, zeros - 1), sqrt_half), 1);
    const int32_t r_b = mpm_saturating_left(x, zeros_b);
    const int32_t power_a = (SUM_BITS - zeros) * (1 << (31 - WIDE_BITS)) + quarter;
    const int32_t power_b = (SUM_BITS - zeros_b) * (1 << (31 - WIDE_BITS)) - quarter;
    const int32_t r = r_a < r_b ? r_a : r_b, power = power_a > power_b ? power_a : power_b;
    const int32_t p = (int32_t)(((int64_t)r + fourth_root + 1) / 2), q = (r - fourth_root) * 2;
    const int32_t square = mpm_high_multiply(q, q);
    const int32_t top =
        mpm_wrapping_add(mpm_high_multiply(q, r), mpm_high_multiply(mpm_high_multiply(q, square), 117049297));
    const int32_t inner = mpm_wrapping_add(1057819769 + q, mpm_high_multiply(127690142, square));
    const int32_t bottom = mpm_wrapping_add(mpm_high_multiply(p, inner), mpm_high_multiply(638450708, q)); /* less 1 */
    const int32_t part = mpm_high_multiply(mpm_rounding_shift(top, WIDE_BITS), mpm_one_over_one_plus(bottom));
    return mpm_saturating_left(mpm_wrapping_add(mpm_high_multiply(power, log_2), part), WIDE_BITS - SCALED_BITS);
}

static void row(const struct log_softmax *s, const int8_t *in, int8_t *out) {
    int32_t max = -128, sum = 0, log_sum, least;
    uint32_t i;
    for (i = 0; i < s->depth; i++) max = in[i] > max ? in[i] : max;
    for (i = 0; i < s->depth; i++)
        if (in[i] - max >= s->least)
            sum = mpm_wrapping_add(
                sum, mpm_rounding_shift(mpm_exp_negative(difference_of(s, in[i] - max), SCALED_BITS), SUM_BITS));
    log_sum = log_of(sum > 0 ? sum : INT32_MAX); /* more than 4,096 elements leave Q12.19 */
    least = mpm_scaled(mpm_wrapping_add(log_sum, INT32_MIN), s->back_multiplier, s->back_shift);
    least = least > s->least - 1 ? least : s->least - 1;
    for (i = 0; i < s->depth; i++) {
        int32_t y = -128;
        if (in[i] - max > least)
            y = mpm_clamp(
                mpm_rounding_shift(mpm_wrapping_add(difference_of(s, in[i] - max), -log_sum), 31 - SCALED_BITS - 4) +
                    127,
                -128, 127);
        out[i] = (int8_t)y;
    }
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct log_softmax *s = params;
    uint32_t r;
    (void)m;
    for (r = 0; r < s->rows; r++) row(s, s->in + (size_t)r * s->depth, s->out + (size_t)r * s->depth);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_multiplier m;
    double real;
    struct log_softmax *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.rank >= 1 && in.type == out.type && in.count == out.count && in.scale > 0,
             "input and output do not fit");
    MPM_SUPPORT(p, out.scale >= 1.0f / 16 && out.scale <= 1.0f / 16 && out.zero_point == 127,
                "the output must have scale 1/16 and zero point 127");
    real = (double)in.scale * (double)(1 << (31 - SCALED_BITS));
    m = mpm_multiplier_of_double(real > 2147483647.0 ? 2147483647.0 : real);
    MPM_SUPPORT(p, m.shift >= 1, "the input's scale is too small");
    s->multiplier = m.value;
    s->shift = m.shift;
    s->least = -(int32_t)((((1u << SCALED_BITS) - 1) << (31 - SCALED_BITS)) >> m.shift);
    m = mpm_multiplier_of_double((double)(1u << (31 - m.shift)) / (double)m.value);
    s->back_multiplier = m.value;
    s->back_shift = m.shift;
    s->depth = (uint32_t)in.dims[in.rank - 1];
    s->rows = s->depth == 0 ? 0 : in.count / s->depth;
    s->in = in.data;
    s->out = out.data;
    mpm_may_overlay(p, 0);
    p->run = run;
    p->params = s;
    return MPM_OK;
}

const struct mpm_kernel mpm_log_softmax_s8 = {MPM_OP_LOG_SOFTMAX, MPM_INT8, 0, NULL, prepare};
