#include "plan.h"

#include <string.h>

enum mpm_status mpm_run_graph(struct mpm_interpreter *m, uint32_t graph) {
    const struct mpm_graph *g = &m->graphs[graph];
    const struct mpm_op *op = g->ops, *end = op + g->op_count;
    enum mpm_status status = MPM_OK;
    if (m->depth >= MPM_MAX_DEPTH) return MPM_BAD_VALUE;
    m->depth++;
    for (; op != end; op++) {
        status = op->run(m, op->params);
        if (status != MPM_OK) {
            m->error.op = (int16_t)(op - g->ops);
            m->error.subgraph = (uint8_t)graph;
            break;
        }
    }
    m->depth--;
    return status;
}

static enum mpm_status run_timed(struct mpm_interpreter *m) {
    const struct mpm_graph *g = &m->graphs[0];
    enum mpm_status status = MPM_OK;
    uint32_t i;
    m->depth = 1;
    for (i = 0; i < g->op_count && status == MPM_OK; i++) {
        const uint32_t begin = m->clock();
        status = g->ops[i].run(m, g->ops[i].params);
        m->ticks[i] += m->clock() - begin;
        m->error.op = (int16_t)i;
    }
    m->depth = 0;
    return status;
}

enum mpm_status mpm_run(struct mpm_interpreter *m) {
    if (m->graphs == NULL || m->error.status != MPM_OK) return MPM_BAD_ARGUMENT;
    return m->clock != NULL ? run_timed(m) : mpm_run_graph(m, 0);
}

void mpm_profile(struct mpm_interpreter *m, uint32_t (*clock)(void), uint32_t *ticks) {
    m->clock = clock;
    m->ticks = ticks;
}

void mpm_limit_rounds(struct mpm_interpreter *m, uint32_t rounds) { m->rounds_left = rounds; }

void mpm_reset(struct mpm_interpreter *m) {
    const struct mpm_resource *r;
    uint32_t i, end = m->variable_bytes;
    memset(m->variables, 0, m->variable_bytes);
    for (i = m->reset_count; i-- > 0;) {
        const uint32_t at = (m->resets[i] >> 8) * MPM_ALIGN; /* memset takes the low byte */
        memset(m->variables + at, (int)m->resets[i], end - at);
        end = at;
    }
    for (r = m->resources; r != NULL; r = r->next) memset(r->data, r->value, r->bytes);
    for (i = 0; i < m->graph_count; i++) m->graphs[i].done = 0;
}

uint32_t mpm_input_count(const struct mpm_interpreter *m) { return m->graphs[0].input_count; }

uint32_t mpm_output_count(const struct mpm_interpreter *m) { return m->graphs[0].output_count; }

void *mpm_input(const struct mpm_interpreter *m, uint32_t index) {
    return index < m->graphs[0].input_count ? m->graphs[0].ends[index] : NULL;
}

const void *mpm_output(const struct mpm_interpreter *m, uint32_t index) {
    return index < m->graphs[0].output_count ? m->graphs[0].ends[m->graphs[0].input_count + index] : NULL;
}
