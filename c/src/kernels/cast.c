/* CAST. */
#include "../kernel.h"

/* 20 bytes on a 32-bit chip. */
struct cast {
    const void *in;
    void *out;
    uint32_t count;
    uint8_t from, to;
};

static float as_float(const void *in, uint32_t type, uint32_t i) {
    switch (type) {
        case MPM_FLOAT32: return ((const float *)in)[i];
        case MPM_INT8: return ((const int8_t *)in)[i];
        case MPM_INT16: return ((const int16_t *)in)[i];
        case MPM_INT32: return (float)((const int32_t *)in)[i];
        case MPM_UINT32: return (float)((const uint32_t *)in)[i];
        default: return ((const uint8_t *)in)[i];
    }
}

static int32_t as_integer(const void *in, uint32_t type, uint32_t i) {
    float x;
    switch (type) {
        case MPM_INT8: return ((const int8_t *)in)[i];
        case MPM_INT16: return ((const int16_t *)in)[i];
        case MPM_INT32: case MPM_UINT32: return ((const int32_t *)in)[i];
        case MPM_FLOAT32:
            x = ((const float *)in)[i];
            return x >= 2147483648.0f ? INT32_MAX : x > -2147483648.0f ? (int32_t)x : INT32_MIN; /* NaN too */
        default: return ((const uint8_t *)in)[i];
    }
}

static enum mpm_status run_cast(struct mpm_interpreter *m, const void *params) {
    const struct cast *c = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < c->count; i++) {
        switch (c->to) {
            case MPM_FLOAT32: ((float *)c->out)[i] = as_float(c->in, c->from, i); break;
            case MPM_INT8: case MPM_UINT8: ((uint8_t *)c->out)[i] = (uint8_t)as_integer(c->in, c->from, i); break;
            case MPM_BOOL: ((uint8_t *)c->out)[i] = as_float(c->in, c->from, i) != 0.0f; break;
            case MPM_INT16: ((uint16_t *)c->out)[i] = (uint16_t)as_integer(c->in, c->from, i); break;
            default: ((int32_t *)c->out)[i] = as_integer(c->in, c->from, i); break;
        }
    }
    return MPM_OK;
}

static int can_cast(uint32_t type) {
    return type == MPM_FLOAT32 || type == MPM_INT8 || type == MPM_UINT8 || type == MPM_BOOL || type == MPM_INT16 ||
           type == MPM_INT32 || type == MPM_UINT32;
}

static MPM_ONCE enum mpm_status prepare_cast(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    struct cast *c = mpm_keep(p, sizeof *c);
    if (c == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_NEED(p, in.count == out.count, "input and output differ in shape");
    MPM_SUPPORT(p, can_cast(in.type) && can_cast(out.type), "these types are not supported");
    c->in = in.data;
    c->out = out.data;
    c->count = in.count;
    c->from = in.type;
    c->to = out.type;
    p->run = run_cast;
    p->params = c;
    return MPM_OK;
}

const struct mpm_kernel mpm_cast = {MPM_OP_CAST, MPM_ANY_TYPE, 0, NULL, prepare_cast};
