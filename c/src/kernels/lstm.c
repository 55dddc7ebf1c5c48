#include "lstm.h"

static int is_matrix(const struct mpm_tensor *t, uint32_t rows, uint32_t columns) {
    return t->rank == 2 && (uint32_t)t->dims[0] == rows && (uint32_t)t->dims[1] == columns;
}

static MPM_ONCE enum mpm_status gate_scales(struct mpm_prep *p, struct mpm_gate *g, float in, float weights,
                                            float hidden, float recurrent) {
    const float gate_scale = 1.0f / 4096; /* Q3.12 */
    struct mpm_multiplier a, b;
    MPM_NEED(p, in > 0 && weights > 0 && hidden > 0 && recurrent > 0, "a tensor has no scale");
    a = mpm_multiplier_of(in * weights, 1.0f, gate_scale);
    b = mpm_multiplier_of(hidden * recurrent, 1.0f, gate_scale);
    g->in_multiplier = a.value;
    g->in_shift = (int8_t)a.shift;
    g->recurrent_multiplier = b.value;
    g->recurrent_shift = (int8_t)b.shift;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status gates(struct mpm_prep *p, struct mpm_lstm *l, const struct mpm_tensor *in,
                             const struct mpm_tensor *hidden) {
    const uint32_t weight_type = in->type == MPM_FLOAT32 ? MPM_FLOAT32 : MPM_INT8;
    const uint32_t bias_type = in->type == MPM_FLOAT32 ? MPM_FLOAT32 : in->type == MPM_INT8 ? MPM_INT32 : MPM_INT64;
    uint32_t i;
    for (i = 0; i < 4; i++) {
        struct mpm_tensor w, r, b;
        struct mpm_gate *g = &l->gates[i];
        MPM_TRY(mpm_in(p, LSTM_WEIGHTS + i, &w));
        MPM_TRY(mpm_in(p, LSTM_RECURRENT + i, &r));
        MPM_TRY(mpm_in(p, LSTM_BIAS + i, &b));
        MPM_SUPPORT(p, w.constant && r.constant && b.constant, "weights and biases must be constants");
        MPM_SUPPORT(p, w.type == weight_type && r.type == weight_type && b.type == bias_type,
                    "hybrid quantisation: weights or biases do not have the types that go with the input's");
        MPM_NEED(p, is_matrix(&w, l->units, l->depth) && is_matrix(&r, l->units, l->units) && b.count == l->units,
                 "weights or biases have the wrong shape");
        MPM_SUPPORT(p, w.scale_count <= 1 && r.scale_count <= 1 && w.zero_point == 0 && r.zero_point == 0,
                    "weights must have one scale and zero point 0");
        g->weights = w.data;
        g->recurrent = r.data;
        g->bias = b.data;
        if (in->type != MPM_FLOAT32) MPM_TRY(gate_scales(p, g, in->scale, w.scale, hidden->scale, r.scale));
    }
    return MPM_OK;
}

/* log2 of a scale that is a power of two. */
static int log2_of(float scale, int32_t *log2) {
    float power = 1.0f;
    int32_t n = 0;
    if (!(scale > 1e-9f && scale < 1e9f)) return 0;
    for (; power > scale * 1.4f && n > -30; n--) power *= 0.5f;
    for (; power < scale * 0.7f && n < 30; n++) power *= 2.0f;
    *log2 = n;
    return scale > power * 0.9993f && scale < power * 1.0007f;
}

static MPM_ONCE enum mpm_status state_scales(struct mpm_prep *p, struct mpm_lstm *l, const struct mpm_tensor *cell,
                                    const struct mpm_tensor *hidden) {
    const float unit = 1.0f / 32768; /* Q0.15 */
    struct mpm_multiplier m;
    int32_t power = 0;
    MPM_NEED(p, cell->scale > 0 && hidden->scale > 0, "a state has no scale");
    MPM_SUPPORT(p, log2_of(cell->scale, &power), "the cell state's scale is not a power of two");
    m = mpm_multiplier_of(unit, cell->scale, cell->scale);
    l->forget_multiplier = m.value;
    l->forget_shift = (int8_t)m.shift;
    m = mpm_multiplier_of(unit, unit, cell->scale);
    l->in_multiplier = m.value;
    l->in_shift = (int8_t)m.shift;
    m = mpm_multiplier_of(unit, unit, hidden->scale);
    l->hidden_multiplier = m.value;
    l->hidden_shift = (int8_t)m.shift;
    l->tanh_shift = (int8_t)(power + 12 < 0 ? -(power + 12) : power + 12);
    l->tanh_multiplier = power + 12 < 0 ? 3 : 0;
    MPM_SUPPORT(p, power + 12 <= 15, "the cell state's scale is too large");
    if (!(l->clip_f32 > 0)) /* NaN too */
        l->clip = 0;
    else
        l->clip = l->clip_f32 / cell->scale > 32767.0f ? 32767 : (int16_t)(l->clip_f32 / cell->scale);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status no_extras(struct mpm_prep *p) {
    uint32_t i;
    MPM_NEED(p, p->inputs.count == LSTM_ENDS, "the operator must have 24 inputs");
    for (i = 9; i < LSTM_ENDS; i++)
        if ((i < LSTM_BIAS || i >= 16) && i != LSTM_HIDDEN && i != LSTM_CELL)
            MPM_SUPPORT(p, !mpm_has_input(p, i), "peepholes, projection and layer norm are not supported");
    return MPM_OK;
}

MPM_ONCE enum mpm_status mpm_prepare_lstm(struct mpm_prep *p, struct mpm_lstm **made) {
    struct mpm_tensor in, out, hidden, cell;
    struct mpm_file *f = &p->m->file;
    struct mpm_lstm *l = mpm_keep(p, sizeof *l);
    uint32_t activation;
    if (l == NULL) return MPM_ARENA_TOO_SMALL;
    *made = l;
    MPM_TRY(no_extras(p));
    MPM_TRY(mpm_in(p, LSTM_IN, &in));
    MPM_TRY(mpm_in(p, LSTM_HIDDEN, &hidden));
    MPM_TRY(mpm_in(p, LSTM_CELL, &cell));
    MPM_TRY(mpm_out(p, 0, &out));
    /* Options: activation, cell_clip, proj_clip, time_major */
    activation = mpm_field_u8(f, p->options, 0, 0);
    l->clip_f32 = mpm_field_f32(f, p->options, 1, 0.0f);
    l->time_major = mpm_field_u8(f, p->options, 3, 0) != 0;
    MPM_SUPPORT(p, activation == 4 || activation == 6, "the cell's activation is neither TANH nor SIGMOID");
    l->cell_is_sigmoid = activation == 6;
    MPM_NEED(p, in.rank == 3 && out.rank == 3 && hidden.rank == 2 && hidden.variable && cell.variable,
             "input, output or states have the wrong form");
    l->batch = (uint32_t)in.dims[l->time_major ? 1 : 0];
    l->steps = (uint32_t)in.dims[l->time_major ? 0 : 1];
    l->depth = (uint32_t)in.dims[2];
    l->units = (uint32_t)hidden.dims[1];
    MPM_NEED(p, (uint32_t)hidden.dims[0] == l->batch && cell.count == hidden.count && out.dims[0] == in.dims[0] &&
                    out.dims[1] == in.dims[1] && (uint32_t)out.dims[2] == l->units,
             "states or output have the wrong shape");
    MPM_NEED(p, hidden.type == in.type && out.type == in.type &&
                    cell.type == (in.type == MPM_FLOAT32 ? MPM_FLOAT32 : MPM_INT16),
             "states or output have the wrong type");
    MPM_TRY(gates(p, l, &in, &hidden));
    if (in.type != MPM_FLOAT32) MPM_TRY(state_scales(p, l, &cell, &hidden));
    l->in_zero = (int16_t)in.zero_point;
    l->hidden_zero = (int16_t)hidden.zero_point;
    l->in = in.data;
    l->out = out.data;
    l->hidden = hidden.data;
    l->cell = cell.data;
    p->params = l;
    return MPM_OK;
}
