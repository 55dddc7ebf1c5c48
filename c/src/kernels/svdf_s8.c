/* SVDF of int8 with a state of int8 or int16: each filter feeds one number a run into its memory, and a unit is the
 * weighted sum over the memories of its filters. No scratch memory: a filter is finished before the next begins. */
#include "matmul.h"

#include <string.h>

/* 48 bytes on a 32-bit chip. */
struct svdf {
    const int8_t *in;
    const int8_t *feature;   /* [filters][depth] */
    const void *time;        /* [filters][memory], of the state's type */
    const int32_t *bias;     /* [units]; may be null */
    void *state;             /* [batch][filters][memory] */
    int8_t *out;             /* [batch][units] */
    int32_t multiplier_1, multiplier_2;
    uint16_t units, depth, memory;
    int16_t state_zero;
    uint8_t batch, rank;
    int8_t in_zero, out_zero;
    int8_t shift_1, shift_2;
    uint8_t state_16;
};

/* What the next four filters (fewer at the end) feed into their memories. */
static void features(const struct svdf *s, const int8_t *in, const int8_t *weights, uint32_t filters, int32_t made[4]) {
    const int32_t low = s->state_16 ? -32768 : -128;
    const int8_t *rows[4];
    uint32_t i;
    for (i = 0; i < 4; i++) {
        rows[i] = weights + (i < filters ? i : 0) * (size_t)s->depth;
        made[i] = 0;
    }
    mpm_dot4_s8(in, rows, s->depth, -s->in_zero, made);
    for (i = 0; i < 4; i++)
        made[i] = mpm_clamp(mpm_scaled(made[i], s->multiplier_1, s->shift_1), low, -low - 1) + s->state_zero;
}

/* Moves the memories of `count` filters one step on; their products with the weights in time go to `sums`. Fours of
 * loads and stores side by side become one of a word. A function of its own, so that it has all registers. */
#define REMEMBER(T, NAME) \
    static MPM_APART void NAME(const struct svdf *s, T *memory, const T *weights, const int32_t *fed, uint32_t count, \
                               int32_t *sums) { \
        const int32_t zero = s->state_zero; \
        const ptrdiff_t steps = s->memory - 1; \
        for (; count > 0; count--, memory++, weights++) { \
            T *const last = memory + steps; \
            const int32_t value = *fed++; \
            int32_t sum = 0; \
            for (; last - memory >= 4; memory += 4, weights += 4) { \
                const T x0 = memory[1], x1 = memory[2], x2 = memory[3], x3 = memory[4]; \
                memory[0] = x0, memory[1] = x1, memory[2] = x2, memory[3] = x3; \
                sum = mpm_wrapping_add(sum, weights[0] * (x0 - zero)); \
                sum = mpm_wrapping_add(sum, weights[1] * (x1 - zero)); \
                sum = mpm_wrapping_add(sum, weights[2] * (x2 - zero)); \
                sum = mpm_wrapping_add(sum, weights[3] * (x3 - zero)); \
            } \
            for (; memory != last; memory++, weights++) { \
                memory[0] = memory[1]; \
                sum = mpm_wrapping_add(sum, *weights * (*memory - zero)); \
            } \
            *last = (T)value; \
            *sums++ = mpm_wrapping_add(sum, *weights * (*last - zero)); \
        } \
    }
REMEMBER(int8_t, remember_s8)
REMEMBER(int16_t, remember_s16)

static int8_t finished(const struct svdf *s, int32_t sum) {
    return (int8_t)mpm_clamp(mpm_wrapping_add(mpm_scaled(sum, s->multiplier_2, s->shift_2), s->out_zero), -128, 127);
}

