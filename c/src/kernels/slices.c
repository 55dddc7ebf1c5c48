/* Operators that take parts of one tensor: SLICE, STRIDED_SLICE, SPLIT, SPLIT_V, UNPACK, TRANSPOSE, REVERSE_V2,
 * BROADCAST_TO. */
#include "move.h"

static MPM_ONCE enum mpm_status ends(struct mpm_prep *p, struct mpm_tensor *in, struct mpm_tensor *out) {
    MPM_TRY(mpm_in(p, 0, in));
    MPM_TRY(mpm_out(p, 0, out));
    MPM_NEED(p, in->type == out->type, "input and output differ in type");
    MPM_SUPPORT(p, in->type != MPM_INT4, "int4 is not supported here");
    return MPM_OK;
}

static MPM_ONCE enum mpm_status finish(struct mpm_prep *p, const struct mpm_move *list) {
    p->run = mpm_run_moves;
    p->params = (void *)(uintptr_t)list;
    return MPM_OK;
}

static const uint8_t *element(const struct mpm_tensor *t, int32_t index) {
    return (const uint8_t *)t->data + (ptrdiff_t)index * (ptrdiff_t)mpm_type_bytes(t->type);
}

static MPM_ONCE enum mpm_status prepare_slice(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_dim dims[MPM_MAX_RANK];
    int32_t begin[MPM_MAX_RANK], size[MPM_MAX_RANK], step[MPM_MAX_RANK], start = 0;
    const struct mpm_move *list = NULL;
    uint32_t i;
    MPM_TRY(ends(p, &in, &out));
    MPM_TRY(mpm_values(p, 1, in.rank, begin, NULL));
    MPM_TRY(mpm_values(p, 2, in.rank, size, NULL));
    MPM_NEED(p, in.rank == out.rank, "input and output differ in rank");
    mpm_strides(&in, step);
    for (i = 0; i < in.rank; i++) {
        const int32_t count = size[i] < 0 ? in.dims[i] - begin[i] : size[i];
        MPM_NEED(p,
                 begin[i] >= 0 && begin[i] <= in.dims[i] && count >= 0 && count <= in.dims[i] - begin[i] &&
                     count == out.dims[i],
                 "the slice is not inside the input, or not the output's shape");
        dims[i].count = count;
        dims[i].from = step[i];
        start += begin[i] * step[i];
    }
    mpm_strides(&out, step);
    for (i = 0; i < in.rank; i++) dims[i].to = step[i];
    MPM_TRY(mpm_keep_move(p, &list, element(&in, out.count == 0 ? 0 : start), out.data, mpm_type_bytes(in.type),
                          in.rank, dims));
    return finish(p, list);
}

struct strided {
    int32_t begin[MPM_MAX_RANK], end[MPM_MAX_RANK], step[MPM_MAX_RANK];
    uint32_t begin_mask, end_mask, shrink_mask;
};

/* NumPy's rules for one dim: where it begins and how many there are. */
static int32_t strided_dim(const struct strided *s, uint32_t i, int32_t size, int32_t *begin) {
    const int32_t step = s->step[i], low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
    int32_t from = s->begin[i] < 0 ? s->begin[i] + size : s->begin[i],
            to = s->end[i] < 0 ? s->end[i] + size : s->end[i];
    if (s->begin_mask >> i & 1) from = step > 0 ? low : high;
    if (s->end_mask >> i & 1) to = step > 0 ? high : low;
    from = from < low ? low : from > high ? high : from;
    if (s->shrink_mask >> i & 1) {
        *begin = from;
        return from >= 0 && from < size ? 1 : 0;
    }
    to = to < low ? low : to > high ? high : to;
    *begin = from;
    if (step > 0) return to > from ? (to - from + step - 1) / step : 0;
    return from > to ? (from - to - step - 1) / -step : 0;
}

