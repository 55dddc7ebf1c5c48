#include "plan.h"

#include <string.h>

uint32_t mpm_round_up(uint32_t bytes) { return (bytes + (MPM_ALIGN - 1)) & ~(uint32_t)(MPM_ALIGN - 1); }

void mpm_see_peak(struct mpm_prep *p) {
    const struct mpm_arena *arena = p->m->arena;
    const uint32_t used =
        (uint32_t)(p->low - arena->scratch) + (uint32_t)(arena->persistent - p->high) - arena->persistent_used;
    if (p->peak < used && !p->final) p->peak = used;
}

struct mpm_buffer *mpm_new_buffer(struct mpm_prep *p, uint32_t tensor, uint32_t bytes) {
    const struct mpm_arena *arena = p->m->arena;
    const uint8_t *end = arena->persistent_bytes != 0 ? arena->scratch + arena->scratch_bytes : p->high;
    struct mpm_buffer *b = &p->buffers[p->buffer_count];
    if (sizeof *b > (size_t)(end - p->low) || p->buffer_count >= MPM_SCRATCH) {
        p->m->error.at = 0;
        mpm_fail(p, MPM_ARENA_TOO_SMALL, -1, MPM_TEXT("the arena is too small to plan memory in"));
        return NULL;
    }
    p->low += sizeof *b;
    mpm_see_peak(p);
    b->bytes = mpm_round_up(bytes);
    b->offset = MPM_NO_ROOM;
    b->tensor = (uint16_t)tensor;
    b->root = (uint16_t)p->buffer_count++;
    return b;
}

static struct mpm_buffer *find(struct mpm_prep *p, uint32_t tensor) {
    uint32_t i;
    for (i = p->m->graphs[p->subgraph].done; i < p->buffer_count; i++)
        if (p->buffers[i].tensor == tensor) return &p->buffers[i];
    return NULL;
}

/* The buffer of a tensor, made if it is new and not constant; null in `found` if it is constant. */
static enum mpm_status buffer_for(struct mpm_prep *p, uint32_t tensor, uint32_t *variables, struct mpm_buffer **found) {
    struct mpm_tensor t;
    struct mpm_buffer *b = find(p, tensor);
    *found = b;
    if (b != NULL) return MPM_OK;
    MPM_TRY(mpm_tensor_at(p, p->subgraph, tensor, &t));
    if (t.constant) return MPM_OK;
    if (tensor >= MPM_SCRATCH) return mpm_fail(p, MPM_UNSUPPORTED, (int32_t)tensor, MPM_TEXT("too many tensors"));
    b = mpm_new_buffer(p, tensor, t.bytes);
    if (b == NULL) return MPM_ARENA_TOO_SMALL;
    b->first = 0xffff; /* nothing has written it */
    b->last = 0;
    if (t.variable) {
        if (b->bytes > 0x7ffffffu - *variables)
            return mpm_fail(p, MPM_UNSUPPORTED, (int32_t)tensor,
                            MPM_TEXT("the model has more than 128 MB of variables"));
        b->offset = *variables;
        *variables += b->bytes;
        b->root = MPM_VARIABLE;
        p->m->reset_count++;
        if (t.type == MPM_INT8 && t.zero_point != 0) p->has_values = 1;
        b->first = 0;
        b->last = 0xffff;
    }
    *found = b;
    return MPM_OK;
}

static enum mpm_status op_lifetimes(struct mpm_prep *p, uint32_t *variables) {
    struct mpm_file *f = &p->m->file;
    struct mpm_buffer *b;
    uint32_t i;
    for (i = 0; i < p->inputs.count; i++) {
        const uint32_t tensor = mpm_u32(f, p->inputs.at + 4 * i);
        if ((int32_t)tensor < 0) continue;
        MPM_TRY(buffer_for(p, tensor, variables, &b));
        if (b == NULL) continue;
        if (b->first == 0xffff) {
            const struct mpm_kernel *kernel;
            MPM_TRY(mpm_find_kernel(p, &kernel)); /* an operator that is not known may have scratch among its inputs */
            return mpm_fail(p, MPM_BAD_MODEL, (int32_t)tensor, MPM_TEXT("a tensor is read before it is written"));
        }
        if (b->last < p->op) b->last = p->op;
    }
    for (i = 0; i < p->outputs.count; i++) {
        const uint32_t tensor = mpm_u32(f, p->outputs.at + 4 * i);
        MPM_TRY(buffer_for(p, tensor, variables, &b));
        if (b == NULL || b->first != 0xffff)
            return mpm_fail(p, MPM_BAD_MODEL, (int32_t)tensor, MPM_TEXT("a tensor is written twice"));
        b->first = b->last = p->op;
    }
    return MPM_OK;
}

