/* CONV_2D of int8: each output pixel is a patch of the input times the filter's rows. Patches are gathered two at a
 * time into scratch memory, or read in place where the filter is 1x1. */
#include "conv.h"

#include <string.h>

static void gather(const struct mpm_conv *c, const int8_t *image, int32_t oy, int32_t ox, int8_t *patch) {
    const struct mpm_window *w = &c->window;
    const struct mpm_range y = mpm_taps(oy, w->stride_y, w->pad_top, w->step_y, w->height, w->in_height);
    const struct mpm_range x = mpm_taps(ox, w->stride_x, w->pad_left, w->step_x, w->width, w->in_width);
    const uint32_t depth = c->in_depth, row = w->width * depth;
    int32_t ky, kx;
    if (y.end - y.begin < w->height || x.end - x.begin < w->width)
        memset(patch, c->in_zero, (size_t)row * w->height); /* what lies outside adds nothing */
    for (ky = y.begin; ky < y.end; ky++) {
        const int8_t *line = image + (size_t)(y.at + ky * w->step_y) * w->in_width * depth;
        int8_t *to = patch + (uint32_t)ky * row;
        if (w->step_x == 1) {
            memcpy(to + (uint32_t)x.begin * depth, line + (size_t)(x.at + x.begin) * depth,
                   (size_t)(x.end - x.begin) * depth);
        } else {
            for (kx = x.begin; kx < x.end; kx++)
                memcpy(to + (uint32_t)kx * depth, line + (size_t)(x.at + kx * w->step_x) * depth, depth);
        }
    }
}

/* One pixel, where each output channel sees a group of the input's. */
static void grouped(const struct mpm_conv *c, const int8_t *patch, const int8_t *filter, struct mpm_output_range range,
                    int8_t *out) {
    const uint32_t taps = (uint32_t)c->window.height * c->window.width;
    uint32_t oc, tap, k;
    for (oc = 0; oc < c->out_depth; oc++) {
        const int8_t *x = patch + mpm_group_start(c, oc);
        int32_t sum = 0;
        for (tap = 0; tap < taps; tap++, x += c->in_depth)
            for (k = 0; k < c->filter_depth; k++) sum += x[k] * *filter++;
        out[oc] = mpm_requantise(sum, &c->table[oc], &range);
    }
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct mpm_conv *c = params;
    const struct mpm_window *w = &c->window;
    const uint32_t depth = (uint32_t)w->height * w->width * c->in_depth,
                   weights = (uint32_t)w->height * w->width * c->filter_depth;
    const uint32_t pixels = (uint32_t)w->out_height * w->out_width, image = (uint32_t)w->in_height * w->in_width;
    const struct mpm_output_range range = {c->out_zero, c->low, c->high};
    const int8_t *filter = mpm_conv_weights(c, weights * c->out_depth), *in = c->in;
    int8_t *patch = (int8_t *)c->patch + (c->is_int4 ? weights * c->out_depth : 0), *out = c->out;
    uint32_t b, i;
    int32_t oy, ox;
    (void)m;
    mpm_conv_table(c, filter, weights, 1, weights);
    for (b = 0; b < c->batch; b++, in += (size_t)image * c->in_depth) {
        if (depth == c->in_depth && weights == depth && w->stride_x == 1 && w->stride_y == 1) {
            mpm_matmul_s8(in, pixels, filter, c->out_depth, depth, c->table, range, out);
            out += (size_t)pixels * c->out_depth;
            continue;
        }
        for (i = 0, oy = 0, ox = 0; i < pixels; i += 2) {
            const uint32_t rows = pixels - i < 2 ? 1 : 2;
            uint32_t r;
            for (r = 0; r < rows; r++) {
                gather(c, in, oy, ox, patch + r * depth);
                if (++ox == w->out_width) ox = 0, oy++;
            }
            if (weights == depth) mpm_matmul_s8(patch, rows, filter, c->out_depth, depth, c->table, range, out);
            else for (r = 0; r < rows; r++) grouped(c, patch + r * depth, filter, range, out + r * c->out_depth);
            out += (size_t)rows * c->out_depth;
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_conv *c;
    uint32_t depth, weights, gathered = 0;
    MPM_TRY(mpm_prepare_conv(p, 0, &c));
    depth = (uint32_t)c->window.height * c->window.width * c->in_depth;
    weights = (uint32_t)c->window.height * c->window.width * c->filter_depth;
    if (depth != c->in_depth || weights != depth || c->window.stride_x != 1 || c->window.stride_y != 1)
        gathered = 2 * depth;
    c->table = mpm_scratch(p, c->out_depth * (uint32_t)sizeof *c->table);
    c->patch = mpm_scratch(p, gathered + (c->is_int4 ? weights * c->out_depth : 0));
    if (c->table == NULL || c->patch == NULL) return MPM_ARENA_TOO_SMALL;
    p->run = run;
    return MPM_OK;
}

const struct mpm_kernel mpm_conv_2d_s8 = {MPM_OP_CONV_2D, MPM_INT8, 0, NULL, prepare};
