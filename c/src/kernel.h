/* What a kernel is, and what it may ask for while it is prepared. */
#ifndef MPM_KERNEL_H
#define MPM_KERNEL_H

#include <mpm_ops.h>

#include "flat.h"

#ifdef MPM_NO_TEXT
#define MPM_TEXT(words) ""
#else
#define MPM_TEXT(words) (words)
#endif

/* APART: not to be put into its caller. ONCE: what only mpm_init runs, made small rather than fast. */
#ifdef __GNUC__
#define MPM_APART __attribute__((noinline))
#define MPM_ONCE __attribute__((cold))
#else
#define MPM_APART
#define MPM_ONCE
#endif

/* int64 as constants of a file have it: at multiples of 4, since a flatbuffer aligns its vectors to no more. Where the
 * compiler has no word for that, such a constant must lie at a multiple of 8. */
#ifdef __GNUC__
typedef int64_t mpm_int64 __attribute__((aligned(4)));
#define MPM_INT64_ALIGN 4u
#else
typedef int64_t mpm_int64;
#define MPM_INT64_ALIGN 8u
#endif

#define MPM_ANY_TYPE 255u

struct mpm_prep;

/* In flash: 16 bytes. A table of pointers to these is all that ties a kernel to a program, so a linker that
 * drops unused sections keeps only the kernels named. One operator may have several, for several types. */
struct mpm_kernel {
    int16_t builtin;    /* enum mpm_builtin */
    uint8_t type;       /* enum mpm_type of the input that decides, or MPM_ANY_TYPE */
    uint8_t type_input; /* which input that is */
    const char *custom; /* the name of a custom operator, else null */
    /* Reads and checks everything, and leaves in `prep` how to run. It is called twice: once to count memory,
     * then for good, and must ask for the same memory in the same order both times. */
    enum mpm_status (*prepare)(struct mpm_prep *prep);
};

/* One buffer of the plan, while mpm_init works: 16 bytes. */
struct mpm_buffer {
    uint32_t bytes;
    uint32_t offset; /* from the beginning of the scratch memory; of a variable: from that of the variables */
    uint16_t tensor; /* MPM_SCRATCH + subgraph: a kernel's scratch memory */
    uint16_t first, last; /* operators between which it is needed, both included */
    uint16_t root;   /* number of the buffer whose memory it shares (itself, if none) */
};
#define MPM_SCRATCH 0xff00u /* tensors have lower numbers */
#define MPM_MAX_GRAPHS 64u
#define MPM_VARIABLE 0xffffu /* root: lies among the variables */
#define MPM_NO_ROOM 0xffffffffu /* offset: not placed yet */

/* The state of mpm_init; on its stack. */
struct mpm_prep {
    struct mpm_interpreter *m;
    uint32_t model;          /* offset of the model's table */
    uint32_t graph;          /* offset of this subgraph's table */
    uint32_t op_table;       /* offset of this operator's table */
    uint32_t options;        /* offset of its options' table; 0: all default */
    struct mpm_vector inputs, outputs;
    struct mpm_buffer *buffers;
    uint32_t tensor_buffers; /* those of tensors come first, subgraph by subgraph */
    uint32_t buffer_count;   /* with those of scratch memory, in the order in which it was asked for */
    uint32_t scratch_cursor; /* the next scratch buffer, in the second round */
    uint8_t *low, *high;     /* what is free between the two ends */
    uint32_t kept;           /* bytes that kernels asked to keep, rounded up: the sum of the first round */
    uint32_t peak;           /* the most that both ends together have taken in the first round */
    uint16_t op, subgraph;
    uint8_t has_values;      /* some variable is not reset to zeros */
    uint8_t planned;         /* lifetimes are known: tensors must have a buffer */
    uint8_t final;           /* second round: addresses are true */
    enum mpm_status (*run)(struct mpm_interpreter *m, const void *params);
    void *params;
};

/* Stops with a place and a reason; returns `status`. Without texts a call takes an argument less, and the macros below
 * one instead of four: there are some ten calls in a kernel. */
#ifdef MPM_NO_TEXT
enum mpm_status mpm_fail_at(struct mpm_prep *p, enum mpm_status status, int32_t tensor);
#define mpm_fail(p, status, tensor, what) mpm_fail_at((p), (status), (tensor))
#else
enum mpm_status mpm_fail(struct mpm_prep *p, enum mpm_status status, int32_t tensor, const char *what);
#endif

/* `return`s from prepare with MPM_BAD_MODEL or MPM_UNSUPPORTED unless the condition holds. */
#ifdef MPM_NO_TEXT
enum mpm_status mpm_bad_model(struct mpm_prep *p);
enum mpm_status mpm_unsupported(struct mpm_prep *p);
#define MPM_BAD(p, what) mpm_bad_model(p)
#define MPM_LACKS(p, what) mpm_unsupported(p)
#else
#define MPM_BAD(p, what) mpm_fail((p), MPM_BAD_MODEL, -1, (what))
#define MPM_LACKS(p, what) mpm_fail((p), MPM_UNSUPPORTED, -1, (what))
#endif
#define MPM_NEED(p, condition, what) \
    do { \
        if (!(condition)) return MPM_BAD(p, what); \
    } while (0)
#define MPM_SUPPORT(p, condition, what) \
    do { \
        if (!(condition)) return MPM_LACKS(p, what); \
    } while (0)
#define MPM_TRY(call) \
    do { \
        const enum mpm_status mpm_status_ = (call); \
        if (mpm_status_ != MPM_OK) return mpm_status_; \
    } while (0)

/* Input or output number `i` of the operator, checked. An input that must be there. */
enum mpm_status mpm_in(struct mpm_prep *p, uint32_t i, struct mpm_tensor *t);
enum mpm_status mpm_out(struct mpm_prep *p, uint32_t i, struct mpm_tensor *t);
/* Whether the operator has input i, that is not left out by a -1. */
int mpm_has_input(struct mpm_prep *p, uint32_t i);

/* Memory that lives as long as the interpreter; null: the arena is full (mpm_fail has been called). Aligned for
 * any type of up to 8 bytes. */
void *mpm_keep(struct mpm_prep *p, uint32_t bytes);
/* State of its own that a reset fills with `value`: `bytes` of memory that lives as long as the interpreter. */
struct mpm_resource *mpm_keep_resource(struct mpm_prep *p, uint32_t bytes, uint8_t value);
/* Memory while the operator runs. The address is true in the second round only. */
void *mpm_scratch(struct mpm_prep *p, uint32_t bytes);
/* The kernel may write output 0 over input i: it reads each element before it writes what lies there. */
void mpm_may_overlay(struct mpm_prep *p, uint32_t i);

/* The operator code of the operator at this place in the file, and the BuiltinOperator of a code. */
uint32_t mpm_code_of(struct mpm_prep *p, uint32_t op);
uint32_t mpm_builtin_of(struct mpm_file *f, uint32_t code);

/* A tensor of any subgraph. */
enum mpm_status mpm_tensor_at(struct mpm_prep *p, uint32_t subgraph, uint32_t index, struct mpm_tensor *t);

/* Runs another subgraph; the kernel has filled in its inputs. */
enum mpm_status mpm_run_graph(struct mpm_interpreter *m, uint32_t graph);

uint32_t mpm_type_bytes(uint32_t type); /* 0: no such type; INT4 counts as 1 here */

int mpm_same_shape(const struct mpm_tensor *a, const struct mpm_tensor *b);

#endif
