/* DEPTHWISE_CONV_2D of int8, four channels at a time. */
#include "conv.h"

/* Sums of four channels over the taps inside the image. x_step: 1 where each channel has its own input, 0 where the
 * four share one. `offset` is added to each input; 0 where the table's start holds its share. */
struct taps {
    const int8_t *x, *w;
    ptrdiff_t x_row, w_row, x_next, w_next; /* elements from row to row and from tap to tap */
    int32_t rows, columns;
};

static inline void four(const struct taps *t, ptrdiff_t x_step, int32_t offset, int32_t s[4]) {
    const int8_t *x_line = t->x, *w_line = t->w;
    int32_t s0 = s[0], s1 = s[1], s2 = s[2], s3 = s[3], ky, kx;
    for (ky = t->rows; ky > 0; ky--, x_line += t->x_row, w_line += t->w_row) {
        const int8_t *x = x_line, *w = w_line;
        for (kx = t->columns; kx > 0; kx--, x += t->x_next, w += t->w_next) {
            s0 += (x[0] + offset) * w[0];
            s1 += (x[x_step] + offset) * w[1];
            s2 += (x[2 * x_step] + offset) * w[2];
            s3 += (x[3 * x_step] + offset) * w[3];
        }
    }
    s[0] = s0;
    s[1] = s1;
    s[2] = s2;
    s[3] = s3;
}

static int32_t one(const struct taps *t, int32_t offset) {
    const int8_t *x_line = t->x, *w_line = t->w;
    int32_t sum = 0, ky, kx;
    for (ky = t->rows; ky > 0; ky--, x_line += t->x_row, w_line += t->w_row)
        for (kx = 0; kx < t->columns; kx++) sum += (x_line[kx * t->x_next] + offset) * w_line[kx * t->w_next];
    return sum;
}

/* All channels of one output pixel. */
static void pixel(const struct mpm_conv *c, struct taps t, int whole, int8_t *out) {
    const struct mpm_output_range range = {c->out_zero, c->low, c->high};
    const int32_t *bias = c->bias;
    const int32_t offset = whole ? 0 : -c->in_zero;
    const struct mpm_channel *table = c->table;
    uint32_t channel = 0, in_multiple = 0;
    const int fours = c->multiple == 1 || c->multiple % 4 == 0;
    while (channel < c->out_depth) {
        const uint32_t n = fours && c->out_depth - channel >= 4 ? 4 : 1;
        int32_t s[4] = {0, 0, 0, 0};
        uint32_t i;
        if (n == 4 && c->multiple == 1) {
            if (whole) four(&t, 1, 0, s);
            else four(&t, 1, offset, s);
        } else if (n == 4) {
            if (whole) four(&t, 0, 0, s);
            else four(&t, 0, offset, s);
        }
        else s[0] = one(&t, offset);
        if (!whole) /* at the border not all taps count: the table's share of the offset is taken out again */
            for (i = 0; i < n; i++)
                s[i] = (int32_t)((uint32_t)s[i] + (bias == NULL ? 0u : (uint32_t)bias[channel + i]) -
                                 (uint32_t)table[i].start);
        out[0] = mpm_requantise(s[0], &table[0], &range);
        if (n == 4) {
            out[1] = mpm_requantise(s[1], &table[1], &range);
            out[2] = mpm_requantise(s[2], &table[2], &range);
            out[3] = mpm_requantise(s[3], &table[3], &range);
        }
        table += n;
        out += n;
        channel += n;
        t.w += n;
        in_multiple += n;
        if (c->multiple == 1) {
            t.x += n;
        } else if (in_multiple == c->multiple) {
            in_multiple = 0;
            t.x++;
        }
    }
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct mpm_conv *c = params;
    const struct mpm_window *w = &c->window;
    const uint32_t taps = (uint32_t)w->height * w->width;
    const int8_t *filter = mpm_conv_weights(c, taps * c->out_depth), *in = c->in;
    int8_t *out = c->out;
    struct taps t;
    uint32_t b;
    int32_t oy, ox;
    (void)m;
    mpm_conv_table(c, filter, 1, c->out_depth, taps);
    t.x_row = (ptrdiff_t)w->step_y * w->in_width * c->in_depth;
    t.x_next = (ptrdiff_t)w->step_x * c->in_depth;
    t.w_row = (ptrdiff_t)w->width * c->out_depth;
    t.w_next = c->out_depth;
    for (b = 0; b < c->batch; b++, in += (size_t)w->in_height * w->in_width * c->in_depth) {
        for (oy = 0; oy < w->out_height; oy++) {
            const struct mpm_range y = mpm_taps(oy, w->stride_y, w->pad_top, w->step_y, w->height, w->in_height);
            t.rows = y.end - y.begin;
            for (ox = 0; ox < w->out_width; ox++, out += c->out_depth) {
                const struct mpm_range x = mpm_taps(ox, w->stride_x, w->pad_left, w->step_x, w->width, w->in_width);
                t.columns = x.end - x.begin;
                t.x = in + ((ptrdiff_t)(y.at + y.begin * w->step_y) * w->in_width + x.at + x.begin * w->step_x) *
                               (ptrdiff_t)c->in_depth;
                t.w = filter + (ptrdiff_t)((uint32_t)y.begin * w->width + (uint32_t)x.begin) * c->out_depth;
                pixel(c, t, t.rows == w->height && t.columns == w->width, out);
            }
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_conv *c;
    MPM_TRY(mpm_prepare_conv(p, 1, &c));
    c->table = mpm_scratch(p, c->out_depth * (uint32_t)sizeof *c->table);
    c->patch = mpm_scratch(p, c->is_int4 ? (uint32_t)c->window.height * c->window.width * c->out_depth : 0);
    if (c->table == NULL || c->patch == NULL) return MPM_ARENA_TOO_SMALL;
    p->run = run;
    return MPM_OK;
}

const struct mpm_kernel mpm_depthwise_conv_2d_s8 = {MPM_OP_DEPTHWISE_CONV_2D, MPM_INT8, 0, NULL, prepare};
