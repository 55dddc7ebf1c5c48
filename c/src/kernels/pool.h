/* What the pooling operators of all types share. */
#ifndef MPM_POOL_H
#define MPM_POOL_H

#include "../fixed.h"
#include "window.h"

/* 52 bytes on a 32-bit chip. */
struct mpm_pool {
    const void *in;
    void *out;
    uint32_t batch, depth;
    int32_t low, high;
    float low_f32, high_f32;
    struct mpm_window window;
};

enum mpm_status mpm_prepare_pool(struct mpm_prep *p, struct mpm_pool **made);

/* One window: rows, columns and the address of its first element. */
struct mpm_tile {
    const void *at;
    int32_t rows, columns;
    ptrdiff_t row; /* elements from row to row */
};

/* Calls `reduce` for every output pixel. */
void mpm_each_tile(const struct mpm_pool *p, uint32_t element_bytes,
                   void (*reduce)(const struct mpm_pool *p, const struct mpm_tile *tile, void *out));

#endif
