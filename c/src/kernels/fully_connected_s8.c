/* FULLY_CONNECTED of int8, four outputs at a time. */
#include "conv.h"

/* Only where the filter has a scale for each channel, int4 weights or a zero point: 20 bytes on a 32-bit chip. */
struct extras {
    int8_t *unpacked;      /* scratch, for int4 weights; else null */
    const uint8_t *scales; /* null: one scale for all */
    float in, out;
    int32_t filter_zero;
};

/* 40 bytes on a 32-bit chip. */
struct fully_connected {
    const int8_t *in;
    const int8_t *filter; /* [out][in] */
    const int32_t *bias;  /* may be null */
    int8_t *out;
    struct extras *extras; /* null: one scale for all, weights of int8, and no zero point */
    int32_t multiplier;
    int32_t depth;
    uint16_t batch, channels;
    int8_t in_zero, out_zero, low, high;
    int8_t shift;
};

static int32_t single(const int8_t *x, const int8_t *w, int32_t depth, int32_t offset) {
    int32_t sum = 0;
    for (; depth > 0; depth--) sum += (*x++ + offset) * *w++;
    return sum;
}

/* What the filter's zero point takes from each channel's sum of a row of the input. */
static int32_t part_of_zeros(const struct fully_connected *f, const int8_t *in) {
    int32_t sum = 0, k;
    for (k = 0; k < f->depth; k++) sum += in[k] - f->in_zero;
    return (int32_t)((uint32_t)sum * (uint32_t)-f->extras->filter_zero);
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct fully_connected *f = params;
    const int8_t *filter = f->filter, *in = f->in;
    const struct mpm_output_range range = {f->out_zero, f->low, f->high};
    struct mpm_channel entry;
    int8_t *out = f->out;
    int32_t b, c;
    (void)m;
    if (f->extras != NULL && f->extras->unpacked != NULL) {
        mpm_unpack_int4((const uint8_t *)f->filter, f->channels * (uint32_t)f->depth, f->extras->unpacked);
        filter = f->extras->unpacked;
    }
    entry.multiplier = f->multiplier;
    entry.shift = f->shift;
    for (b = 0; b < f->batch; b++, in += f->depth) {
        const int8_t *w = filter;
        const int32_t zeros = f->extras != NULL && f->extras->filter_zero != 0 ? part_of_zeros(f, in) : 0;
        for (c = 0; c < f->channels;) {
            const int32_t n = f->channels - c >= 4 ? 4 : 1, end = c + n;
            int32_t sums[4] = {0, 0, 0, 0};
            const int32_t *sum = sums;
            if (n == 4) {
                const int8_t *const rows[4] = {w, w + f->depth, w + 2 * f->depth, w + 3 * f->depth};
                mpm_dot4_s8(in, rows, (uint32_t)f->depth, -f->in_zero, sums);
            } else {
                sums[0] = single(in, w, f->depth, -f->in_zero);
            }
            w += n * f->depth;
            for (; c < end; c++) {
                entry.start = mpm_wrapping_add(zeros, f->bias == NULL ? 0 : f->bias[c]);
                if (f->extras != NULL && f->extras->scales != NULL) {
                    const struct mpm_multiplier scaled =
                        mpm_multiplier_of(f->extras->in, mpm_scale_at(f->extras->scales, (uint32_t)c), f->extras->out);
                    entry.multiplier = scaled.value;
                    entry.shift = scaled.shift;
                }
                *out++ = mpm_requantise(*sum++, &entry, &range);
            }
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status scales(struct mpm_prep *p, struct fully_connected *f, const struct mpm_tensor *in,
                              const struct mpm_tensor *filter, const struct mpm_tensor *out) {
    struct mpm_multiplier one;
    MPM_NEED(p, in->scale > 0 && filter->scale > 0 && out->scale > 0, "input, filter or output has no scale");
    MPM_NEED(p, filter->scale_count == 1 || (filter->channel_dim == 0 && filter->scale_count == f->channels),
             "the filter's scales do not belong to its output channels");
    MPM_SUPPORT(p, filter->zero_point == 0 || filter->scale_count == 1,
                "a filter with a scale for each channel has a zero point that is not 0");
    f->in_zero = (int8_t)in->zero_point;
    f->out_zero = (int8_t)out->zero_point;
    if (filter->scale_count > 1 || filter->type == MPM_INT4 || filter->zero_point != 0) {
        f->extras = mpm_keep(p, sizeof *f->extras);
        if (f->extras == NULL) return MPM_ARENA_TOO_SMALL;
        f->extras->filter_zero = filter->zero_point;
        f->extras->in = in->scale;
        f->extras->out = out->scale;
    }
    if (filter->scale_count > 1) {
        f->extras->scales = filter->scales;
        return MPM_OK;
    }
    /* With one scale the reference multiplies the scales as float32, with several as doubles. */
    one = mpm_multiplier_of(in->scale * filter->scale, 1.0f, out->scale);
    f->multiplier = one.value;
    f->shift = (int8_t)one.shift;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, filter, out, bias;
    struct fully_connected *f = mpm_keep(p, sizeof *f);
    int32_t low = 0, high = 0;
    if (f == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &filter));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, out.type == MPM_INT8, "input and output differ in type");
    MPM_SUPPORT(p, filter.constant && (filter.type == MPM_INT8 || filter.type == MPM_INT4),
                "the filter must be a constant of int8 or int4");
    MPM_NEED(p, filter.rank == 2 && filter.dims[0] > 0 && filter.dims[1] > 0, "the filter must have 2 dims");
    f->depth = filter.dims[1];
    MPM_NEED(p, in.count % (uint32_t)f->depth == 0, "the filter does not fit the input");
    MPM_SUPPORT(p, filter.dims[0] <= 65535 && in.count / (uint32_t)f->depth <= 65535,
                "more than 65,535 rows or channels");
    f->channels = (uint16_t)filter.dims[0];
    f->batch = (uint16_t)(in.count / (uint32_t)f->depth);
    MPM_NEED(p, out.count == (uint32_t)f->batch * f->channels, "the output's shape does not follow");
    if (mpm_has_input(p, 2)) {
        MPM_TRY(mpm_in(p, 2, &bias));
        MPM_SUPPORT(p, bias.constant && bias.type == MPM_INT32, "the bias must be a constant of int32");
        MPM_NEED(p, bias.count == f->channels, "the bias does not have one value for each channel");
        f->bias = bias.data;
    }
    MPM_TRY(scales(p, f, &in, &filter, &out));
    MPM_TRY(mpm_activation_range(p, mpm_field_u8(&p->m->file, p->options, 0, 0), &out, &low, &high));
    f->low = (int8_t)low;
    f->high = (int8_t)high;
    f->in = in.data;
    f->filter = filter.data;
    f->out = out.data;
    if (filter.type == MPM_INT4) {
        f->extras->unpacked = mpm_scratch(p, filter.count);
        if (f->extras->unpacked == NULL) return MPM_ARENA_TOO_SMALL;
    }
    p->run = run;
    p->params = f;
    return MPM_OK;
}

const struct mpm_kernel mpm_fully_connected_s8 = {MPM_OP_FULLY_CONNECTED, MPM_INT8, 0, NULL, prepare};
