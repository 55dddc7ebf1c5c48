/* What cuts sound into frames and puts it together again: SignalFramer, SignalStacker, SignalDelay, SignalOverlapAdd.
 * Their state is a plain queue, which moves on in memory: half of what TFLM's mirrored circular buffers take. */
#include "../fixed.h"
#include "custom.h"

#include <string.h>

/* 44 bytes on a 32-bit chip, and the state. */
struct stream {
    const void *in;
    void *out;
    uint8_t *valid; /* whether the output is a whole frame */
    struct mpm_resource *state;
    uint32_t rows, frames;     /* of the input */
    uint32_t size, step;       /* samples of a frame, and from frame to frame */
    uint32_t room, filled;     /* samples of a row's queue, and how many zeros it begins with */
    uint8_t is_16;
};

/* A row's queue: how many samples came to what it began with, and the samples. */
struct queue {
    uint32_t more;
    int16_t samples[];
};

static size_t queue_bytes(uint32_t room) { return (sizeof(struct queue) + room * sizeof(int16_t) + 3u) & ~(size_t)3; }

static enum mpm_status run_framer(struct mpm_interpreter *m, const void *params) {
    const struct stream *s = params;
    const int16_t *in = s->in;
    int16_t *out = s->out;
    uint32_t r, f;
    (void)m;
    *s->valid = 1;
    for (r = 0; r < s->rows; r++) {
        struct queue *q = (struct queue *)(void *)((uint8_t *)s->state->data + r * queue_bytes(s->room));
        for (f = 0; f < s->frames; f++, in += s->step, out += s->size) {
            memcpy(q->samples + s->filled + q->more, in, s->step * sizeof *in);
            if (s->filled + q->more + s->step >= s->size) {
                memcpy(out, q->samples, s->size * sizeof *out);
                memmove(q->samples, q->samples + s->step, (s->filled + q->more) * sizeof *out);
            } else {
                memset(out, 0, s->size * sizeof *out); /* TFLM leaves what was there */
                q->more += s->step;
                *s->valid = 0;
            }
        }
    }
    return MPM_OK;
}

static enum mpm_status run_stacker(struct mpm_interpreter *m, const void *params) {
    const struct stream *s = params; /* size: what is put out; step: what is forgotten then; room: what comes in */
    struct queue *q = s->state->data;
    uint32_t i;
    (void)m;
    if (q->more == 0) { /* the first frame also stands for those before it */
        q->more = 1;
        for (i = 0; i < s->frames; i++, q->more += s->room)
            memcpy(q->samples + q->more - 1, s->in, s->room * sizeof(int16_t));
    }
    memcpy(q->samples + q->more - 1, s->in, s->room * sizeof(int16_t));
    q->more += s->room;
    *s->valid = q->more > s->size;
    if (!*s->valid) {
        memset(s->out, 0, s->size * sizeof(int16_t));
        return MPM_OK;
    }
    memcpy(s->out, q->samples, s->size * sizeof(int16_t));
    q->more -= s->step;
    memmove(q->samples, q->samples + s->step, (q->more - 1) * sizeof(int16_t));
    return MPM_OK;
}

static enum mpm_status run_delay(struct mpm_interpreter *m, const void *params) {
    const struct stream *s = params;
    const int16_t *in = s->in;
    int16_t *out = s->out, *late = s->state->data;
    const uint32_t kept = s->room < s->size ? s->room : s->size, through = s->size - kept;
    uint32_t r;
    (void)m;
    for (r = 0; r < s->rows; r++, in += s->size, out += s->size, late += s->room) {
        memcpy(out, late, kept * sizeof *out);
        memcpy(out + kept, in, through * sizeof *out);
        memmove(late, late + kept, (s->room - kept) * sizeof *late);
        memcpy(late + s->room - kept, in + through, kept * sizeof *late);
    }
    return MPM_OK;
}

static enum mpm_status run_overlap(struct mpm_interpreter *m, const void *params) {
    const struct stream *s = params;
    const uint32_t bytes = s->is_16 ? 2 : 4, left = s->size - s->step;
    const uint8_t *in = s->in;
    uint8_t *out = s->out, *sum = s->state->data;
    uint32_t r, f, i;
    (void)m;
    for (r = 0; r < s->rows; r++, sum += (size_t)s->size * bytes)
        for (f = 0; f < s->frames; f++, in += (size_t)s->size * bytes, out += (size_t)s->step * bytes) {
            for (i = 0; i < s->size; i++) {
                int16_t *whole = (int16_t *)(void *)sum + i;
                if (s->is_16)
                    *whole = (int16_t)mpm_clamp(*whole + ((const int16_t *)(const void *)in)[i], -32768, 32767);
                else ((float *)(void *)sum)[i] += ((const float *)(const void *)in)[i];
            }
            memcpy(out, sum, (size_t)s->step * bytes);
            memmove(sum, sum + (size_t)s->step * bytes, (size_t)left * bytes);
            memset(sum + (size_t)left * bytes, 0, (size_t)s->step * bytes);
        }
    return MPM_OK;
}

#define MOST 65535 /* of any option */