static void open_op(struct mpm_prep *p, uint32_t op) {
    struct mpm_file *f = &p->m->file;
    p->op = (uint16_t)op;
    p->op_table = mpm_element(f, p->graph, GRAPH_OPS, op);
    p->inputs = mpm_vector(f, p->op_table, OP_INPUTS, 4);
    p->outputs = mpm_vector(f, p->op_table, OP_OUTPUTS, 4);
}

enum mpm_status mpm_plan_lifetimes(struct mpm_prep *p, uint32_t *variables) {
    struct mpm_file *f = &p->m->file;
    const struct mpm_vector inputs = mpm_vector(f, p->graph, GRAPH_INPUTS, 4);
    const struct mpm_vector outputs = mpm_vector(f, p->graph, GRAPH_OUTPUTS, 4);
    const uint32_t ops = mpm_vector(f, p->graph, GRAPH_OPS, 4).count;
    struct mpm_buffer *b;
    uint32_t i;
    p->op = 0xffff;
    for (i = 0; i < inputs.count; i++) {
        MPM_TRY(buffer_for(p, mpm_u32(f, inputs.at + 4 * i), variables, &b));
        if (b == NULL) return MPM_BAD(p, "an input of the model is a constant");
        b->first = 0;
    }
    for (i = 0; i < ops; i++) {
        open_op(p, i);
        MPM_TRY(op_lifetimes(p, variables));
    }
    p->op = 0xffff;
    for (i = 0; i < outputs.count; i++) {
        const uint32_t tensor = mpm_u32(f, outputs.at + 4 * i);
        MPM_TRY(buffer_for(p, tensor, variables, &b));
        if (b == NULL) continue;
        if (b->first == 0xffff)
            return mpm_fail(p, MPM_BAD_MODEL, (int32_t)tensor, MPM_TEXT("nothing writes an output of the model"));
        b->last = 0xffff;
    }
    return MPM_OK;
}

static uint32_t offline_plan(struct mpm_prep *p, uint32_t *count);

/* Whether the offline plan has both tensors at one place, or leaves both to us. */
static int plan_agrees(struct mpm_prep *p, const struct mpm_buffer *a, const struct mpm_buffer *b) {
    uint32_t count = 0;
    const uint32_t plan = offline_plan(p, &count);
    if (plan == 0 || a->tensor >= count || b->tensor >= count) return 1;
    return mpm_u32(&p->m->file, plan + 4 * (uint32_t)a->tensor) == mpm_u32(&p->m->file, plan + 4 * (uint32_t)b->tensor);
}

void mpm_may_overlay(struct mpm_prep *p, uint32_t i) {
    struct mpm_buffer *in, *out, *root;
    uint32_t tensor;
    if (p->final || !mpm_has_input(p, i) || p->outputs.count == 0) return;
    tensor = mpm_u32(&p->m->file, p->inputs.at + 4 * i);
    in = find(p, tensor);
    out = find(p, mpm_u32(&p->m->file, p->outputs.at));
    if (in == NULL || out == NULL || in->root == MPM_VARIABLE || out->root == MPM_VARIABLE) return;
    if (in->last != p->op || out->root != (uint16_t)(out - p->buffers)) return; /* needed later, or shared already */
    root = &p->buffers[in->root];
    if (root->bytes < out->bytes || !plan_agrees(p, root, out)) return;
    out->root = in->root;
    if (root->last < out->last) root->last = out->last;
}

/* Whether the buffer belongs to this subgraph and needs a place of its own. */
static int is_placed_here(const struct mpm_prep *p, uint32_t i) {
    const struct mpm_buffer *b = &p->buffers[i];
    const struct mpm_graph *graph = &p->m->graphs[p->subgraph];
    if (b->root != i) return 0;
    if (i >= p->tensor_buffers) return b->tensor == MPM_SCRATCH + p->subgraph;
    return i >= graph->done && ((uint32_t)p->subgraph + 1 >= p->m->graph_count || i < graph[1].done);
}

static int alive_together(const struct mpm_buffer *a, const struct mpm_buffer *b) {
    return a->first <= b->last && b->first <= a->last;
}