static MPM_ONCE enum mpm_status prepare_strided_slice(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_file *f = &p->m->file;
    struct strided s;
    struct mpm_dim dims[MPM_MAX_RANK];
    int32_t step[MPM_MAX_RANK], start = 0, to = 1;
    const struct mpm_move *list = NULL;
    uint32_t i, given, count = 1;
    MPM_TRY(ends(p, &in, &out));
    MPM_TRY(mpm_values(p, 1, 0, s.begin, &given));
    MPM_TRY(mpm_values(p, 2, given, s.end, NULL));
    MPM_TRY(mpm_values(p, 3, given, s.step, NULL));
    MPM_NEED(p, given <= in.rank, "more slices than dims");
    /* Options: begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask */
    s.begin_mask = (uint32_t)mpm_field_i32(f, p->options, 0, 0);
    s.end_mask = (uint32_t)mpm_field_i32(f, p->options, 1, 0);
    s.shrink_mask = (uint32_t)mpm_field_i32(f, p->options, 4, 0);
    MPM_SUPPORT(p, mpm_field_i32(f, p->options, 2, 0) == 0 && mpm_field_i32(f, p->options, 3, 0) == 0,
                "ellipsis and new axes are not supported");
    mpm_strides(&in, step);
    for (i = in.rank; i-- > 0;) {
        int32_t begin = 0;
        dims[i].count = in.dims[i];
        dims[i].from = step[i];
        if (i < given) {
            MPM_SUPPORT(p, s.step[i] != 0 && s.step[i] > -65536 && s.step[i] < 65536, "a stride is 0 or too large");
            dims[i].count = strided_dim(&s, i, in.dims[i], &begin);
            dims[i].from = dims[i].count > 1 ? step[i] * s.step[i] : 0;
        }
        dims[i].to = to;
        to *= dims[i].count;
        count *= (uint32_t)dims[i].count;
        start += begin * step[i];
    }
    MPM_NEED(p, count == out.count, "the slice is not the output's shape");
    MPM_TRY(mpm_keep_move(p, &list, element(&in, count == 0 ? 0 : start), out.data, mpm_type_bytes(in.type), in.rank,
                          dims));
    return finish(p, list);
}

/* Cuts `in` along an axis into the outputs; each has `part` of it, or what its own shape says where part is 0. */
static MPM_ONCE enum mpm_status cut(struct mpm_prep *p, uint32_t input, int32_t axis, int squeezed) {
    struct mpm_tensor in, out;
    const struct mpm_move *list = NULL;
    uint32_t i, at = 0, dim, inner;
    MPM_TRY(mpm_in(p, input, &in));
    MPM_TRY(mpm_axis(p, axis, in.rank, &dim));
    inner = mpm_span(&in, dim + 1, in.rank);
    for (i = 0; i < p->outputs.count; i++) {
        struct mpm_dim dims[2];
        uint32_t part;
        MPM_TRY(mpm_out(p, i, &out));
        MPM_NEED(p, in.type == out.type && out.rank + (squeezed ? 1u : 0u) == in.rank,
                 "input and output differ in type or rank");
        part = squeezed ? 1 : (uint32_t)out.dims[dim];
        MPM_NEED(p, part <= (uint32_t)in.dims[dim] - at && out.count == mpm_span(&in, 0, dim) * part * inner,
                 "the outputs are not the parts of the input");
        dims[0].count = (int32_t)mpm_span(&in, 0, dim);
        dims[0].from = (int32_t)((uint32_t)in.dims[dim] * inner);
        dims[0].to = (int32_t)(part * inner);
        dims[1].count = (int32_t)(part * inner);
        dims[1].from = dims[1].to = 1;
        MPM_TRY(
            mpm_keep_move(p, &list, element(&in, (int32_t)(at * inner)), out.data, mpm_type_bytes(in.type), 2, dims));
        at += part;
    }
    MPM_NEED(p, at == (uint32_t)in.dims[dim], "the outputs are not all of the input");
    return finish(p, list);
}

static MPM_ONCE enum mpm_status prepare_split(struct mpm_prep *p) {
    int32_t axis[MPM_MAX_RANK];
    MPM_TRY(mpm_values(p, 0, 1, axis, NULL));
    return cut(p, 1, axis[0], 0);
}

static MPM_ONCE enum mpm_status prepare_split_v(struct mpm_prep *p) {
    int32_t axis[MPM_MAX_RANK];
    MPM_TRY(mpm_values(p, 2, 1, axis, NULL));
    return cut(p, 0, axis[0], 0);
}

static MPM_ONCE enum mpm_status prepare_unpack(struct mpm_prep *p) {
    return cut(p, 0, mpm_field_i32(&p->m->file, p->options, 1, 0), 1);
}

