/* BATCH_MATMUL. */
#include "move.h"

#include "../fixed.h"

/* 84 bytes on a 32-bit chip. */
struct batch_matmul {
    const void *a, *b;
    void *out;
    uint32_t batch_0, batch_1, batch_2, rows, depth, columns;
    uint32_t a_steps[3], b_steps[3]; /* elements from batch to batch; 0: repeated */
    uint32_t a_row, a_depth, b_column, b_depth; /* strides */
    int32_t a_zero, b_zero, out_zero, multiplier, shift;
    uint8_t type;
};

#define DOT(T, SUM, PRODUCT) \
    for (k = 0; k < o->depth; k++) { \
        const T x = ((const T *)o->a)[a + (size_t)r * o->a_row + (size_t)k * o->a_depth]; \
        const T y = ((const T *)o->b)[b + (size_t)c * o->b_column + (size_t)k * o->b_depth]; \
        SUM = PRODUCT; \
    }

static void product(const struct batch_matmul *o, size_t a, size_t b, size_t out) {
    uint32_t r, c, k;
    for (r = 0; r < o->rows; r++)
        for (c = 0; c < o->columns; c++, out++) {
            float real = 0.0f;
            int32_t sum = 0;
            int64_t wide = 0;
            switch (o->type) {
                case MPM_INT8:
                    DOT(int8_t, sum, mpm_wrapping_add(sum, (x - o->a_zero) * (y - o->b_zero)))
                    sum = mpm_wrapping_add(mpm_scaled(sum, o->multiplier, o->shift), o->out_zero);
                    ((int8_t *)o->out)[out] = (int8_t)mpm_clamp(sum, -128, 127);
                    break;
                case MPM_INT16:
                    DOT(int16_t, wide, wide + x * y)((int16_t *)o->out)[out] =
                        (int16_t)mpm_clamp(mpm_scaled64(wide, o->multiplier, o->shift), -32768, 32767);
                    break;
                default:
                    DOT(float, real, real + x * y)
                    ((float *)o->out)[out] = real;
                    break;
            }
        }
}

static enum mpm_status run_batch_matmul(struct mpm_interpreter *m, const void *params) {
    const struct batch_matmul *o = params;
    size_t out = 0;
    uint32_t i, j, k;
    (void)m;
    for (i = 0; i < o->batch_0; i++)
        for (j = 0; j < o->batch_1; j++)
            for (k = 0; k < o->batch_2; k++, out += (size_t)o->rows * o->columns)
                product(o, (size_t)i * o->a_steps[0] + (size_t)j * o->a_steps[1] + (size_t)k * o->a_steps[2],
                        (size_t)i * o->b_steps[0] + (size_t)j * o->b_steps[1] + (size_t)k * o->b_steps[2], out);
    return MPM_OK;
}

/* The dims before the last two, right-aligned to three, with their strides. */
static void batches(const struct mpm_tensor *t, int32_t sizes[3], uint32_t steps[3]) {
    uint32_t step = (uint32_t)t->dims[t->rank - 1] * (uint32_t)t->dims[t->rank - 2], i;
    for (i = 3; i-- > 0;) {
        const int32_t at = (int32_t)i + t->rank - 5;
        sizes[i] = at >= 0 ? t->dims[at] : 1;
        steps[i] = sizes[i] == 1 ? 0 : step;
        step *= (uint32_t)sizes[i];
    }
}

static MPM_ONCE enum mpm_status prepare_batch_matmul(struct mpm_prep *p) {
    struct mpm_tensor a, b, out;
    struct mpm_file *f = &p->m->file;
    int32_t in_a[3], in_b[3], all[3];
    uint32_t i, ra, ca, rb, cb;
    const int turn_a = mpm_field_u8(f, p->options, 0, 0) != 0, turn_b = mpm_field_u8(f, p->options, 1, 0) != 0;
    struct batch_matmul *o = mpm_keep(p, sizeof *o);
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &a));
    MPM_TRY(mpm_in(p, 1, &b));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p,
                a.type == b.type && a.type == out.type &&
                    (a.type == MPM_FLOAT32 || a.type == MPM_INT8 || a.type == MPM_INT16),
                "float32, int8 or int16 only");
    MPM_SUPPORT(p, a.rank >= 2 && b.rank >= 2 && a.rank <= 5 && b.rank <= 5, "2 to 5 dims are supported");
    ra = (uint32_t)a.dims[a.rank - 2], ca = (uint32_t)a.dims[a.rank - 1], rb = (uint32_t)b.dims[b.rank - 2],
    cb = (uint32_t)b.dims[b.rank - 1];
    o->rows = turn_a ? ca : ra;
    o->depth = turn_a ? ra : ca;
    o->columns = turn_b ? rb : cb;
    MPM_NEED(p, o->depth == (turn_b ? cb : rb), "the inner dims differ");
    o->a_row = turn_a ? 1 : ca;
    o->a_depth = turn_a ? ca : 1;
    o->b_column = turn_b ? cb : 1;
    o->b_depth = turn_b ? 1 : cb;
    batches(&a, in_a, o->a_steps);
    batches(&b, in_b, o->b_steps);
    for (i = 0; i < 3; i++) {
        MPM_NEED(p, in_a[i] == in_b[i] || in_a[i] == 1 || in_b[i] == 1, "the batches cannot be spread to one shape");
        all[i] = in_a[i] == 1 ? in_b[i] : in_a[i];
    }
    o->batch_0 = (uint32_t)all[0], o->batch_1 = (uint32_t)all[1], o->batch_2 = (uint32_t)all[2];
    MPM_NEED(p,
             out.count == (uint64_t)o->batch_0 * o->batch_1 * o->batch_2 && o->rows == 1 && o->columns == 1
                 ? 1
                 : out.rank >= 2 && (uint32_t)out.dims[out.rank - 2] == o->rows &&
                       (uint32_t)out.dims[out.rank - 1] == o->columns &&
                       mpm_span(&out, 0, out.rank - 2u) == (uint64_t)o->batch_0 * o->batch_1 * o->batch_2,
             "the output's shape does not follow");
    o->type = a.type;
    if (a.type != MPM_FLOAT32) {
        struct mpm_multiplier m;
        MPM_SUPPORT(p, a.type != MPM_INT16 || (a.zero_point == 0 && b.zero_point == 0 && out.zero_point == 0),
                    "int16 needs zero points of 0");
        MPM_NEED(p, a.scale > 0 && b.scale > 0 && out.scale > 0 && a.scale_count == 1 && b.scale_count == 1,
                 "every tensor needs one scale");
        m = mpm_multiplier_of(a.scale * b.scale, 1.0f, out.scale);
        o->multiplier = m.value;
        o->shift = m.shift;
    }
    o->a_zero = a.zero_point;
    o->b_zero = b.zero_point;
    o->out_zero = out.zero_point;
    o->a = a.data;
    o->b = b.data;
    o->out = out.data;
    p->run = run_batch_matmul;
    p->params = o;
    return MPM_OK;
}

const struct mpm_kernel mpm_batch_matmul = {MPM_OP_BATCH_MATMUL, MPM_ANY_TYPE, 0, NULL, prepare_batch_matmul};
