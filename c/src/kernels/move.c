#include "move.h"

#include <string.h>

void mpm_strides(const struct mpm_tensor *t, int32_t strides[MPM_MAX_RANK]) {
    int32_t step = 1;
    uint32_t i;
    for (i = t->rank; i-- > 0;) {
        strides[i] = step;
        step *= t->dims[i];
    }
}

uint32_t mpm_span(const struct mpm_tensor *t, uint32_t begin, uint32_t end) {
    uint32_t product = 1;
    for (; begin < end; begin++) product *= (uint32_t)t->dims[begin];
    return product;
}

MPM_ONCE enum mpm_status mpm_axis(struct mpm_prep *p, int32_t axis, uint32_t rank, uint32_t *made) {
    const int32_t positive = axis < 0 ? axis + (int32_t)rank : axis;
    MPM_NEED(p, positive >= 0 && (uint32_t)positive < rank, "an axis is out of range");
    *made = (uint32_t)positive;
    return MPM_OK;
}

MPM_ONCE enum mpm_status mpm_values(struct mpm_prep *p, uint32_t i, uint32_t count, int32_t values[MPM_MAX_RANK],
                                    uint32_t *found) {
    struct mpm_tensor t;
    uint32_t k;
    MPM_TRY(mpm_in(p, i, &t));
    MPM_SUPPORT(p, t.constant || t.count == 0, "dynamic shapes are not supported: an argument is not a constant");
    MPM_SUPPORT(p, t.type == MPM_INT32 || t.type == MPM_INT64, "an argument is neither int32 nor int64");
    MPM_NEED(p, t.count <= MPM_MAX_RANK && (count == 0 || t.count == count),
             "an argument has the wrong number of values");
    for (k = 0; k < t.count; k++) {
        const int64_t value = t.type == MPM_INT64 ? ((const mpm_int64 *)t.data)[k] : ((const int32_t *)t.data)[k];
        values[k] = value > 0x3fffffff ? 0x3fffffff : value < -0x3fffffff ? -0x3fffffff : (int32_t)value;
    }
    if (found != NULL) *found = t.count;
    return MPM_OK;
}

MPM_ONCE enum mpm_status mpm_keep_move(struct mpm_prep *p, const struct mpm_move **list, const void *from, void *to,
                              uint32_t element_bytes, uint32_t rank, const struct mpm_dim *dims) {
    struct mpm_dim merged[MPM_MAX_RANK];
    struct mpm_move *move;
    uint32_t n = 0, i;
    uint32_t run = element_bytes;
    for (i = 0; i < rank; i++) {
        struct mpm_dim d = dims[i];
        if (d.count == 1) continue;
        d.from *= (int32_t)element_bytes;
        d.to *= (int32_t)element_bytes;
        if (n > 0 && merged[n - 1].from == d.from * d.count && merged[n - 1].to == d.to * d.count) {
            d.count *= merged[n - 1].count; /* both step on as if they were one dim */
            n--;
        }
        merged[n++] = d;
    }
    if (n > 0 && merged[n - 1].from == (int32_t)run && merged[n - 1].to == (int32_t)run)
        run *= (uint32_t)merged[--n].count;
    move = mpm_keep(p, (uint32_t)(sizeof *move + n * sizeof merged[0]));
    if (move == NULL) return MPM_ARENA_TOO_SMALL;
    move->from = from;
    move->to = to;
    move->run = run;
    move->rank = n;
    memcpy(move->dims, merged, n * sizeof merged[0]);
    move->next = *list;
    *list = move;
    return MPM_OK;
}

void mpm_move_to(const struct mpm_move *m, uint8_t *to) {
    int32_t at[MPM_MAX_RANK] = {0};
    const uint8_t *from = m->from;
    uint32_t k;
    for (k = 0; k < m->rank; k++)
        if (m->dims[k].count == 0) return;
    for (;;) {
        switch (m->run) {
            case 0: return;
            case 1: *to = *from; break;
            default: memmove(to, from, m->run); break;
        }
        for (k = m->rank;; k--) { /* the next index, as a counter of many digits */
            if (k == 0) return;
            from += m->dims[k - 1].from;
            to += m->dims[k - 1].to;
            if (++at[k - 1] < m->dims[k - 1].count) break;
            at[k - 1] = 0;
            from -= (ptrdiff_t)m->dims[k - 1].from * m->dims[k - 1].count;
            to -= (ptrdiff_t)m->dims[k - 1].to * m->dims[k - 1].count;
        }
    }
}

void mpm_move_all(const struct mpm_move *list) {
    for (; list != NULL; list = list->next) mpm_move_to(list, list->to);
}

enum mpm_status mpm_run_moves(struct mpm_interpreter *m, const void *params) {
    (void)m;
    mpm_move_all(params);
    return MPM_OK;
}
