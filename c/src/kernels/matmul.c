#include "matmul.h"

int32_t mpm_sum_s8(const int8_t *values, uint32_t count) {
    int32_t sum = 0;
    for (; count >= 4; count -= 4, values += 4) sum += values[0] + values[1] + values[2] + values[3];
    for (; count > 0; count--) sum += *values++;
    return sum;
}

void mpm_dot4_s8(const int8_t *x, const int8_t *const w[4], uint32_t depth, int32_t offset, int32_t sums[4]) {
    const int8_t *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3], *const end = x + depth;
    int32_t s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
    while (x != end) { /* loads that step on as they load: unrolled, this takes as many instructions */
        const int32_t value = *x++ + offset;
        s0 += value * *w0++;
        s1 += value * *w1++;
        s2 += value * *w2++;
        s3 += value * *w3++;
    }
    sums[0] = s0;
    sums[1] = s1;
    sums[2] = s2;
    sums[3] = s3;
}

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
    while (a0 != fours) {
        STEP(0);
        STEP(1);
        STEP(2);
        STEP(3);
        a0 += 4, a1 += 4, b0 += 4, b1 += 4;
    }
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
