/* SOFTMAX, LOG_SOFTMAX, L2_NORMALIZATION, AVERAGE_POOL_2D, MAX_POOL_2D and UNIDIRECTIONAL_SEQUENCE_LSTM of float32. */
#include "lstm.h"
#include "pool.h"

#include <math.h>
#include <string.h>

/* 20 bytes on a 32-bit chip. */
struct rows {
    const float *in;
    float *out;
    uint32_t rows, depth;
    float beta;
};

static MPM_ONCE enum mpm_status rows_of(struct mpm_prep *p, struct rows **made) {
    struct mpm_tensor in, out;
    struct rows *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return MPM_ARENA_TOO_SMALL;
    *made = r;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.rank >= 1 && out.count == in.count && in.type == MPM_FLOAT32 && out.type == MPM_FLOAT32,
             "input and output must be float32 of one shape");
    r->in = in.data;
    r->out = out.data;
    r->depth = (uint32_t)in.dims[in.rank - 1];
    r->rows = r->depth == 0 ? 0 : in.count / r->depth;
    mpm_may_overlay(p, 0);
    p->params = r;
    return MPM_OK;
}

static float largest(const float *in, uint32_t count) {
    float max = -3.402823466e38f;
    for (; count > 0; count--, in++) max = *in > max ? *in : max;
    return max;
}

static enum mpm_status run_softmax(struct mpm_interpreter *m, const void *params) {
    const struct rows *s = params;
    uint32_t r, i;
    (void)m;
    for (r = 0; r < s->rows; r++) {
        const float *in = s->in + (size_t)r * s->depth;
        float *out = s->out + (size_t)r * s->depth;
        const float max = largest(in, s->depth);
        float sum = 0.0f;
        for (i = 0; i < s->depth; i++) sum += out[i] = expf((in[i] - max) * s->beta);
        for (i = 0; i < s->depth; i++) out[i] /= sum;
    }
    return MPM_OK;
}

static enum mpm_status run_log_softmax(struct mpm_interpreter *m, const void *params) {
    const struct rows *s = params;
    uint32_t r, i;
    (void)m;
    for (r = 0; r < s->rows; r++) {
        const float *in = s->in + (size_t)r * s->depth;
        float *out = s->out + (size_t)r * s->depth;
        const float max = largest(in, s->depth);
        float sum = 0.0f;
        for (i = 0; i < s->depth; i++) sum += expf(in[i] - max);
        sum = logf(sum);
        for (i = 0; i < s->depth; i++) out[i] = in[i] - max - sum;
    }
    return MPM_OK;
}

static enum mpm_status run_l2(struct mpm_interpreter *m, const void *params) {
    const struct rows *s = params;
    uint32_t r, i;
    (void)m;
    for (r = 0; r < s->rows; r++) {
        const float *in = s->in + (size_t)r * s->depth;
        float *out = s->out + (size_t)r * s->depth;
        float sum = 0.0f;
        for (i = 0; i < s->depth; i++) sum += in[i] * in[i];
        sum = sqrtf(sum);
        sum = sum > 1e-6f ? sum : 1e-6f;
        for (i = 0; i < s->depth; i++) out[i] = in[i] / sum;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_softmax(struct mpm_prep *p) {
    struct rows *r;
    MPM_TRY(rows_of(p, &r));
    r->beta = mpm_field_f32(&p->m->file, p->options, 0, 0.0f);
    p->run = run_softmax;
    return MPM_OK;
}
static MPM_ONCE enum mpm_status prepare_log_softmax(struct mpm_prep *p) {
    struct rows *r;
    p->run = run_log_softmax;
    return rows_of(p, &r);
}
static MPM_ONCE enum mpm_status prepare_l2(struct mpm_prep *p) {
    struct rows *r;
    p->run = run_l2;
    return rows_of(p, &r);
}

static float clamp_pool(const struct mpm_pool *p, float x) {
    return x < p->low_f32 ? p->low_f32 : x > p->high_f32 ? p->high_f32 : x;
}

#define POOL(NAME, BEGIN, STEP, END) \
    static void NAME##_tile(const struct mpm_pool *p, const struct mpm_tile *t, void *to) { \
        uint32_t c; \
        for (c = 0; c < p->depth; c++) { \
            const float *line = (const float *)t->at + c; \
            float sum = BEGIN; \
            int32_t y, x; \
            for (y = 0; y < t->rows; y++, line += t->row) \
                for (x = 0; x < t->columns; x++) { \
                    const float v = line[(size_t)x * p->depth]; \
                    STEP; \
                } \
            ((float *)to)[c] = clamp_pool(p, END); \
        } \
    } \
    static enum mpm_status run_##NAME(struct mpm_interpreter *m, const void *params) { \
        (void)m; \
        mpm_each_tile(params, sizeof(float), NAME##_tile); \
        return MPM_OK; \
    } \
    static MPM_ONCE enum mpm_status prepare_##NAME(struct mpm_prep *p) { \
        struct mpm_pool *pool; \
        MPM_TRY(mpm_prepare_pool(p, &pool)); \
        p->run = run_##NAME; \
        return MPM_OK; \
    }
