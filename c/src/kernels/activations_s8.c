/* ELU and HARD_SWISH of int8. */
#include "../fixed.h"

#include <math.h>

#define VALUES 256

/* 36 bytes on a 32-bit chip. */
struct elu {
    const int8_t *in;
    int8_t *out;
    int8_t *table; /* scratch: [VALUES], of tensors that have more elements than that; else null */
    uint32_t count;
    float in_scale, out_inverse;
    int32_t in_zero, out_zero;
};

static int8_t elu_of(const struct elu *e, int32_t x) {
    const float real = e->in_scale * (float)(x - e->in_zero);
    const float made = real < 0.0f ? expf(real) - 1.0f : real;
    const float steps = roundf(made * e->out_inverse) + (float)e->out_zero;
    return (int8_t)(steps >= 127.0f ? 127 : steps <= -128.0f ? -128 : (int32_t)steps);
}

static enum mpm_status run_elu(struct mpm_interpreter *m, const void *params) {
    const struct elu *e = params;
    uint32_t i;
    int32_t x;
    (void)m;
    for (x = -128; e->table != NULL && x < 128; x++) e->table[x + 128] = elu_of(e, x);
    for (i = 0; i < e->count; i++) e->out[i] = e->table != NULL ? e->table[e->in[i] + 128] : elu_of(e, e->in[i]);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status ends(struct mpm_prep *p, struct mpm_tensor *in, struct mpm_tensor *out) {
    MPM_TRY(mpm_in(p, 0, in));
    MPM_TRY(mpm_out(p, 0, out));
    MPM_NEED(p, in->type == out->type && in->count == out->count, "input and output differ in type or shape");
    MPM_NEED(p, in->scale > 0 && out->scale > 0, "input or output has no scale");
    mpm_may_overlay(p, 0);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_elu(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct elu *e = mpm_keep(p, sizeof *e);
    if (e == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(ends(p, &in, &out));
    e->in = in.data;
    e->out = out.data;
    e->count = in.count;
    e->in_scale = in.scale;
    e->out_inverse = 1.0f / out.scale;
    e->in_zero = in.zero_point;
    e->out_zero = out.zero_point;
    if (in.count > VALUES) {
        e->table = mpm_scratch(p, VALUES);
        if (e->table == NULL) return MPM_ARENA_TOO_SMALL;
    }
    p->run = run_elu;
    p->params = e;
    return MPM_OK;
}

/* 32 bytes on a 32-bit chip. Multipliers in Q0.15. */
struct hard_swish {
    const int8_t *in;
    int8_t *out;
    uint32_t count;
    int32_t in_zero, out_zero;
    int16_t out_multiplier, gate_multiplier;
    int8_t out_shift, gate_shift;
};

static int32_t saturate(int32_t x) { return mpm_clamp(x, -32768, 32767); }

/* a * b / 2^15, rounded to nearest; halves up, as in the 32-bit form. */
static int32_t high_multiply(int32_t a, int32_t b) { return saturate((a * b + (1 << 14)) >> 15); }

/* x * relu6(x + 3) / 6, where the gate relu6(x + 3) / 6 is x from [-3, 3] brought to [0, 1]. */
static int8_t hard_swish_of(const struct hard_swish *h, int32_t x) {
    const int32_t fine = (x - h->in_zero) * 128, scaled = high_multiply(fine, h->out_multiplier);
    int32_t gate = fine;
    if (h->gate_shift > 0) gate = saturate((int32_t)((uint32_t)gate << (h->gate_shift - 1)));
    gate = high_multiply(gate, h->gate_multiplier);
    if (h->gate_shift > 0) gate = saturate(gate * 2);
    if (h->gate_shift < 0) gate = mpm_rounding_shift(gate, -h->gate_shift);
    gate = (gate + 32768) >> 1;
    /* towards zero, against the others' bias */
    x = mpm_rounding_shift(gate * scaled / 32768, -h->out_shift) + h->out_zero;
    return (int8_t)mpm_clamp(x, -128, 127);
}

static enum mpm_status run_hard_swish(struct mpm_interpreter *m, const void *params) {
    const struct hard_swish *h = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < h->count; i++) h->out[i] = hard_swish_of(h, h->in[i]);
    return MPM_OK;
}

static int16_t to_16(int32_t multiplier) {
    return (int16_t)(multiplier >= 0x7fff8000 - 1 ? 0x7fff : (multiplier + 0x8000) >> 16);
}

static MPM_ONCE enum mpm_status prepare_hard_swish(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_multiplier m;
    float fine;
    struct hard_swish *h = mpm_keep(p, sizeof *h);
    if (h == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(ends(p, &in, &out));
    fine = in.scale / 128.0f;
    MPM_SUPPORT(p, fine / out.scale > 1e-9f && fine / out.scale <= 1.0f && fine > 1e-8f && fine < 1.0f,
                "the scales are too far apart");
    m = mpm_multiplier_of_double((double)fine / (double)out.scale);
    MPM_SUPPORT(p, m.shift <= 0, "the scales are too far apart");
    h->out_multiplier = to_16(m.value);
    h->out_shift = (int8_t)m.shift;
    m = mpm_multiplier_of_double((double)fine / (3.0 / 32768.0));
    MPM_SUPPORT(p, m.shift >= -15 && m.shift <= 16, "the input's scale is too large or too small");
    h->gate_multiplier = to_16(m.value);
    h->gate_shift = (int8_t)m.shift;
    h->in = in.data;
    h->out = out.data;
    h->count = in.count;
    h->in_zero = in.zero_point;
    h->out_zero = out.zero_point;
    p->run = run_hard_swish;
    p->params = h;
    return MPM_OK;
}

const struct mpm_kernel mpm_elu_s8 = {MPM_OP_ELU, MPM_INT8, 0, NULL, prepare_elu};
const struct mpm_kernel mpm_hard_swish_s8 = {MPM_OP_HARD_SWISH, MPM_INT8, 0, NULL, prepare_hard_swish};
