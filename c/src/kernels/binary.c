#include "binary.h"

#include <string.h>

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct mpm_binary *o = params;
    const struct mpm_spread *s = o->spread;
    const uint8_t *a = o->a, *b = o->b;
    uint8_t *out = o->out;
    int32_t at[MPM_MAX_RANK] = {0};
    uint32_t last, k;
    (void)m;
    if (o->count == 0) return MPM_OK;
    if (s == NULL) {
        o->inner(o, a, 1, b, 1, out, o->count);
        return MPM_OK;
    }
    last = s->rank - 1;
    for (;;) {
        o->inner(o, a, s->a[last], b, s->b[last], out, (uint32_t)s->dims[last]);
        out += (size_t)s->dims[last] * o->out_bytes;
        for (k = last;; k--) {
            if (k == 0) return MPM_OK;
            a += (ptrdiff_t)s->a[k - 1] * o->a_bytes;
            b += (ptrdiff_t)s->b[k - 1] * o->b_bytes;
            if (++at[k - 1] < s->dims[k - 1]) break;
            at[k - 1] = 0;
            a -= (ptrdiff_t)s->a[k - 1] * s->dims[k - 1] * o->a_bytes;
            b -= (ptrdiff_t)s->b[k - 1] * s->dims[k - 1] * o->b_bytes;
        }
    }
}

static int32_t dim_of(const struct mpm_tensor *t, uint32_t rank, uint32_t i) {
    return i + t->rank < rank ? 1 : t->dims[i + t->rank - rank];
}

static MPM_ONCE enum mpm_status spread_of(struct mpm_prep *p, struct mpm_binary *o, const struct mpm_tensor *a,
                                 const struct mpm_tensor *b, const struct mpm_tensor *out) {
    struct mpm_spread full;
    struct mpm_spread *s;
    const uint32_t rank = a->rank > b->rank ? a->rank : b->rank;
    int32_t step_a = 1, step_b = 1;
    uint32_t i, n = 0;
    MPM_NEED(p, rank == out->rank || out->count == 1, "the output's shape is not that of the inputs together");
    memset(&full, 0, sizeof full);
    for (i = rank; i-- > 0;) {
        const int32_t da = dim_of(a, rank, i), db = dim_of(b, rank, i), d = da == 1 ? db : da;
        MPM_NEED(p, (da == d || da == 1) && (db == d || db == 1) && d == dim_of(out, rank, i),
                 "the shapes cannot be spread to the output's");
        full.a[i] = da == 1 ? 0 : step_a;
        full.b[i] = db == 1 ? 0 : step_b;
        full.dims[i] = d;
        step_a *= da;
        step_b *= db;
    }
    for (i = 0; i < rank; i++) { /* put dims together that both step through as one */
        if (full.dims[i] == 1) continue;
        if (n > 0 && full.a[n - 1] == full.a[i] * full.dims[i] && full.b[n - 1] == full.b[i] * full.dims[i]) {
            full.dims[n - 1] *= full.dims[i];
            full.a[n - 1] = full.a[i];
            full.b[n - 1] = full.b[i];
            continue;
        }
        full.dims[n] = full.dims[i];
        full.a[n] = full.a[i];
        full.b[n++] = full.b[i];
    }
    if (n == 0) full.dims[n++] = 1;
    full.rank = n;
    s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    *s = full;
    o->spread = s;
    return MPM_OK;
}

MPM_ONCE enum mpm_status mpm_prepare_binary(struct mpm_prep *p, enum mpm_binary_types types, struct mpm_binary **made,
                                            struct mpm_tensor *a, struct mpm_tensor *b, struct mpm_tensor *out) {
    struct mpm_binary *o = mpm_keep(p, sizeof *o);
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    *made = o;
    MPM_TRY(mpm_in(p, 0, a));
    MPM_TRY(mpm_in(p, 1, b));
    MPM_TRY(mpm_out(p, 0, out));
    MPM_NEED(
        p, types == MPM_OWN_TYPES || (a->type == b->type && out->type == (types == MPM_SAME_TYPE ? a->type : MPM_BOOL)),
        "inputs and output do not fit in type");
    MPM_SUPPORT(p, a->type != MPM_INT4, "int4 is not supported here");
    if (!mpm_same_shape(a, b)) MPM_TRY(spread_of(p, o, a, b, out));
    else MPM_NEED(p, out->count == a->count, "the output's shape is not that of the inputs");
    o->a = a->data;
    o->b = b->data;
    o->out = out->data;
    o->count = out->count;
    o->a_bytes = (uint8_t)mpm_type_bytes(a->type);
    o->b_bytes = (uint8_t)mpm_type_bytes(b->type);
    o->out_bytes = (uint8_t)mpm_type_bytes(out->type);
    if (types == MPM_SAME_TYPE && a->count == out->count)
        mpm_may_overlay(p, 0); /* one that is not spread is read in step */
    if (types == MPM_SAME_TYPE && b->count == out->count) mpm_may_overlay(p, 1);
    p->run = run;
    p->params = o;
    return MPM_OK;
}
