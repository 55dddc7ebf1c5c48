/* Reads tensors out of the file and checks them: shape against buffer, quantisation against shape. */
#include "kernel.h"

#include <string.h>

uint32_t mpm_type_bytes(uint32_t type) {
    switch (type) {
        case MPM_UINT8: case MPM_BOOL: case MPM_INT8: case MPM_INT4: return 1;
        case MPM_INT16: case MPM_UINT16: return 2;
        case MPM_FLOAT32: case MPM_INT32: case MPM_UINT32: case MPM_RESOURCE: return 4;
        case MPM_INT64: case MPM_UINT64: return 8;
        default: return 0;
    }
}

int mpm_same_shape(const struct mpm_tensor *a, const struct mpm_tensor *b) {
    return a->rank == b->rank && memcmp(a->dims, b->dims, a->rank * sizeof a->dims[0]) == 0;
}

static enum mpm_status fail_at(struct mpm_prep *p, enum mpm_status status, int32_t tensor) {
    struct mpm_error *error = &p->m->error;
    error->status = (uint8_t)status;
    error->tensor = tensor;
    error->op = (int16_t)p->op;
    error->subgraph = (uint8_t)p->subgraph;
    return status;
}

#ifdef MPM_NO_TEXT
enum mpm_status mpm_fail_at(struct mpm_prep *p, enum mpm_status status, int32_t tensor) {
    return fail_at(p, status, tensor);
}
enum mpm_status mpm_bad_model(struct mpm_prep *p) { return fail_at(p, MPM_BAD_MODEL, -1); }
enum mpm_status mpm_unsupported(struct mpm_prep *p) { return fail_at(p, MPM_UNSUPPORTED, -1); }
#else
enum mpm_status mpm_fail(struct mpm_prep *p, enum mpm_status status, int32_t tensor, const char *what) {
    p->m->error.what = what;
    return fail_at(p, status, tensor);
}
#endif

static enum mpm_status shape_of(struct mpm_prep *p, uint32_t table, int32_t index, struct mpm_tensor *t) {
    struct mpm_file *f = &p->m->file;
    const struct mpm_vector shape = mpm_vector(f, table, TENSOR_SHAPE, 4);
    uint32_t i, size, span = 1;
    t->type = (uint8_t)mpm_field_u8(f, table, TENSOR_TYPE, 0);
    size = mpm_type_bytes(t->type);
    if (size == 0) return mpm_fail(p, MPM_UNSUPPORTED, index, MPM_TEXT("a tensor's type is not supported"));
    if (mpm_field(f, table, TENSOR_SPARSITY, 4) != 0)
        return mpm_fail(p, MPM_UNSUPPORTED, index, MPM_TEXT("sparse tensors are not supported"));
    if (shape.count > MPM_MAX_RANK)
        return mpm_fail(p, MPM_UNSUPPORTED, index, MPM_TEXT("a tensor has more than 6 dims"));
    t->rank = (uint8_t)shape.count;
    t->count = 1;
    for (i = 0; i < shape.count; i++) {
        const int32_t dim = (int32_t)mpm_u32(f, shape.at + 4 * i);
        if (dim < 0) return mpm_fail(p, MPM_UNSUPPORTED, index, MPM_TEXT("dynamic shapes are not supported"));
        t->dims[i] = dim;
        /* dims of 0 count as 1 here, so that products of any of the dims stay small as well */
        if (dim != 0 && span > 0x10000000u / size / (uint32_t)dim)
            return mpm_fail(p, MPM_UNSUPPORTED, index, MPM_TEXT("a tensor has more than 2^28 bytes"));
        span *= dim == 0 ? 1 : (uint32_t)dim;
        t->count *= (uint32_t)dim;
    }
    t->bytes = t->type == MPM_INT4 ? (t->count + 1) / 2 : t->count * size;
    return MPM_OK;
}

/* Finite, positive and not denormal: what the integer arithmetic of scales relies on. */
static int is_scale(uint32_t bits) { return bits >= 0x00800000u && bits < 0x7f800000u; }

static enum mpm_status quantization_of(struct mpm_prep *p, uint32_t table, int32_t index, struct mpm_tensor *t) {
    struct mpm_file *f = &p->m->file;
    const uint32_t quant = mpm_child(f, table, TENSOR_QUANTIZATION);
    const struct mpm_vector scales = mpm_vector(f, quant, QUANT_SCALE, 4);
    const struct mpm_vector zeros = mpm_vector(f, quant, QUANT_ZERO, 8);
    uint32_t i;
    if (scales.count == 0) return MPM_OK;
    t->scales = f->base + scales.at;
    t->scale_count = scales.count;
    t->channel_dim = mpm_field_i32(f, quant, QUANT_DIM, 0);
    /* Once is enough: every tensor is read before the planning ends. */
    for (i = 0; !p->planned && i < scales.count; i++) {
        uint32_t bits;
        memcpy(&bits, t->scales + 4 * (size_t)i, 4); /* mpm_vector has seen that all lie in the file */
        if (!is_scale(bits))
            return mpm_fail(p, MPM_BAD_MODEL, index, MPM_TEXT("a scale is not a positive, normal float32"));
    }
    memcpy(&t->scale, t->scales, 4);
    if (zeros.count != 0) {
        const int32_t low = (int32_t)mpm_u32(f, zeros.at), high = (int32_t)mpm_u32(f, zeros.at + 4);
        if (low < -32768 || low > 65535 || high != (low < 0 ? -1 : 0) ||
            (t->type == MPM_INT8 && (low < -128 || low > 127)))
            return mpm_fail(p, MPM_BAD_MODEL, index, MPM_TEXT("a zero point is out of its type's range"));
        t->zero_point = low;
    }
    return MPM_OK;
}

