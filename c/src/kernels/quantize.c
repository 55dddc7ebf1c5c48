/* QUANTIZE and DEQUANTIZE between all types that TFLM has. */
#include "../fixed.h"

/* 28 bytes on a 32-bit chip. */
struct quantize {
    const void *in;
    void *out;
    uint32_t count;
    union {
        int32_t multiplier; /* of integers */
        float scale;        /* of the float32 on the other side */
    };
    int32_t zero_out;
    int32_t zero_in;
    int8_t shift;
    uint8_t in_type, out_type;
};

static int32_t load(const void *from, uint32_t type, uint32_t i) {
    switch (type) {
        case MPM_INT8: return ((const int8_t *)from)[i];
        case MPM_UINT8: return ((const uint8_t *)from)[i];
        case MPM_INT16: return ((const int16_t *)from)[i];
        default: return ((const int32_t *)from)[i];
    }
}

static void store(void *to, uint32_t type, uint32_t i, int32_t value) {
    switch (type) {
        case MPM_INT8: ((int8_t *)to)[i] = (int8_t)mpm_clamp(value, -128, 127); break;
        case MPM_UINT8: ((uint8_t *)to)[i] = (uint8_t)mpm_clamp(value, 0, 255); break;
        case MPM_INT16: ((int16_t *)to)[i] = (int16_t)mpm_clamp(value, -32768, 32767); break;
        default: ((int32_t *)to)[i] = value; break;
    }
}

static enum mpm_status run_integers(struct mpm_interpreter *m, const void *params) {
    const struct quantize *q = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < q->count; i++) {
        const int32_t x = mpm_wrapping_add(load(q->in, q->in_type, i), -q->zero_in);
        store(q->out, q->out_type, i, mpm_wrapping_add(mpm_scaled(x, q->multiplier, q->shift), q->zero_out));
    }
    return MPM_OK;
}

/* The usual pair, without a choice at each element. */
static enum mpm_status run_16_to_8(struct mpm_interpreter *m, const void *params) {
    const struct quantize *q = params;
    const int16_t *in = q->in;
    int8_t *out = q->out;
    uint32_t i;
    (void)m;
    for (i = 0; i < q->count; i++) {
        const int32_t x = mpm_scaled(*in++ - q->zero_in, q->multiplier, q->shift);
        *out++ = (int8_t)mpm_clamp(mpm_wrapping_add(x, q->zero_out), -128, 127);
    }
    return MPM_OK;
}

static enum mpm_status run_from_f32(struct mpm_interpreter *m, const void *params) {
    const struct quantize *q = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < q->count; i++)
        store(q->out, q->out_type, i, mpm_quantised(((const float *)q->in)[i], q->scale) + q->zero_out);
    return MPM_OK;
}

static enum mpm_status run_to_f32(struct mpm_interpreter *m, const void *params) {
    const struct quantize *q = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < q->count; i++)
        ((float *)q->out)[i] = q->scale * (float)mpm_wrapping_add(load(q->in, q->in_type, i), -q->zero_in);
    return MPM_OK;
}

static int is_integer(uint32_t type) {
    return type == MPM_INT8 || type == MPM_UINT8 || type == MPM_INT16 || type == MPM_INT32;
}

static MPM_ONCE enum mpm_status ends(struct mpm_prep *p, struct quantize **made, struct mpm_tensor *in,
                                     struct mpm_tensor *out) {
    struct quantize *q = mpm_keep(p, sizeof *q);
    if (q == NULL) return MPM_ARENA_TOO_SMALL;
    *made = q;
    MPM_TRY(mpm_in(p, 0, in));
    MPM_TRY(mpm_out(p, 0, out));
    MPM_NEED(p, in->count == out->count, "input and output differ in shape");
    MPM_SUPPORT(p, in->scale_count <= 1 && out->scale_count <= 1, "scales for each channel are not supported here");
    q->in = in->data;
    q->out = out->data;
    q->count = in->count;
    q->in_type = in->type;
    q->out_type = out->type;
    q->zero_in = in->zero_point;
    q->zero_out = out->zero_point;
    p->params = q;
    if (mpm_type_bytes(in->type) >= mpm_type_bytes(out->type)) mpm_may_overlay(p, 0);
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_quantize(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct mpm_multiplier scaled;
    struct quantize *q;
    MPM_TRY(ends(p, &q, &in, &out));
    MPM_SUPPORT(p, is_integer(out.type) && (is_integer(in.type) || in.type == MPM_FLOAT32),
                "these types are not supported");
    MPM_NEED(p, out.scale > 0, "the output has no scale");
    if (in.type == MPM_FLOAT32) {
        MPM_SUPPORT(p, out.type == MPM_INT8 || out.type == MPM_INT16, "float32 goes to int8 or int16");
        q->scale = out.scale;
        p->run = run_from_f32;
        return MPM_OK;
    }
    MPM_NEED(p, in.scale > 0, "the input has no scale");
    scaled = mpm_multiplier_of(in.scale, 1.0f, out.scale);
    q->multiplier = scaled.value;
    q->shift = (int8_t)scaled.shift;
    p->run = in.type == MPM_INT16 && out.type == MPM_INT8 ? run_16_to_8 : run_integers;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_dequantize(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct quantize *q;
    MPM_TRY(ends(p, &q, &in, &out));
    MPM_SUPPORT(p, is_integer(in.type) && in.type != MPM_INT32 && out.type == MPM_FLOAT32,
                "these types are not supported");
    MPM_NEED(p, in.scale > 0, "the input has no scale");
    q->scale = in.scale;
    p->run = run_to_f32;
    return MPM_OK;
}

const struct mpm_kernel mpm_quantize = {MPM_OP_QUANTIZE, MPM_ANY_TYPE, 0, NULL, prepare_quantize};
const struct mpm_kernel mpm_dequantize = {MPM_OP_DEQUANTIZE, MPM_ANY_TYPE, 0, NULL, prepare_dequantize};
