/* From a file to an interpreter: lifetimes, then a first round in which the kernels say what memory they need,
 * then places for all of it, then a second round in which they write down how to run. */
#include "plan.h"

#include <string.h>

#define KEEP_ALIGN ((uint32_t)sizeof(void *))

void mpm_arena_init_split(struct mpm_arena *arena, void *scratch, uint32_t scratch_bytes, void *persistent,
                          uint32_t persistent_bytes) {
    const uint32_t skip = (uint32_t)(-(uintptr_t)scratch & 15u);
    uint8_t *end = persistent == NULL ? (uint8_t *)scratch + scratch_bytes : (uint8_t *)persistent + persistent_bytes;
    const uint32_t over = (uint32_t)((uintptr_t)end & 7u);
    memset(arena, 0, sizeof *arena);
    if (scratch_bytes < skip + (persistent == NULL ? over : 0)) return;
    arena->scratch = (uint8_t *)scratch + skip;
    arena->scratch_bytes = scratch_bytes - skip - (persistent == NULL ? over : 0);
    arena->persistent = end - over;
    arena->persistent_bytes = persistent == NULL || persistent_bytes < over ? 0 : persistent_bytes - over;
}

void mpm_arena_init(struct mpm_arena *arena, void *memory, uint32_t bytes) {
    mpm_arena_init_split(arena, memory, bytes, NULL, 0);
}

static uint8_t *persistent_floor(const struct mpm_arena *arena) {
    return arena->persistent_bytes != 0 ? arena->persistent - arena->persistent_bytes : arena->scratch;
}

/* Room at the high end. Where scratch and persistent memory are one piece, what init has at the low end limits it. */
static void *take(struct mpm_prep *p, uint32_t bytes) {
    const struct mpm_arena *arena = p->m->arena;
    uint8_t *floor = arena->persistent_bytes != 0 ? persistent_floor(arena) : p->low;
    bytes = (bytes + KEEP_ALIGN - 1) & ~(KEEP_ALIGN - 1);
    p->kept += bytes;
    if (bytes > (size_t)(p->high - floor)) {
        mpm_fail(p, MPM_ARENA_TOO_SMALL, -1, MPM_TEXT("the arena is too small"));
        return NULL;
    }
    p->high -= bytes;
    mpm_see_peak(p);
    return p->high;
}

void *mpm_keep(struct mpm_prep *p, uint32_t bytes) {
    void *memory = take(p, bytes);
    if (memory != NULL) memset(memory, 0, bytes);
    return memory;
}

void *mpm_scratch(struct mpm_prep *p, uint32_t bytes) {
    struct mpm_buffer *b;
    if (p->final) return p->m->arena->scratch + p->buffers[p->scratch_cursor++].offset;
    b = mpm_new_buffer(p, MPM_SCRATCH + p->subgraph, bytes);
    if (b == NULL) return NULL;
    b->first = b->last = p->op;
    return p->m->arena->scratch;
}

static int is_custom(struct mpm_prep *p, uint32_t code, const char *name) {
    struct mpm_file *f = &p->m->file;
    const struct mpm_vector said = mpm_vector(f, code, CODE_CUSTOM, 1);
    return name != NULL && strlen(name) == said.count && memcmp(f->base + said.at, name, said.count) == 0;
}

uint32_t mpm_code_of(struct mpm_prep *p, uint32_t op) {
    struct mpm_file *f = &p->m->file;
    return mpm_element(f, p->model, MODEL_CODES, (uint32_t)mpm_field_i32(f, op, OP_CODE, 0));
}

uint32_t mpm_builtin_of(struct mpm_file *f, uint32_t code) {
    const uint32_t old = mpm_field_u8(f, code, CODE_OLD, 0);
    const uint32_t new = (uint32_t)mpm_field_i32(f, code, CODE_BUILTIN, 0);
    return new > old ? new : old; /* as the schema asks: the wider field was added later */
}

static uint32_t type_of(struct mpm_prep *p, uint32_t input) {
    struct mpm_file *f = &p->m->file;
    return mpm_field_u8(f, mpm_element(f, p->graph, GRAPH_TENSORS, mpm_u32(f, p->inputs.at + 4 * input)), TENSOR_TYPE,
                        0);
}

