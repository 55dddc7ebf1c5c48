#include "conv.h"

#include <string.h>

float mpm_scale_at(const uint8_t *scales, uint32_t c) {
    float scale;
    memcpy(&scale, scales + 4 * (size_t)c, 4);
    return scale;
}

void mpm_unpack_int4(const uint8_t *packed, uint32_t count, int8_t *out) {
    uint32_t i;
    for (i = 0; i < count; i++) {
        const int32_t nibble = i & 1 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
        out[i] = (int8_t)((nibble ^ 8) - 8);
    }
}

const int8_t *mpm_conv_weights(const struct mpm_conv *c, uint32_t count) {
    if (!c->is_int4) return c->filter;
    mpm_unpack_int4(c->filter, count, c->patch);
    return c->patch;
}

void mpm_conv_table(const struct mpm_conv *c, const int8_t *filter, uint32_t stride, uint32_t step, uint32_t count) {
    struct mpm_channel *entry = c->table;
    struct mpm_multiplier m = {0, 0};
    uint32_t i, k;
    for (i = 0; i < c->out_depth; i++, entry++, filter += stride) {
        int32_t sum = 0;
        if (i == 0 || c->per_channel)
            m = mpm_multiplier_of(c->in_scale, mpm_scale_at(c->filter_scales, i), c->out_scale);
        if (c->in_zero != 0) {
            const int8_t *w = filter;
            if (step == 1) sum = mpm_sum_s8(filter, count);
            else for (k = 0; k < count; k++, w += step) sum += *w;
        }
        entry->multiplier = m.value;
        entry->shift = m.shift;
        entry->start = (int32_t)((c->bias == NULL || c->bias_is_64 ? 0u : (uint32_t)((const int32_t *)c->bias)[i]) -
                                 (uint32_t)c->in_zero * (uint32_t)sum);
    }
}