static MPM_ONCE enum mpm_status begin(struct mpm_prep *p, struct stream **made, struct mpm_tensor *in,
                                      struct mpm_tensor *out,
                                      enum mpm_status (*run)(struct mpm_interpreter *m, const void *params)) {
    struct stream *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    *made = s;
    MPM_TRY(mpm_in(p, 0, in));
    MPM_TRY(mpm_out(p, 0, out));
    MPM_SUPPORT(p, in->type == out->type && (in->type == MPM_INT16 || (in->type == MPM_FLOAT32 && run == run_overlap)),
                "this type is not supported here");
    MPM_NEED(p, in->rank >= 1 && in->count > 0, "the input is empty");
    s->in = in->data;
    s->out = out->data;
    s->is_16 = in->type == MPM_INT16;
    p->run = run;
    p->params = s;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status option(struct mpm_prep *p, uint32_t index, uint32_t *value) {
    int32_t number;
    MPM_TRY(mpm_custom_number(p, index, &number));
    MPM_SUPPORT(p, number >= 0 && number <= MOST, "an option is out of range");
    *value = (uint32_t)number;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status keep_state(struct mpm_prep *p, struct stream *s, uint64_t bytes) {
    MPM_SUPPORT(p, bytes < 0x10000000u, "the state is too large");
    s->state = mpm_keep_resource(p, (uint32_t)bytes, 0);
    return s->state == NULL ? MPM_ARENA_TOO_SMALL : MPM_OK;
}

static MPM_ONCE enum mpm_status flag(struct mpm_prep *p, struct stream *s) {
    struct mpm_tensor valid;
    MPM_TRY(mpm_out(p, 1, &valid));
    MPM_NEED(p, valid.type == MPM_BOOL && valid.count == 1, "the second output is not one bool");
    s->valid = valid.data;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_framer(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct stream *s;
    uint32_t prefill, inner;
    MPM_TRY(begin(p, &s, &in, &out, run_framer));
    MPM_TRY(flag(p, s));
    MPM_TRY(option(p, 0, &s->size));
    MPM_TRY(option(p, 1, &s->step));
    MPM_TRY(option(p, 2, &prefill));
    inner = (uint32_t)in.dims[in.rank - 1];
    MPM_NEED(p, s->step >= 1 && s->step <= s->size && inner % s->step == 0,
             "frame, step and input do not fit together");
    s->rows = in.count / inner;
    s->frames = inner / s->step;
    MPM_NEED(p, out.count == (uint64_t)s->rows * s->frames * s->size, "the output's shape does not follow");
    s->filled = prefill != 0 ? s->size - s->step : 0;
    s->room = s->size + s->step;
    return keep_state(p, s, (uint64_t)s->rows * queue_bytes(s->room));
}

static MPM_ONCE enum mpm_status prepare_stacker(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct stream *s;
    uint32_t right, step;
    MPM_TRY(begin(p, &s, &in, &out, run_stacker));
    MPM_TRY(flag(p, s));
    MPM_TRY(option(p, 0, &s->room));
    MPM_TRY(option(p, 1, &s->frames)); /* to the left */
    MPM_TRY(option(p, 2, &right));
    MPM_TRY(option(p, 3, &step));
    MPM_NEED(p,
             step >= 1 && step <= s->frames + right + 1 && s->room >= 1 && in.count == s->room &&
                 out.count == (uint64_t)s->room * (s->frames + right + 1),
             "channels, context, step and shapes do not fit together");
    s->size = out.count;
    s->step = s->room * step;
    return keep_state(p, s, queue_bytes(s->size + s->room));
}

static MPM_ONCE enum mpm_status prepare_delay(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct stream *s;
    MPM_TRY(begin(p, &s, &in, &out, run_delay));
    MPM_TRY(option(p, 0, &s->room));
    MPM_NEED(p, in.count == out.count, "input and output differ in shape");
    s->size = (uint32_t)in.dims[in.rank - 1];
    s->rows = in.count / s->size;
    return keep_state(p, s, (uint64_t)s->rows * s->room * sizeof(int16_t));
}

static MPM_ONCE enum mpm_status prepare_overlap(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct stream *s;
    MPM_TRY(begin(p, &s, &in, &out, run_overlap));
    MPM_TRY(option(p, 1, &s->step)); /* number 0 is the type */
    MPM_NEED(p, in.rank >= 2, "the input has no frames");
    s->size = (uint32_t)in.dims[in.rank - 1];
    s->frames = (uint32_t)in.dims[in.rank - 2];
    s->rows = in.count / s->size / s->frames;
    MPM_NEED(p, s->step >= 1 && s->step <= s->size && out.count == (uint64_t)s->rows * s->frames * s->step,
             "step, input and output do not fit together");
    return keep_state(p, s, (uint64_t)s->rows * s->size * (s->is_16 ? 2 : 4));
}

const struct mpm_kernel mpm_signal_framer = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalFramer", prepare_framer};
const struct mpm_kernel mpm_signal_stacker = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalStacker", prepare_stacker};
const struct mpm_kernel mpm_signal_delay = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalDelay", prepare_delay};
const struct mpm_kernel mpm_signal_overlap_add = {MPM_OP_CUSTOM, MPM_ANY_TYPE, 0, "SignalOverlapAdd", prepare_overlap};