/* All filters of one example. `state`: elements before its memories. */
static void example(const struct svdf *s, const int8_t *in, size_t state, int8_t *out) {
    const uint32_t filters = (uint32_t)s->units * s->rank;
    const int32_t *bias = s->bias;
    int32_t fed[4], sums[4], sum = 0;
    uint32_t f, i, left = 0;
    for (f = 0; f < filters; f += 4) {
        const uint32_t n = filters - f < 4 ? filters - f : 4;
        const size_t at = (size_t)f * s->memory;
        features(s, in, s->feature + (size_t)f * s->depth, n, fed);
        if (s->state_16) remember_s16(s, (int16_t *)s->state + state + at, (const int16_t *)s->time + at, fed, n, sums);
        else remember_s8(s, (int8_t *)s->state + state + at, (const int8_t *)s->time + at, fed, n, sums);
        for (i = 0; i < n; i++) {
            if (left == 0) {
                left = s->rank;
                sum = bias == NULL ? 0 : *bias++;
            }
            sum = mpm_wrapping_add(sum, sums[i]);
            if (--left == 0) *out++ = finished(s, sum);
        }
    }
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct svdf *s = params;
    uint32_t b;
    (void)m;
    for (b = 0; b < s->batch; b++)
        example(s, s->in + (size_t)b * s->depth, (size_t)b * s->units * s->rank * s->memory,
                s->out + (size_t)b * s->units);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status shapes(struct mpm_prep *p, struct svdf *s, const struct mpm_tensor *in,
                              const struct mpm_tensor *feature_weights, const struct mpm_tensor *time,
                              const struct mpm_tensor *state) {
    struct mpm_tensor out, bias;
    const int32_t rank = mpm_field_i32(&p->m->file, p->options, 0, 0);
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in->rank == 2 && feature_weights->rank == 2 && time->rank == 2 && in->dims[1] > 0 && time->dims[1] > 0,
             "input and weights must have 2 dims");
    MPM_NEED(p, rank >= 1 && feature_weights->dims[0] % rank == 0, "the rank does not divide the number of filters");
    MPM_SUPPORT(p,
                in->dims[0] <= 255 && rank <= 255 && in->dims[1] <= 65535 && time->dims[1] <= 65535 &&
                    feature_weights->dims[0] / rank <= 65535,
                "more than 255 in batch or rank, or 65,535 in another dim");
    s->batch = (uint8_t)in->dims[0];
    s->rank = (uint8_t)rank;
    s->units = (uint16_t)(feature_weights->dims[0] / rank);
    s->depth = (uint16_t)in->dims[1];
    s->memory = (uint16_t)time->dims[1];
    MPM_NEED(p, feature_weights->dims[1] == in->dims[1] && time->dims[0] == feature_weights->dims[0],
             "the weights' shapes do not fit");
    MPM_NEED(p, state->variable && state->count == (uint64_t)s->batch * time->count, "the state's shape does not fit");
    MPM_NEED(p, out.type == MPM_INT8 && out.count == (uint32_t)s->batch * s->units, "the output's shape does not fit");
    if (mpm_has_input(p, 3)) {
        MPM_TRY(mpm_in(p, 3, &bias));
        MPM_NEED(p, bias.constant && bias.type == MPM_INT32 && bias.count == s->units, "the bias does not fit");
        s->bias = bias.data;
    }
    s->out = out.data;
    s->out_zero = (int8_t)out.zero_point;
    MPM_NEED(p, in->scale > 0 && feature_weights->scale > 0 && time->scale > 0 && state->scale > 0 && out.scale > 0,
             "a tensor has no scale");
    {
        const double one = (double)in->scale * (double)feature_weights->scale / (double)state->scale;
        const double two = (double)state->scale * (double)time->scale / (double)out.scale;
        struct mpm_multiplier a, b;
        MPM_NEED(p, one > 0 && one < 1e30 && two > 0 && two < 1e30, "the scales do not fit together");
        a = mpm_multiplier_of_double(one);
        b = mpm_multiplier_of_double(two);
        s->multiplier_1 = a.value;
        s->shift_1 = (int8_t)a.shift;
        s->multiplier_2 = b.value;
        s->shift_2 = (int8_t)b.shift;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, feature_weights, time, state;
    struct svdf *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &feature_weights));
    MPM_TRY(mpm_in(p, 2, &time));
    MPM_TRY(mpm_in(p, 4, &state));
    MPM_SUPPORT(p, feature_weights.constant && feature_weights.type == MPM_INT8 && time.constant,
                "the weights must be constants, those of the features int8");
    MPM_SUPPORT(p, (state.type == MPM_INT8 || state.type == MPM_INT16) && time.type == state.type,
                "state and weights in time must both be int8 or both int16");
    s->state_16 = state.type == MPM_INT16;
    s->in = in.data;
    s->feature = feature_weights.data;
    s->time = time.data;
    s->state = state.data;
    s->in_zero = (int8_t)in.zero_point;
    s->state_zero = (int16_t)state.zero_point;
    MPM_TRY(shapes(p, s, &in, &feature_weights, &time, &state));
    p->run = run;
    p->params = s;
    return MPM_OK;
}

const struct mpm_kernel mpm_svdf_s8 = {MPM_OP_SVDF, MPM_INT8, 0, NULL, prepare};
