/* What the forms of UNIDIRECTIONAL_SEQUENCE_LSTM share. */
#ifndef MPM_LSTM_H
#define MPM_LSTM_H

#include "../fixed.h"

/* The operator's inputs. Gates are in the file's order: input, forget, cell, output. */
enum {
    LSTM_IN = 0,
    LSTM_WEIGHTS = 1,
    LSTM_RECURRENT = 5,
    LSTM_BIAS = 12,
    LSTM_HIDDEN = 18,
    LSTM_CELL = 19,
    LSTM_ENDS = 24
};
enum { GATE_IN, GATE_FORGET, GATE_CELL, GATE_OUT };

/* One gate: 20 bytes on a 32-bit chip, with its padding. */
struct mpm_gate {
    const void *weights, *recurrent, *bias;
    int32_t in_multiplier, recurrent_multiplier;
    int8_t in_shift, recurrent_shift;
};

/* 188 bytes on a 32-bit chip. */
struct mpm_lstm {
    const void *in;
    void *out, *hidden, *cell; /* hidden: [batch][units], the activations' type; cell: [batch][units] */
    struct mpm_gate gates[4];
    uint32_t batch, steps, depth, units;
    int32_t forget_multiplier, in_multiplier, hidden_multiplier; /* the products of gates and states */
    float clip_f32;        /* of the cell's state; 0: none */
    int32_t tanh_multiplier;
    int16_t clip;          /* the same, quantised; 0: none */
    int16_t in_zero, hidden_zero;
    int8_t forget_shift, in_shift, hidden_shift, tanh_shift;
    uint8_t time_major, cell_is_sigmoid;
};

enum mpm_status mpm_prepare_lstm(struct mpm_prep *p, struct mpm_lstm **made);

/* Where step t of batch b is, in rows of the input or output. */
static inline size_t mpm_lstm_row(const struct mpm_lstm *l, uint32_t b, uint32_t t) {
    return l->time_major ? (size_t)t * l->batch + b : (size_t)b * l->steps + t;
}

#endif
