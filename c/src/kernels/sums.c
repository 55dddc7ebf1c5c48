/* ADD_N and CUMSUM: float32 and int8. */
#include "../fixed.h"
#include "move.h"

#define UNIT_BITS 19 /* int8: sums are kept in units of 2^-19 of a step of the input, as the reference does */

/* What int8 needs beside the elements: 16 bytes. */
struct sum_scale {
    int32_t multiplier, shift, in_zero, out_zero;
};

static MPM_ONCE enum mpm_status scale_of(struct mpm_prep *p, struct sum_scale *s, const struct mpm_tensor *in,
                                         const struct mpm_tensor *out) {
    struct mpm_multiplier m;
    if (in->type == MPM_FLOAT32) return MPM_OK;
    MPM_NEED(p, in->scale > 0 && out->scale > 0, "input or output has no scale");
    m = mpm_multiplier_of(2 * in->scale, 1.0f, (float)(1 << (UNIT_BITS + 1)) * out->scale);
    s->multiplier = m.value;
    s->shift = m.shift;
    s->in_zero = in->zero_point;
    s->out_zero = out->zero_point;
    return MPM_OK;
}

static int32_t fine(int32_t steps) { return (int32_t)((uint32_t)steps << UNIT_BITS); }

/* A sum begins with the number 0, which is not zero where the input has a zero point: so in the reference. */
static int32_t zero_of(const struct sum_scale *s) { return fine(-s->in_zero); }

static int8_t finished(const struct sum_scale *s, int32_t sum) {
    return (int8_t)mpm_clamp(mpm_wrapping_add(mpm_scaled(sum, s->multiplier, s->shift), s->out_zero), -128, 127);
}

/* 32 bytes on a 32-bit chip, and the addresses of the inputs. */
struct add_n {
    void *out;
    uint32_t count, inputs;
    struct sum_scale scale;
    uint8_t is_8;
    const void *in[];
};

static enum mpm_status run_add_n(struct mpm_interpreter *m, const void *params) {
    const struct add_n *o = params;
    uint32_t i, k;
    (void)m;
    for (i = 0; i < o->count; i++) {
        if (o->is_8) {
            int32_t sum = zero_of(&o->scale);
            for (k = 0; k < o->inputs; k++)
                sum = mpm_wrapping_add(sum, fine(((const int8_t *)o->in[k])[i] - o->scale.in_zero));
            ((int8_t *)o->out)[i] = finished(&o->scale, sum);
        } else {
            float sum = 0.0f;
            for (k = 0; k < o->inputs; k++) sum += ((const float *)o->in[k])[i];
            ((float *)o->out)[i] = sum;
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_add_n(struct mpm_prep *p) {
    struct mpm_tensor first, in, out;
    uint32_t k;
    struct add_n *o = mpm_keep(p, (uint32_t)(sizeof *o + p->inputs.count * sizeof o->in[0]));
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &first));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, (first.type == MPM_FLOAT32 || first.type == MPM_INT8) && out.type == first.type,
                "float32 or int8 only");
    MPM_NEED(p, p->inputs.count >= 2 && first.count == out.count,
             "at least two inputs of the output's shape are needed");
    for (k = 0; k < p->inputs.count; k++) {
        MPM_TRY(mpm_in(p, k, &in));
        MPM_NEED(p, in.type == first.type && mpm_same_shape(&in, &first), "the inputs differ in type or shape");
        MPM_SUPPORT(p, in.scale <= first.scale && in.scale >= first.scale && in.zero_point == first.zero_point,
                    "the inputs differ in scale or zero point");
        o->in[k] = in.data;
        mpm_may_overlay(p, k);
    }
    MPM_TRY(scale_of(p, &o->scale, &first, &out));
    o->out = out.data;
    o->count = out.count;
    o->inputs = p->inputs.count;
    o->is_8 = first.type == MPM_INT8;
    p->run = run_add_n;
    p->params = o;
    return MPM_OK;
}

/* 40 bytes on a 32-bit chip. */
struct cumsum {
    const void *in;
    void *out;
    uint32_t before, depth, after; /* the axis, and what lies on either side of it */
    struct sum_scale scale;
    uint8_t is_8, exclusive, reverse;
};

static enum mpm_status run_cumsum(struct mpm_interpreter *m, const void *params) {
    const struct cumsum *c = params;
    uint32_t b, a, k;
    (void)m;
    for (b = 0; b < c->before; b++)
        for (a = 0; a < c->after; a++) {
            int32_t sum = zero_of(&c->scale);
            float real = 0.0f;
            for (k = 0; k < c->depth; k++) {
                const size_t at = ((size_t)b * c->depth + (c->reverse ? c->depth - 1 - k : k)) * c->after + a;
                if (c->is_8) {
                    const int32_t next = mpm_wrapping_add(sum, fine(((const int8_t *)c->in)[at] - c->scale.in_zero));
                    ((int8_t *)c->out)[at] = finished(&c->scale, c->exclusive ? sum : next);
                    sum = next;
                } else {
                    const float next = real + ((const float *)c->in)[at];
                    ((float *)c->out)[at] = c->exclusive ? real : next;
                    real = next;
                }
            }
        }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_cumsum(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    int32_t axes[MPM_MAX_RANK];
    uint32_t axis;
    struct cumsum *c = mpm_keep(p, sizeof *c);
    if (c == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, (in.type == MPM_FLOAT32 || in.type == MPM_INT8) && out.type == in.type, "float32 or int8 only");
    MPM_NEED(p, mpm_same_shape(&in, &out), "input and output differ in shape");
    MPM_TRY(mpm_values(p, 1, 1, axes, NULL));
    MPM_TRY(mpm_axis(p, axes[0], in.rank, &axis));
    MPM_TRY(scale_of(p, &c->scale, &in, &out));
    c->before = mpm_span(&in, 0, axis);
    c->depth = (uint32_t)in.dims[axis];
    c->after = mpm_span(&in, axis + 1, in.rank);
    c->exclusive = mpm_field_u8(&p->m->file, p->options, 0, 0) != 0;
    c->reverse = mpm_field_u8(&p->m->file, p->options, 1, 0) != 0;
    c->is_8 = in.type == MPM_INT8;
    c->in = in.data;
    c->out = out.data;
    mpm_may_overlay(p, 0);
    p->run = run_cumsum;
    p->params = c;
    return MPM_OK;
}

const struct mpm_kernel mpm_add_n = {MPM_OP_ADD_N, MPM_ANY_TYPE, 0, NULL, prepare_add_n};
const struct mpm_kernel mpm_cumsum = {MPM_OP_CUMSUM, MPM_ANY_TYPE, 0, NULL, prepare_cumsum};
