/* IF, WHILE and CALL_ONCE. Values are copied into the other subgraph's inputs and out of its outputs. */
#include "../kernel.h"

#include <string.h>

/* One copy: 12 bytes on a 32-bit chip. */
struct link {
    void *to;
    const void *from;
    uint32_t bytes;
};

/* 16 bytes on a 32-bit chip, and its copies. IF has two of these, WHILE two. */
struct call {
    uint32_t graph;
    uint32_t in_count, out_count;
    const struct link *links; /* in_count from the operator into the subgraph, then out_count back */
};

struct branch {
    const uint8_t *condition; /* a bool: of IF its first input, of WHILE the output of the first subgraph */
    struct call calls[2];
    const struct link *first; /* WHILE: inputs to outputs, before it begins */
    uint32_t first_count;
};

static void copy(const struct link *links, uint32_t count) {
    for (; count > 0; count--, links++)
        if (links->to != links->from) memmove(links->to, links->from, links->bytes);
}

static enum mpm_status run_call(struct mpm_interpreter *m, const struct call *c) {
    copy(c->links, c->in_count);
    MPM_TRY(mpm_run_graph(m, c->graph));
    copy(c->links + c->in_count, c->out_count);
    return MPM_OK;
}

/* A tensor on either side of a call. `end`: the numbers of tensors of the subgraph or of the operator. */
static MPM_ONCE enum mpm_status side(struct mpm_prep *p, uint32_t graph, struct mpm_vector ends, uint32_t i,
                                     struct mpm_tensor *t) {
    MPM_NEED(p, i < ends.count, "operator and subgraph differ in the number of inputs or outputs");
    return mpm_tensor_at(p, graph, mpm_u32(&p->m->file, ends.at + 4 * i), t);
}

static MPM_ONCE enum mpm_status connect(struct mpm_prep *p, struct link *l, const struct mpm_tensor *to,
                                        const struct mpm_tensor *from) {
    MPM_NEED(p, to->type == from->type && to->bytes == from->bytes && !to->constant,
             "operator and subgraph differ in a tensor's type or size");
    l->to = to->data;
    l->from = from->data;
    l->bytes = from->bytes;
    return MPM_OK;
}

/* A call of subgraph `graph`: its inputs from `ins` of the operator, its outputs (if wanted) to the operator's. */
static MPM_ONCE enum mpm_status prepare_call(struct mpm_prep *p, struct call *c, int32_t graph, struct mpm_vector ins,
                                             int outs) {
    struct mpm_file *f = &p->m->file;
    struct mpm_vector inner_in, inner_out;
    struct link *links;
    uint32_t i, table;
    MPM_NEED(p, graph > 0 && graph < p->m->graph_count && graph != p->subgraph, "there is no such subgraph to call");
    table = mpm_element(f, p->model, MODEL_SUBGRAPHS, (uint32_t)graph);
    inner_in = mpm_vector(f, table, GRAPH_INPUTS, 4);
    inner_out = mpm_vector(f, table, GRAPH_OUTPUTS, 4);
    MPM_NEED(p, inner_in.count == ins.count && (!outs || inner_out.count == p->outputs.count),
             "operator and subgraph differ in the number of inputs or outputs");
    c->graph = (uint32_t)graph;
    c->in_count = inner_in.count;
    c->out_count = outs ? inner_out.count : 0;
    c->links = links = mpm_keep(p, (c->in_count + c->out_count) * (uint32_t)sizeof *links);
    if (links == NULL) return MPM_ARENA_TOO_SMALL;
    for (i = 0; i < c->in_count + c->out_count; i++) {
        const int in = i < c->in_count;
        const uint32_t k = in ? i : i - c->in_count;
        struct mpm_tensor outer, inner;
        MPM_TRY(side(p, p->subgraph, in ? ins : p->outputs, k, &outer));
        MPM_TRY(side(p, (uint32_t)graph, in ? inner_in : inner_out, k, &inner));
        MPM_TRY(in ? connect(p, &links[i], &inner, &outer) : connect(p, &links[i], &outer, &inner));
    }
    return MPM_OK;
}

static enum mpm_status run_if(struct mpm_interpreter *m, const void *params) {
    const struct branch *b = params;
    return run_call(m, &b->calls[*b->condition != 0 ? 0 : 1]);
}

