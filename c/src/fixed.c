#include "fixed.h"

#include <string.h>

/* Splits a positive, normal float32 into a 24-bit mantissa and an exponent: value = mantissa * 2^exponent. */
static uint32_t mantissa_of(float value, int32_t *exponent) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *exponent += (int32_t)(bits >> 23) - 150;
    return (bits & 0x7fffffu) | 0x800000u;
}

static struct mpm_multiplier in_range(uint32_t value, int32_t shift) {
    struct mpm_multiplier m = {0, 0};
    if (value == 0x80000000u) {
        value = 0x40000000u;
        shift++;
    }
    if (shift < -31) return m;
    m.value = (int32_t)value;
    m.shift = shift;
    if (shift > 30) {
        m.value = 0x7fffffff;
        m.shift = 30;
    }
    return m;
}

/* The quotient of the mantissas by long division, 8 bits a step, to 31 bits and a remainder.
 *
 * Rounding to a double (53 bits) first and to 31 bits then differs from rounding once only where the quotient is
 * less than half a unit of the 53rd bit below a half of the 31st: with a remainder r of divisor d, where
 * 2^23 * r >= (2^22 - 1) * d. That is the test below; quotients of 24-bit mantissas come no closer. */
struct mpm_multiplier mpm_multiplier_of(float a, float b, float c) {
    int32_t exponent = 0, negative = 0;
    const uint32_t ma = mantissa_of(a, &exponent), mb = mantissa_of(b, &exponent), d = mantissa_of(c, &negative);
    const uint64_t product = (uint64_t)ma * mb; /* 2^46..2^48 */
    uint32_t rest = (uint32_t)(product >> 24), low = (uint32_t)product << 8, quotient, i, bits;
    quotient = rest >= d;
    rest -= quotient != 0 ? d : 0;
    for (i = 0; i < 3; i++) {
        rest = rest << 8 | low >> 24;
        low <<= 8;
        quotient = quotient << 8 | rest / d;
        rest %= d;
    }
    /* quotient = product / d, 2^22..2^25: as many more bits as make it 31 */
    bits = quotient >= 1u << 24 ? 6 : quotient >= 1u << 23 ? 7 : 8;
    rest <<= bits;
    quotient = quotient << bits | rest / d;
    rest %= d;
    quotient += (uint64_t)rest << 23 >= (uint64_t)d * ((1u << 22) - 1);
    return in_range(quotient, exponent - negative - (int32_t)bits + 31);
}

struct mpm_multiplier mpm_multiplier_of_double(double real) {
    uint64_t bits;
    int32_t exponent;
    memcpy(&bits, &real, 8);
    exponent = (int32_t)(bits >> 52) - 1022;
    bits = (bits & 0xfffffffffffffu) | 0x10000000000000u; /* 53 bits: real = bits * 2^(exponent - 53) */
    return in_range((uint32_t)((bits + (1u << 21)) >> 22), exponent);
}

/* exp on [-1/4, 0), Q0.31: a Taylor polynomial of degree 4 about -1/8. */
static int32_t exp_small(int32_t a) {
    const int32_t x = a + (1 << 28);
    const int32_t x2 = mpm_high_multiply(x, x), x3 = mpm_high_multiply(x2, x), x4 = mpm_high_multiply(x2, x2);
    const int32_t third = mpm_high_multiply(mpm_rounding_shift(x4, 2) + x3, 715827883);
    const int32_t middle = 1895147668; /* exp(-1/8) */
    return middle + mpm_high_multiply(middle, x + mpm_rounding_shift(third + x2, 1));
}

int32_t mpm_exp_negative(int32_t x, int integer_bits) {
    static const int32_t factors[7] = {1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242};
    const int fraction = 31 - integer_bits;
    const int32_t quarter = 1 << (fraction - 2);
    const int32_t small = (x & (quarter - 1)) - quarter; /* in [-1/4, 0) */
    int32_t left, result = exp_small((int32_t)((uint32_t)small << integer_bits)), i;
    if (x == 0) return INT32_MAX;
    left = mpm_wrapping_add(small, -x); /* whole quarters, each bit a factor exp(-2^i) */
    for (i = -2; i < integer_bits; i++)
        if ((left & (int32_t)(1u << (fraction + i))) != 0) result = mpm_high_multiply(result, factors[i + 2]);
    return result;
}

/* Saturating x * 4: from Q2.29 to Q0.31. */
static int32_t times_four(int32_t x) {
    return x > 0x1fffffff ? INT32_MAX : x < -0x1fffffff ? INT32_MIN : (int32_t)((uint32_t)x << 2);
}

/* Newton's iteration for 1 / half of (1 + x), Q2.29. */
static int32_t reciprocal(int32_t x) {
    const int32_t half = (int32_t)(((int64_t)x + INT32_MAX + 1) / 2);
    int32_t r = mpm_wrapping_add(1515870810, mpm_high_multiply(half, -1010580540)), i; /* 48/17 - 32/17 half */
    for (i = 0; i < 3; i++)
        r = mpm_wrapping_add(r,
                             times_four(mpm_high_multiply(r, mpm_wrapping_add(1 << 29, -mpm_high_multiply(half, r)))));
    return r;
}

int32_t mpm_one_over_one_plus(int32_t x) {
    const int32_t r = reciprocal(x);
    /* halving only moves the binary point: Q2.29 read as Q1.30, saturating to Q0.31 */
    return r > 0x3fffffff ? INT32_MAX : r < -0x3fffffff ? INT32_MIN : (int32_t)((uint32_t)r << 1);
}

/* Newton's iteration from 1, Q3.28; what it is for is brought into [1/4, 1) by even shifts first. */
struct mpm_multiplier mpm_inverse_sqrt(int32_t x) {
    struct mpm_multiplier m = {INT32_MAX, 0};
    int32_t half, y = 1 << 28, shift = 11, pairs, i;
    if (x <= 1) return m;
    for (; x >= 1 << 29; shift++) x /= 4;
    pairs = (mpm_leading_zeros((uint32_t)x) - 1) / 2 - 1;
    shift -= pairs;
    x <<= 2 * pairs;
    half = mpm_rounding_shift(x >> 1, 1);
    for (i = 0; i < 5; i++) {
        const int32_t cube = mpm_saturating_left(mpm_high_multiply(mpm_high_multiply(y, y), y), 6);
        y = mpm_saturating_left(
            mpm_wrapping_add(mpm_high_multiply((1 << 28) + (1 << 27), y), -mpm_high_multiply(half, cube)), 3);
    }
    m.value = mpm_high_multiply(y, 1518500250); /* sqrt(1/2) */
    m.shift = -shift;
    if (shift < 0) {
        m.value = (int32_t)((uint32_t)m.value << -shift);
        m.shift = 0;
    }
    return m;
}

int32_t mpm_logistic(int32_t x) {
    int32_t positive;
    if (x == 0) return 1 << 30;
    positive = mpm_one_over_one_plus(mpm_exp_negative(x > 0 ? -x : x, 4));
    return x > 0 ? positive : INT32_MAX - positive;
}

int32_t mpm_tanh(int32_t x) {
    int32_t t;
    if (x == 0) return 0;
    /* tanh|x| = (1 - e) / (1 + e) with e = exp(-2|x|): twice x in Q5.26 has the same bits as x in Q4.27 */
    t = times_four(mpm_wrapping_add(reciprocal(mpm_exp_negative(x > 0 ? -x : x, 5)), -(1 << 29)));
    return x < 0 ? -t : t;
}
