/* SVDF of float32: as that of int8, without scales. */
#include "../fixed.h"

#include <string.h>

/* 52 bytes on a 32-bit chip. */
struct svdf {
    const float *in, *feature, *time, *bias; /* feature: [filters][depth]; time: [filters][memory]; bias may be null */
    float *state, *out;                      /* state: [batch][filters][memory] */
    uint32_t batch, units, rank, depth, memory;
    float low, high;
};

static float filter(const struct svdf *s, const float *in, const float *feature, const float *time, float *memory) {
    float fed = 0.0f, sum = 0.0f;
    uint32_t k;
    for (k = 0; k < s->depth; k++) fed += feature[k] * in[k];
    memmove(memory, memory + 1, (s->memory - 1) * sizeof *memory);
    memory[s->memory - 1] = fed;
    for (k = 0; k < s->memory; k++) sum += time[k] * memory[k];
    return sum;
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct svdf *s = params;
    float *memory = s->state, *out = s->out;
    uint32_t b, u, r;
    (void)m;
    for (b = 0; b < s->batch; b++) {
        const float *feature = s->feature, *time = s->time;
        for (u = 0; u < s->units; u++) {
            float sum = s->bias == NULL ? 0.0f : s->bias[u];
            for (r = 0; r < s->rank; r++, feature += s->depth, time += s->memory, memory += s->memory)
                sum += filter(s, s->in + (size_t)b * s->depth, feature, time, memory);
            *out++ = sum < s->low ? s->low : sum > s->high ? s->high : sum;
        }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, feature, time, bias, state, out;
    const int32_t rank = mpm_field_i32(&p->m->file, p->options, 0, 0);
    struct svdf *s = mpm_keep(p, sizeof *s);
    if (s == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 1, &feature));
    MPM_TRY(mpm_in(p, 2, &time));
    MPM_TRY(mpm_in(p, 4, &state));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p,
                feature.type == MPM_FLOAT32 && time.type == MPM_FLOAT32 && state.type == MPM_FLOAT32 &&
                    out.type == MPM_FLOAT32,
                "hybrid quantisation: a float32 input with weights or a state of another type");
    MPM_NEED(p,
             in.rank == 2 && feature.rank == 2 && time.rank == 2 && in.dims[1] == feature.dims[1] &&
                 time.dims[0] == feature.dims[0] && time.dims[1] > 0,
             "the weights' shapes do not fit");
    MPM_NEED(p, rank >= 1 && feature.dims[0] % rank == 0, "the rank does not divide the number of filters");
    s->batch = (uint32_t)in.dims[0];
    s->rank = (uint32_t)rank;
    s->units = (uint32_t)(feature.dims[0] / rank);
    s->depth = (uint32_t)in.dims[1];
    s->memory = (uint32_t)time.dims[1];
    MPM_NEED(p, state.variable && state.count == (uint64_t)s->batch * time.count, "the state's shape does not fit");
    MPM_NEED(p, out.count == (uint64_t)s->batch * s->units, "the output's shape does not fit");
    if (mpm_has_input(p, 3)) {
        MPM_TRY(mpm_in(p, 3, &bias));
        MPM_NEED(p, bias.type == MPM_FLOAT32 && bias.count == s->units, "the bias does not fit");
        s->bias = bias.data;
    }
    MPM_TRY(mpm_activation_range_f32(p, mpm_field_u8(&p->m->file, p->options, 1, 0), &s->low, &s->high));
    s->in = in.data;
    s->feature = feature.data;
    s->time = time.data;
    s->state = state.data;
    s->out = out.data;
    p->run = run;
    p->params = s;
    return MPM_OK;
}

const struct mpm_kernel mpm_svdf_f32 = {MPM_OP_SVDF, MPM_FLOAT32, 0, NULL, prepare};
