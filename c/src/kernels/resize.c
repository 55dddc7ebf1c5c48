/* RESIZE_BILINEAR of float32 and int8; RESIZE_NEAREST_NEIGHBOR of any type. */
#include "../fixed.h"
#include "move.h"

#include <math.h>
#include <string.h>

#define FINE 1024 /* int8: places between pixels are counted in these */

/* 40 bytes on a 32-bit chip. */
struct resize {
    const void *in;
    void *out;
    uint32_t batch, depth; /* depth: elements; bytes for the nearest neighbour */
    int32_t in_height, in_width, out_height, out_width;
    uint8_t align_corners, half_pixels, is_8;
};

/* Two pixels of a row or column, and what the second weighs of 1 (int8: of FINE). */
struct between {
    int32_t a, b;
    float weight;
    int32_t fine;
};

static struct between place_f32(const struct resize *r, int32_t at, int32_t in, int32_t out) {
    const float scale = r->align_corners && out > 1 ? (float)(in - 1) / (float)(out - 1) : (float)in / (float)out;
    const float place = r->half_pixels ? ((float)at + 0.5f) * scale - 0.5f : (float)at * scale;
    struct between p = {(int32_t)floorf(place), (int32_t)ceilf(place), 0.0f, 0};
    p.a = mpm_clamp(p.a, 0, in - 1);
    p.b = mpm_clamp(p.b, 0, in - 1);
    p.weight = place - (float)p.a;
    return p;
}

/* In the reference rounding may lead past the last pixel, where it reads what is not the image's; here the last one
 * is taken. */
static struct between place_s8(const struct resize *r, int32_t at, int32_t in, int32_t out) {
    const int32_t scale =
        r->align_corners && out > 1 ? (FINE * (in - 1) + (out - 1) / 2) / (out - 1) : (FINE * in + out / 2) / out;
    const int32_t place = at * scale + (r->half_pixels ? scale / 2 - FINE / 2 : 0);
    struct between p = {place / FINE, (place + FINE - 1) / FINE, 0.0f, 0};
    p.a = mpm_clamp(p.a, 0, in - 1);
    p.b = mpm_clamp(p.b, 0, in - 1);
    p.fine = place - FINE * p.a;
    return p;
}

static void mix_s8(const int8_t *const corners[4], struct between y, struct between x, uint32_t depth, int8_t *out) {
    const int64_t weights[4] = {(int64_t)(FINE - y.fine) * (FINE - x.fine), (int64_t)y.fine * (FINE - x.fine),
                                (int64_t)(FINE - y.fine) * x.fine, (int64_t)y.fine * x.fine};
    uint32_t c, k;
    for (c = 0; c < depth; c++) {
        int64_t sum = 0;
        for (k = 0; k < 4; k++) sum += corners[k][c] * weights[k];
        out[c] = (int8_t)((sum + (sum > 0 ? FINE * FINE / 2 : -FINE * FINE / 2)) / (FINE * FINE));
    }
}

static void mix_f32(const float *const corners[4], struct between y, struct between x, uint32_t depth, float *out) {
    const float up = 1 - y.weight, left = 1 - x.weight;
    uint32_t c;
    for (c = 0; c < depth; c++)
        out[c] = corners[0][c] * up * left + corners[1][c] * y.weight * left + corners[2][c] * up * x.weight +
                 corners[3][c] * y.weight * x.weight;
}

static void mix(const struct resize *r, size_t image, struct between y, struct between x, size_t out) {
    const size_t width = (size_t)r->in_width;
    const size_t at[4] = {
        (image + (size_t)y.a * width + (size_t)x.a) * r->depth, (image + (size_t)y.b * width + (size_t)x.a) * r->depth,
        (image + (size_t)y.a * width + (size_t)x.b) * r->depth, (image + (size_t)y.b * width + (size_t)x.b) * r->depth};
    if (r->is_8) {
        const int8_t *in = r->in, *const corners[4] = {in + at[0], in + at[1], in + at[2], in + at[3]};
        mix_s8(corners, y, x, r->depth, (int8_t *)r->out + out);
    } else {
        const float *in = r->in, *const corners[4] = {in + at[0], in + at[1], in + at[2], in + at[3]};
        mix_f32(corners, y, x, r->depth, (float *)r->out + out);
    }
}

