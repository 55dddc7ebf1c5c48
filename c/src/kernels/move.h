/* Everything that only moves elements: a copy between two views of up to 6 dims with any strides. */
#ifndef MPM_MOVE_H
#define MPM_MOVE_H

#include "../kernel.h"

struct mpm_dim {
    int32_t count;
    int32_t from, to; /* elements from one index to the next, in source and destination */
};

/* One copy, with what it needs of its dims behind it: 20 + 12 * rank bytes on a 32-bit chip. */
struct mpm_move {
    const uint8_t *from;
    uint8_t *to;
    const struct mpm_move *next;
    uint32_t run; /* bytes that lie together in both */
    uint32_t rank;
    struct mpm_dim dims[]; /* in bytes */
};

/* Keeps a copy of `rank` dims (6 at most), put together where they lie together. Prepends it to *list. */
enum mpm_status mpm_keep_move(struct mpm_prep *p, const struct mpm_move **list, const void *from, void *to,
                              uint32_t element_bytes, uint32_t rank, const struct mpm_dim *dims);

void mpm_move_all(const struct mpm_move *list);
/* One copy, to another place than its own. */
void mpm_move_to(const struct mpm_move *m, uint8_t *to);
/* A kernel's run: params is the list. */
enum mpm_status mpm_run_moves(struct mpm_interpreter *m, const void *params);

/* Row-major strides of a tensor, in elements. */
void mpm_strides(const struct mpm_tensor *t, int32_t strides[MPM_MAX_RANK]);

/* The constant int32 or int64 values of input i: `count` of them, or as many as there are, up to 6, where it is 0. */
enum mpm_status mpm_values(struct mpm_prep *p, uint32_t i, uint32_t count, int32_t values[MPM_MAX_RANK],
                           uint32_t *found);

/* A dim given as -rank..rank-1; fails out of range. */
enum mpm_status mpm_axis(struct mpm_prep *p, int32_t axis, uint32_t rank, uint32_t *made);

/* Product of dims begin..end-1. */
uint32_t mpm_span(const struct mpm_tensor *t, uint32_t begin, uint32_t end);

#endif
