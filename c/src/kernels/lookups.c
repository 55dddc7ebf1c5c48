/* Operators that read or write at places known only when they run: GATHER, GATHER_ND, EMBEDDING_LOOKUP,
 * DYNAMIC_UPDATE_SLICE. */
#include "move.h"

#include <string.h>

static enum mpm_status out_of_range(struct mpm_interpreter *m) {
    m->error.what = MPM_TEXT("an index is out of range");
    return MPM_BAD_VALUE;
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
                if (at < 0 || (uint32_t)at >= g->axis) return out_of_range(m);
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
    MPM_SUPPORT(p, indices.type == MPM_INT32 && in.type == out.type && in.type != MPM_INT4,
                "indices must be int32, input and output of one type");
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

/* 52 bytes on a 32-bit chip. */
struct gather_nd {
    const uint8_t *in;
    const int32_t *indices; /* [count][depth] */
    uint8_t *out;
    uint32_t count, depth, bytes; /* bytes: of what an index names */
    int32_t dims[MPM_MAX_RANK];
};

static enum mpm_status run_gather_nd(struct mpm_interpreter *m, const void *params) {
    const struct gather_nd *g = params;
    const int32_t *index = g->indices;
    uint32_t i, k;
    for (i = 0; i < g->count; i++) {
        size_t at = 0;
        for (k = 0; k < g->depth; k++, index++) {
            if (*index < 0 || *index >= g->dims[k]) return out_of_range(m);
            at = at * (size_t)g->dims[k] + (size_t)*index;
        }
        memcpy(g->out + (size_t)i * g->bytes, g->in + at * g->bytes, g->bytes);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_gather_nd(struct mpm_prep *p) {
    struct mpm_tensor in, indices, out;
    struct gather_nd *g = mpm_keep(p, sizeof *g);
    if (g == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &indices));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, indices.type == MPM_INT32 && in.type == out.type && in.type != MPM_INT4,
                "indices must be int32, input and output of one type");
    MPM_NEED(p, indices.rank >= 1 && in.rank >= 1 && indices.dims[indices.rank - 1] <= in.rank,
             "an index has more numbers than the input has dims");
    g->depth = (uint32_t)indices.dims[indices.rank - 1];
    g->count = mpm_span(&indices, 0, indices.rank - 1u);
    g->bytes = mpm_span(&in, g->depth, in.rank) * mpm_type_bytes(in.type);
    MPM_NEED(p, (uint64_t)g->count * g->bytes == out.bytes, "the output's shape does not follow");
    memcpy(g->dims, in.dims, sizeof g->dims);
    g->in = in.data;
    g->indices = indices.data;
    g->out = out.data;
    p->run = run_gather_nd;
    p->params = g;
    return MPM_OK;
}

/* 28 bytes on a 32-bit chip. */
struct embedding {
    const int32_t *ids;
    const int8_t *rows;
    void *out;
    uint32_t count, row_count, width; /* width: elements where they become float32, else bytes */
    float scale;                      /* int8 rows become float32; 0: they are copied */
};

static enum mpm_status run_embedding(struct mpm_interpreter *m, const void *params) {
    const struct embedding *e = params;
    uint32_t i, k;
    for (i = 0; i < e->count; i++) {
        const int8_t *row;
        if (e->ids[i] < 0 || (uint32_t)e->ids[i] >= e->row_count) return out_of_range(m);
        row = e->rows + (size_t)e->ids[i] * e->width;
        if (e->scale > 0)
            for (k = 0; k < e->width; k++) ((float *)e->out)[(size_t)i * e->width + k] = e->scale * (float)row[k];
        else memcpy((uint8_t *)e->out + (size_t)i * e->width, row, e->width);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_embedding(struct mpm_prep *p) {
    struct mpm_tensor ids, rows, out;
    struct embedding *e = mpm_keep(p, sizeof *e);
    int widens;
    if (e == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &ids));
    MPM_TRY(mpm_in(p, 1, &rows));
    MPM_TRY(mpm_out(p, 0, &out));
    widens = rows.type == MPM_INT8 && out.type == MPM_FLOAT32;
    MPM_SUPPORT(p, ids.type == MPM_INT32 && ids.rank == 1, "the ids must be a list of int32");
    MPM_SUPPORT(p, (rows.type == MPM_FLOAT32 || rows.type == MPM_INT8) && (widens || rows.type == out.type),
                "float32 or int8 rows only");
    MPM_SUPPORT(p, !widens || (rows.scale > 0 && rows.zero_point == 0 && rows.scale_count == 1),
                "int8 rows need one scale and zero point 0");
    MPM_NEED(p, rows.rank >= 2, "the rows must have at least 2 dims");
    e->width = mpm_span(&rows, 1, rows.rank);
    MPM_NEED(p, out.count == (uint64_t)ids.count * e->width, "the output's shape does not follow");
    if (!widens) e->width *= mpm_type_bytes(rows.type);
    e->scale = widens ? rows.scale : 0.0f;
    e->ids = ids.data;
    e->count = ids.count;
    e->rows = rows.data;
    e->row_count = (uint32_t)rows.dims[0];
    e->out = out.data;
    p->run = run_embedding;
    p->params = e;
    return MPM_OK;
}

/* 76 bytes on a 32-bit chip, and a move. */
struct update {
    const void *in, *starts;
    uint8_t *out;
    const struct mpm_move *move; /* of the update to the output's beginning */
    uint32_t bytes;
    int32_t last[MPM_MAX_RANK]; /* the last place at which the update fits */
    int32_t step[MPM_MAX_RANK]; /* bytes from place to place */
    uint8_t rank, is_64;
};

static enum mpm_status run_update(struct mpm_interpreter *m, const void *params) {
    const struct update *u = params;
    ptrdiff_t at = 0;
    uint32_t k;
    (void)m;
    if (u->in != u->out) memmove(u->out, u->in, u->bytes);
    for (k = 0; k < u->rank; k++) {
        int64_t start = u->is_64 ? ((const mpm_int64 *)u->starts)[k] : ((const int32_t *)u->starts)[k];
        start = start < 0 ? 0 : start > u->last[k] ? u->last[k] : start; /* clamped, so that the update fits */
        at += (ptrdiff_t)start * u->step[k];
    }
    mpm_move_to(u->move, u->out + at);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_update(struct mpm_prep *p) {
    struct mpm_tensor in, update, starts, out;
    struct mpm_dim dims[MPM_MAX_RANK];
    int32_t step_in[MPM_MAX_RANK], step_out[MPM_MAX_RANK];
    uint32_t k;
    struct update *u = mpm_keep(p, sizeof *u);
    if (u == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &update));
    MPM_TRY(mpm_in(p, 2, &starts));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, starts.type == MPM_INT32 || starts.type == MPM_INT64, "the start must be int32 or int64");
    MPM_SUPPORT(p, in.type != MPM_INT4, "int4 is not supported here");
    MPM_NEED(p, in.type == update.type && in.type == out.type && mpm_same_shape(&in, &out),
             "input, update and output do not fit together");
    MPM_NEED(p, update.rank == in.rank && starts.count == in.rank,
             "input, update and start differ in the number of dims");
    mpm_strides(&update, step_in);
    mpm_strides(&out, step_out);
    for (k = 0; k < in.rank; k++) {
        MPM_NEED(p, update.dims[k] <= in.dims[k], "the update is larger than the input");
        dims[k].count = update.dims[k];
        dims[k].from = step_in[k];
        dims[k].to = step_out[k];
        u->last[k] = in.dims[k] - update.dims[k];
        u->step[k] = step_out[k] * (int32_t)mpm_type_bytes(in.type);
    }
    MPM_TRY(mpm_keep_move(p, &u->move, update.data, out.data, mpm_type_bytes(in.type), in.rank, dims));
    u->in = in.data;
    u->starts = starts.data;
    u->out = out.data;
    u->bytes = in.bytes;
    u->rank = in.rank;
    u->is_64 = starts.type == MPM_INT64;
    mpm_may_overlay(p, 0);
    p->run = run_update;
    p->params = u;
    return MPM_OK;
}

const struct mpm_kernel mpm_gather = {MPM_OP_GATHER, MPM_ANY_TYPE, 0, NULL, prepare_gather};
const struct mpm_kernel mpm_gather_nd = {MPM_OP_GATHER_ND, MPM_ANY_TYPE, 0, NULL, prepare_gather_nd};
const struct mpm_kernel mpm_embedding_lookup = {MPM_OP_EMBEDDING_LOOKUP, MPM_ANY_TYPE, 0, NULL, prepare_embedding};
const struct mpm_kernel mpm_dynamic_update_slice = {MPM_OP_DYNAMIC_UPDATE_SLICE, MPM_ANY_TYPE, 0, NULL, prepare_update};
