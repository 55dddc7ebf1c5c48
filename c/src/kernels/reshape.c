/* RESHAPE, SQUEEZE, EXPAND_DIMS: the same elements under another shape. Where the planner laid the output over the
 * input, nothing moves. */
#include "../kernel.h"

#include <string.h>

/* 12 bytes on a 32-bit chip. */
struct reshape {
    const void *in;
    void *out;
    uint32_t bytes;
};

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct reshape *r = params;
    (void)m;
    if (r->in != r->out) memmove(r->out, r->in, r->bytes);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, out, shape;
    struct reshape *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    if (mpm_has_input(p, 1)) {
        MPM_TRY(mpm_in(p, 1, &shape));
        MPM_SUPPORT(p, shape.constant || shape.count == 0,
                    "dynamic shapes are not supported: the new shape is no constant");
    }
    MPM_NEED(p, in.type == out.type && in.count == out.count, "input and output differ in type or number of elements");
    r->in = in.data;
    r->out = out.data;
    r->bytes = in.bytes;
    mpm_may_overlay(p, 0);
    p->run = run;
    p->params = r;
    return MPM_OK;
}

const struct mpm_kernel mpm_reshape = {MPM_OP_RESHAPE, MPM_ANY_TYPE, 0, NULL, prepare};
const struct mpm_kernel mpm_squeeze = {MPM_OP_SQUEEZE, MPM_ANY_TYPE, 0, NULL, prepare};
const struct mpm_kernel mpm_expand_dims = {MPM_OP_EXPAND_DIMS, MPM_ANY_TYPE, 0, NULL, prepare};