static enum mpm_status constant_of(struct mpm_prep *p, uint32_t table, int32_t index, struct mpm_tensor *t) {
    struct mpm_file *f = &p->m->file;
    const uint32_t number = (uint32_t)mpm_field_i32(f, table, TENSOR_BUFFER, 0);
    uint32_t buffer, at, bytes, size = mpm_type_bytes(t->type);
    struct mpm_vector data;
    if (number == 0) return MPM_OK;
    buffer = mpm_element(f, p->model, MODEL_BUFFERS, number);
    data = mpm_vector(f, buffer, BUFFER_DATA, 1);
    at = data.at;
    bytes = data.count;
    if (bytes == 0) { /* large files keep their data behind the flatbuffer: 64-bit offset and size */
        const uint32_t offset = mpm_field(f, buffer, BUFFER_OFFSET, 8), length = mpm_field(f, buffer, BUFFER_SIZE, 8);
        if (offset == 0 || length == 0) return MPM_OK;
        at = mpm_u32(f, offset);
        bytes = mpm_u32(f, length);
        if (at <= 1 || bytes == 0) return MPM_OK;
        if (mpm_u32(f, offset + 4) != 0 || mpm_u32(f, length + 4) != 0 || at > f->size || bytes > f->size - at) {
            mpm_mark_bad(f, offset);
            return MPM_OK;
        }
    }
    if (bytes < t->bytes) return mpm_fail(p, MPM_BAD_MODEL, index, MPM_TEXT("a constant is shorter than its shape"));
    if (size == 8) size = MPM_INT64_ALIGN;
    if (((uintptr_t)(f->base + at) & (size - 1)) != 0)
        return mpm_fail(p, MPM_BAD_MODEL, index, MPM_TEXT("a constant is not aligned to its type"));
    t->data = (void *)(uintptr_t)(f->base + at);
    t->constant = 1;
    return MPM_OK;
}

/* The buffer of a tensor; null before it is planned. Those of a subgraph lie together, and while mpm_init works,
 * graph.done is the number of the first. */
static const struct mpm_buffer *buffer_of(struct mpm_prep *p, uint32_t subgraph, uint32_t tensor) {
    const struct mpm_interpreter *m = p->m;
    uint32_t i, end = p->tensor_buffers;
    if (p->buffers == NULL || m->graphs == NULL) return NULL;
    if (subgraph + 1 < m->graph_count) end = m->graphs[subgraph + 1].done;
    for (i = m->graphs[subgraph].done; i < end; i++)
        if (p->buffers[i].tensor == tensor) return &p->buffers[i];
    return NULL;
}

enum mpm_status mpm_tensor_at(struct mpm_prep *p, uint32_t subgraph, uint32_t index, struct mpm_tensor *t) {
    struct mpm_file *f = &p->m->file;
    uint32_t table;
    memset(t, 0, sizeof *t);
    table = mpm_element(f, subgraph == p->subgraph ? p->graph : mpm_element(f, p->model, MODEL_SUBGRAPHS, subgraph),
                        GRAPH_TENSORS, index);
    if (f->bad == 0) {
        MPM_TRY(shape_of(p, table, (int32_t)index, t));
        MPM_TRY(quantization_of(p, table, (int32_t)index, t));
        t->variable = mpm_field_u8(f, table, TENSOR_VARIABLE, 0) != 0;
        if (!t->variable) MPM_TRY(constant_of(p, table, (int32_t)index, t));
    }
    if (f->bad != 0) {
        p->m->error.at = f->bad - 1;
        return mpm_fail(p, MPM_BAD_FILE, (int32_t)index, MPM_TEXT("an offset in the file leads nowhere"));
    }
    if (!t->constant && p->planned) {
        const struct mpm_buffer *b = buffer_of(p, subgraph, index);
        if (b == NULL)
            return mpm_fail(p, MPM_BAD_MODEL, (int32_t)index, MPM_TEXT("a tensor is read that nothing writes"));
        if (b->root == MPM_VARIABLE) t->data = p->m->variables + b->offset;
        else t->data = p->m->arena->scratch + (p->final ? p->buffers[b->root].offset : 0);
    }
    return MPM_OK;
}

int mpm_has_input(struct mpm_prep *p, uint32_t i) {
    return i < p->inputs.count && (int32_t)mpm_u32(&p->m->file, p->inputs.at + 4 * i) >= 0;
}

static enum mpm_status end_at(struct mpm_prep *p, struct mpm_vector ends, uint32_t i, struct mpm_tensor *t) {
    if (i >= ends.count) return MPM_BAD(p, "the operator has too few inputs or outputs");
    return mpm_tensor_at(p, p->subgraph, mpm_u32(&p->m->file, ends.at + 4 * i), t);
}

enum mpm_status mpm_in(struct mpm_prep *p, uint32_t i, struct mpm_tensor *t) { return end_at(p, p->inputs, i, t); }

enum mpm_status mpm_out(struct mpm_prep *p, uint32_t i, struct mpm_tensor *t) {
    MPM_TRY(end_at(p, p->outputs, i, t));
    if (t->constant || t->variable) return MPM_BAD(p, "an operator writes a constant");
    return MPM_OK;
}
