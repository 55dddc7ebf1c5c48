/* Fixed-point arithmetic, bit-equal to that of TFLM's reference kernels (double rounding).
 *
 * A real multiplier M > 0 is kept as (multiplier, shift): M = multiplier * 2^(shift - 31), with multiplier in
 * [2^30, 2^31) and shift in -31..30. Sums that leave int32 wrap; in the reference that is undefined. */
#ifndef MPM_FIXED_H
#define MPM_FIXED_H

#include "kernel.h"

struct mpm_multiplier {
    int32_t value; /* 0, or 2^30..2^31 - 1 */
    int32_t shift; /* -31..30 */
};

/* a * b / c, as doubles round it and QuantizeMultiplier then does; exact, and in integers alone. a, b, c: positive,
 * normal float32. Past the range of shift: 0 below, 2^31 - 1 with shift 30 above. */
struct mpm_multiplier mpm_multiplier_of(float a, float b, float c);

/* The same of any positive double. */
struct mpm_multiplier mpm_multiplier_of_double(double real);

static inline int32_t mpm_wrapping_add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }

/* a * b / 2^31, rounded to nearest, halves up. */
static inline int32_t mpm_high_multiply(int32_t a, int32_t b) {
    return (int32_t)(((int64_t)a * b + (1 << 30)) >> 31);
}

/* x / 2^n, rounded to nearest, halves away from zero; n in 0..31. */
static inline int32_t mpm_rounding_shift(int32_t x, int n) {
    const int32_t mask = (int32_t)((1u << n) - 1u);
    return (x >> n) + ((x & mask) > (mask >> 1) + (x < 0));
}

static inline int32_t mpm_scaled(int32_t x, int32_t multiplier, int32_t shift) {
    if (shift > 0) return mpm_high_multiply((int32_t)((uint32_t)x << shift), multiplier);
    if (shift == 0) return mpm_high_multiply(x, multiplier);
    x = mpm_high_multiply(x, multiplier);
    /* the same as mpm_rounding_shift for n > 0, in fewer instructions; no step leaves int32 */
    return (((x + (x >> 31)) >> (-shift - 1)) + 1) >> 1;
}

/* The 48-bit accumulators of int16 operators: one rounding, with the multiplier cut to 16 bits. */
static inline int32_t mpm_scaled64(int64_t x, int32_t multiplier, int32_t shift) {
    const int32_t reduced = multiplier < 0x7fff0000 ? (multiplier + (1 << 15)) >> 16 : 0x7fff;
    const int total = shift > 14 ? 1 : 15 - shift;
    const uint64_t rounded = (uint64_t)x * (uint64_t)(int64_t)reduced + ((uint64_t)1 << (total - 1));
    return (int32_t)((int64_t)rounded >> total);
}

/* x * 2^n, saturating; n in 0..30. */
static inline int32_t mpm_saturating_left(int32_t x, int n) {
    const int32_t most = (int32_t)((1u << (31 - n)) - 1u);
    return n == 0 ? x : x > most ? INT32_MAX : x < -most ? INT32_MIN : (int32_t)((uint32_t)x << n);
}

static inline int mpm_leading_zeros(uint32_t x) {
    int n = 0;
    for (; n < 32 && (x & 0x80000000u) == 0; x <<= 1) n++;
    return n;
}

static inline int32_t mpm_clamp(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

/* exp(x) for x <= 0. In: Q(integer_bits).(31 - integer_bits), 4..5 integer bits; out: Q0.31. */
int32_t mpm_exp_negative(int32_t x, int integer_bits);
/* 1 / (1 + x) for x in [0, 1), Q0.31 both. */
int32_t mpm_one_over_one_plus(int32_t x);
/* 1 / sqrt(x) for a whole number x >= 1, as a multiplier; that of 0 is 1. */
struct mpm_multiplier mpm_inverse_sqrt(int32_t x);
/* Q4.27 to Q0.31. */
int32_t mpm_logistic(int32_t x);
int32_t mpm_tanh(int32_t x);

/* sigmoid(i / 24) * 2^16, i = 0..255: int16 LOGISTIC and TANH interpolate in it. 512 bytes of flash. */
extern const uint16_t mpm_sigmoid_table[256];
int16_t mpm_logistic16(int32_t x, int32_t multiplier, int32_t shift);
int16_t mpm_tanh16(int32_t x, int32_t multiplier, int32_t shift);

/* value / scale, rounded to nearest, halves away from zero, saturating at 1e9; NaN gives 1e9. */
int32_t mpm_quantised(float value, float scale);

/* Range of a fused activation in quantised numbers. NONE 0, RELU 1, RELU_N1_TO_1 2, RELU6 3. */
enum mpm_status mpm_activation_range(struct mpm_prep *p, uint32_t activation, const struct mpm_tensor *out,
                                     int32_t *low, int32_t *high);
enum mpm_status mpm_activation_range_f32(struct mpm_prep *p, uint32_t activation, float *low, float *high);

#endif