static MPM_ONCE enum mpm_status options_of(struct mpm_prep *p, int depthwise, struct mpm_conv *c,
                                           const struct mpm_tensor *in, const struct mpm_tensor *out) {
    struct mpm_file *f = &p->m->file;
    /* Conv2DOptions: padding, stride_w, stride_h, activation, dilation_w, dilation_h; DepthwiseConv2DOptions has the
     * multiplier before the activation. */
    const uint32_t extra = depthwise ? 1 : 0, o = p->options;
    const int32_t step_x = mpm_field_i32(f, o, 4 + extra, 1), step_y = mpm_field_i32(f, o, 5 + extra, 1);
    const uint32_t activation = mpm_field_u8(f, o, 3 + extra, 0);
    int32_t low = 0, high = 0;
    MPM_SUPPORT(p, step_x >= 1 && step_x <= 255 && step_y >= 1 && step_y <= 255, "dilations must be 1 to 255");
    c->window.step_x = (uint8_t)step_x;
    c->window.step_y = (uint8_t)step_y;
    MPM_TRY(mpm_fit_window(p, in, out, mpm_field_i32(f, o, 2, 0), mpm_field_i32(f, o, 1, 0), mpm_field_u8(f, o, 0, 0),
                           &c->window));
    if (in->type == MPM_FLOAT32) return mpm_activation_range_f32(p, activation, &c->low_f32, &c->high_f32);
    MPM_TRY(mpm_activation_range(p, activation, out, &low, &high));
    c->low = (int16_t)low;
    c->high = (int16_t)high;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status types_of(struct mpm_prep *p, struct mpm_conv *c, const struct mpm_tensor *in,
                                const struct mpm_tensor *filter, const struct mpm_tensor *out, uint32_t channel_dim) {
    MPM_NEED(p, in->type == out->type, "input and output differ in type");
    MPM_SUPPORT(p, filter->constant, "the filter is not a constant");
    if (in->type == MPM_FLOAT32) {
        MPM_SUPPORT(p, filter->type == MPM_FLOAT32, "hybrid quantisation: float32 input, integer filter");
        return MPM_OK;
    }
    MPM_SUPPORT(p, filter->type == MPM_INT8 || (filter->type == MPM_INT4 && in->type == MPM_INT8),
                "the filter must be int8, or int4 for an int8 input");
    MPM_NEED(p, in->scale > 0 && filter->scale > 0 && out->scale > 0, "input, filter or output has no scale");
    MPM_NEED(p, filter->rank == 4 && (filter->scale_count == 1 ||
                                      ((uint32_t)filter->channel_dim == channel_dim &&
                                       filter->scale_count == (uint32_t)filter->dims[channel_dim])),
             "the filter's scales do not belong to its output channels");
    MPM_SUPPORT(p, in->type != MPM_INT16 || (in->zero_point == 0 && out->zero_point == 0),
                "int16 needs zero points of 0");
    c->filter_scales = filter->scales;
    c->per_channel = filter->scale_count > 1;
    c->in_scale = in->scale;
    c->out_scale = out->scale;
    c->in_zero = (int8_t)in->zero_point;
    c->out_zero = (int8_t)out->zero_point;
    c->is_int4 = filter->type == MPM_INT4;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status bias_of(struct mpm_prep *p, struct mpm_conv *c, const struct mpm_tensor *in,
                                        int32_t depth) {
    struct mpm_tensor bias;
    if (!mpm_has_input(p, 2)) return MPM_OK;
    MPM_TRY(mpm_in(p, 2, &bias));
    MPM_SUPPORT(p, bias.constant, "the bias is not a constant");
    MPM_NEED(p, bias.count == (uint32_t)depth, "the bias does not have one value for each channel");
    MPM_NEED(p, in->type == MPM_FLOAT32 ? bias.type == MPM_FLOAT32
                                        : bias.type == MPM_INT32 || (in->type == MPM_INT16 && bias.type == MPM_INT64),
             "the bias has the wrong type");
    c->bias = bias.data;
    c->bias_is_64 = bias.type == MPM_INT64;
    return MPM_OK;
}

MPM_ONCE enum mpm_status mpm_prepare_conv(struct mpm_prep *p, int depthwise, struct mpm_conv **made) {
    struct mpm_tensor in, filter, out;
    struct mpm_conv *c = mpm_keep(p, sizeof *c);
    int32_t depth;
    if (c == NULL) return MPM_ARENA_TOO_SMALL;
    *made = c;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &filter));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(types_of(p, c, &in, &filter, &out, depthwise ? 3 : 0));
    MPM_NEED(p, filter.rank == 4 && in.rank == 4 && out.rank == 4, "an image or a filter does not have 4 dims");
    depth = filter.dims[depthwise ? 3 : 0];
    MPM_NEED(p, out.dims[3] == depth, "filter and output differ in channels");
    MPM_SUPPORT(p, depth >= 1 && depth <= 65535 && in.dims[3] >= 1 && in.dims[3] <= 65535 && filter.dims[1] >= 1 &&
                       filter.dims[1] <= 65535 && filter.dims[2] >= 1 && filter.dims[2] <= 65535,
                "channels and filter sides must be 1 to 65,535");
    if (depthwise) {
        MPM_NEED(p, filter.dims[0] == 1 && depth % in.dims[3] == 0, "the channels are no multiple of the input's");
        MPM_SUPPORT(p, depth / in.dims[3] <= 255, "more than 255 outputs for an input channel");
        c->multiple = (uint8_t)(depth / in.dims[3]);
    } else {
        MPM_NEED(p,
                 filter.dims[3] >= 1 && in.dims[3] % filter.dims[3] == 0 && depth % (in.dims[3] / filter.dims[3]) == 0,
                 "the filter's depth does not cut input and output into groups");
        c->filter_depth = (uint16_t)filter.dims[3];
    }
    c->window.height = (uint16_t)filter.dims[1];
    c->window.width = (uint16_t)filter.dims[2];
    c->in_depth = (uint16_t)in.dims[3];
    c->out_depth = (uint16_t)depth;
    MPM_SUPPORT(p, in.dims[0] <= 65535, "the batch is larger than 65,535");
    c->batch = (uint16_t)in.dims[0];
    c->in = in.data;
    c->filter = filter.data;
    c->out = out.data;
    MPM_TRY(options_of(p, depthwise, c, &in, &out));
    MPM_TRY(bias_of(p, c, &in, depth));
    p->params = c;
    return MPM_OK;
}
