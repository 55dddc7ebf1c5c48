/* CONV_2D and DEPTHWISE_CONV_2D of float32, and both of int16 with weights of int8: the plain loops. */
#include "conv.h"

#define TAPS(...) \
    for (ky = y.begin; ky < y.end; ky++) \
        for (kx = x.begin; kx < x.end; kx++) { \
            const size_t at = \
                ((size_t)(y.at + ky * w->step_y) * w->in_width + (size_t)(x.at + kx * w->step_x)) * c->in_depth; \
            const size_t tap = (size_t)ky * w->width + (size_t)kx; \
            __VA_ARGS__ \
        }

/* The sum for output channel `oc` at one pixel: of CONV_2D over all input channels, of DEPTHWISE over one. */
static float sum_f32(const struct mpm_conv *c, const float *in, struct mpm_range y, struct mpm_range x, uint32_t oc,
                     int depthwise) {
    const struct mpm_window *w = &c->window;
    const float *filter = c->filter;
    float sum = 0.0f;
    int32_t ky, kx;
    uint32_t k;
    if (depthwise) {
        const uint32_t ic = oc / c->multiple;
        TAPS(sum += in[at + ic] * filter[tap * c->out_depth + oc];)
    } else {
        filter += (size_t)oc * w->height * w->width * c->filter_depth;
        in += mpm_group_start(c, oc);
        TAPS(for (k = 0; k < c->filter_depth; k++) sum += in[at + k] * filter[tap * c->filter_depth + k];)
    }
    return sum + (c->bias == NULL ? 0.0f : ((const float *)c->bias)[oc]);
}

static int64_t sum_s16(const struct mpm_conv *c, const int16_t *in, struct mpm_range y, struct mpm_range x, uint32_t oc,
                       int depthwise) {
    const struct mpm_window *w = &c->window;
    const int8_t *filter = c->filter;
    int64_t sum = 0;
    int32_t ky, kx;
    uint32_t k;
    if (depthwise) {
        const uint32_t ic = oc / c->multiple;
        TAPS(sum += in[at + ic] * filter[tap * c->out_depth + oc];)
    } else {
        filter += (size_t)oc * w->height * w->width * c->filter_depth;
        in += mpm_group_start(c, oc);
        TAPS({
            int32_t part = 0; /* 2^16 products of 23 bits may leave it: flushed before */
            for (k = 0; k < c->filter_depth; k++) {
                part += in[at + k] * filter[tap * c->filter_depth + k];
                if ((k & 255) == 255) sum += part, part = 0;
            }
            sum += part;
        })
    }
    return sum;
}

static int16_t finish_s16(const struct mpm_conv *c, int64_t sum, uint32_t oc, int has_32) {
    const struct mpm_channel *e = &c->table[oc];
    if (has_32) {
        const int32_t acc =
            mpm_wrapping_add((int32_t)(uint32_t)(uint64_t)sum, c->bias == NULL ? 0 : ((const int32_t *)c->bias)[oc]);
        return (int16_t)mpm_clamp(mpm_scaled(acc, e->multiplier, e->shift), c->low, c->high);
    }
    if (c->bias != NULL) sum = (int64_t)((uint64_t)sum + (uint64_t)((const mpm_int64 *)c->bias)[oc]);
    return (int16_t)mpm_clamp(mpm_scaled64(sum, e->multiplier, e->shift), c->low, c->high);
}

static void each(const struct mpm_conv *c, int depthwise, int is_16) {
    const struct mpm_window *w = &c->window;
    const size_t image = (size_t)w->in_height * w->in_width * c->in_depth;
    size_t out = 0;
    uint32_t b, oc;
    int32_t oy, ox;
    for (b = 0; b < c->batch; b++)
        for (oy = 0; oy < w->out_height; oy++) {
            const struct mpm_range y = mpm_taps(oy, w->stride_y, w->pad_top, w->step_y, w->height, w->in_height);
            for (ox = 0; ox < w->out_width; ox++) {
                const struct mpm_range x = mpm_taps(ox, w->stride_x, w->pad_left, w->step_x, w->width, w->in_width);
                for (oc = 0; oc < c->out_depth; oc++, out++) {
                    if (is_16) {
                        ((int16_t *)c->out)[out] =
                            finish_s16(c, sum_s16(c, (const int16_t *)c->in + b * image, y, x, oc, depthwise), oc,
                                       c->bias != NULL && !c->bias_is_64);
                    } else {
                        const float sum = sum_f32(c, (const float *)c->in + b * image, y, x, oc, depthwise);
                        ((float *)c->out)[out] = sum < c->low_f32 ? c->low_f32 : sum > c->high_f32 ? c->high_f32 : sum;
                    }
                }
            }
        }
}

#define FORM(NAME, DEPTHWISE, IS_16) \
    static enum mpm_status run_##NAME(struct mpm_interpreter *m, const void *params) { \
        const struct mpm_conv *c = params; \
        (void)m; \
        if (IS_16) mpm_conv_table(c, c->filter, 0, 1, 0); \
        each(c, DEPTHWISE, IS_16); \
        return MPM_OK; \
    } \
    static MPM_ONCE enum mpm_status prepare_##NAME(struct mpm_prep *p) { \
        struct mpm_conv *c; \
        MPM_TRY(mpm_prepare_conv(p, DEPTHWISE, &c)); \
        p->run = run_##NAME; \
        if (!IS_16) return MPM_OK; \
        c->table = mpm_scratch(p, c->out_depth * (uint32_t)sizeof *c->table); \
        return c->table == NULL ? MPM_ARENA_TOO_SMALL : MPM_OK; \
    }

FORM(conv_f32, 0, 0)
FORM(depthwise_f32, 1, 0)
FORM(conv_s16, 0, 1)
FORM(depthwise_s16, 1, 1)

const struct mpm_kernel mpm_conv_2d_f32 = {MPM_OP_CONV_2D, MPM_FLOAT32, 0, NULL, prepare_conv_f32};
const struct mpm_kernel mpm_depthwise_conv_2d_f32 = {MPM_OP_DEPTHWISE_CONV_2D, MPM_FLOAT32, 0, NULL,
                                                     prepare_depthwise_f32};
const struct mpm_kernel mpm_conv_2d_s16 = {MPM_OP_CONV_2D, MPM_INT16, 0, NULL, prepare_conv_s16};
const struct mpm_kernel mpm_depthwise_conv_2d_s16 = {MPM_OP_DEPTHWISE_CONV_2D, MPM_INT16, 0, NULL,
                                                     prepare_depthwise_s16};
