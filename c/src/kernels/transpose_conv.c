/* TRANSPOSE_CONV of float32, int8 and int16: for each output pixel, the taps whose input pixel there is. */
#include "conv.h"

/* 88 bytes on a 32-bit chip. */
struct transposed {
    const void *in, *filter, *bias; /* filter: [out][height][width][in]; bias may be null */
    void *out;
    struct mpm_channel *table; /* scratch, for integers */
    const uint8_t *filter_scales;
    float in_scale, out_scale, low_f32, high_f32;
    uint32_t batch, in_depth, out_depth;
    int32_t in_height, in_width, out_height, out_width, height, width, pad_top, pad_left, stride_y, stride_x;
    struct mpm_output_range range;
    int32_t in_zero;
    uint8_t per_channel, type, bias_type;
};

/* The input's row or column under tap `tap` of output `at`, or -1. */
static int32_t under(int32_t at, int32_t pad, int32_t tap, int32_t stride, int32_t size) {
    const int32_t moved = at + pad - tap;
    return moved < 0 || moved % stride != 0 || moved / stride >= size ? -1 : moved / stride;
}

struct sums {
    float real;
    int32_t sum;
    int64_t wide;
};

static void add_tap(const struct transposed *t, size_t x, size_t w, struct sums *s) {
    uint32_t k;
    for (k = 0; k < t->in_depth; k++) {
        if (t->type == MPM_INT8)
            s->sum = mpm_wrapping_add(s->sum, (((const int8_t *)t->in)[x + k] - t->in_zero) *
                                                  ((const int8_t *)t->filter)[w + k]);
        else if (t->type == MPM_INT16) s->wide += ((const int16_t *)t->in)[x + k] * ((const int8_t *)t->filter)[w + k];
        else s->real += ((const float *)t->in)[x + k] * ((const float *)t->filter)[w + k];
    }
}

static void finish(const struct transposed *t, struct sums s, uint32_t oc, size_t out) {
    if (t->type == MPM_INT8) {
        ((int8_t *)t->out)[out] = mpm_requantise(s.sum, &t->table[oc], &t->range);
    } else if (t->type == MPM_INT16) {
        const int64_t bias = t->bias == NULL             ? 0
                             : t->bias_type == MPM_INT64 ? ((const mpm_int64 *)t->bias)[oc]
                                                         : ((const int16_t *)t->bias)[oc];
        const int32_t y =
            mpm_scaled64((int64_t)((uint64_t)s.wide + (uint64_t)bias), t->table[oc].multiplier, t->table[oc].shift);
        ((int16_t *)t->out)[out] = (int16_t)mpm_clamp(y, t->range.low, t->range.high);
    } else {
        if (t->bias != NULL) s.real += ((const float *)t->bias)[oc];
        ((float *)t->out)[out] = s.real < t->low_f32 ? t->low_f32 : s.real > t->high_f32 ? t->high_f32 : s.real;
    }
}