enum mpm_status mpm_find_kernel(struct mpm_prep *p, const struct mpm_kernel **found) {
    struct mpm_interpreter *m = p->m;
    const uint32_t code = mpm_code_of(p, p->op_table), builtin = mpm_builtin_of(&m->file, code);
    uint32_t i, known = 0;
    for (i = 0; i < m->kernel_count; i++) {
        const struct mpm_kernel *k = m->kernels[i];
        if ((uint32_t)k->builtin != builtin || (builtin == MPM_OP_CUSTOM && !is_custom(p, code, k->custom))) continue;
        known = 1;
        *found = k;
        if (k->type == MPM_ANY_TYPE) return MPM_OK;
        if (mpm_has_input(p, k->type_input) && type_of(p, k->type_input) == k->type) return MPM_OK;
    }
    (void)known; /* without texts */
    m->error.at = builtin;
    return mpm_fail(p, MPM_NO_KERNEL, -1,
                    known ? MPM_TEXT("the table of kernels has this operator, but not for these types")
                          : MPM_TEXT("the table of kernels lacks this operator"));
}

static enum mpm_status prepare_op(struct mpm_prep *p, uint32_t op, struct mpm_op *made) {
    struct mpm_file *f = &p->m->file;
    const struct mpm_kernel *kernel = NULL;
    enum mpm_status status;
    p->op = (uint16_t)op;
    p->op_table = mpm_element(f, p->graph, GRAPH_OPS, op);
    p->inputs = mpm_vector(f, p->op_table, OP_INPUTS, 4);
    p->outputs = mpm_vector(f, p->op_table, OP_OUTPUTS, 4);
    p->options = mpm_child(f, p->op_table, OP_OPTIONS);
    p->run = NULL;
    p->params = NULL;
    status = mpm_find_kernel(p, &kernel);
    if (status == MPM_OK) status = kernel->prepare(p);
    if (f->bad != 0) {
        p->m->error.at = f->bad - 1;
        return mpm_fail(p, MPM_BAD_FILE, -1, MPM_TEXT("an offset in the file leads nowhere"));
    }
    if (status == MPM_OK && made != NULL) {
        made->run = p->run;
        made->params = p->params;
    }
    return status;
}

/* Turns to a subgraph: what is prepared from now on belongs to it. */
static struct mpm_graph *enter(struct mpm_prep *p, uint32_t g) {
    p->subgraph = (uint16_t)g;
    p->graph = mpm_element(&p->m->file, p->model, MODEL_SUBGRAPHS, g);
    return &p->m->graphs[g];
}

/* Both rounds over all operators of all subgraphs. */
static enum mpm_status prepare_all(struct mpm_prep *p) {
    struct mpm_interpreter *m = p->m;
    uint32_t g, i;
    for (g = 0; g < m->graph_count; g++) {
        struct mpm_graph *graph = enter(p, g);
        for (i = 0; i < graph->op_count; i++) {
            uint8_t *high = p->high;
            MPM_TRY(prepare_op(p, i, p->final ? &graph->ops[i] : NULL));
            if (!p->final) p->high = high; /* the first round only counts */
        }
    }
    return MPM_OK;
}

static enum mpm_status fill_ends(struct mpm_prep *p) {
    struct mpm_interpreter *m = p->m;
    uint32_t g, i;
    for (g = 0; g < m->graph_count; g++) {
        struct mpm_graph *graph = enter(p, g);
        for (i = 0; i < (uint32_t)graph->input_count + graph->output_count; i++) {
            const int is_in = i < graph->input_count;
            const struct mpm_vector ends = mpm_vector(&m->file, p->graph, is_in ? GRAPH_INPUTS : GRAPH_OUTPUTS, 4);
            struct mpm_tensor t;
            MPM_TRY(mpm_tensor_at(p, g, mpm_u32(&m->file, ends.at + 4 * (is_in ? i : i - graph->input_count)), &t));
            graph->ends[i] = t.data;
        }
    }
    return MPM_OK;
}

