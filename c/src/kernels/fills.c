/* Operators whose output does not depend on the numbers of their input, or hardly: FILL, ZEROS_LIKE, SHAPE,
 * BROADCAST_ARGS. */
#include "move.h"

#include <string.h>

/* 16 bytes on a 32-bit chip. */
struct fill {
    uint8_t *out;
    const uint8_t *value; /* one element; null: zeros */
    uint32_t bytes, element_bytes;
};

static enum mpm_status run_fill(struct mpm_interpreter *m, const void *params) {
    const struct fill *f = params;
    uint32_t i;
    (void)m;
    if (f->value == NULL) memset(f->out, 0, f->bytes);
    else for (i = 0; i < f->bytes; i += f->element_bytes) memcpy(f->out + i, f->value, f->element_bytes);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status begin_fill(struct mpm_prep *p, const struct mpm_tensor *out, const void *value) {
    struct fill *f = mpm_keep(p, sizeof *f);
    if (f == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_SUPPORT(p, out->type != MPM_INT4, "int4 is not supported here");
    f->out = out->data;
    f->value = value;
    f->bytes = out->bytes;
    f->element_bytes = mpm_type_bytes(out->type);
    p->run = run_fill;
    p->params = f;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_fill(struct mpm_prep *p) {
    struct mpm_tensor value, out;
    int32_t dims[MPM_MAX_RANK];
    uint32_t i, rank;
    MPM_TRY(mpm_in(p, 1, &value));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(mpm_values(p, 0, 0, dims, &rank));
    MPM_NEED(p, value.count == 1 && value.type == out.type, "the value is not one element of the output's type");
    MPM_NEED(p, rank == out.rank, "the output does not have the shape that is asked for");
    for (i = 0; i < rank; i++)
        MPM_NEED(p, dims[i] == out.dims[i], "the output does not have the shape that is asked for");
    return begin_fill(p, &out, value.data);
}

static MPM_ONCE enum mpm_status prepare_zeros_like(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.type == out.type && mpm_same_shape(&in, &out), "input and output differ in type or shape");
    return begin_fill(p, &out, NULL);
}

/* 32 bytes on a 32-bit chip. */
struct shape {
    int32_t *out;
    uint32_t rank;
    int32_t dims[MPM_MAX_RANK];
};

static enum mpm_status run_shape(struct mpm_interpreter *m, const void *params) {
    const struct shape *s = params;
    (void)m;
    memcpy(s->out, s->dims, s->rank * sizeof s->dims[0]);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_shape(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct shape *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, out.type == MPM_INT32, "the output must be int32");
    MPM_NEED(p, out.count == in.rank, "the output does not have one number for each dim");
    s->out = out.data;
    s->rank = in.rank;
    memcpy(s->dims, in.dims, sizeof s->dims);
    p->run = run_shape;
    p->params = s;
    return MPM_OK;
}

/* 20 bytes on a 32-bit chip. */
struct broadcast_args {
    const void *in[2];
    void *out;
    uint8_t count[2], out_count; /* dims, MPM_MAX_RANK at most */
    uint8_t is_64;
};

static int64_t dim_at(const struct broadcast_args *o, int which, uint32_t from_end) {
    if (from_end >= o->count[which]) return 1;
    from_end = o->count[which] - 1 - from_end;
    return o->is_64 ? ((const mpm_int64 *)o->in[which])[from_end] : ((const int32_t *)o->in[which])[from_end];
}

static enum mpm_status run_broadcast_args(struct mpm_interpreter *m, const void *params) {
    const struct broadcast_args *o = params;
    uint32_t i;
    for (i = 0; i < o->out_count; i++) {
        const int64_t a = dim_at(o, 0, i), b = dim_at(o, 1, i), d = a == 1 ? b : a;
        const uint32_t at = o->out_count - 1 - i;
        if (b != 1 && b != d) {
            m->error.what = MPM_TEXT("two shapes cannot be spread to one");
            return MPM_BAD_VALUE;
        }
        if (o->is_64) ((int64_t *)o->out)[at] = d;
        else ((int32_t *)o->out)[at] = (int32_t)d;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_broadcast_args(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    uint32_t i;
    struct broadcast_args *o = mpm_keep(p, sizeof *o);
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, out.type == MPM_INT32 || out.type == MPM_INT64, "shapes must be int32 or int64");
    for (i = 0; i < 2; i++) {
        MPM_TRY(mpm_in(p, i, &in));
        MPM_NEED(p, in.type == out.type && in.rank == 1 && in.count <= out.count,
                 "the shapes differ in type, or have more dims than the output");
        o->in[i] = in.data;
        o->count[i] = (uint8_t)in.count;
    }
    MPM_SUPPORT(p, out.rank == 1 && out.count <= MPM_MAX_RANK, "a shape has more than 6 dims");
    o->out = out.data;
    o->out_count = (uint8_t)out.count;
    o->is_64 = out.type == MPM_INT64;
    p->run = run_broadcast_args;
    p->params = o;
    return MPM_OK;
}

const struct mpm_kernel mpm_fill = {MPM_OP_FILL, MPM_ANY_TYPE, 1, NULL, prepare_fill};
const struct mpm_kernel mpm_zeros_like = {MPM_OP_ZEROS_LIKE, MPM_ANY_TYPE, 0, NULL, prepare_zeros_like};
const struct mpm_kernel mpm_shape = {MPM_OP_SHAPE, MPM_ANY_TYPE, 0, NULL, prepare_shape};
const struct mpm_kernel mpm_broadcast_args = {MPM_OP_BROADCAST_ARGS, MPM_ANY_TYPE, 0, NULL, prepare_broadcast_args};
