/* Operators that put tensors together or spread them out: CONCATENATION, PACK, PAD, PADV2, MIRROR_PAD,
 * SPACE_TO_DEPTH, DEPTH_TO_SPACE. */
#include "move.h"

#include <string.h>

/* 28 bytes on a 32-bit chip, and its moves. */
struct padded {
    uint8_t *out;
    uint32_t bytes, element_bytes;
    uint8_t value[8]; /* one element: what stands where nothing is copied */
    const struct mpm_move *moves;
};

static enum mpm_status run_padded(struct mpm_interpreter *m, const void *params) {
    const struct padded *o = params;
    uint32_t i;
    (void)m;
    if (o->element_bytes == 1) memset(o->out, o->value[0], o->bytes);
    else for (i = 0; i < o->bytes; i += o->element_bytes) memcpy(o->out + i, o->value, o->element_bytes);
    mpm_move_all(o->moves);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status join(struct mpm_prep *p, int32_t axis, int new_dim) {
    struct mpm_tensor in, out;
    const struct mpm_move *list = NULL;
    uint32_t i, dim, at = 0, inner, outer, bytes;
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(mpm_axis(p, axis, out.rank, &dim));
    MPM_SUPPORT(p, out.type != MPM_INT4, "int4 is not supported here");
    bytes = mpm_type_bytes(out.type);
    outer = mpm_span(&out, 0, dim);
    inner = mpm_span(&out, dim + 1, out.rank);
    for (i = 0; i < p->inputs.count; i++) {
        struct mpm_dim dims[2];
        uint32_t part;
        MPM_TRY(mpm_in(p, i, &in));
        MPM_NEED(p, in.type == out.type && in.rank + (new_dim ? 1u : 0u) == out.rank,
                 "inputs and output differ in type or rank");
        part = new_dim ? 1 : (uint32_t)in.dims[dim];
        MPM_NEED(p, part <= (uint32_t)out.dims[dim] - at && in.count == outer * part * inner,
                 "the inputs are not the parts of the output");
        MPM_SUPPORT(p, in.scale_count == 0 || out.scale_count == 0 ||
                           ((in.scale - out.scale < 1e-6f * out.scale) && (out.scale - in.scale < 1e-6f * out.scale) &&
                            in.zero_point == out.zero_point),
                    "inputs and output differ in scale or zero point");
        dims[0].count = (int32_t)outer;
        dims[0].from = (int32_t)(part * inner);
        dims[0].to = (int32_t)((uint32_t)out.dims[dim] * inner);
        dims[1].count = (int32_t)(part * inner);
        dims[1].from = dims[1].to = 1;
        MPM_TRY(mpm_keep_move(p, &list, in.data, (uint8_t *)out.data + (size_t)at * inner * bytes, bytes, 2, dims));
        at += part;
    }
    MPM_NEED(p, at == (uint32_t)out.dims[dim], "the inputs are not all of the output");
    p->run = mpm_run_moves;
    p->params = (void *)(uintptr_t)list;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_concatenation(struct mpm_prep *p) {
    MPM_SUPPORT(p, mpm_field_u8(&p->m->file, p->options, 1, 0) == 0, "a fused activation is not supported here");
    return join(p, mpm_field_i32(&p->m->file, p->options, 0, 0), 0);
}

static MPM_ONCE enum mpm_status prepare_pack(struct mpm_prep *p) {
    return join(p, mpm_field_i32(&p->m->file, p->options, 1, 0), 1);
}

/* The values that stand before and after each dim: constant [rank][2]. */
static MPM_ONCE enum mpm_status paddings(struct mpm_prep *p, const struct mpm_tensor *in, const struct mpm_tensor *out,
                                         int32_t before[MPM_MAX_RANK]) {
    struct mpm_tensor t;
    uint32_t i;
    MPM_TRY(mpm_in(p, 1, &t));
    MPM_SUPPORT(p, t.constant && (t.type == MPM_INT32 || t.type == MPM_INT64),
                "dynamic shapes are not supported: the paddings are no constant");
    MPM_NEED(p, t.count == 2u * in->rank && in->rank == out->rank && in->type == out->type,
             "paddings, input and output do not fit");
    for (i = 0; i < in->rank; i++) {
        const int64_t left =
            t.type == MPM_INT64 ? ((const mpm_int64 *)t.data)[2 * i] : ((const int32_t *)t.data)[2 * i];
        const int64_t right =
            t.type == MPM_INT64 ? ((const mpm_int64 *)t.data)[2 * i + 1] : ((const int32_t *)t.data)[2 * i + 1];
        MPM_NEED(p,
                 left >= 0 && right >= 0 && left < 0x10000000 && right < 0x10000000 &&
                     left + right + in->dims[i] == out->dims[i],
                 "the output's shape is not the input's with the paddings");
        before[i] = (int32_t)left;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status pad(struct mpm_prep *p, int has_value) {
    struct mpm_tensor in, out, value;
    struct mpm_dim dims[MPM_MAX_RANK];
    int32_t before[MPM_MAX_RANK], step_in[MPM_MAX_RANK], step_out[MPM_MAX_RANK], start = 0;
    uint32_t i;
    struct padded *o = mpm_keep(p, sizeof *o);
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, in.type != MPM_INT4, "int4 is not supported here");
    MPM_TRY(paddings(p, &in, &out, before));
    mpm_strides(&in, step_in);
    mpm_strides(&out, step_out);
    for (i = 0; i < in.rank; i++) {
        dims[i].count = in.dims[i];
        dims[i].from = step_in[i];
        dims[i].to = step_out[i];
        start += before[i] * step_out[i];
    }
    o->out = out.data;
    o->bytes = out.bytes;
    o->element_bytes = mpm_type_bytes(in.type);
    if (in.type == MPM_INT8) o->value[0] = (uint8_t)out.zero_point;
    if (has_value) {
        MPM_TRY(mpm_in(p, 2, &value));
        MPM_SUPPORT(p, value.constant && value.type == in.type && value.count == 1,
                    "the padding value must be one constant of the input's type");
        memcpy(o->value, value.data, o->element_bytes);
    }
    MPM_TRY(mpm_keep_move(p, &o->moves, in.data, o->out + (size_t)(in.count == 0 ? 0 : start) * o->element_bytes,
                          o->element_bytes, in.rank, dims));
    p->run = run_padded;
    p->params = o;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_pad(struct mpm_prep *p) { return pad(p, mpm_has_input(p, 2)); }

/* 3^rank moves, of which most are empty: each dim is the mirrored part before, the middle, or the mirrored part
 * after. */
static MPM_ONCE enum mpm_status prepare_mirror_pad(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    int32_t before[MPM_MAX_RANK], step_in[MPM_MAX_RANK], step_out[MPM_MAX_RANK];
    const struct mpm_move *list = NULL;
    const int32_t edge = mpm_field_u8(&p->m->file, p->options, 0, 0) == 0 ? 1 : 0; /* REFLECT leaves out the edge */
    uint32_t i, part, parts = 1;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, in.rank <= 5 && in.type != MPM_INT4, "at most 5 dims, and not int4");
    MPM_TRY(paddings(p, &in, &out, before));
    mpm_strides(&in, step_in);
    mpm_strides(&out, step_out);
    for (i = 0; i < in.rank; i++) {
        MPM_NEED(p, before[i] <= in.dims[i] - edge && out.dims[i] - in.dims[i] - before[i] <= in.dims[i] - edge,
                 "more padding than there is to mirror");
        parts *= 3;
    }
    for (part = 0; part < parts; part++) {
        struct mpm_dim dims[MPM_MAX_RANK];
        int32_t from = 0, to = 0, all = 1;
        uint32_t code = part;
        for (i = 0; i < in.rank; i++, code /= 3) {
            const int32_t after = out.dims[i] - in.dims[i] - before[i];
            dims[i].to = step_out[i];
            dims[i].from = code % 3 == 1 ? step_in[i] : -step_in[i];
            dims[i].count = code % 3 == 0 ? before[i] : code % 3 == 1 ? in.dims[i] : after;
            from += (code % 3 == 0 ? before[i] - 1 + edge : code % 3 == 1 ? 0 : in.dims[i] - 1 - edge) * step_in[i];
            to += (code % 3 == 0 ? 0 : code % 3 == 1 ? before[i] : before[i] + in.dims[i]) * step_out[i];
            all = all != 0 && dims[i].count != 0;
        }
        if (!all) continue;
        MPM_TRY(mpm_keep_move(p, &list, (const uint8_t *)in.data + (ptrdiff_t)from * (ptrdiff_t)mpm_type_bytes(in.type),
                              (uint8_t *)out.data + (ptrdiff_t)to * (ptrdiff_t)mpm_type_bytes(in.type),
                              mpm_type_bytes(in.type), in.rank, dims));
    }
    p->run = mpm_run_moves;
    p->params = (void *)(uintptr_t)list;
    return MPM_OK;
}

/* Both are one copy of 6 dims [batch][y][dy][x][dx][depth], in two orders. */
static MPM_ONCE enum mpm_status blocks(struct mpm_prep *p, int to_depth) {
    struct mpm_tensor in, out, *wide, *deep;
    const int32_t n = mpm_field_i32(&p->m->file, p->options, 0, 0);
    const struct mpm_move *list = NULL;
    struct mpm_dim dims[6];
    int32_t i, w, c;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    wide = to_depth ? &in : &out;
    deep = to_depth ? &out : &in;
    MPM_NEED(p, in.rank == 4 && out.rank == 4 && in.type == out.type && n >= 1 && n < 32768,
             "4 dims and a block of 1 to 32,767 are needed");
    MPM_NEED(p, in.dims[0] == out.dims[0] && wide->dims[1] == deep->dims[1] * n && wide->dims[2] == deep->dims[2] * n &&
                    deep->dims[3] == wide->dims[3] * n * n, "the output's shape does not follow");
    w = wide->dims[2];
    c = wide->dims[3];
    {
        const int32_t counts[6] = {in.dims[0], deep->dims[1], n, deep->dims[2], n, c};
        const int32_t spread[6] = {wide->dims[1] * w * c, n * w * c, w * c, n * c, c, 1};
        const int32_t packed[6] = {
            deep->dims[1] * deep->dims[2] * deep->dims[3], deep->dims[2] * deep->dims[3], n * c, deep->dims[3], c, 1};
        for (i = 0; i < 6; i++) {
            dims[i].count = counts[i];
            dims[i].from = to_depth ? spread[i] : packed[i];
            dims[i].to = to_depth ? packed[i] : spread[i];
        }
    }
    MPM_TRY(mpm_keep_move(p, &list, in.data, out.data, mpm_type_bytes(in.type), 6, dims));
    p->run = mpm_run_moves;
    p->params = (void *)(uintptr_t)list;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_space_to_depth(struct mpm_prep *p) { return blocks(p, 1); }
static MPM_ONCE enum mpm_status prepare_depth_to_space(struct mpm_prep *p) { return blocks(p, 0); }

const struct mpm_kernel mpm_concatenation = {MPM_OP_CONCATENATION, MPM_ANY_TYPE, 0, NULL, prepare_concatenation};
const struct mpm_kernel mpm_pack = {MPM_OP_PACK, MPM_ANY_TYPE, 0, NULL, prepare_pack};
const struct mpm_kernel mpm_pad = {MPM_OP_PAD, MPM_ANY_TYPE, 0, NULL, prepare_pad};
const struct mpm_kernel mpm_padv2 = {MPM_OP_PADV2, MPM_ANY_TYPE, 0, NULL, prepare_pad};
const struct mpm_kernel mpm_mirror_pad = {MPM_OP_MIRROR_PAD, MPM_ANY_TYPE, 0, NULL, prepare_mirror_pad};
const struct mpm_kernel mpm_space_to_depth = {MPM_OP_SPACE_TO_DEPTH, MPM_ANY_TYPE, 0, NULL, prepare_space_to_depth};
const struct mpm_kernel mpm_depth_to_space = {MPM_OP_DEPTH_TO_SPACE, MPM_ANY_TYPE, 0, NULL, prepare_depth_to_space};
