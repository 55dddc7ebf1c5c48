/* RSQRT and L2_NORMALIZATION of int8. */
#include "../fixed.h"

#include <math.h>

#define RAISED 20 /* bits by which 1 / sqrt(x) is raised before it is rounded */

/* 28 bytes on a 32-bit chip. */
struct rsqrt {
    const int8_t *in;
    int8_t *out;
    uint32_t count;
    int32_t in_zero, out_zero, multiplier, shift;
};

static enum mpm_status run_rsqrt(struct mpm_interpreter *m, const void *params) {
    const struct rsqrt *r = params;
    uint32_t i;
    for (i = 0; i < r->count; i++) {
        const int32_t x = r->in[i] - r->in_zero;
        struct mpm_multiplier root;
        int32_t y = 127; /* of 0 */
        if (x < 0) {
            m->error.what = MPM_TEXT("the root of a negative number");
            return MPM_BAD_VALUE;
        }
        if (x > 0) {
            root = mpm_inverse_sqrt(x);
            y = mpm_scaled(1, root.value, root.shift + RAISED);
            y = mpm_clamp(mpm_wrapping_add(mpm_scaled(y, r->multiplier, r->shift - RAISED), r->out_zero), -128, 127);
        }
        r->out[i] = (int8_t)y;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_rsqrt(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_multiplier m;
    float scale;
    struct rsqrt *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.type == out.type && in.count == out.count && in.scale > 0 && out.scale > 0,
             "input and output do not fit");
    scale = sqrtf(in.scale) * out.scale;
    MPM_SUPPORT(p, scale > 4e-9f && scale < 1e3f, "the scales are too large or too small"); /* shifts of -31 to 9 */
    m = mpm_multiplier_of_double(1.0 / (double)scale);
    r->multiplier = m.value;
    r->shift = m.shift;
    r->in_zero = in.zero_point;
    r->out_zero = out.zero_point;
    r->in = in.data;
    r->out = out.data;
    r->count = in.count;
    mpm_may_overlay(p, 0);
    p->run = run_rsqrt;
    p->params = r;
    return MPM_OK;
}

/* 20 bytes on a 32-bit chip. */
struct normal {
    const int8_t *in;
    int8_t *out;
    uint32_t rows, depth;
    int32_t in_zero;
};

static enum mpm_status run_normal(struct mpm_interpreter *m, const void *params) {
    const struct normal *n = params;
    const int8_t *in = n->in;
    int8_t *out = n->out;
    uint32_t r, k;
    (void)m;
    for (r = 0; r < n->rows; r++, in += n->depth, out += n->depth) {
        int32_t sum = 0;
        struct mpm_multiplier root;
        for (k = 0; k < n->depth; k++) sum = mpm_wrapping_add(sum, (in[k] - n->in_zero) * (in[k] - n->in_zero));
        root = mpm_inverse_sqrt(sum);
        for (k = 0; k < n->depth; k++)
            out[k] = (int8_t)mpm_clamp(mpm_scaled(in[k] - n->in_zero, root.value, root.shift + 7), -128, 127);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_normal(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct normal *n = mpm_keep(p, sizeof *n);
    if (n == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.rank >= 1 && in.type == out.type && in.count == out.count && in.scale > 0,
             "input and output do not fit");
    MPM_SUPPORT(p, out.scale >= 1.0f / 128 && out.scale <= 1.0f / 128 && out.zero_point == 0,
                "the output must have scale 1/128 and zero point 0");
    MPM_SUPPORT(p, mpm_field_u8(&p->m->file, p->options, 0, 0) == 0, "a fused activation is not supported here");
    n->in = in.data;
    n->out = out.data;
    n->depth = (uint32_t)in.dims[in.rank - 1];
    n->rows = n->depth == 0 ? 0 : in.count / n->depth;
    n->in_zero = in.zero_point;
    mpm_may_overlay(p, 0);
    p->run = run_normal;
    p->params = n;
    return MPM_OK;
}

const struct mpm_kernel mpm_rsqrt_s8 = {MPM_OP_RSQRT, MPM_INT8, 0, NULL, prepare_rsqrt};
const struct mpm_kernel mpm_l2_normalization_s8 = {MPM_OP_L2_NORMALIZATION, MPM_INT8, 0, NULL, prepare_normal};
