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
    while (x != end) {
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
static void block(const int8_t *a, const int8_t *b, uint32_t depth, int32_t sums[4]) {
    const int8_t *const end = a + depth, *const a1 = a + depth, *const b1 = b + depth;
    const ptrdiff_t next_a = a1 - a, next_b = b1 - b;
    int32_t s00 = 0, s01 = 0, s10 = 0, s11 = 0;
    while (end - a >= 4) {
        int i;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 4
#endif
        for (i = 0; i < 4; i++) {
            const int32_t x0 = a[i], x1 = a[i + next_a], y0 = b[i], y1 = b[i + next_b];
            s00 += x0 * y0;
            s01 += x0 * y1;
            s10 += x1 * y0;
            s11 += x1 * y1;
        }
        a += 4;
        b += 4;
    }
    for (; a != end; a++, b++) {
        const int32_t x0 = a[0], x1 = a[next_a], y0 = b[0], y1 = b[next_b];
        s00 += x0 * y0;
        s01 += x0 * y1;
        s10 += x1 * y0;
        s11 += x1 * y1;
    }
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