static enum mpm_status run_while(struct mpm_interpreter *m, const void *params) {
    const struct branch *b = params;
    copy(b->first, b->first_count);
    for (;;) {
        MPM_TRY(run_call(m, &b->calls[0]));
        if (*b->condition == 0) return MPM_OK;
        if (m->rounds_left == 0) {
            m->error.what = MPM_TEXT("WHILE has done as many rounds as it may");
            return MPM_BAD_VALUE;
        }
        if (m->rounds_left != UINT32_MAX) m->rounds_left--;
        MPM_TRY(run_call(m, &b->calls[1]));
    }
}

static MPM_ONCE enum mpm_status prepare_if(struct mpm_prep *p) {
    struct mpm_tensor condition;
    struct mpm_vector rest = p->inputs;
    struct branch *b = mpm_keep(p, sizeof *b);
    if (b == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &condition));
    MPM_NEED(p, condition.type == MPM_BOOL && condition.count == 1, "the condition is not one bool");
    b->condition = condition.data;
    rest.at += 4;
    rest.count--;
    MPM_TRY(prepare_call(p, &b->calls[0], mpm_field_i32(&p->m->file, p->options, 0, 0), rest, 1));
    MPM_TRY(prepare_call(p, &b->calls[1], mpm_field_i32(&p->m->file, p->options, 1, 0), rest, 1));
    p->run = run_if;
    p->params = b;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_while(struct mpm_prep *p) {
    struct mpm_file *f = &p->m->file;
    struct mpm_tensor in, out;
    struct link *first;
    struct mpm_vector ends;
    uint32_t i;
    const int32_t test = mpm_field_i32(f, p->options, 0, 0), body = mpm_field_i32(f, p->options, 1, 0);
    struct branch *b = mpm_keep(p, sizeof *b);
    if (b == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_NEED(p, p->inputs.count == p->outputs.count, "a loop must have as many outputs as inputs");
    b->first_count = p->inputs.count;
    b->first = first = mpm_keep(p, p->inputs.count * (uint32_t)sizeof *first);
    if (first == NULL) return MPM_ARENA_TOO_SMALL;
    for (i = 0; i < p->inputs.count; i++) {
        MPM_TRY(mpm_in(p, i, &in));
        MPM_TRY(mpm_out(p, i, &out));
        MPM_TRY(connect(p, &first[i], &out, &in));
    }
    MPM_TRY(prepare_call(p, &b->calls[0], test, p->outputs, 0));
    MPM_TRY(prepare_call(p, &b->calls[1], body, p->outputs, 1));
    ends = mpm_vector(f, mpm_element(f, p->model, MODEL_SUBGRAPHS, (uint32_t)test), GRAPH_OUTPUTS, 4);
    MPM_NEED(p, ends.count == 1, "the condition's subgraph must have one output");
    MPM_TRY(side(p, (uint32_t)test, ends, 0, &in));
    MPM_NEED(p, in.type == MPM_BOOL && in.count == 1, "the condition is not one bool");
    b->condition = in.data;
    p->run = run_while;
    p->params = b;
    return MPM_OK;
}

static enum mpm_status run_once(struct mpm_interpreter *m, const void *params) {
    const struct call *c = params;
    if (m->graphs[c->graph].done) return MPM_OK;
    m->graphs[c->graph].done = 1;
    return mpm_run_graph(m, c->graph);
}

static MPM_ONCE enum mpm_status prepare_call_once(struct mpm_prep *p) {
    struct call *c = mpm_keep(p, sizeof *c);
    if (c == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(prepare_call(p, c, mpm_field_i32(&p->m->file, p->options, 0, 0), p->inputs, 0));
    p->run = run_once;
    p->params = c;
    return MPM_OK;
}

const struct mpm_kernel mpm_if = {MPM_OP_IF, MPM_ANY_TYPE, 0, NULL, prepare_if};
const struct mpm_kernel mpm_while = {MPM_OP_WHILE, MPM_ANY_TYPE, 0, NULL, prepare_while};
const struct mpm_kernel mpm_call_once = {MPM_OP_CALL_ONCE, MPM_ANY_TYPE, 0, NULL, prepare_call_once};
