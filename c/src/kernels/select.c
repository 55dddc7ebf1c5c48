/* SELECT_V2. */
#include "../kernel.h"

#include <string.h>

/* 128 bytes on a 32-bit chip. */
struct select {
    const uint8_t *which, *a, *b;
    uint8_t *out;
    uint32_t count, bytes, rank;
    int32_t dims[MPM_MAX_RANK], steps[3][MPM_MAX_RANK]; /* strides in elements; 0: repeated */
};

static enum mpm_status run_select(struct mpm_interpreter *m, const void *params) {
    const struct select *s = params;
    uint32_t i, k;
    (void)m;
    for (i = 0; i < s->count; i++) {
        uint32_t rest = i;
        int32_t at[3] = {0, 0, 0};
        for (k = s->rank; k-- > 0; rest /= (uint32_t)s->dims[k]) {
            const int32_t place = (int32_t)(rest % (uint32_t)s->dims[k]);
            at[0] += place * s->steps[0][k];
            at[1] += place * s->steps[1][k];
            at[2] += place * s->steps[2][k];
        }
        memcpy(s->out + (size_t)i * s->bytes,
               s->which[at[0]] ? s->a + (size_t)at[1] * s->bytes : s->b + (size_t)at[2] * s->bytes, s->bytes);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_select(struct mpm_prep *p) {
    struct mpm_tensor t[3], out;
    uint32_t i, k;
    struct select *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    for (i = 0; i < 3; i++) MPM_TRY(mpm_in(p, i, &t[i]));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, t[0].type == MPM_BOOL && t[1].type == out.type && t[2].type == out.type && out.type != MPM_INT4,
             "a bool and two inputs of the output's type are needed");
    s->rank = out.rank;
    for (i = 0; i < 3; i++) {
        int32_t step = 1;
        MPM_NEED(p, t[i].rank <= out.rank, "an input has more dims than the output");
        for (k = out.rank; k-- > 0;) {
            const int32_t d = k + t[i].rank < out.rank ? 1 : t[i].dims[k + t[i].rank - out.rank];
            MPM_NEED(p, d == out.dims[k] || d == 1, "the inputs cannot be spread to the output's shape");
            s->dims[k] = out.dims[k];
            s->steps[i][k] = d == 1 ? 0 : step;
            step *= d;
        }
    }
    s->which = t[0].data;
    s->a = t[1].data;
    s->b = t[2].data;
    s->out = out.data;
    s->count = out.count;
    s->bytes = mpm_type_bytes(out.type);
    p->run = run_select;
    p->params = s;
    return MPM_OK;
}

const struct mpm_kernel mpm_select_v2 = {MPM_OP_SELECT_V2, MPM_ANY_TYPE, 0, NULL, prepare_select};
