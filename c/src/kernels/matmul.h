/* Rows of int8 times rows of int8: what CONV_2D and FULLY_CONNECTED spend their time on. */
#ifndef MPM_MATMUL_H
#define MPM_MATMUL_H

#include "../fixed.h"

/* What becomes of a channel's sum: out = clamp(scaled(sum + start) + zero). 12 bytes, rebuilt at each run in scratch
 * memory: that costs about 1 % of the time and saves keeping it in RAM. */
struct mpm_channel {
    int32_t start; /* bias + (zero point of the input's negative) * sum of the channel's weights */
    int32_t multiplier, shift;
};

struct mpm_output_range {
    int32_t zero, low, high;
};

/* out[p * stride_out + c] for `rows` rows of `depth` at `left` and `channels` rows at `right`. */
void mpm_matmul_s8(const int8_t *left, uint32_t rows, const int8_t *right, uint32_t channels, uint32_t depth,
                   const struct mpm_channel *table, struct mpm_output_range range, int8_t *out);

static inline int8_t mpm_requantise(int32_t sum, const struct mpm_channel *c, const struct mpm_output_range *r) {
    return (int8_t)mpm_clamp(
        mpm_wrapping_add(mpm_scaled(mpm_wrapping_add(sum, c->start), c->multiplier, c->shift), r->zero), r->low,
        r->high);
}

/* Four products of one row with four: sums[i] += sum over k of (x[k] + offset) * w[i][k]. */
void mpm_dot4_s8(const int8_t *x, const int8_t *const w[4], uint32_t depth, int32_t offset, int32_t sums[4]);

int32_t mpm_sum_s8(const int8_t *values, uint32_t count);

#endif
