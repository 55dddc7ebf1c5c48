/* What a program may ask of a model's inputs and outputs; apart, because few programs on chips do. */
#include "kernel.h"

#include <string.h>

static enum mpm_status info(struct mpm_interpreter *m, uint32_t ends_id, uint32_t index, struct mpm_tensor *t) {
    struct mpm_prep p;
    struct mpm_vector ends;
    memset(&p, 0, sizeof p);
    p.m = m;
    p.model = mpm_follow(&m->file, 0);
    p.graph = mpm_element(&m->file, p.model, MODEL_SUBGRAPHS, 0);
    ends = mpm_vector(&m->file, p.graph, ends_id, 4);
    if (index >= ends.count) return MPM_BAD_ARGUMENT;
    return mpm_tensor_at(&p, 0, mpm_u32(&m->file, ends.at + 4 * index), t);
}

enum mpm_status mpm_input_info(struct mpm_interpreter *m, uint32_t index, struct mpm_tensor *t) {
    enum mpm_status status = info(m, GRAPH_INPUTS, index, t);
    if (status == MPM_OK) t->data = mpm_input(m, index);
    return status;
}

enum mpm_status mpm_output_info(struct mpm_interpreter *m, uint32_t index, struct mpm_tensor *t) {
    enum mpm_status status = info(m, GRAPH_OUTPUTS, index, t);
    if (status == MPM_OK) t->data = m->graphs[0].ends[m->graphs[0].input_count + index];
    return status;
}
