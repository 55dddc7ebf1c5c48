/* UNIDIRECTIONAL_SEQUENCE_LSTM of int8 with a cell state of int16. One unit's four gates are computed together, so
 * each input is loaded once for four products; the new hidden state grows in the output, and no scratch is needed. */
#include "lstm.h"
#include "matmul.h"

#include <string.h>

static int32_t saturate(int32_t x) { return mpm_clamp(x, -32768, 32767); }

/* A unit's rows of weights, gate by gate. */
struct rows {
    const int8_t *in[4], *hidden[4];
};

static void first_rows(const struct mpm_lstm *l, struct rows *r) {
    uint32_t i;
    for (i = 0; i < 4; i++) {
        r->in[i] = l->gates[i].weights;
        r->hidden[i] = l->gates[i].recurrent;
    }
}

static int32_t gate(const struct mpm_gate *g, int32_t in, int32_t hidden, uint32_t unit) {
    in = mpm_wrapping_add(in, ((const int32_t *)g->bias)[unit]);
    return saturate(saturate(mpm_scaled(in, g->in_multiplier, g->in_shift)) +
                    saturate(mpm_scaled(hidden, g->recurrent_multiplier, g->recurrent_shift)));
}

/* The four gates of a unit, before their activations: Q3.12. Leaves the rows of the next unit. */
static void gates_of(const struct mpm_lstm *l, const int8_t *x, const int8_t *hidden, uint32_t unit, struct rows *r,
                     int32_t out[4]) {
    int32_t from_in[4] = {0, 0, 0, 0}, from_hidden[4] = {0, 0, 0, 0};
    uint32_t i;
    mpm_dot4_s8(x, r->in, l->depth, -l->in_zero, from_in);
    mpm_dot4_s8(hidden, r->hidden, l->units, -l->hidden_zero, from_hidden);
    for (i = 0; i < 4; i++) {
        r->in[i] += l->depth;
        r->hidden[i] += l->units;
        out[i] = gate(&l->gates[i], from_in[i], from_hidden[i], unit);
    }
}

static int8_t step_of(const struct mpm_lstm *l, const int32_t gates[4], int16_t *cell) {
    const int32_t in = mpm_logistic16(gates[GATE_IN], 0, 0), forget = mpm_logistic16(gates[GATE_FORGET], 0, 0);
    const int32_t open = mpm_logistic16(gates[GATE_OUT], 0, 0);
    const int32_t new =
        l->cell_is_sigmoid ? mpm_logistic16(gates[GATE_CELL], 0, 0) : mpm_tanh16(gates[GATE_CELL], 0, 0);
    int32_t state = saturate(mpm_scaled(forget * *cell, l->forget_multiplier, l->forget_shift));
    state = saturate(state + saturate(mpm_scaled(in * new, l->in_multiplier, l->in_shift)));
    if (l->clip > 0) state = mpm_clamp(state, -l->clip, l->clip);
    *cell = (int16_t)state;
    state = mpm_tanh16(state, l->tanh_multiplier, l->tanh_shift);
    return (int8_t)mpm_clamp(
        mpm_wrapping_add(mpm_scaled(state * open, l->hidden_multiplier, l->hidden_shift), l->hidden_zero), -128, 127);
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct mpm_lstm *l = params;
    uint32_t b, t, u;
    (void)m;
    for (b = 0; b < l->batch; b++) {
        int8_t *hidden = (int8_t *)l->hidden + (size_t)b * l->units;
        int16_t *cell = (int16_t *)l->cell + (size_t)b * l->units;
        for (t = 0; t < l->steps; t++) {
            const int8_t *x = (const int8_t *)l->in + mpm_lstm_row(l, b, t) * l->depth;
            int8_t *out = (int8_t *)l->out + mpm_lstm_row(l, b, t) * l->units;
            struct rows rows;
            first_rows(l, &rows);
            for (u = 0; u < l->units; u++) {
                int32_t gates[4];
                gates_of(l, x, hidden, u, &rows, gates);
                out[u] = step_of(l, gates, &cell[u]);
            }
            memcpy(hidden, out, l->units);
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_lstm *l;
    MPM_TRY(mpm_prepare_lstm(p, &l));
    p->run = run;
    return MPM_OK;
}

const struct mpm_kernel mpm_unidirectional_sequence_lstm_s8 = {MPM_OP_UNIDIRECTIONAL_SEQUENCE_LSTM, MPM_INT8, 0, NULL,
                                                               prepare};
