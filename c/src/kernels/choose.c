/* CAST, GATHER, SELECT_V2 and BATCH_MATMUL. */
#include "move.h"

#include "../fixed.h"

#include <string.h>

/* 20 bytes on a 32-bit chip. */
struct cast {
    const void *in;
    void *out;
    uint32_t count;
    uint8_t from, to;
};

static float as_float(const void *in, uint32_t type, uint32_t i) {
    switch (type) {
        case MPM_FLOAT32: return ((const float *)in)[i];
        case MPM_INT8: return ((const int8_t *)in)[i];
        case MPM_INT16: return ((const int16_t *)in)[i];
        case MPM_INT32: return (float)((const int32_t *)in)[i];
        case MPM_UINT32: return (float)((const uint32_t *)in)[i];
        default: return ((const uint8_t *)in)[i];
    }
}

static int32_t as_integer(const void *in, uint32_t type, uint32_t i) {
    float x;
    switch (type) {
        case MPM_INT8: return ((const int8_t *)in)[i];
        case MPM_INT16: return ((const int16_t *)in)[i];
        case MPM_INT32: case MPM_UINT32: return ((const int32_t *)in)[i];
        case MPM_FLOAT32:
            x = ((const float *)in)[i];
            return x >= 2147483648.0f ? INT32_MAX : x > -2147483648.0f ? (int32_t)x : INT32_MIN; /* NaN too */
        default: return ((const uint8_t *)in)[i];
    }
}

static enum mpm_status run_cast(struct mpm_interpreter *m, const void *params) {
    const struct cast *c = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < c->count; i++) {
        switch (c->to) {
            case MPM_FLOAT32: ((float *)c->out)[i] = as_float(c->in, c->from, i); break;
            case MPM_INT8: case MPM_UINT8: ((uint8_t *)c->out)[i] = (uint8_t)as_integer(c->in, c->from, i); break;
            case MPM_BOOL: ((uint8_t *)c->out)[i] = as_float(c->in, c->from, i) != 0.0f; break;
            case MPM_INT16: ((uint16_t *)c->out)[i] = (uint16_t)as_integer(c->in, c->from, i); break;
            default: ((int32_t *)c->out)[i] = as_integer(c->in, c->from, i); break;
        }
    }
    return MPM_OK;
}

static int can_cast(uint32_t type) {
    return type == MPM_FLOAT32 || type == MPM_INT8 || type == MPM_UINT8 || type == MPM_BOOL || type == MPM_INT16 ||
           type == MPM_INT32 || type == MPM_UINT32;
}

static MPM_ONCE enum mpm_status prepare_cast(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct cast *c = mpm_keep(p, sizeof *c);
    if (c == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.count == out.count, "input and output differ in shape");
    MPM_SUPPORT(p, can_cast(in.type) && can_cast(out.type), "these types are not supported");
    c->in = in.data;
    c->out = out.data;
    c->count = in.count;
    c->from = in.type;
    c->to = out.type;
    p->run = run_cast;
    p->params = c;
    return MPM_OK;
}

/* 36 bytes on a 32-bit chip. */
struct gather {
    const uint8_t *in;
    const int32_t *indices;
    uint8_t *out;
    uint32_t batch, outer, count, axis, inner; /* inner: bytes; count: indices of a batch */
};

