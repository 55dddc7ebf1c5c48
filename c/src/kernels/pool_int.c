/* AVERAGE_POOL_2D and MAX_POOL_2D of int8 and int16. */
#include "pool.h"

static int32_t average(int32_t sum, int32_t count) {
    if (count == 0) return 0;
    return sum > 0 ? (sum + count / 2) / count : (sum - count / 2) / count; /* halves away from zero */
}

#define POOLS(T, NAME) \
    static void average_##NAME(const struct mpm_pool *p, const struct mpm_tile *t, void *to) { \
        T *out = to; \
        uint32_t c; \
        for (c = 0; c < p->depth; c++) { \
            const T *line = (const T *)t->at + c; \
            int32_t sum = 0, y, x; \
            for (y = 0; y < t->rows; y++, line += t->row) \
                for (x = 0; x < t->columns; x++) sum = mpm_wrapping_add(sum, line[(size_t)x * p->depth]); \
            out[c] = (T)mpm_clamp(average(sum, t->rows * t->columns), p->low, p->high); \
        } \
    } \
    static void max_##NAME(const struct mpm_pool *p, const struct mpm_tile *t, void *to) { \
        T *out = to; \
        uint32_t c; \
        for (c = 0; c < p->depth; c++) { \
            const T *line = (const T *)t->at + c; \
            int32_t max = sizeof(T) == 1 ? -128 : -32768, y, x; \
            for (y = 0; y < t->rows; y++, line += t->row) \
                for (x = 0; x < t->columns; x++) \
                    if (line[(size_t)x * p->depth] > max) max = line[(size_t)x * p->depth]; \
            out[c] = (T)mpm_clamp(max, p->low, p->high); \
        } \
    } \
    static enum mpm_status run_average_##NAME(struct mpm_interpreter *m, const void *params) { \
        (void)m; \
        mpm_each_tile(params, sizeof(T), average_##NAME); \
        return MPM_OK; \
    } \
    static enum mpm_status run_max_##NAME(struct mpm_interpreter *m, const void *params) { \
        (void)m; \
        mpm_each_tile(params, sizeof(T), max_##NAME); \
        return MPM_OK; \
    } \
    static MPM_ONCE enum mpm_status prepare_average_##NAME(struct mpm_prep *p) { \
        struct mpm_pool *pool; \
        MPM_TRY(mpm_prepare_pool(p, &pool)); \
        p->run = run_average_##NAME; \
        return MPM_OK; \
    } \
    static MPM_ONCE enum mpm_status prepare_max_##NAME(struct mpm_prep *p) { \
        struct mpm_pool *pool; \
        MPM_TRY(mpm_prepare_pool(p, &pool)); \
        p->run = run_max_##NAME; \
        return MPM_OK; \
    }

POOLS(int8_t, s8)
POOLS(int16_t, s16)

const struct mpm_kernel mpm_average_pool_2d_s8 = {MPM_OP_AVERAGE_POOL_2D, MPM_INT8, 0, NULL, prepare_average_s8};
const struct mpm_kernel mpm_average_pool_2d_s16 = {MPM_OP_AVERAGE_POOL_2D, MPM_INT16, 0, NULL, prepare_average_s16};
const struct mpm_kernel mpm_max_pool_2d_s8 = {MPM_OP_MAX_POOL_2D, MPM_INT8, 0, NULL, prepare_max_s8};
const struct mpm_kernel mpm_max_pool_2d_s16 = {MPM_OP_MAX_POOL_2D, MPM_INT16, 0, NULL, prepare_max_s16};
