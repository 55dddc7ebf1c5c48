/* VAR_HANDLE, READ_VARIABLE, ASSIGN_VARIABLE: variables that have a name, and may be used from any subgraph.
 *
 * A handle is the place in the file of the first VAR_HANDLE that has its name. Who holds one looks it up when it runs,
 * so handles may travel between subgraphs, and one that is not a handle is an error, not an address. */
#include "../kernel.h"

#include <string.h>

static int same_text(struct mpm_file *f, uint32_t a, uint32_t b, uint32_t field) {
    const struct mpm_vector x = mpm_vector(f, a, field, 1), y = mpm_vector(f, b, field, 1);
    return x.count == y.count && memcmp(f->base + x.at, f->base + y.at, x.count) == 0;
}

/* Container and name of two VAR_HANDLEs, both given by the places of their options. */
static int same_variable(struct mpm_file *f, uint32_t a, uint32_t b) {
    return same_text(f, a, b, 0) && same_text(f, a, b, 1);
}

static uint32_t first_number(struct mpm_file *f, uint32_t op, uint32_t field, uint32_t index) {
    const struct mpm_vector all = mpm_vector(f, op, field, 4);
    return index < all.count ? mpm_u32(f, all.at + 4 * index) : 0xffffffffu;
}

/* The first operator of `graph` (or of any, from the first on, where it is 0) that is a VAR_HANDLE and either writes
 * `tensor`, or has the name in `options`. 0: there is none. */
static uint32_t find_handle(struct mpm_prep *p, uint32_t graph, uint32_t tensor, uint32_t options) {
    struct mpm_file *f = &p->m->file;
    uint32_t g, i;
    for (g = 0; g < p->m->graph_count; g++) {
        const uint32_t table = graph != 0 ? graph : mpm_element(f, p->model, MODEL_SUBGRAPHS, g);
        const uint32_t count = mpm_vector(f, table, GRAPH_OPS, 4).count;
        for (i = 0; i < count; i++) {
            const uint32_t op = mpm_element(f, table, GRAPH_OPS, i);
            if (mpm_builtin_of(f, mpm_code_of(p, op)) != MPM_OP_VAR_HANDLE) continue;
            if (graph != 0 ? first_number(f, op, OP_OUTPUTS, 0) == tensor
                           : same_variable(f, mpm_child(f, op, OP_OPTIONS), options))
                return op;
        }
        if (graph != 0) return 0;
    }
    return 0;
}

/* The value that is assigned to the variable first in the file: it says how large the variable is. */
static MPM_ONCE enum mpm_status value_of(struct mpm_prep *p, uint32_t options, struct mpm_tensor *t) {
    struct mpm_file *f = &p->m->file;
    uint32_t g, i;
    for (g = 0; g < p->m->graph_count; g++) {
        const uint32_t graph = mpm_element(f, p->model, MODEL_SUBGRAPHS, g),
                       count = mpm_vector(f, graph, GRAPH_OPS, 4).count;
        for (i = 0; i < count && f->bad == 0; i++) {
            const uint32_t op = mpm_element(f, graph, GRAPH_OPS, i);
            uint32_t handle;
            if (mpm_builtin_of(f, mpm_code_of(p, op)) != MPM_OP_ASSIGN_VARIABLE) continue;
            handle = find_handle(p, graph, first_number(f, op, OP_INPUTS, 0), 0);
            if (handle != 0 && same_variable(f, mpm_child(f, handle, OP_OPTIONS), options))
                return mpm_tensor_at(p, g, first_number(f, op, OP_INPUTS, 1), t);
        }
    }
    return mpm_fail(p, MPM_BAD_MODEL, -1, MPM_TEXT("nothing assigns a value to this variable"));
}

/* 8 bytes on a 32-bit chip. */
struct handle {
    uint32_t *out;
    uint32_t id;
};

static enum mpm_status run_handle(struct mpm_interpreter *m, const void *params) {
    const struct handle *h = params;
    (void)m;
    *h->out = h->id;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_handle(struct mpm_prep *p) {
    struct mpm_tensor out, value;
    struct handle *h = mpm_keep(p, sizeof *h);
    if (h == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, out.type == MPM_RESOURCE && out.count == 1, "the output is not one handle");
    h->out = out.data;
    h->id = find_handle(p, 0, 0, p->options);
    p->run = run_handle;
    p->params = h;
    if (h->id != p->op_table) return MPM_OK; /* an operator before this one has made the variable */
    MPM_TRY(value_of(p, p->options, &value));
    return mpm_keep_resource(p, value.bytes, (uint8_t)value.zero_point) == NULL ? MPM_ARENA_TOO_SMALL : MPM_OK;
}

/* 12 bytes on a 32-bit chip. */
struct access {
    const uint32_t *handle;
    void *value;
    uint32_t bytes;
};

static enum mpm_status find(struct mpm_interpreter *m, const struct access *a, void **data) {
    const struct mpm_resource *r = m->resources;
    while (r != NULL && r->id != *a->handle) r = r->next;
    if (r == NULL || r->bytes != a->bytes) {
        m->error.what =
            r == NULL ? MPM_TEXT("a handle is that of no variable") : MPM_TEXT("a variable has another size");
        return MPM_BAD_VALUE;
    }
    *data = r->data;
    return MPM_OK;
}

static enum mpm_status run_read(struct mpm_interpreter *m, const void *params) {
    const struct access *a = params;
    void *data = NULL;
    MPM_TRY(find(m, a, &data));
    memcpy(a->value, data, a->bytes);
    return MPM_OK;
}

static enum mpm_status run_assign(struct mpm_interpreter *m, const void *params) {
    const struct access *a = params;
    void *data = NULL;
    MPM_TRY(find(m, a, &data));
    memcpy(data, a->value, a->bytes);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status begin(struct mpm_prep *p, int assigns) {
    struct mpm_tensor handle, value;
    struct access *a = mpm_keep(p, sizeof *a);
    if (a == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &handle));
    if (assigns) MPM_TRY(mpm_in(p, 1, &value));
    else MPM_TRY(mpm_out(p, 0, &value));
    MPM_NEED(p, handle.type == MPM_RESOURCE && handle.count == 1, "the first input is not one handle");
    a->handle = handle.data;
    a->value = value.data;
    a->bytes = value.bytes;
    p->run = assigns ? run_assign : run_read;
    p->params = a;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_read(struct mpm_prep *p) { return begin(p, 0); }
static MPM_ONCE enum mpm_status prepare_assign(struct mpm_prep *p) { return begin(p, 1); }

const struct mpm_kernel mpm_var_handle = {MPM_OP_VAR_HANDLE, MPM_ANY_TYPE, 0, NULL, prepare_handle};
const struct mpm_kernel mpm_read_variable = {MPM_OP_READ_VARIABLE, MPM_ANY_TYPE, 0, NULL, prepare_read};
const struct mpm_kernel mpm_assign_variable = {MPM_OP_ASSIGN_VARIABLE, MPM_ANY_TYPE, 0, NULL, prepare_assign};
