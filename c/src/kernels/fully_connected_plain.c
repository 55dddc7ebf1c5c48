/* FULLY_CONNECTED of float32, and of int16 with weights of int8: the plain loops. */
#include "conv.h"

/* 68 bytes on a 32-bit chip. */
struct dense {
    const void *in, *filter, *bias; /* filter: [out][in]; bias may be null */
    void *out;
    const uint8_t *filter_scales; /* of int16; null: one for all */
    uint32_t batch, depth, channels;
    float low, high;
    float in_scale, out_scale;
    int32_t multiplier, shift;
    int16_t low_16, high_16;
    uint8_t bias_is_64;
};

static enum mpm_status run_f32(struct mpm_interpreter *m, const void *params) {
    const struct dense *d = params;
    const float *in = d->in, *bias = d->bias;
    float *out = d->out;
    uint32_t b, c, k;
    (void)m;
    for (b = 0; b < d->batch; b++, in += d->depth) {
        const float *w = d->filter;
        for (c = 0; c < d->channels; c++, w += d->depth) {
            float sum = 0.0f;
            for (k = 0; k < d->depth; k++) sum += in[k] * w[k];
            if (bias != NULL) sum += bias[c];
            *out++ = sum < d->low ? d->low : sum > d->high ? d->high : sum;
        }
    }
    return MPM_OK;
}

static enum mpm_status run_s16(struct mpm_interpreter *m, const void *params) {
    const struct dense *d = params;
    const int16_t *in = d->in;
    int16_t *out = d->out;
    struct mpm_multiplier scale = {d->multiplier, d->shift};
    uint32_t b, c, k;
    (void)m;
    for (b = 0; b < d->batch; b++, in += d->depth) {
        const int8_t *w = d->filter;
        for (c = 0; c < d->channels; c++, w += d->depth) {
            int64_t sum = 0;
            int32_t y;
            for (k = 0; k < d->depth; k++) sum += in[k] * w[k];
            if (d->filter_scales != NULL)
                scale = mpm_multiplier_of(d->in_scale, mpm_scale_at(d->filter_scales, c), d->out_scale);
            if (d->bias != NULL && !d->bias_is_64) {
                y = mpm_scaled(mpm_wrapping_add((int32_t)(uint32_t)(uint64_t)sum, ((const int32_t *)d->bias)[c]),
                               scale.value, scale.shift);
            } else {
                if (d->bias != NULL) sum = (int64_t)((uint64_t)sum + (uint64_t)((const mpm_int64 *)d->bias)[c]);
                y = mpm_scaled64(sum, scale.value, scale.shift);
            }
            *out++ = (int16_t)mpm_clamp(y, d->low_16, d->high_16);
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status scales(struct mpm_prep *p, struct dense *d, const struct mpm_tensor *in,
                                       const struct mpm_tensor *filter, const struct mpm_tensor *out) {
    struct mpm_multiplier m;
    MPM_NEED(p, in->scale > 0 && filter->scale > 0 && out->scale > 0, "input, filter or output has no scale");
    MPM_SUPPORT(p, in->zero_point == 0 && out->zero_point == 0 && filter->zero_point == 0,
                "int16 needs zero points of 0");
    MPM_NEED(p, filter->scale_count == 1 || (filter->channel_dim == 0 && filter->scale_count == d->channels),
             "the filter's scales do not belong to its output channels");
    d->in_scale = in->scale;
    d->out_scale = out->scale;
    if (filter->scale_count > 1) {
        d->filter_scales = filter->scales;
        return MPM_OK;
    }
    m = mpm_multiplier_of(in->scale * filter->scale, 1.0f, out->scale);
    d->multiplier = m.value;
    d->shift = m.shift;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, filter, out, bias;
    struct dense *d = mpm_keep(p, sizeof *d);
    const uint32_t activation = mpm_field_u8(&p->m->file, p->options, 0, 0);
    int32_t low = 0, high = 0;
    int is_16;
    if (d == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &filter));
    MPM_TRY(mpm_out(p, 0, &out));
    is_16 = in.type == MPM_INT16;
    MPM_SUPPORT(p, filter.type == (is_16 ? MPM_INT8 : MPM_FLOAT32),
                "hybrid quantisation: the filter's type does not go with the input's");
    MPM_NEED(p, out.type == in.type && filter.rank == 2 && filter.dims[0] > 0 && filter.dims[1] > 0,
             "the filter must have 2 dims");
    d->channels = (uint32_t)filter.dims[0];
    d->depth = (uint32_t)filter.dims[1];
    MPM_NEED(p, in.count % d->depth == 0 && out.count == (uint64_t)(in.count / d->depth) * d->channels,
             "the filter or the output does not fit the input");
    d->batch = in.count / d->depth;
    if (mpm_has_input(p, 2)) {
        MPM_TRY(mpm_in(p, 2, &bias));
        MPM_NEED(p,
                 bias.count == d->channels &&
                     (is_16 ? bias.type == MPM_INT32 || bias.type == MPM_INT64 : bias.type == MPM_FLOAT32),
                 "the bias does not fit");
        d->bias = bias.data;
        d->bias_is_64 = bias.type == MPM_INT64;
    }
    if (is_16) {
        MPM_TRY(scales(p, d, &in, &filter, &out));
        MPM_TRY(mpm_activation_range(p, activation, &out, &low, &high));
        d->low_16 = (int16_t)low;
        d->high_16 = (int16_t)high;
    } else {
        MPM_TRY(mpm_activation_range_f32(p, activation, &d->low, &d->high));
    }
    d->in = in.data;
    d->filter = filter.data;
    d->out = out.data;
    p->run = is_16 ? run_s16 : run_f32;
    p->params = d;
    return MPM_OK;
}

const struct mpm_kernel mpm_fully_connected_f32 = {MPM_OP_FULLY_CONNECTED, MPM_FLOAT32, 0, NULL, prepare};
const struct mpm_kernel mpm_fully_connected_s16 = {MPM_OP_FULLY_CONNECTED, MPM_INT16, 0, NULL, prepare};