/* The lowest offset from `base` at which b meets no placed buffer that is needed at the same time. */
static uint32_t lowest_free(const struct mpm_prep *p, const struct mpm_buffer *b, uint32_t base) {
    const struct mpm_buffer *const end = p->buffers + p->buffer_count, *o;
    uint32_t at = base, before;
    do { /* whoever was passed below the new place may be in the way of it: again, until nobody is */
        before = at;
        for (o = p->buffers; o != end; o++)
            if (o->offset != MPM_NO_ROOM && alive_together(b, o) && at < o->offset + o->bytes &&
                o->offset < at + b->bytes && is_placed_here(p, (uint32_t)(o - p->buffers)))
                at = o->offset + o->bytes;
    } while (at != before);
    return at;
}

/* The offline plan of this subgraph: int32 version, subgraph, count, then an offset for each tensor, -1 for those
 * that are left to us. Returns the offset in the file of the first of them; 0 where there is no such plan. */
static uint32_t offline_plan(struct mpm_prep *p, uint32_t *count) {
    static const char name[] = "OfflineMemoryAllocation";
    struct mpm_file *f = &p->m->file;
    const uint32_t entries = mpm_vector(f, p->model, MODEL_METADATA, 4).count;
    uint32_t i;
    for (i = 0; i < entries; i++) {
        const uint32_t entry = mpm_element(f, p->model, MODEL_METADATA, i);
        const struct mpm_vector said = mpm_vector(f, entry, METADATA_NAME, 1);
        const uint32_t buffer = (uint32_t)mpm_field_i32(f, entry, METADATA_BUFFER, 0);
        struct mpm_vector data;
        if (said.count != sizeof name - 1 || memcmp(f->base + said.at, name, sizeof name - 1) != 0) continue;
        data = mpm_vector(f, mpm_element(f, p->model, MODEL_BUFFERS, buffer), BUFFER_DATA, 1);
        if (data.count < 12 || mpm_u32(f, data.at + 4) != p->subgraph) continue;
        *count = mpm_u32(f, data.at + 8);
        if (*count > (data.count - 12) / 4) {
            mpm_mark_bad(f, data.at);
            return 0;
        }
        return data.at + 12;
    }
    return 0;
}

/* Takes over the offsets of the offline plan, and refuses one in which two buffers meet. */
static enum mpm_status place_offline(struct mpm_prep *p, uint32_t base) {
    uint32_t count = 0, i, k;
    const uint32_t plan = offline_plan(p, &count);
    if (plan == 0) return MPM_OK;
    for (i = 0; i < p->tensor_buffers; i++) {
        struct mpm_buffer *b = &p->buffers[i];
        uint32_t offset;
        if (!is_placed_here(p, i) || b->tensor >= count) continue;
        offset = mpm_u32(&p->m->file, plan + 4 * (uint32_t)b->tensor);
        if (offset == MPM_NO_ROOM) continue;
        if (offset % MPM_ALIGN != 0 || offset > 0x7fffffffu - base - b->bytes)
            return mpm_fail(p, MPM_BAD_MODEL, b->tensor, MPM_TEXT("the offline plan has an offset that cannot be"));
        b->offset = base + offset;
        for (k = 0; k < i; k++) {
            const struct mpm_buffer *o = &p->buffers[k];
            if (is_placed_here(p, k) && o->offset != MPM_NO_ROOM && alive_together(b, o) &&
                b->offset < o->offset + o->bytes && o->offset < b->offset + b->bytes)
                return mpm_fail(p, MPM_BAD_MODEL, b->tensor, MPM_TEXT("two tensors meet in the offline plan"));
        }
    }
    return MPM_OK;
}

enum mpm_status mpm_plan_place(struct mpm_prep *p, uint32_t base, uint32_t *end) {
    uint32_t i;
    p->op = 0xffff;
    *end = base;
    MPM_TRY(place_offline(p, base));
    for (;;) {
        struct mpm_buffer *largest = NULL;
        for (i = 0; i < p->buffer_count; i++) {
            struct mpm_buffer *b = &p->buffers[i];
            if (b->offset == MPM_NO_ROOM && is_placed_here(p, i) && (largest == NULL || b->bytes > largest->bytes))
                largest = b;
        }
        if (largest == NULL) break;
        largest->offset = lowest_free(p, largest, base);
        if (largest->offset > 0x7fffffffu - largest->bytes)
            return MPM_LACKS(p, "the model needs more than 2 GB of memory");
    }
    for (i = 0; i < p->buffer_count; i++)
        if (is_placed_here(p, i) && p->buffers[i].offset + p->buffers[i].bytes > *end)
            *end = p->buffers[i].offset + p->buffers[i].bytes;
    return MPM_OK;
}