static void channel(const struct transposed *t, uint32_t b, int32_t oy, int32_t ox, uint32_t oc, size_t out) {
    struct sums s = {0.0f, 0, 0};
    int32_t ky, kx;
    for (ky = 0; ky < t->height; ky++) {
        const int32_t iy = under(oy, t->pad_top, ky, t->stride_y, t->in_height);
        for (kx = 0; iy >= 0 && kx < t->width; kx++) {
            const int32_t ix = under(ox, t->pad_left, kx, t->stride_x, t->in_width);
            const size_t x =
                (((size_t)b * (size_t)t->in_height + (size_t)iy) * (size_t)t->in_width + (size_t)ix) * t->in_depth;
            const size_t w =
                (((size_t)oc * (size_t)t->height + (size_t)ky) * (size_t)t->width + (size_t)kx) * t->in_depth;
            if (ix >= 0) add_tap(t, x, w, &s);
        }
    }
    finish(t, s, oc, out);
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct transposed *t = params;
    size_t out = 0;
    uint32_t b, oc;
    int32_t oy, ox;
    (void)m;
    for (oc = 0; t->type != MPM_FLOAT32 && oc < t->out_depth; oc++) {
        const struct mpm_multiplier s =
            mpm_multiplier_of(t->in_scale, mpm_scale_at(t->filter_scales, t->per_channel ? oc : 0), t->out_scale);
        t->table[oc].start = t->bias == NULL || t->type != MPM_INT8 ? 0 : ((const int32_t *)t->bias)[oc];
        t->table[oc].multiplier = s.value;
        t->table[oc].shift = s.shift;
    }
    for (b = 0; b < t->batch; b++)
        for (oy = 0; oy < t->out_height; oy++)
            for (ox = 0; ox < t->out_width; ox++)
                for (oc = 0; oc < t->out_depth; oc++) channel(t, b, oy, ox, oc, out++);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status scales(struct mpm_prep *p, struct transposed *t, const struct mpm_tensor *in,
                                       const struct mpm_tensor *filter, const struct mpm_tensor *out,
                                       uint32_t activation) {
    if (t->type == MPM_FLOAT32) return mpm_activation_range_f32(p, activation, &t->low_f32, &t->high_f32);
    MPM_NEED(p, in->scale > 0 && filter->scale > 0 && out->scale > 0, "input, filter or output has no scale");
    MPM_NEED(p, filter->scale_count == 1 || (filter->channel_dim == 0 && filter->scale_count == t->out_depth),
             "the filter's scales do not belong to its output channels");
    MPM_SUPPORT(p, t->type == MPM_INT8 || (in->zero_point == 0 && out->zero_point == 0),
                "int16 needs zero points of 0");
    t->filter_scales = filter->scales;
    t->per_channel = filter->scale_count > 1;
    t->in_scale = in->scale;
    t->out_scale = out->scale;
    t->in_zero = in->zero_point;
    t->range.zero = out->zero_point;
    MPM_TRY(mpm_activation_range(p, activation, out, &t->range.low, &t->range.high));
    t->table = mpm_scratch(p, t->out_depth * (uint32_t)sizeof *t->table);
    return t->table == NULL ? MPM_ARENA_TOO_SMALL : MPM_OK;
}

static MPM_ONCE enum mpm_status bias_of(struct mpm_prep *p, struct transposed *t) {
    struct mpm_tensor bias;
    if (!mpm_has_input(p, 3)) return MPM_OK;
    MPM_TRY(mpm_in(p, 3, &bias));
    MPM_NEED(p, bias.constant && bias.count == t->out_depth, "the bias does not fit");
    if (t->type == MPM_INT16)
        MPM_SUPPORT(p, bias.type == MPM_INT64 || bias.type == MPM_INT16, "the bias of int16 must be int64 or int16");
    else MPM_NEED(p, bias.type == (t->type == MPM_INT8 ? MPM_INT32 : MPM_FLOAT32), "the bias has the wrong type");
    t->bias_type = bias.type;
    t->bias = bias.data;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, filter, out;
    struct mpm_file *f = &p->m->file;
    struct mpm_window w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1};
    struct transposed *t = mpm_keep(p, sizeof *t);
    if (t == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 1, &filter));
    MPM_TRY(mpm_in(p, 2, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    t->type = in.type;
    MPM_SUPPORT(p, filter.type == (in.type == MPM_INT16 ? MPM_INT8 : in.type) && out.type == in.type && filter.constant,
                "input and output must have one type, the filter too (int8 for int16), and be a constant");
    MPM_NEED(p,
             filter.rank == 4 && in.rank == 4 && out.rank == 4 && filter.dims[0] == out.dims[3] &&
                 filter.dims[3] == in.dims[3],
             "the filter's shape does not fit");
    MPM_SUPPORT(p,
                filter.dims[1] >= 1 && filter.dims[1] <= 65535 && filter.dims[2] >= 1 && filter.dims[2] <= 65535 &&
                    out.dims[3] >= 1,
                "filter sides must be 1 to 65,535");
    w.height = (uint16_t)filter.dims[1];
    w.width = (uint16_t)filter.dims[2];
    /* the padding is that of the convolution that goes the other way, from this output to this input */
    MPM_TRY(mpm_fit_window(p, &out, &in, mpm_field_i32(f, p->options, 2, 0), mpm_field_i32(f, p->options, 1, 0),
                           mpm_field_u8(f, p->options, 0, 0), &w));
    t->batch = (uint32_t)in.dims[0];
    t->in_depth = (uint32_t)in.dims[3];
    t->out_depth = (uint32_t)out.dims[3];
    t->in_height = in.dims[1], t->in_width = in.dims[2], t->out_height = out.dims[1], t->out_width = out.dims[2];
    t->height = w.height, t->width = w.width, t->pad_top = w.pad_top, t->pad_left = w.pad_left;
    t->stride_y = w.stride_y, t->stride_x = w.stride_x;
    t->in = in.data;
    t->filter = filter.data;
    t->out = out.data;
    MPM_TRY(bias_of(p, t));
    MPM_TRY(scales(p, t, &in, &filter, &out, mpm_field_u8(f, p->options, 3, 0)));
    p->run = run;
    p->params = t;
    return MPM_OK;
}

const struct mpm_kernel mpm_transpose_conv_f32 = {MPM_OP_TRANSPOSE_CONV, MPM_FLOAT32, 2, NULL, prepare};
const struct mpm_kernel mpm_transpose_conv_s8 = {MPM_OP_TRANSPOSE_CONV, MPM_INT8, 2, NULL, prepare};
const struct mpm_kernel mpm_transpose_conv_s16 = {MPM_OP_TRANSPOSE_CONV, MPM_INT16, 2, NULL, prepare};
