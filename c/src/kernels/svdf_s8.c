/* SVDF of int8 with a state of int8 or int16: each filter feeds one number a run into its memory, and a unit is the
 * weighted sum over the memories of its filters. No scratch memory: a filter is finished before the next begins. */
#include "../fixed.h"

#include <string.h>

/* 56 bytes on a 32-bit chip. */
struct svdf {
    const int8_t *in;
    const int8_t *feature;   /* [filters][depth] */
    const void *time;        /* [filters][memory], of the state's type */
    const int32_t *bias;     /* [units]; may be null */
    void *state;             /* [batch][filters][memory] */
    int8_t *out;             /* [batch][units] */
    int32_t multiplier_1, multiplier_2;
    uint32_t units, depth, memory;
    uint16_t batch, rank;
    int16_t in_zero, state_zero, out_zero;
    int8_t shift_1, shift_2;
    uint8_t state_16;
};

static int32_t feature(const struct svdf *s, const int8_t *in, const int8_t *weights, int32_t low, int32_t high) {
    const int32_t offset = -s->in_zero;
    int32_t sum = 0;
    uint32_t i;
    for (i = 0; i < s->depth; i++) sum += weights[i] * (in[i] + offset);
    return mpm_clamp(mpm_scaled(sum, s->multiplier_1, s->shift_1), low, high) + s->state_zero;
}

/* Moves a memory one step on, and returns its product with the filter's weights in time. */
#define REMEMBER(T, NAME) \
    static int32_t remember_##NAME(const struct svdf *s, T *memory, const T *weights, int32_t value) { \
        const uint32_t last = s->memory - 1; \
        const int32_t zero = s->state_zero; \
        uint32_t i; \
        int32_t sum = 0; \
        for (i = 0; i < last; i++) { \
            const T old = memory[i + 1]; \
            memory[i] = old; \
            sum = mpm_wrapping_add(sum, weights[i] * (old - zero)); \
        } \
        memory[last] = (T)value; \
        return mpm_wrapping_add(sum, weights[last] * ((T)value - zero)); \
    }
REMEMBER(int8_t, s8)
REMEMBER(int16_t, s16)

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct svdf *s = params;
    const int8_t *in = s->in;
    int8_t *out = s->out;
    size_t state = 0;
    uint32_t b, u, r;
    (void)m;
    for (b = 0; b < s->batch; b++, in += s->depth) {
        const int8_t *weights = s->feature;
        size_t time = 0;
        for (u = 0; u < s->units; u++) {
            int32_t sum = s->bias == NULL ? 0 : s->bias[u];
            for (r = 0; r < s->rank; r++, weights += s->depth, time += s->memory, state += s->memory) {
                if (s->state_16)
                    sum = mpm_wrapping_add(sum, remember_s16(s, (int16_t *)s->state + state, (const int16_t *)s->time + time,
                                                             feature(s, in, weights, -32768, 32767)));
                else
                    sum = mpm_wrapping_add(sum, remember_s8(s, (int8_t *)s->state + state, (const int8_t *)s->time + time,
                                                            feature(s, in, weights, -128, 127)));
            }
            *out++ = (int8_t)mpm_clamp(mpm_wrapping_add(mpm_scaled(sum, s->multiplier_2, s->shift_2), s->out_zero), -128, 127);
        }
    }
    return MPM_OK;
}

static enum mpm_status shapes(struct mpm_prep *p, struct svdf *s, const struct mpm_tensor *in,
                              const struct mpm_tensor *feature_weights, const struct mpm_tensor *time,
                              const struct mpm_tensor *state) {
    struct mpm_tensor out, bias;
    const int32_t rank = mpm_field_i32(&p->m->file, p->options, 0, 0);
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in->rank == 2 && feature_weights->rank == 2 && time->rank == 2 && in->dims[1] > 0 && time->dims[1] > 0,
             "input and weights must have 2 dims");
    MPM_NEED(p, rank >= 1 && rank <= 65535 && feature_weights->dims[0] % rank == 0,
             "the rank does not divide the number of filters");
    MPM_SUPPORT(p, in->dims[0] <= 65535, "the batch is too large");
    s->batch = (uint16_t)in->dims[0];
    s->rank = (uint16_t)rank;
    s->units = (uint32_t)(feature_weights->dims[0] / rank);
    s->depth = (uint32_t)in->dims[1];
    s->memory = (uint32_t)time->dims[1];
    MPM_NEED(p, feature_weights->dims[1] == in->dims[1] && time->dims[0] == feature_weights->dims[0],
             "the weights' shapes do not fit");
    MPM_NEED(p, state->variable && state->count == (uint64_t)s->batch * time->count, "the state's shape does not fit");
    MPM_NEED(p, out.type == MPM_INT8 && out.count == (uint64_t)s->batch * s->units, "the output's shape does not fit");
    if (mpm_has_input(p, 3)) {
        MPM_TRY(mpm_in(p, 3, &bias));
        MPM_NEED(p, bias.constant && bias.type == MPM_INT32 && bias.count == s->units, "the bias does not fit");
        s->bias = bias.data;
    }
    s->out = out.data;
    s->out_zero = (int16_t)out.zero_point;
    MPM_NEED(p, in->scale > 0 && feature_weights->scale > 0 && time->scale > 0 && state->scale > 0 && out.scale > 0,
             "a tensor has no scale");
    {   /* the reference works these out in float32 */
        const float one = in->scale * feature_weights->scale / state->scale;
        const float two = state->scale * time->scale / out.scale;
        struct mpm_multiplier a, b;
        MPM_NEED(p, one > 0 && one < 1e30f && two > 0 && two < 1e30f, "the scales do not fit together");
        a = mpm_multiplier_of_double((double)one);
        b = mpm_multiplier_of_double((double)two);
        s->multiplier_1 = a.value;
        s->shift_1 = (int8_t)a.shift;
        s->multiplier_2 = b.value;
        s->shift_2 = (int8_t)b.shift;
    }
    return MPM_OK;
}

static enum mpm_status prepare(struct mpm_prep *p) {
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
    s->in_zero = (int16_t)in.zero_point;
    s->state_zero = (int16_t)state.zero_point;
    MPM_TRY(shapes(p, s, &in, &feature_weights, &time, &state));
    p->run = run;
    p->params = s;
    return MPM_OK;
}

const struct mpm_kernel mpm_svdf_s8 = {27, MPM_INT8, 0, NULL, prepare};
