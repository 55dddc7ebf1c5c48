/* Element-wise operators of two tensors that may spread to a common shape. */
#ifndef MPM_BINARY_H
#define MPM_BINARY_H

#include "../fixed.h"

struct mpm_binary;
/* `count` elements; a step of 0 repeats one element. */
typedef void (*mpm_binary_fn)(const struct mpm_binary *o, const void *a, ptrdiff_t step_a, const void *b,
                              ptrdiff_t step_b, void *out, uint32_t count);

/* The shape where the inputs differ in theirs: 76 bytes on a 32-bit chip. */
struct mpm_spread {
    uint32_t rank;
    int32_t dims[MPM_MAX_RANK], a[MPM_MAX_RANK], b[MPM_MAX_RANK]; /* strides in elements; 0: repeated */
};

/* 72 bytes on a 32-bit chip. */
struct mpm_binary {
    mpm_binary_fn inner;
    const void *a, *b;
    void *out;
    const struct mpm_spread *spread; /* null: all shapes are the same */
    uint32_t count;
    uint8_t a_bytes, b_bytes, out_bytes, left_shift;
    int8_t a_shift, b_shift, out_shift;
    int32_t a_zero, b_zero, out_zero; /* negative zero points of the inputs */
    int32_t a_multiplier, b_multiplier, out_multiplier;
    int32_t low, high;
    float low_f32, high_f32;
};

/* What the output's type is: the inputs' or bool; or each tensor has its own, which the caller checks. */
enum mpm_binary_types { MPM_TO_BOOL, MPM_SAME_TYPE, MPM_OWN_TYPES };

/* Reads and checks the tensors. */
enum mpm_status mpm_prepare_binary(struct mpm_prep *p, enum mpm_binary_types types, struct mpm_binary **made,
                                   struct mpm_tensor *a, struct mpm_tensor *b, struct mpm_tensor *out);

#endif
