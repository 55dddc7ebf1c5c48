/* The audio front end, beside its Fourier transform: SignalWindow, SignalFftAutoScale, SignalEnergy, SignalFilterBank,
 * SignalFilterBankSquareRoot, SignalFilterBankSpectralSubtraction, SignalPCAN, SignalFilterBankLog. Whole numbers
 * alone, bit-equal to TFLM's. */
#include "../fixed.h"
#include "custom.h"

#include <string.h>

/* Bits up to the highest that is set; of 0 it is 32, as there. */
static uint32_t bits_of(uint32_t x) { return x == 0 ? 32 : 32u - (uint32_t)mpm_leading_zeros(x); }

static MPM_ONCE enum mpm_status in_type(struct mpm_prep *p, uint32_t i, uint32_t type, struct mpm_tensor *t) {
    MPM_TRY(mpm_in(p, i, t));
    MPM_SUPPORT(p, t->type == type, "an input has another type than this operator takes");
    return MPM_OK;
}

static MPM_ONCE enum mpm_status out_type(struct mpm_prep *p, uint32_t i, uint32_t type, struct mpm_tensor *t) {
    MPM_TRY(mpm_out(p, i, t));
    MPM_SUPPORT(p, t->type == type, "an output has another type than this operator makes");
    return MPM_OK;
}

/* What most of them need: 24 bytes on a 32-bit chip. */
struct channels {
    const void *in, *other;
    void *out, *other_out;
    uint32_t count;
    int32_t number; /* the operator's one option */
};

static MPM_ONCE enum mpm_status begin(struct mpm_prep *p, struct channels **made, uint32_t from, uint32_t to,
                                      enum mpm_status (*run)(struct mpm_interpreter *m, const void *params)) {
    struct mpm_tensor in, out;
    struct channels *c = mpm_keep(p, sizeof *c);
    if (c == NULL) return MPM_ARENA_TOO_SMALL;
    *made = c;
    MPM_TRY(in_type(p, 0, from, &in));
    MPM_TRY(out_type(p, 0, to, &out));
    MPM_NEED(p, in.count == out.count, "input and output differ in shape");
    c->in = in.data;
    c->out = out.data;
    c->count = in.count;
    p->run = run;
    p->params = c;
    return MPM_OK;
}