static enum mpm_status open_graphs(struct mpm_prep *p, uint32_t *variables) {
    struct mpm_interpreter *m = p->m;
    uint32_t g;
    for (g = 0; g < m->graph_count; g++) {
        struct mpm_graph *graph = enter(p, g);
        struct mpm_vector ops, inputs, outputs;
        ops = mpm_vector(&m->file, p->graph, GRAPH_OPS, 4);
        inputs = mpm_vector(&m->file, p->graph, GRAPH_INPUTS, 4);
        outputs = mpm_vector(&m->file, p->graph, GRAPH_OUTPUTS, 4);
        p->op = 0xffff;
        if (ops.count > 0x7fff || inputs.count > 0x7fff || outputs.count > 0x7fff)
            return MPM_LACKS(p, "a subgraph has more than 32,767 operators"); /* error.op is an int16 */
        graph->op_count = (uint16_t)ops.count;
        graph->input_count = (uint16_t)inputs.count;
        graph->output_count = (uint16_t)outputs.count;
        graph->done = (uint16_t)p->buffer_count;
        graph->ops = take(p, ops.count * (uint32_t)sizeof(struct mpm_op));
        graph->ends = take(p, (inputs.count + outputs.count) * (uint32_t)sizeof(void *));
        if (graph->ops == NULL || graph->ends == NULL) return MPM_ARENA_TOO_SMALL;
        MPM_TRY(mpm_plan_lifetimes(p, variables));
    }
    p->tensor_buffers = p->buffer_count;
    return MPM_OK;
}

/* Where the table of buffers goes for the second round. It may be larger than all activations, and the variables are
 * not needed yet: the table goes there where the arena has no room for it beside them. */
static uint32_t settle_table(struct mpm_prep *p, uint32_t end) {
    struct mpm_interpreter *m = p->m;
    const struct mpm_arena *arena = m->arena;
    const uint32_t table = p->buffer_count * (uint32_t)sizeof(struct mpm_buffer);
    if (end >= table) return end;
    if (arena->persistent_bytes != 0 || table > m->variable_bytes) return table;
    if (table + m->persistent_bytes + arena->persistent_used > arena->scratch_bytes) {
        memcpy(m->variables, p->buffers, table);
        p->buffers = (struct mpm_buffer *)(void *)m->variables;
        p->low = arena->scratch;
    }
    return end;
}

/* Places everything, and sees whether it fits. */
static enum mpm_status settle(struct mpm_prep *p) {
    struct mpm_interpreter *m = p->m;
    const struct mpm_arena *arena = m->arena;
    uint32_t g, end = 0, low;
    for (g = 0; g < m->graph_count; g++) {
        enter(p, g);
        MPM_TRY(mpm_plan_place(p, end, &end));
    }
    m->scratch_bytes = end;
    m->buffer_count = (uint16_t)p->buffer_count;
    m->persistent_bytes = (p->kept + 7u) & ~7u;
    low = settle_table(p, end);
    m->needed_bytes = low + m->persistent_bytes > p->peak ? low + m->persistent_bytes : p->peak;
    p->op = 0xffff;
    m->error.at = m->needed_bytes + arena->persistent_used;
    if (low > arena->scratch_bytes ||
        m->persistent_bytes + arena->persistent_used >
            (arena->persistent_bytes != 0
                 ? arena->persistent_bytes
                 : arena->scratch_bytes - (low > arena->scratch_used ? low : arena->scratch_used)))
        return mpm_fail(p, MPM_ARENA_TOO_SMALL, -1, MPM_TEXT("the arena is too small"));
    return MPM_OK;
}

static enum mpm_status open_file(struct mpm_prep *p, const void *model, uint32_t bytes) {
    struct mpm_file *f = &p->m->file;
    uint32_t graphs;
    p->op = 0xffff;
    if (model == NULL || p->m->arena == NULL || p->m->arena->scratch == NULL || p->m->kernels == NULL)
        return mpm_fail(p, MPM_BAD_ARGUMENT, -1, MPM_TEXT("a null pointer, or no arena at all"));
    if (((uintptr_t)model & 15u) != 0)
        return mpm_fail(p, MPM_BAD_ARGUMENT, -1, MPM_TEXT("the model is not at a multiple of 16"));
    f->base = model;
    f->size = bytes;
    if (bytes < 8 || bytes > 0x7fffffffu || memcmp(f->base + 4, "TFL3", 4) != 0)
        return mpm_fail(p, MPM_BAD_FILE, -1, MPM_TEXT("not a .tflite file: it does not say TFL3 at byte 4"));
    p->model = mpm_follow(f, 0);
    if (f->bad == 0 && mpm_field_i32(f, p->model, MODEL_VERSION, 0) != 3)
        return MPM_LACKS(p, "the schema's version is not 3");
    graphs = mpm_vector(f, p->model, MODEL_SUBGRAPHS, 4).count;
    if (f->bad == 0 && (graphs == 0 || graphs > MPM_MAX_GRAPHS))
        return MPM_LACKS(p, "the model has no subgraph, or more than 64");
    p->m->graph_count = (uint16_t)graphs;
    return MPM_OK;
}

