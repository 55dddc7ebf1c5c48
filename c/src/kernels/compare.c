/* EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, LOGICAL_AND, LOGICAL_OR: to bool. */
#include "binary.h"

#define COMPARE(NAME, T, OPERATION) \
    static void NAME(const struct mpm_binary *o, const void *pa, ptrdiff_t step_a, const void *pb, ptrdiff_t step_b, \
                     void *out, uint32_t count) { \
        const T *a = pa, *b = pb; \
        uint8_t *to = out; \
        (void)o; \
        for (; count > 0; count--, a += step_a, b += step_b) *to++ = *a OPERATION *b; \
    }
/* int8: both in a common unit first */
#define COMPARE_S8(NAME, OPERATION) \
    static void NAME(const struct mpm_binary *o, const void *pa, ptrdiff_t step_a, const void *pb, ptrdiff_t step_b, \
                     void *out, uint32_t count) { \
        const int8_t *a = pa, *b = pb; \
        uint8_t *to = out; \
        for (; count > 0; count--, a += step_a, b += step_b) \
            *to++ = mpm_scaled((*a + o->a_zero) * 256, o->a_multiplier, o->a_shift) OPERATION \
                mpm_scaled((*b + o->b_zero) * 256, o->b_multiplier, o->b_shift); \
    }

struct forms {
    mpm_binary_fn f32, s32, s64, s8, boolean;
};

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p, const struct forms *f) {
    struct mpm_tensor a, b, out;
    struct mpm_binary *o;
    struct mpm_multiplier m;
    MPM_TRY(mpm_prepare_binary(p, MPM_TO_BOOL, &o, &a, &b, &out));
    o->inner = a.type == MPM_FLOAT32 ? f->f32 : a.type == MPM_INT32 ? f->s32 : a.type == MPM_INT64 ? f->s64
             : a.type == MPM_INT8 ? f->s8 : a.type == MPM_BOOL ? f->boolean : NULL;
    MPM_SUPPORT(p, o->inner != NULL, "this type is not supported here");
    if (a.type != MPM_INT8) return MPM_OK;
    MPM_NEED(p, a.scale > 0 && b.scale > 0, "an input has no scale");
    o->a_zero = -a.zero_point;
    o->b_zero = -b.zero_point;
    m = mpm_multiplier_of(a.scale, 1.0f, 1.0f);
    MPM_SUPPORT(p, m.shift <= 7, "a scale is too large to compare");
    o->a_multiplier = m.value;
    o->a_shift = (int8_t)m.shift;
    m = mpm_multiplier_of(b.scale, 1.0f, 1.0f);
    MPM_SUPPORT(p, m.shift <= 7, "a scale is too large to compare");
    o->b_multiplier = m.value;
    o->b_shift = (int8_t)m.shift;
    return MPM_OK;
}

#define OPERATOR(NAME, NUMBER, OPERATION) \
    COMPARE(NAME##_f32, float, OPERATION) \
    COMPARE(NAME##_s32, int32_t, OPERATION) \
    COMPARE(NAME##_s64, mpm_int64, OPERATION) \
    COMPARE_S8(NAME##_s8, OPERATION) \
    COMPARE(NAME##_bool, uint8_t, OPERATION) \
    static MPM_ONCE enum mpm_status prepare_##NAME(struct mpm_prep *p) { \
        static const struct forms forms = {NAME##_f32, NAME##_s32, NAME##_s64, NAME##_s8, NAME##_bool}; \
        return prepare(p, &forms); \
    } \
    const struct mpm_kernel mpm_##NAME = {NUMBER, MPM_ANY_TYPE, 0, NULL, prepare_##NAME};

OPERATOR(equal, MPM_OP_EQUAL, ==)
OPERATOR(not_equal, MPM_OP_NOT_EQUAL, !=)
OPERATOR(less, MPM_OP_LESS, <)
OPERATOR(less_equal, MPM_OP_LESS_EQUAL, <=)
OPERATOR(greater, MPM_OP_GREATER, >)
OPERATOR(greater_equal, MPM_OP_GREATER_EQUAL, >=)

COMPARE(and_bool, uint8_t, &&)
COMPARE(or_bool, uint8_t, ||)

static MPM_ONCE enum mpm_status prepare_and(struct mpm_prep *p) {
    static const struct forms forms = {NULL, NULL, NULL, NULL, and_bool};
    return prepare(p, &forms);
}
static MPM_ONCE enum mpm_status prepare_or(struct mpm_prep *p) {
    static const struct forms forms = {NULL, NULL, NULL, NULL, or_bool};
    return prepare(p, &forms);
}
const struct mpm_kernel mpm_logical_and = {MPM_OP_LOGICAL_AND, MPM_ANY_TYPE, 0, NULL, prepare_and};
const struct mpm_kernel mpm_logical_or = {MPM_OP_LOGICAL_OR, MPM_ANY_TYPE, 0, NULL, prepare_or};