static enum mpm_status run_gather(struct mpm_interpreter *m, const void *params) {
    const struct gather *g = params;
    uint8_t *out = g->out;
    uint32_t b, o, i;
    for (b = 0; b < g->batch; b++)
        for (o = 0; o < g->outer; o++)
            for (i = 0; i < g->count; i++, out += g->inner) {
                const int32_t at = g->indices[b * g->count + i];
                if (at < 0 || (uint32_t)at >= g->axis) {
                    m->error.what = MPM_TEXT("an index is out of range");
                    return MPM_BAD_VALUE;
                }
                memcpy(out, g->in + (((size_t)b * g->outer + o) * g->axis + (uint32_t)at) * g->inner, g->inner);
            }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_gather(struct mpm_prep *p) {
    struct mpm_tensor in, indices, out;
    struct mpm_file *f = &p->m->file;
    uint32_t axis, batch_dims, k;
    struct gather *g = mpm_keep(p, sizeof *g);
    if (g == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &indices));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(mpm_axis(p, mpm_field_i32(f, p->options, 0, 0), in.rank, &axis));
    batch_dims = (uint32_t)mpm_field_i32(f, p->options, 1, 0);
    MPM_SUPPORT(p, indices.type == MPM_INT32 && in.type == out.type && in.type != MPM_INT4, "indices must be int32, input and output of one type");
    MPM_NEED(p, batch_dims <= axis && batch_dims <= indices.rank, "batch_dims is out of range");
    for (k = 0; k < batch_dims; k++) MPM_NEED(p, in.dims[k] == indices.dims[k], "input and indices differ in batch");
    g->batch = mpm_span(&in, 0, batch_dims);
    g->outer = mpm_span(&in, batch_dims, axis);
    g->axis = (uint32_t)in.dims[axis];
    g->inner = mpm_span(&in, axis + 1, in.rank) * mpm_type_bytes(in.type);
    g->count = mpm_span(&indices, batch_dims, indices.rank);
    MPM_NEED(p, (uint64_t)g->batch * g->outer * g->count * g->inner == out.bytes, "the output's shape does not follow");
    g->in = in.data;
    g->indices = indices.data;
    g->out = out.data;
    p->run = run_gather;
    p->params = g;
    return MPM_OK;
}

/* 128 bytes on a 32-bit chip. */
struct select {
    const uint8_t *which, *a, *b;
    uint8_t *out;
    uint32_t count, bytes, rank;
    int32_t dims[MPM_MAX_RANK], steps[3][MPM_MAX_RANK]; /* strides in elements; 0: repeated */
};