/* The variables, where one of them does not begin as zeros. */
static enum mpm_status fill_resets(struct mpm_prep *p) {
    struct mpm_interpreter *m = p->m;
    uint32_t *next = m->resets;
    uint32_t g, i;
    for (g = 0; g < m->graph_count; g++) {
        const uint32_t end = g + 1 < m->graph_count ? m->graphs[g + 1].done : p->tensor_buffers;
        enter(p, g);
        for (i = m->graphs[g].done; i < end; i++) {
            struct mpm_tensor t;
            if (p->buffers[i].root != MPM_VARIABLE) continue;
            MPM_TRY(mpm_tensor_at(p, g, p->buffers[i].tensor, &t));
            *next++ = p->buffers[i].offset / MPM_ALIGN << 8 | (t.type == MPM_INT8 ? (uint8_t)t.zero_point : 0u);
        }
    }
    return MPM_OK;
}

static enum mpm_status init(struct mpm_prep *p, const void *model, uint32_t bytes) {
    struct mpm_interpreter *m = p->m;
    uint32_t variables = 0, g;
    MPM_TRY(open_file(p, model, bytes));
    p->low = m->arena->scratch;
    p->high = m->arena->persistent - m->arena->persistent_used;
    p->buffers = (struct mpm_buffer *)(void *)p->low;
    m->graphs = take(p, m->graph_count * (uint32_t)sizeof(struct mpm_graph));
    if (m->graphs == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(open_graphs(p, &variables));
    m->variable_bytes = variables;
    p->high -= (uintptr_t)p->high & 7u;
    p->kept = (p->kept + 7u) & ~7u;
    m->variables = take(p, variables);
    if (m->variables == NULL) return MPM_ARENA_TOO_SMALL;
    if (!p->has_values) m->reset_count = 0; /* all variables are reset to zeros */
    m->resets = take(p, m->reset_count * (uint32_t)sizeof *m->resets);
    if (m->resets == NULL) return MPM_ARENA_TOO_SMALL;
    p->planned = 1;
    if (p->has_values) MPM_TRY(fill_resets(p));
    MPM_TRY(prepare_all(p));
    MPM_TRY(settle(p));
    p->final = 1;
    p->scratch_cursor = p->tensor_buffers;
    MPM_TRY(prepare_all(p));
    MPM_TRY(fill_ends(p));
    for (g = 0; g < m->graph_count; g++) m->graphs[g].done = 0;
    return MPM_OK;
}

enum mpm_status mpm_init(struct mpm_interpreter *m, const void *model, uint32_t model_bytes, struct mpm_arena *arena,
                         const struct mpm_kernel *const *kernels, uint32_t kernel_count) {
    struct mpm_prep prep;
    enum mpm_status status;
    if (m == NULL) return MPM_BAD_ARGUMENT;
    memset(m, 0, sizeof *m);
    memset(&prep, 0, sizeof prep);
    m->arena = arena;
    m->kernels = kernels;
    m->kernel_count = kernel_count;
    m->rounds_left = UINT32_MAX;
    m->error.tensor = -1;
    m->error.what = "";
    prep.m = m;
    status = init(&prep, model, model_bytes);
    if (m->file.bad != 0 && status != MPM_BAD_FILE) {
        m->error.at = m->file.bad - 1;
        status = mpm_fail(&prep, MPM_BAD_FILE, -1, MPM_TEXT("an offset in the file leads nowhere"));
    }
    if (status != MPM_OK) return status;
    arena->persistent_used += m->persistent_bytes;
    if (arena->scratch_used < m->scratch_bytes) arena->scratch_used = m->scratch_bytes;
    mpm_reset(m);
    return MPM_OK;
}