/* in[i] * window[i] >> shift */
static enum mpm_status run_window(struct mpm_interpreter *m, const void *params) {
    const struct channels *c = params;
    const uint32_t size = (uint32_t)(c->number >> 8), shift = (uint32_t)c->number & 255;
    uint32_t i, k;
    (void)m;
    for (i = 0, k = 0; i < c->count; i++, k = k + 1 < size ? k + 1 : 0)
        ((int16_t *)c->out)[i] =
            (int16_t)mpm_clamp((((const int16_t *)c->in)[i] * ((const int16_t *)c->other)[k]) >> shift, -32768, 32767);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_window(struct mpm_prep *p) {
    struct mpm_tensor weights;
    struct channels *c;
    int32_t shift;
    MPM_TRY(begin(p, &c, MPM_INT16, MPM_INT16, run_window));
    MPM_TRY(in_type(p, 1, MPM_INT16, &weights));
    MPM_TRY(mpm_custom_number(p, 0, &shift));
    MPM_NEED(
        p, shift >= 0 && shift <= 31 && weights.count > 0 && weights.count < 0x7fffff && c->count % weights.count == 0,
        "the window does not fit the input");
    c->other = weights.data;
    c->number = (int32_t)(weights.count << 8) | shift;
    mpm_may_overlay(p, 0);
    return MPM_OK;
}

/* Shifts to the left so far as the largest allows, and says how far. The largest is a 16-bit number there too, so
 * -32768 counts as one below all. */
static enum mpm_status run_auto_scale(struct mpm_interpreter *m, const void *params) {
    const struct channels *c = params;
    const int16_t *in = c->in;
    int16_t max = 0;
    int32_t shift;
    uint32_t i;
    (void)m;
    for (i = 0; i < c->count; i++) {
        if (in[i] > max) max = in[i];
        else if (-in[i] > max) max = (int16_t)-in[i];
    }
    shift = 15 - (int32_t)bits_of((uint32_t)(int32_t)max);
    if (shift < 0) shift = 0;
    for (i = 0; i < c->count; i++) ((int16_t *)c->out)[i] = (int16_t)(uint16_t)((uint32_t)in[i] << shift);
    *(int32_t *)c->other_out = shift;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_auto_scale(struct mpm_prep *p) {
    struct mpm_tensor bits;
    struct channels *c;
    MPM_TRY(begin(p, &c, MPM_INT16, MPM_INT16, run_auto_scale));
    MPM_TRY(out_type(p, 1, MPM_INT32, &bits));
    MPM_NEED(p, bits.count == 1, "the second output is not one number");
    c->other_out = bits.data;
    mpm_may_overlay(p, 0);
    return MPM_OK;
}

/* 20 bytes on a 32-bit chip. */
struct energy {
    const int16_t *in; /* real and imaginary part in turn */
    uint32_t *out;
    uint32_t start, end, count;
};

static enum mpm_status run_energy(struct mpm_interpreter *m, const void *params) {
    const struct energy *e = params;
    uint32_t i;
    (void)m;
    memset(e->out, 0, e->count * sizeof *e->out);
    for (i = e->start; i < e->end; i++) {
        const int32_t re = e->in[2 * i], im = e->in[2 * i + 1];
        e->out[i] = (uint32_t)(re * re) + (uint32_t)(im * im);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_energy(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    int32_t start, end;
    struct energy *e = mpm_keep(p, sizeof *e);
    if (e == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(in_type(p, 0, MPM_INT16, &in));
    MPM_TRY(out_type(p, 0, MPM_UINT32, &out));
    MPM_TRY(mpm_custom_number(p, 0, &end));
    MPM_TRY(mpm_custom_number(p, 1, &start));
    MPM_NEED(p, start >= 0 && start <= end && (uint32_t)end <= out.count && (uint32_t)end <= in.count / 2,
             "start or end is out of range");
    e->in = in.data;
    e->out = out.data;
    e->start = (uint32_t)start;
    e->end = (uint32_t)end;
    e->count = out.count;
    p->run = run_energy;
    p->params = e;
    return MPM_OK;
}

/* 32 bytes on a 32-bit chip. */
struct bank {
    const uint32_t *in;
    const int16_t *weights, *unweights;      /* of this channel, and what is left for the next one */
    const int16_t *starts, *places, *widths; /* [channels + 1]: in the input, in the weights, and how many */
    uint64_t *out;
    uint32_t channels;
};

static enum mpm_status run_bank(struct mpm_interpreter *m, const void *params) {
    const struct bank *b = params;
    uint64_t sum = 0;
    uint32_t i;
    int32_t k;
    (void)m;
    for (i = 0; i <= b->channels; i++) {
        uint64_t left = 0;
        for (k = 0; k < b->widths[i]; k++) {
            const uint64_t x = b->in[b->starts[i] + k];
            sum += (uint64_t)(int64_t)b->weights[b->places[i] + k] * x;
            left += (uint64_t)(int64_t)b->unweights[b->places[i] + k] * x;
        }
        if (i > 0) b->out[i - 1] = sum;
        sum = left;
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_bank(struct mpm_prep *p) {
    struct mpm_tensor t[6], out;
    int32_t channels;
    uint32_t i;
    struct bank *b = mpm_keep(p, sizeof *b);
    if (b == NULL) return MPM_ARENA_TOO_SMALL;
    for (i = 0; i < 6; i++) MPM_TRY(in_type(p, i, i == 0 ? MPM_UINT32 : MPM_INT16, &t[i]));
    MPM_TRY(out_type(p, 0, MPM_UINT64, &out));
    MPM_TRY(mpm_custom_number(p, 0, &channels));
    MPM_NEED(p, channels >= 1 && (uint32_t)channels == out.count,
             "the output does not have one number for each channel");
    for (i = 1; i < 6; i++) MPM_SUPPORT(p, t[i].constant, "weights and places must be constants");
    for (i = 3; i < 6; i++)
        MPM_NEED(p, t[i].count > (uint32_t)channels, "there are not enough places for the channels");
    b->starts = t[3].data;
    b->places = t[4].data;
    b->widths = t[5].data;
    for (i = 0; i <= (uint32_t)channels; i++) {
        const int32_t width = b->widths[i], start = b->starts[i], place = b->places[i];
        MPM_NEED(p,
                 width >= 0 && start >= 0 && place >= 0 && (uint32_t)(start + width) <= t[0].count &&
                     (uint32_t)(place + width) <= t[1].count && (uint32_t)(place + width) <= t[2].count,
                 "a channel lies outside of its input or weights");
    }
    b->in = t[0].data;
    b->weights = t[1].data;
    b->unweights = t[2].data;
    b->out = out.data;
    b->channels = (uint32_t)channels;
    p->run = run_bank;
    p->params = b;
    return MPM_OK;
}

/* The nearest whole number to the root; one of 32 bits has a root of 16. */
static uint32_t root_of(uint64_t x) {
    const uint64_t most = x >> 32 == 0 ? 0xffffu : 0xffffffffu;
    uint64_t root = 0, bit = (uint64_t)1 << 62;
    for (; bit > x; bit >>= 2) { }
    for (; bit != 0; bit >>= 2) {
        if (x >= root + bit) {
            x -= root + bit;
            root = (root >> 1) + bit;
        } else {
            root >>= 1;
        }
    }
    return (uint32_t)(x > root && root != most ? root + 1 : root);
}

static enum mpm_status run_root(struct mpm_interpreter *m, const void *params) {
    const struct channels *c = params;
    const int32_t shift = *(const int32_t *)c->other;
    uint32_t i;
    if (shift < 0 || shift > 31) {
        m->error.what = MPM_TEXT("a shift is out of range");
        return MPM_BAD_VALUE;
    }
    for (i = 0; i < c->count; i++) ((uint32_t *)c->out)[i] = root_of(((const uint64_t *)c->in)[i]) >> shift;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_root(struct mpm_prep *p) {
    struct mpm_tensor bits;
    struct channels *c;
    MPM_TRY(begin(p, &c, MPM_UINT64, MPM_UINT32, run_root));
    MPM_TRY(in_type(p, 1, MPM_INT32, &bits));
    MPM_NEED(p, bits.count == 1, "the second input is not one number");
    c->other = bits.data;
    mpm_may_overlay(p, 0);
    return MPM_OK;
}

/* 48 bytes on a 32-bit chip, and the estimate. In the order of the options' names. */
struct subtraction {
    const uint32_t *in;
    uint32_t *out, *noise_out;
    struct mpm_resource *noise; /* the estimate: [count], cleared by a reset */
    uint32_t count;
    uint32_t rest_odd, part_odd; /* of odd channels: 1 - smoothing, smoothing */
    uint32_t least;
    uint32_t rest, part;
    uint8_t clamps, smoothing_bits, bits;
};

static enum mpm_status run_subtraction(struct mpm_interpreter *m, const void *params) {
    const struct subtraction *s = params;
    uint32_t *noise = s->noise->data, i;
    (void)m;
    for (i = 0; i < s->count; i++) {
        const uint32_t x = s->in[i], up = x << s->smoothing_bits;
        const uint64_t part = (i & 1) != 0 ? s->part_odd : s->part, rest = (i & 1) != 0 ? s->rest_odd : s->rest;
        const uint32_t least = (uint32_t)((uint64_t)x * s->least >> s->bits);
        uint32_t estimate = (uint32_t)((up * part + noise[i] * rest) >> s->bits), left;
        noise[i] = estimate;
        if (estimate > up) {
            estimate = up;
            if (s->clamps) noise[i] = up;
        }
        left = (up - estimate) >> s->smoothing_bits;
        s->out[i] = left > least ? left : least;
    }
    memcpy(s->noise_out, noise, s->count * sizeof *noise);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_subtraction(struct mpm_prep *p) {
    struct mpm_tensor in, out, noise;
    int32_t n[9];
    uint32_t i;
    struct subtraction *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(in_type(p, 0, MPM_UINT32, &in));
    MPM_TRY(out_type(p, 0, MPM_UINT32, &out));
    MPM_TRY(out_type(p, 1, MPM_UINT32, &noise));
    for (i = 0; i < 9; i++) MPM_TRY(mpm_custom_number(p, i, &n[i]));
    MPM_NEED(p, in.count == out.count && in.count == noise.count && n[4] >= 0 && (uint32_t)n[4] == in.count,
             "input and outputs differ in shape");
    MPM_NEED(p, n[7] >= 0 && n[7] <= 31 && n[8] >= 0 && n[8] <= 31, "the bits are out of range");
    s->rest_odd = (uint32_t)n[0], s->part_odd = (uint32_t)n[1], s->least = (uint32_t)n[3];
    s->rest = (uint32_t)n[5], s->part = (uint32_t)n[6];
    s->clamps = n[2] != 0;
    s->smoothing_bits = (uint8_t)n[7];
    s->bits = (uint8_t)n[8];
    s->noise = mpm_keep_resource(p, in.bytes, 0);
    if (s->noise == NULL) return MPM_ARENA_TOO_SMALL;
    s->in = in.data;
    s->out = out.data;
    s->noise_out = noise.data;
    s->count = in.count;
    p->run = run_subtraction;
    p->params = s;
    return MPM_OK;
}

#define LUT_SIZE 125 /* three numbers for each of 32 sizes, four apart */

/* The gain for a noise: a parabola in its size's interval. */
static uint32_t gain_of(uint32_t x, const int16_t *lut) {
    const uint32_t bits = bits_of(x);
    int32_t fraction, sum;
    if (x <= 2) return (uint32_t)lut[x];
    lut += 4 * bits - 6;
    fraction = (int32_t)((bits < 11 ? x << (11 - bits) : x >> (bits - 11)) & 0x3ff);
    sum = (lut[2] * fraction) >> 5;
    sum = mpm_wrapping_add(sum, (int32_t)((uint32_t)lut[1] << 5));
    sum = (int32_t)((uint32_t)sum * (uint32_t)fraction);
    return (uint32_t)(int16_t)(mpm_wrapping_add(sum, 1 << 14) / 32768 - (mpm_wrapping_add(sum, 1 << 14) % 32768 < 0) +
                               lut[0]);
}

static enum mpm_status run_pcan(struct mpm_interpreter *m, const void *params) {
    const struct channels *c = params;
    const uint32_t *noise = c->other;
    uint32_t i;
    (void)m;
    for (i = 0; i < c->count; i++) {
        const uint32_t gain = gain_of(noise[i], c->other_out);
        const uint32_t x = (uint32_t)((uint64_t)((const uint32_t *)c->in)[i] * gain >> c->number);
        ((uint32_t *)c->out)[i] = x < 2 << 12 ? (x * x) >> 20 : (x >> 6) - (1 << 6);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_pcan(struct mpm_prep *p) {
    struct mpm_tensor noise, lut;
    struct channels *c;
    MPM_TRY(begin(p, &c, MPM_UINT32, MPM_UINT32, run_pcan));
    MPM_TRY(in_type(p, 1, MPM_UINT32, &noise));
    MPM_TRY(in_type(p, 2, MPM_INT16, &lut));
    MPM_TRY(mpm_custom_number(p, 0, &c->number));
    MPM_NEED(p, noise.count == c->count && lut.count >= LUT_SIZE && c->number >= 0 && c->number <= 63,
             "noise, table or shift do not fit");
    c->other = noise.data;
    c->other_out = lut.data; /* is read */
    mpm_may_overlay(p, 0);
    return MPM_OK;
}

/* log2(1 + i / 128) - i / 128, in units of 2^-16. */
static const uint16_t log_table[129] = {
    0, 224, 442, 654, 861, 1063, 1259, 1450, 1636, 1817, 1992, 2163, 2329, 2490, 2646, 2797, 2944, 3087, 3224, 3358,
    3487, 3611, 3732, 3848, 3960, 4068, 4172, 4272, 4368, 4460, 4549, 4633, 4714, 4791, 4864, 4934, 5001, 5063,
    5123, 5178, 5231, 5280, 5326, 5368, 5408, 5444, 5477, 5507, 5533, 5557, 5578, 5595, 5610, 5622, 5631, 5637,
    5640, 5641, 5638, 5633, 5626, 5615, 5602, 5586, 5568, 5547, 5524, 5498, 5470, 5439, 5406, 5370, 5332, 5291,
    5249, 5203, 5156, 5106, 5054, 5000, 4944, 4885, 4825, 4762, 4697, 4630, 4561, 4490, 4416, 4341, 4264, 4184,
    4103, 4020, 3935, 3848, 3759, 3668, 3575, 3481, 3384, 3286, 3186, 3084, 2981, 2875, 2768, 2659, 2549, 2437,
    2323, 2207, 2090, 1971, 1851, 1729, 1605, 1480, 1353, 1224, 1094, 963, 830, 695, 559, 421, 282, 142, 0};

/* log(x) * scale, x > 1: Q16.16 inside. */
static uint32_t log_of(uint32_t x, uint32_t scale) {
    const uint32_t whole = bits_of(x) - 1;
    const uint32_t fraction = whole < 16 ? (x - (1u << whole)) << (16 - whole) : (x - (1u << whole)) >> (whole - 16);
    const uint32_t at = fraction >> 9;
    const int32_t a = log_table[at], b = at < 128 ? log_table[at + 1] : 0;
    const uint32_t log2 = (whole << 16) + fraction + (uint32_t)(a + (((b - a) * (int32_t)(fraction & 511)) >> 16));
    const uint32_t log = (uint32_t)(((uint64_t)45426 * log2 + 32768) >> 16); /* log(2) * 2^16 */
    return (scale * log + 32768) >> 16;
}

static enum mpm_status run_log(struct mpm_interpreter *m, const void *params) {
    const struct channels *c = params;
    const uint32_t scale = (uint32_t)c->number & 0xffffff, shift = (uint32_t)c->number >> 24;
    uint32_t i;
    (void)m;
    for (i = 0; i < c->count; i++) {
        const uint32_t x = ((const uint32_t *)c->in)[i] << shift, y = x > 1 ? log_of(x, scale) : 0;
        ((int16_t *)c->out)[i] = (int16_t)(y < 32767 ? y : 32767);
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_log(struct mpm_prep *p) {
    struct channels *c;
    int32_t shift, scale;
    MPM_TRY(begin(p, &c, MPM_UINT32, MPM_INT16, run_log));
    MPM_TRY(mpm_custom_number(p, 0, &shift));
    MPM_TRY(mpm_custom_number(p, 1, &scale));
    MPM_SUPPORT(p, shift >= 0 && shift <= 31 && scale >= 0 && scale <= 0xffffff, "correction or scale is out of range");
    c->number = (int32_t)((uint32_t)shift << 24 | (uint32_t)scale);
    mpm_may_overlay(p, 0);
    return MPM_OK;
}

const struct mpm_kernel mpm_signal_window = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalWindow", prepare_window};
const struct mpm_kernel mpm_signal_fft_auto_scale = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalFftAutoScale",
                                                     prepare_auto_scale};
const struct mpm_kernel mpm_signal_energy = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalEnergy", prepare_energy};
const struct mpm_kernel mpm_signal_filter_bank = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalFilterBank", prepare_bank};
const struct mpm_kernel mpm_signal_square_root = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalFilterBankSquareRoot",
                                                  prepare_root};
const struct mpm_kernel mpm_signal_subtraction = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalFilterBankSpectralSubtraction",
                                                  prepare_subtraction};
const struct mpm_kernel mpm_signal_pcan = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalPCAN", prepare_pcan};
const struct mpm_kernel mpm_signal_log = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalFilterBankLog", prepare_log};
