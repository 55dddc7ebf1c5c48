/* MEAN, SUM, REDUCE_MAX, REDUCE_MIN, REDUCE_ALL, ARG_MAX, ARG_MIN. No scratch: each output is finished before the
 * next. */
#include "../fixed.h"
#include "move.h"

/* 108 bytes on a 32-bit chip. */
struct reduce {
    const void *in;
    void *out;
    uint32_t outer, inner; /* elements to keep, and of each to put together */
    uint32_t keep_rank, gone_rank;
    struct mpm_dim keep[MPM_MAX_RANK], gone[MPM_MAX_RANK]; /* count and `from` */
    int32_t multiplier, shift, in_zero, out_zero;
    uint8_t type, kind;
};

enum { MEAN, SUM, MAX, MIN, ALL };

/* The offset of element `index` in row-major order over some dims. */
static int32_t offset_of(const struct mpm_dim *dims, uint32_t rank, uint32_t index) {
    int32_t at = 0;
    for (; rank > 0; rank--) {
        at += (int32_t)(index % (uint32_t)dims[rank - 1].count) * dims[rank - 1].from;
        index /= (uint32_t)dims[rank - 1].count;
    }
    return at;
}

static int32_t load(const struct reduce *r, int32_t at) {
    switch (r->type) {
        case MPM_INT8: return ((const int8_t *)r->in)[at];
        case MPM_INT16: return ((const int16_t *)r->in)[at];
        case MPM_BOOL: return ((const uint8_t *)r->in)[at];
        default: return ((const int32_t *)r->in)[at];
    }
}

static int32_t integer(const struct reduce *r, int32_t base) {
    int32_t sum = r->kind == MAX ? INT32_MIN : r->kind == MIN ? INT32_MAX : r->kind == ALL ? 1 : 0;
    uint32_t i;
    for (i = 0; i < r->inner; i++) {
        const int32_t x = load(r, base + offset_of(r->gone, r->gone_rank, i));
        if (r->kind == MAX) sum = x > sum ? x : sum;
        else if (r->kind == MIN) sum = x < sum ? x : sum;
        else if (r->kind == ALL) sum = sum && x;
        else sum = mpm_wrapping_add(sum, x);
    }
    if (r->kind == MEAN || r->kind == SUM) {
        sum = (int32_t)((uint32_t)sum - (uint32_t)r->in_zero * r->inner);
        sum = mpm_wrapping_add(mpm_scaled(sum, r->multiplier, r->shift), r->out_zero);
        sum = r->type == MPM_INT8 ? mpm_clamp(sum, -128, 127) : mpm_clamp(sum, -32768, 32767);
    }
    return sum;
}

static float real(const struct reduce *r, int32_t base) {
    float sum = r->kind == MAX ? -3.402823466e38f : r->kind == MIN ? 3.402823466e38f : 0.0f;
    uint32_t i;
    for (i = 0; i < r->inner; i++) {
        const float x = ((const float *)r->in)[base + offset_of(r->gone, r->gone_rank, i)];
        if (r->kind == MAX) sum = x > sum ? x : sum;
        else if (r->kind == MIN) sum = x < sum ? x : sum;
        else sum += x;
    }
    return r->kind == MEAN ? sum / (float)r->inner : sum;
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct reduce *r = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < r->outer; i++) {
        const int32_t base = offset_of(r->keep, r->keep_rank, i);
        switch (r->type) {
            case MPM_FLOAT32: ((float *)r->out)[i] = real(r, base); break;
            case MPM_INT8: ((int8_t *)r->out)[i] = (int8_t)integer(r, base); break;
            case MPM_INT16: ((int16_t *)r->out)[i] = (int16_t)integer(r, base); break;
            case MPM_BOOL: ((uint8_t *)r->out)[i] = (uint8_t)integer(r, base); break;
            default: ((int32_t *)r->out)[i] = integer(r, base); break;
        }
    }
    return MPM_OK;
}

