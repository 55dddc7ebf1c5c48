/* UNIDIRECTIONAL_SEQUENCE_LSTM of int16 with weights of int8 and biases of int64: the plain loops. */
#include "lstm.h"

#include <string.h>

static int32_t saturate(int32_t x) { return mpm_clamp(x, -32768, 32767); }

static int64_t dot(const int16_t *x, const int8_t *w, uint32_t depth) {
    int64_t sum = 0;
    for (; depth > 0; depth--) sum += *x++ * *w++;
    return sum;
}

/* A gate before its activation: Q3.12. */
static int32_t gate_of(const struct mpm_lstm *l, uint32_t gate, const int16_t *x, const int16_t *hidden,
                       uint32_t unit) {
    const struct mpm_gate *g = &l->gates[gate];
    const int64_t bias = ((const mpm_int64 *)g->bias)[unit];
    const int64_t in =
        (int64_t)((uint64_t)dot(x, (const int8_t *)g->weights + (size_t)unit * l->depth, l->depth) + (uint64_t)bias);
    const int64_t again = dot(hidden, (const int8_t *)g->recurrent + (size_t)unit * l->units, l->units);
    return saturate(saturate(mpm_scaled64(in, g->in_multiplier, g->in_shift)) +
                    saturate(mpm_scaled64(again, g->recurrent_multiplier, g->recurrent_shift)));
}

static int16_t step_of(const struct mpm_lstm *l, const int16_t *x, const int16_t *hidden, uint32_t unit,
                       int16_t *cell) {
    const int32_t in = mpm_logistic16(gate_of(l, GATE_IN, x, hidden, unit), 0, 0);
    const int32_t forget = mpm_logistic16(gate_of(l, GATE_FORGET, x, hidden, unit), 0, 0);
    const int32_t open = mpm_logistic16(gate_of(l, GATE_OUT, x, hidden, unit), 0, 0);
    const int32_t raw = gate_of(l, GATE_CELL, x, hidden, unit);
    const int32_t new = l->cell_is_sigmoid ? mpm_logistic16(raw, 0, 0) : mpm_tanh16(raw, 0, 0);
    int32_t state = saturate(mpm_scaled(forget * *cell, l->forget_multiplier, l->forget_shift));
    state = saturate(state + saturate(mpm_scaled(in * new, l->in_multiplier, l->in_shift)));
    if (l->clip > 0) state = mpm_clamp(state, -l->clip, l->clip);
    *cell = (int16_t)state;
    state = mpm_tanh16(state, l->tanh_multiplier, l->tanh_shift);
    return (int16_t)saturate(
        mpm_wrapping_add(mpm_scaled(state * open, l->hidden_multiplier, l->hidden_shift), l->hidden_zero));
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct mpm_lstm *l = params;
    uint32_t b, t, u;
    (void)m;
    for (b = 0; b < l->batch; b++) {
        int16_t *hidden = (int16_t *)l->hidden + (size_t)b * l->units,
                *cell = (int16_t *)l->cell + (size_t)b * l->units;
        for (t = 0; t < l->steps; t++) {
            const int16_t *x = (const int16_t *)l->in + mpm_lstm_row(l, b, t) * l->depth;
            int16_t *out = (int16_t *)l->out + mpm_lstm_row(l, b, t) * l->units;
            for (u = 0; u < l->units; u++) out[u] = step_of(l, x, hidden, u, &cell[u]);
            memcpy(hidden, out, l->units * sizeof *out);
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_lstm *l;
    MPM_TRY(mpm_prepare_lstm(p, &l));
    MPM_SUPPORT(p, l->in_zero == 0 && l->hidden_zero == 0, "int16 needs zero points of 0");
    p->run = run;
    return MPM_OK;
}

const struct mpm_kernel mpm_unidirectional_sequence_lstm_s16 = {MPM_OP_UNIDIRECTIONAL_SEQUENCE_LSTM, MPM_INT16, 0, NULL,
                                                                prepare};