static MPM_ONCE enum mpm_status prepare_transpose(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_dim dims[MPM_MAX_RANK];
    int32_t order[MPM_MAX_RANK], step_in[MPM_MAX_RANK], step_out[MPM_MAX_RANK];
    const struct mpm_move *list = NULL;
    uint32_t i, seen = 0;
    MPM_TRY(ends(p, &in, &out));
    MPM_TRY(mpm_values(p, 1, in.rank, order, NULL));
    MPM_NEED(p, in.rank == out.rank, "input and output differ in rank");
    mpm_strides(&in, step_in);
    mpm_strides(&out, step_out);
    for (i = 0; i < in.rank; i++) {
        uint32_t from = 0;
        MPM_TRY(mpm_axis(p, order[i], in.rank, &from));
        seen |= 1u << from;
        MPM_NEED(p, in.dims[from] == out.dims[i], "the output's shape is not the input's, transposed");
        dims[i].count = out.dims[i];
        dims[i].from = step_in[from];
        dims[i].to = step_out[i];
    }
    MPM_NEED(p, seen + 1 == 1u << in.rank, "the order does not name every dim once");
    MPM_TRY(mpm_keep_move(p, &list, in.data, out.data, mpm_type_bytes(in.type), in.rank, dims));
    return finish(p, list);
}

static MPM_ONCE enum mpm_status prepare_reverse(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_dim dims[MPM_MAX_RANK];
    int32_t axes[MPM_MAX_RANK], step[MPM_MAX_RANK], start = 0;
    const struct mpm_move *list = NULL;
    uint32_t i, k, count;
    MPM_TRY(ends(p, &in, &out));
    MPM_TRY(mpm_values(p, 1, 0, axes, &count));
    MPM_NEED(p, mpm_same_shape(&in, &out), "input and output differ in shape");
    mpm_strides(&in, step);
    for (i = 0; i < in.rank; i++) {
        dims[i].count = in.dims[i];
        dims[i].from = dims[i].to = step[i];
    }
    for (k = 0; k < count; k++) {
        MPM_TRY(mpm_axis(p, axes[k], in.rank, &i));
        MPM_NEED(p, dims[i].from > 0 || in.count == 0, "an axis is named twice");
        dims[i].from = -step[i];
        start += (in.dims[i] - 1) * step[i];
    }
    MPM_TRY(mpm_keep_move(p, &list, element(&in, in.count == 0 ? 0 : start), out.data, mpm_type_bytes(in.type), in.rank,
                          dims));
    return finish(p, list);
}

static MPM_ONCE enum mpm_status prepare_broadcast_to(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_dim dims[MPM_MAX_RANK];
    int32_t step_in[MPM_MAX_RANK], step_out[MPM_MAX_RANK];
    const struct mpm_move *list = NULL;
    uint32_t i;
    MPM_TRY(ends(p, &in, &out));
    MPM_NEED(p, in.rank <= out.rank, "the output has fewer dims than the input");
    mpm_strides(&in, step_in);
    mpm_strides(&out, step_out);
    for (i = 0; i < out.rank; i++) {
        const uint32_t new = (uint32_t)out.rank - in.rank;
        const int32_t size = i < new ? 1 : in.dims[i - new];
        MPM_NEED(p, size == out.dims[i] || size == 1, "the input cannot be spread to the output's shape");
        dims[i].count = out.dims[i];
        dims[i].from = size == 1 ? 0 : step_in[i - new];
        dims[i].to = step_out[i];
    }
    MPM_TRY(mpm_keep_move(p, &list, in.data, out.data, mpm_type_bytes(in.type), out.rank, dims));
    return finish(p, list);
}

const struct mpm_kernel mpm_slice = {MPM_OP_SLICE, MPM_ANY_TYPE, 0, NULL, prepare_slice};
const struct mpm_kernel mpm_strided_slice = {MPM_OP_STRIDED_SLICE, MPM_ANY_TYPE, 0, NULL, prepare_strided_slice};
const struct mpm_kernel mpm_split = {MPM_OP_SPLIT, MPM_ANY_TYPE, 0, NULL, prepare_split};
const struct mpm_kernel mpm_split_v = {MPM_OP_SPLIT_V, MPM_ANY_TYPE, 0, NULL, prepare_split_v};
const struct mpm_kernel mpm_unpack = {MPM_OP_UNPACK, MPM_ANY_TYPE, 0, NULL, prepare_unpack};
const struct mpm_kernel mpm_transpose = {MPM_OP_TRANSPOSE, MPM_ANY_TYPE, 0, NULL, prepare_transpose};
const struct mpm_kernel mpm_reverse_v2 = {MPM_OP_REVERSE_V2, MPM_ANY_TYPE, 0, NULL, prepare_reverse};
const struct mpm_kernel mpm_broadcast_to = {MPM_OP_BROADCAST_TO, MPM_ANY_TYPE, 0, NULL, prepare_broadcast_to};
