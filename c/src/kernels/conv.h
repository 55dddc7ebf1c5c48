/* What CONV_2D and DEPTHWISE_CONV_2D share. */
#ifndef MPM_CONV_H
#define MPM_CONV_H

#include "matmul.h"
#include "window.h"

/* 76 bytes on a 32-bit chip. */
struct mpm_conv {
    const void *in, *filter, *bias; /* bias may be null */
    void *out;
    struct mpm_channel *table;      /* scratch: [out_depth] */
    void *patch;                    /* scratch: two patches of CONV_2D; all int4 weights, one to a byte */
    const uint8_t *filter_scales;   /* float32 [out_depth], or one for all */
    union {
        struct { float in_scale, out_scale; }; /* quantised */
        struct { float low_f32, high_f32; };   /* float32 */
    };
    uint16_t batch;
    uint16_t in_depth, out_depth;
    uint16_t filter_depth;          /* of CONV_2D: the input's, or that of a group of it */
    struct mpm_window window;
    int8_t in_zero, out_zero;
    int16_t low, high;              /* the fused activation's range, quantised */
    uint8_t per_channel;            /* scales: one a channel, or one for all */
    uint8_t is_int4, bias_is_64;
    uint8_t multiple;               /* DEPTHWISE: outputs for each input channel, 255 at most */
};

/* Reads and checks tensors and options; `depthwise` decides the filter's layout. Chooses no function. */
enum mpm_status mpm_prepare_conv(struct mpm_prep *p, int depthwise, struct mpm_conv **made);

/* Fills c->table. `sums` of weights times the input's offset are part of it for int8 without padding trouble. */
void mpm_conv_table(const struct mpm_conv *c, const int8_t *filter, uint32_t stride, uint32_t step, uint32_t count);

/* The weights as int8: unpacked into c->patch where they are int4. */
const int8_t *mpm_conv_weights(const struct mpm_conv *c, uint32_t count);

void mpm_unpack_int4(const uint8_t *packed, uint32_t count, int8_t *out);

/* The first input channel that counts for an output channel of CONV_2D. */
static inline uint32_t mpm_group_start(const struct mpm_conv *c, uint32_t out) {
    return c->filter_depth == c->in_depth
               ? 0
               : out / (c->out_depth / (c->in_depth / (uint32_t)c->filter_depth)) * c->filter_depth;
}

float mpm_scale_at(const uint8_t *scales, uint32_t c);

#endif
