#include "matmul.h"

#if defined(__ARM_FEATURE_DSP) && !defined(MPM_PORTABLE)
#include <string.h>

/* Four int8 as two pairs of int16, (0, 2) and (1, 3); the DSP extension multiplies and adds a pair in one. */
static inline uint32_t load4(const int8_t *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}
static inline uint32_t even(uint32_t word) {
    uint32_t pair;
    __asm__("sxtb16 %0, %1" : "=r"(pair) : "r"(word));
    return pair;
}
static inline uint32_t odd(uint32_t word) {
    uint32_t pair;
    __asm__("sxtb16 %0, %1, ror #8" : "=r"(pair) : "r"(word));
    return pair;
}
static inline int32_t add_products(uint32_t a, uint32_t b, int32_t sum) {
    __asm__("smlad %0, %1, %2, %0" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
}
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* GCC would put the steps of a loop that is written out together, and then needs more instructions than with loads that
 * step on as they load. */
#ifdef __GNUC__
#define STEPS(pointer) __asm__("" : "+r"(pointer))
#else
#define STEPS(pointer) (void)0
#endif

int32_t mpm_sum_s8(const int8_t *values, uint32_t count) {
    int32_t sum = 0;
    for (; count >= 4; count -= 4, values += 4) sum += values[0] + values[1] + values[2] + values[3];
    for (; count > 0; count--) sum += *values++;
    return sum;
}

#define STEP() \
    do { \
        const int32_t value = *x++ + offset; \
        s0 += value * *w0++; \
        s1 += value * *w1++; \
        s2 += value * *w2++; \
        s3 += value * *w3++; \
        STEPS(x); \
        STEPS(w0); \
        STEPS(w1); \
        STEPS(w2); \
        STEPS(w3); \
    } while (0)

void mpm_dot4_s8(const int8_t *x, const int8_t *const w[4], uint32_t depth, int32_t offset, int32_t sums[4]) {
    const int8_t *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3], *const end = x + depth;
    int32_t s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
#if HAS_PAIRS
    const int8_t *const words = x + (depth & ~3u);
    const uint32_t offsets = ((uint32_t)offset & 0xffffu) * 0x10001u;
    for (; x != words; x += 4, w0 += 4, w1 += 4, w2 += 4, w3 += 4) {
        const uint32_t word = load4(x), y0 = load4(w0), y1 = load4(w1), y2 = load4(w2), y3 = load4(w3);
        uint32_t pair = even(word);
        __asm__("sadd16 %0, %0, %1" : "+r"(pair) : "r"(offsets));
        s0 = add_products(pair, even(y0), s0);
        s1 = add_products(pair, even(y1), s1);
        s2 = add_products(pair, even(y2), s2);
        s3 = add_products(pair, even(y3), s3);
        pair = odd(word);
        __asm__("sadd16 %0, %0, %1" : "+r"(pair) : "r"(offsets));
        s0 = add_products(pair, odd(y0), s0);
        s1 = add_products(pair, odd(y1), s1);
        s2 = add_products(pair, odd(y2), s2);
        s3 = add_products(pair, odd(y3), s3);
    }
#endif
    {
        const int8_t *const fours = x + ((uint32_t)(end - x) & ~3u);
        while (x != fours) {
            STEP();
            STEP();
            STEP();
            STEP();
        }
        while (x != end) STEP();
    }
    sums[0] = s0;
    sums[1] = s1;
    sums[2] = s2;
    sums[3] = s3;
}

#undef STEP

static int32_t dot(const int8_t *a, const int8_t *b, uint32_t depth) {
    int32_t sum = 0;
    for (; depth > 0; depth--) sum += *a++ * *b++;
    return sum;
}

/* Two rows by two channels: four loads for four products. */
static void block(const int8_t *a0, const int8_t *b0, uint32_t depth, int32_t sums[4]) {
    const int8_t *a1 = a0 + depth, *b1 = b0 + depth, *const end = a1, *const fours = a0 + (depth & ~3u);
    int32_t s00 = 0, s01 = 0, s10 = 0, s11 = 0;
#define STEP(I) \
    do { \
        const int32_t x0 = a0[I], y0 = b0[I], x1 = a1[I], y1 = b1[I]; \
        s00 += x0 * y0; \
        s01 += x0 * y1; \
        s10 += x1 * y0; \
        s11 += x1 * y1; \
    } while (0)
#if HAS_PAIRS
    for (; a0 != fours; a0 += 4, a1 += 4, b0 += 4, b1 += 4) {
        const uint32_t wa0 = load4(a0), wb0 = load4(b0), wa1 = load4(a1), wb1 = load4(b1);
        uint32_t pa0 = even(wa0), pb0 = even(wb0), pa1 = even(wa1), pb1 = even(wb1);
        s00 = add_products(pa0, pb0, s00);
        s01 = add_products(pa0, pb1, s01);
        s10 = add_products(pa1, pb0, s10);
        s11 = add_products(pa1, pb1, s11);
        pa0 = odd(wa0), pb0 = odd(wb0), pa1 = odd(wa1), pb1 = odd(wb1);
        s00 = add_products(pa0, pb0, s00);
        s01 = add_products(pa0, pb1, s01);
        s10 = add_products(pa1, pb0, s10);
        s11 = add_products(pa1, pb1, s11);
    }
#else
    while (a0 != fours) {
        STEP(0);
        STEP(1);
        STEP(2);
        STEP(3);
        a0 += 4, a1 += 4, b0 += 4, b1 += 4;
    }
#endif
    while (a0 != end) {
        STEP(0);
        a0++, a1++, b0++, b1++;
    }
#undef STEP
    sums[0] = s00;
    sums[1] = s01;
    sums[2] = s10;
    sums[3] = s11;
}

void mpm_matmul_s8(const int8_t *left, uint32_t rows, const int8_t *right, uint32_t channels, uint32_t depth,
                   const struct mpm_channel *table, struct mpm_output_range range, int8_t *out) {
    uint32_t r, c;
    for (r = 0; r + 2 <= rows; r += 2, left += 2 * (size_t)depth, out += 2 * (size_t)channels) {
        const int8_t *weights = right;
        for (c = 0; c + 2 <= channels; c += 2, weights += 2 * (size_t)depth) {
            int32_t sums[4];
            block(left, weights, depth, sums);
            out[c] = mpm_requantise(sums[0], &table[c], &range);
            out[c + 1] = mpm_requantise(sums[1], &table[c + 1], &range);
            out[c + channels] = mpm_requantise(sums[2], &table[c], &range);
            out[c + channels + 1] = mpm_requantise(sums[3], &table[c + 1], &range);
        }
        for (; c < channels; c++, weights += depth) {
            out[c] = mpm_requantise(dot(left, weights, depth), &table[c], &range);
            out[c + channels] = mpm_requantise(dot(left + depth, weights, depth), &table[c], &range);
        }
    }
    for (; r < rows; r++, left += depth, out += channels)
        for (c = 0; c < channels; c++)
            out[c] = mpm_requantise(dot(left, right + (size_t)c * depth, depth), &table[c], &range);
}