static enum mpm_status run_bilinear(struct mpm_interpreter *m, const void *params) {
    const struct resize *r = params;
    struct between (*place)(const struct resize *, int32_t, int32_t, int32_t) = r->is_8 ? place_s8 : place_f32;
    size_t out = 0;
    uint32_t b;
    int32_t y, x;
    (void)m;
    for (b = 0; b < r->batch; b++)
        for (y = 0; y < r->out_height; y++) {
            const struct between row = place(r, y, r->in_height, r->out_height);
            for (x = 0; x < r->out_width; x++, out += r->depth)
                mix(r, (size_t)b * (size_t)r->in_height * (size_t)r->in_width, row,
                    place(r, x, r->in_width, r->out_width), out);
        }
    return MPM_OK;
}

static int32_t nearest(const struct resize *r, int32_t at, int32_t in, int32_t out) {
    const float scale = r->align_corners && out > 1 ? (float)(in - 1) / (float)(out - 1) : (float)in / (float)out;
    const float place = ((float)at + (r->half_pixels ? 0.5f : 0.0f)) * scale;
    return mpm_clamp((int32_t)(r->align_corners ? roundf(place) : floorf(place)), 0, in - 1);
}

static enum mpm_status run_nearest(struct mpm_interpreter *m, const void *params) {
    const struct resize *r = params;
    const uint8_t *image = r->in;
    uint8_t *out = r->out;
    uint32_t b;
    int32_t y, x;
    (void)m;
    for (b = 0; b < r->batch; b++, image += (size_t)r->in_height * (size_t)r->in_width * r->depth)
        for (y = 0; y < r->out_height; y++) {
            const uint8_t *row =
                image + (size_t)nearest(r, y, r->in_height, r->out_height) * (size_t)r->in_width * r->depth;
            for (x = 0; x < r->out_width; x++, out += r->depth)
                memcpy(out, row + (size_t)nearest(r, x, r->in_width, r->out_width) * r->depth, r->depth);
        }
    return MPM_OK;
}

/* `options`: the first of the two fields, align_corners and half_pixel_centers. */
static MPM_ONCE enum mpm_status begin(struct mpm_prep *p, struct resize **made, struct mpm_tensor *in,
                                      uint32_t options) {
    struct mpm_tensor out;
    int32_t size[MPM_MAX_RANK];
    uint32_t i;
    struct resize *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return MPM_ARENA_TOO_SMALL;
    *made = r;
    MPM_TRY(mpm_in(p, 0, in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(mpm_values(p, 1, 2, size, NULL));
    MPM_NEED(p,
             in->type == out.type && in->rank == 4 && out.rank == 4 && in->dims[0] == out.dims[0] &&
                 in->dims[3] == out.dims[3] && size[0] == out.dims[1] && size[1] == out.dims[2],
             "input, size and output do not fit together");
    for (i = 1; i < 3; i++)
        MPM_SUPPORT(p, in->dims[i] >= 1 && in->dims[i] <= 16383 && out.dims[i] >= 1 && out.dims[i] <= 16383,
                    "an image's sides must be 1 to 16,383");
    r->align_corners = mpm_field_u8(&p->m->file, p->options, options, 0) != 0;
    r->half_pixels = mpm_field_u8(&p->m->file, p->options, options + 1, 0) != 0;
    r->batch = (uint32_t)in->dims[0];
    r->depth = (uint32_t)in->dims[3];
    r->in_height = in->dims[1], r->in_width = in->dims[2], r->out_height = out.dims[1], r->out_width = out.dims[2];
    r->in = in->data;
    r->out = out.data;
    p->params = r;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_bilinear(struct mpm_prep *p) {
    struct mpm_tensor in;
    struct resize *r;
    MPM_TRY(begin(p, &r, &in, 2));
    MPM_SUPPORT(p, in.type == MPM_FLOAT32 || in.type == MPM_INT8, "float32 or int8 only");
    MPM_NEED(p, !r->align_corners || !r->half_pixels, "half_pixel_centers and align_corners exclude each other");
    r->is_8 = in.type == MPM_INT8;
    p->run = run_bilinear;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_nearest(struct mpm_prep *p) {
    struct mpm_tensor in;
    struct resize *r;
    MPM_TRY(begin(p, &r, &in, 0));
    MPM_SUPPORT(p, in.type != MPM_INT4, "int4 is not supported here");
    r->depth *= mpm_type_bytes(in.type);
    p->run = run_nearest;
    return MPM_OK;
}

const struct mpm_kernel mpm_resize_bilinear = {MPM_OP_RESIZE_BILINEAR, MPM_ANY_TYPE, 0, NULL, prepare_bilinear};
const struct mpm_kernel mpm_resize_nearest_neighbor = {MPM_OP_RESIZE_NEAREST_NEIGHBOR, MPM_ANY_TYPE, 0, NULL,
                                                       prepare_nearest};