static enum mpm_status run_select(struct mpm_interpreter *m, const void *params) {
    const struct select *s = params;
    uint32_t i, k;
    (void)m;
    for (i = 0; i < s->count; i++) {
        uint32_t rest = i;
        int32_t at[3] = {0, 0, 0};
        for (k = s->rank; k-- > 0; rest /= (uint32_t)s->dims[k]) {
            const int32_t place = (int32_t)(rest % (uint32_t)s->dims[k]);
            at[0] += place * s->steps[0][k];
            at[1] += place * s->steps[1][k];
            at[2] += place * s->steps[2][k];
        }
        memcpy(s->out + (size_t)i * s->bytes, s->which[at[0]] ? s->a + (size_t)at[1] * s->bytes : s->b + (size_t)at[2] * s->bytes, s->bytes);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_select(struct mpm_prep *p) {
    struct mpm_tensor t[3], out;
    uint32_t i, k;
    struct select *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    for (i = 0; i < 3; i++) MPM_TRY(mpm_in(p, i, &t[i]));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, t[0].type == MPM_BOOL && t[1].type == out.type && t[2].type == out.type && out.type != MPM_INT4, "a bool and two inputs of the output's type are needed");
    s->rank = out.rank;
    for (i = 0; i < 3; i++) {
        int32_t step = 1;
        MPM_NEED(p, t[i].rank <= out.rank, "an input has more dims than the output");
        for (k = out.rank; k-- > 0;) {
            const int32_t d = k + t[i].rank < out.rank ? 1 : t[i].dims[k + t[i].rank - out.rank];
            MPM_NEED(p, d == out.dims[k] || d == 1, "the inputs cannot be spread to the output's shape");
            s->dims[k] = out.dims[k];
            s->steps[i][k] = d == 1 ? 0 : step;
            step *= d;
        }
    }
    s->which = t[0].data;
    s->a = t[1].data;
    s->b = t[2].data;
    s->out = out.data;
    s->count = out.count;
    s->bytes = mpm_type_bytes(out.type);
    p->run = run_select;
    p->params = s;
    return MPM_OK;
}

/* 84 bytes on a 32-bit chip. */
struct batch_matmul {
    const void *a, *b;
    void *out;
    uint32_t batch_0, batch_1, batch_2, rows, depth, columns;
    uint32_t a_steps[3], b_steps[3]; /* elements from batch to batch; 0: repeated */
    uint32_t a_row, a_depth, b_column, b_depth; /* strides */
    int32_t a_zero, b_zero, out_zero, multiplier, shift;
    uint8_t type;
};

#define DOT(T, SUM, PRODUCT) \
    for (k = 0; k < o->depth; k++) { \
        const T x = ((const T *)o->a)[a + (size_t)r * o->a_row + (size_t)k * o->a_depth]; \
        const T y = ((const T *)o->b)[b + (size_t)c * o->b_column + (size_t)k * o->b_depth]; \
        SUM = PRODUCT; \
    }

static void product(const struct batch_matmul *o, size_t a, size_t b, size_t out) {
    uint32_t r, c, k;
    for (r = 0; r < o->rows; r++)
        for (c = 0; c < o->columns; c++, out++) {
            float real = 0.0f;
            int32_t sum = 0;
            int64_t wide = 0;
            switch (o->type) {
                case MPM_INT8:
                    DOT(int8_t, sum, mpm_wrapping_add(sum, (x - o->a_zero) * (y - o->b_zero)))
                    sum = mpm_wrapping_add(mpm_scaled(sum, o->multiplier, o->shift), o->out_zero);
                    ((int8_t *)o->out)[out] = (int8_t)mpm_clamp(sum, -128, 127);
                    break;
                case MPM_INT16:
                    DOT(int16_t, wide, wide + x * y)
                    ((int16_t *)o->out)[out] = (int16_t)mpm_clamp(mpm_scaled64(wide, o->multiplier, o->shift), -32768, 32767);
                    break;
                default:
                    DOT(float, real, real + x * y)
                    ((float *)o->out)[out] = real;
                    break;
            }
        }
}

static enum mpm_status run_batch_matmul(struct mpm_interpreter *m, const void *params) {
    const struct batch_matmul *o = params;
    size_t out = 0;
    uint32_t i, j, k;
    (void)m;
    for (i = 0; i < o->batch_0; i++)
        for (j = 0; j < o->batch_1; j++)
            for (k = 0; k < o->batch_2; k++, out += (size_t)o->rows * o->columns)
                product(o, (size_t)i * o->a_steps[0] + (size_t)j * o->a_steps[1] + (size_t)k * o->a_steps[2],
                        (size_t)i * o->b_steps[0] + (size_t)j * o->b_steps[1] + (size_t)k * o->b_steps[2], out);
    return MPM_OK;
}

/* The dims before the last two, right-aligned to three, with their strides. */
static void batches(const struct mpm_tensor *t, int32_t sizes[3], uint32_t steps[3]) {
    uint32_t step = (uint32_t)t->dims[t->rank - 1] * (uint32_t)t->dims[t->rank - 2], i;
    for (i = 3; i-- > 0;) {
        const int32_t at = (int32_t)i + t->rank - 5;
        sizes[i] = at >= 0 ? t->dims[at] : 1;
        steps[i] = sizes[i] == 1 ? 0 : step;
        step *= (uint32_t)sizes[i];
    }
}

static MPM_ONCE enum mpm_status prepare_batch_matmul(struct mpm_prep *p) {
    struct mpm_tensor a, b, out;
    struct mpm_file *f = &p->m->file;
    int32_t in_a[3], in_b[3], all[3];
    uint32_t i, ra, ca, rb, cb;
    const int turn_a = mpm_field_u8(f, p->options, 0, 0) != 0, turn_b = mpm_field_u8(f, p->options, 1, 0) != 0;
    struct batch_matmul *o = mpm_keep(p, sizeof *o);
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &a));
    MPM_TRY(mpm_in(p, 1, &b));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, a.type == b.type && a.type == out.type && (a.type == MPM_FLOAT32 || a.type == MPM_INT8 || a.type == MPM_INT16), "float32, int8 or int16 only");
    MPM_SUPPORT(p, a.rank >= 2 && b.rank >= 2 && a.rank <= 5 && b.rank <= 5, "2 to 5 dims are supported");
    ra = (uint32_t)a.dims[a.rank - 2], ca = (uint32_t)a.dims[a.rank - 1], rb = (uint32_t)b.dims[b.rank - 2], cb = (uint32_t)b.dims[b.rank - 1];
    o->rows = turn_a ? ca : ra;
    o->depth = turn_a ? ra : ca;
    o->columns = turn_b ? rb : cb;
    MPM_NEED(p, o->depth == (turn_b ? cb : rb), "the inner dims differ");
    o->a_row = turn_a ? 1 : ca;
    o->a_depth = turn_a ? ca : 1;
    o->b_column = turn_b ? cb : 1;
    o->b_depth = turn_b ? 1 : cb;
    batches(&a, in_a, o->a_steps);
    batches(&b, in_b, o->b_steps);
    for (i = 0; i < 3; i++) {
        MPM_NEED(p, in_a[i] == in_b[i] || in_a[i] == 1 || in_b[i] == 1, "the batches cannot be spread to one shape");
        all[i] = in_a[i] == 1 ? in_b[i] : in_a[i];
    }
    o->batch_0 = (uint32_t)all[0], o->batch_1 = (uint32_t)all[1], o->batch_2 = (uint32_t)all[2];
    MPM_NEED(p, out.count == (uint64_t)o->batch_0 * o->batch_1 * o->batch_2 && o->rows == 1 && o->columns == 1
                    ? 1 : out.rank >= 2 && (uint32_t)out.dims[out.rank - 2] == o->rows && (uint32_t)out.dims[out.rank - 1] == o->columns &&
                    mpm_span(&out, 0, out.rank - 2u) == (uint64_t)o->batch_0 * o->batch_1 * o->batch_2, "the output's shape does not follow");
    o->type = a.type;
    if (a.type != MPM_FLOAT32) {
        struct mpm_multiplier m;
        MPM_SUPPORT(p, a.type != MPM_INT16 || (a.zero_point == 0 && b.zero_point == 0 && out.zero_point == 0), "int16 needs zero points of 0");
        MPM_NEED(p, a.scale > 0 && b.scale > 0 && out.scale > 0 && a.scale_count == 1 && b.scale_count == 1, "every tensor needs one scale");
        m = mpm_multiplier_of(a.scale * b.scale, 1.0f, out.scale);
        o->multiplier = m.value;
        o->shift = m.shift;
    }
    o->a_zero = a.zero_point;
    o->b_zero = b.zero_point;
    o->out_zero = out.zero_point;
    o->a = a.data;
    o->b = b.data;
    o->out = out.data;
    p->run = run_batch_matmul;
    p->params = o;
    return MPM_OK;
}

const struct mpm_kernel mpm_cast = {MPM_OP_CAST, MPM_ANY_TYPE, 0, NULL, prepare_cast};
const struct mpm_kernel mpm_gather = {MPM_OP_GATHER, MPM_ANY_TYPE, 0, NULL, prepare_gather};
const struct mpm_kernel mpm_select_v2 = {MPM_OP_SELECT_V2, MPM_ANY_TYPE, 0, NULL, prepare_select};
const struct mpm_kernel mpm_batch_matmul = {MPM_OP_BATCH_MATMUL, MPM_ANY_TYPE, 0, NULL, prepare_batch_matmul};