POOL(average, 0.0f, sum += v, sum / (float)(t->rows * t->columns))
POOL(max, -3.402823466e38f, sum = v > sum ? v : sum, sum)
POOL(l2_pool, 0.0f, sum += v * v, sqrtf(sum / (float)(t->rows * t->columns)))

static float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

static float gate(const struct mpm_lstm *l, uint32_t g, const float *x, const float *hidden, uint32_t unit) {
    const float *w = (const float *)l->gates[g].weights + (size_t)unit * l->depth;
    const float *r = (const float *)l->gates[g].recurrent + (size_t)unit * l->units;
    float sum = 0.0f, again = 0.0f;
    uint32_t k;
    for (k = 0; k < l->depth; k++) sum += x[k] * w[k];
    for (k = 0; k < l->units; k++) again += hidden[k] * r[k];
    return sum + ((const float *)l->gates[g].bias)[unit] + again;
}

static void lstm_step(const struct mpm_lstm *l, const float *x, float *hidden, float *cell, float *out) {
    uint32_t u;
    for (u = 0; u < l->units; u++) {
        const float new = gate(l, GATE_CELL, x, hidden, u);
        float state = logistic(gate(l, GATE_FORGET, x, hidden, u)) * cell[u] +
                      logistic(gate(l, GATE_IN, x, hidden, u)) * (l->cell_is_sigmoid ? logistic(new) : tanhf(new));
        if (l->clip_f32 > 0) state = state > l->clip_f32 ? l->clip_f32 : state < -l->clip_f32 ? -l->clip_f32 : state;
        cell[u] = state;
        out[u] = tanhf(state) * logistic(gate(l, GATE_OUT, x, hidden, u));
    }
    memcpy(hidden, out, l->units * sizeof *out);
}

static enum mpm_status run_lstm(struct mpm_interpreter *m, const void *params) {
    const struct mpm_lstm *l = params;
    uint32_t b, t;
    (void)m;
    for (b = 0; b < l->batch; b++)
        for (t = 0; t < l->steps; t++)
            lstm_step(l, (const float *)l->in + mpm_lstm_row(l, b, t) * l->depth,
                      (float *)l->hidden + (size_t)b * l->units, (float *)l->cell + (size_t)b * l->units,
                      (float *)l->out + mpm_lstm_row(l, b, t) * l->units);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_lstm(struct mpm_prep *p) {
    struct mpm_lstm *l;
    p->run = run_lstm;
    return mpm_prepare_lstm(p, &l);
}

const struct mpm_kernel mpm_softmax_f32 = {MPM_OP_SOFTMAX, MPM_FLOAT32, 0, NULL, prepare_softmax};
const struct mpm_kernel mpm_log_softmax_f32 = {MPM_OP_LOG_SOFTMAX, MPM_FLOAT32, 0, NULL, prepare_log_softmax};
const struct mpm_kernel mpm_l2_normalization_f32 = {MPM_OP_L2_NORMALIZATION, MPM_FLOAT32, 0, NULL, prepare_l2};
const struct mpm_kernel mpm_average_pool_2d_f32 = {MPM_OP_AVERAGE_POOL_2D, MPM_FLOAT32, 0, NULL, prepare_average};
const struct mpm_kernel mpm_max_pool_2d_f32 = {MPM_OP_MAX_POOL_2D, MPM_FLOAT32, 0, NULL, prepare_max};
const struct mpm_kernel mpm_l2_pool_2d_f32 = {MPM_OP_L2_POOL_2D, MPM_FLOAT32, 0, NULL, prepare_l2_pool};
const struct mpm_kernel mpm_unidirectional_sequence_lstm_f32 = {MPM_OP_UNIDIRECTIONAL_SEQUENCE_LSTM, MPM_FLOAT32, 0,
                                                                NULL, prepare_lstm};