/* The mean divides within the multiplier, as the reference does. */
static MPM_ONCE enum mpm_status scales(struct mpm_prep *p, struct reduce *r, const struct mpm_tensor *in,
                                       const struct mpm_tensor *out) {
    struct mpm_multiplier m;
    int32_t shift = 31;
    MPM_NEED(p, in->scale > 0 && out->scale > 0, "input or output has no scale");
    m = mpm_multiplier_of(in->scale, 1.0f, out->scale);
    if (r->kind == MEAN && r->inner > 0) {
        while (r->inner >> shift == 0) shift--;
        shift = shift > 31 + m.shift ? 31 + m.shift : shift;
        m.value = (int32_t)(((int64_t)m.value << shift) / r->inner);
        m.shift -= shift;
    }
    r->multiplier = m.value;
    r->shift = m.shift;
    r->in_zero = in->zero_point;
    r->out_zero = out->zero_point;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p, uint8_t kind) {
    struct mpm_tensor in, out;
    int32_t axes[MPM_MAX_RANK], step[MPM_MAX_RANK];
    uint32_t i, k, count, gone = 0;
    struct reduce *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(mpm_values(p, 1, 0, axes, &count));
    MPM_NEED(p, in.type == out.type, "input and output differ in type");
    MPM_SUPPORT(p,
                kind == ALL ? in.type == MPM_BOOL
                            : in.type == MPM_FLOAT32 || in.type == MPM_INT8 || in.type == MPM_INT16 ||
                                  (kind >= MAX && in.type == MPM_INT32),
                "this type is not supported here");
    for (k = 0; k < count; k++) {
        MPM_TRY(mpm_axis(p, axes[k], in.rank, &i));
        gone |= 1u << i;
    }
    mpm_strides(&in, step);
    r->outer = r->inner = 1;
    for (i = 0; i < in.rank; i++) {
        struct mpm_dim *d = gone >> i & 1 ? &r->gone[r->gone_rank++] : &r->keep[r->keep_rank++];
        d->count = in.dims[i];
        d->from = step[i];
        if (gone >> i & 1) r->inner *= (uint32_t)in.dims[i];
        else r->outer *= (uint32_t)in.dims[i];
    }
    MPM_NEED(p, out.count == r->outer, "the output's shape is not what is left of the input's");
    r->type = in.type;
    r->kind = kind;
    if (kind <= SUM && in.type != MPM_FLOAT32) MPM_TRY(scales(p, r, &in, &out));
    r->in = in.data;
    r->out = out.data;
    p->run = run;
    p->params = r;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_mean(struct mpm_prep *p) { return prepare(p, MEAN); }
static MPM_ONCE enum mpm_status prepare_sum(struct mpm_prep *p) { return prepare(p, SUM); }
static MPM_ONCE enum mpm_status prepare_max(struct mpm_prep *p) { return prepare(p, MAX); }
static MPM_ONCE enum mpm_status prepare_min(struct mpm_prep *p) { return prepare(p, MIN); }
static MPM_ONCE enum mpm_status prepare_all(struct mpm_prep *p) { return prepare(p, ALL); }

static float comparable(const struct reduce *r, int32_t at) {
    return r->type == MPM_FLOAT32 ? ((const float *)r->in)[at] : (float)load(r, at);
}

static enum mpm_status run_arg(struct mpm_interpreter *m, const void *params) {
    const struct reduce *r = params;
    uint32_t i, k;
    (void)m;
    for (i = 0; i < r->outer; i++) {
        const int32_t base = offset_of(r->keep, r->keep_rank, i);
        uint32_t best = 0;
        for (k = 1; k < r->inner; k++) {
            const float x = comparable(r, base + (int32_t)k * r->gone[0].from),
                        y = comparable(r, base + (int32_t)best * r->gone[0].from);
            if (r->kind == MAX ? x > y : x < y) best = k;
        }
        ((int32_t *)r->out)[i] = (int32_t)best;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_arg(struct mpm_prep *p, uint8_t kind) {
    struct mpm_tensor in, out;
    int32_t axes[MPM_MAX_RANK], step[MPM_MAX_RANK];
    uint32_t i, axis;
    struct reduce *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(mpm_values(p, 1, 1, axes, NULL));
    MPM_TRY(mpm_axis(p, axes[0], in.rank, &axis));
    MPM_SUPPORT(p, (in.type == MPM_FLOAT32 || in.type == MPM_INT8) && out.type == MPM_INT32,
                "float32 or int8 to int32 only");
    mpm_strides(&in, step);
    r->outer = 1;
    for (i = 0; i < in.rank; i++) {
        struct mpm_dim *d = i == axis ? &r->gone[r->gone_rank++] : &r->keep[r->keep_rank++];
        d->count = in.dims[i];
        d->from = step[i];
        if (i != axis) r->outer *= (uint32_t)in.dims[i];
    }
    r->inner = (uint32_t)in.dims[axis];
    MPM_NEED(p, out.count == r->outer && r->inner > 0, "the output's shape is not what is left of the input's");
    r->type = in.type;
    r->kind = kind;
    r->in = in.data;
    r->out = out.data;
    p->run = run_arg;
    p->params = r;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_arg_max(struct mpm_prep *p) { return prepare_arg(p, MAX); }
static MPM_ONCE enum mpm_status prepare_arg_min(struct mpm_prep *p) { return prepare_arg(p, MIN); }

const struct mpm_kernel mpm_mean = {MPM_OP_MEAN, MPM_ANY_TYPE, 0, NULL, prepare_mean};
const struct mpm_kernel mpm_sum = {MPM_OP_SUM, MPM_ANY_TYPE, 0, NULL, prepare_sum};
const struct mpm_kernel mpm_reduce_max = {MPM_OP_REDUCE_MAX, MPM_ANY_TYPE, 0, NULL, prepare_max};
const struct mpm_kernel mpm_reduce_min = {MPM_OP_REDUCE_MIN, MPM_ANY_TYPE, 0, NULL, prepare_min};
const struct mpm_kernel mpm_reduce_all = {MPM_OP_REDUCE_ALL, MPM_ANY_TYPE, 0, NULL, prepare_all};
const struct mpm_kernel mpm_arg_max = {MPM_OP_ARG_MAX, MPM_ANY_TYPE, 0, NULL, prepare_arg_max};
const struct mpm_kernel mpm_arg_min = {MPM_OP_ARG_MIN, MPM_ANY_TYPE, 0, NULL, prepare_arg_min};
