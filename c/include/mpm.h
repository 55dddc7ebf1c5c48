/* mpm: runs .tflite models in place, in memory that the caller gives.
 *
 * No heap, no global variables, no recursion but for the subgraphs of IF, WHILE and CALL_ONCE. The model
 * stays where it is, in flash or mapped from a disk; nothing of it is copied. Every offset of the file is
 * checked when it is read, and the file is not read again after mpm_init. Separate interpreters on
 * separate arenas may run in separate threads.
 *
 *     static uint8_t memory[60 * 1024];
 *     struct mpm_arena arena;
 *     struct mpm_interpreter m;
 *     mpm_arena_init(&arena, memory, sizeof memory);
 *     if (mpm_init(&m, model, model_bytes, &arena, mpm_all_kernels, mpm_all_kernels_count) != MPM_OK)
 *         ...m.error says where and why...
 *     memcpy(mpm_input(&m, 0), image, ...);
 *     mpm_run(&m);
 *     ...mpm_output(&m, 0)...
 */
#ifndef MPM_H
#define MPM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MPM_MAX_RANK 6  /* dims of a tensor */
#define MPM_MAX_DEPTH 4 /* subgraphs that call subgraphs, the first one included */

enum mpm_status {
    MPM_OK = 0,
    MPM_BAD_FILE,        /* not a .tflite file, truncated, or an offset that leads nowhere */
    MPM_BAD_MODEL,       /* readable, but the operators and tensors do not fit together */
    MPM_UNSUPPORTED,     /* a type, shape or option that this runtime does not have */
    MPM_NO_KERNEL,       /* an operator whose kernel is not in the caller's table */
    MPM_ARENA_TOO_SMALL, /* error.at holds the bytes that are needed */
    MPM_BAD_ARGUMENT,    /* a null pointer, a misaligned model */
    MPM_BAD_VALUE        /* while running: an index out of range, subgraphs nested too deep, WHILE past its limit */
};

/* As in the schema of .tflite. */
enum mpm_type {
    MPM_FLOAT32 = 0,
    MPM_INT32 = 2,
    MPM_UINT8 = 3,
    MPM_INT64 = 4,
    MPM_BOOL = 6,
    MPM_INT16 = 7,
    MPM_INT8 = 9,
    MPM_UINT64 = 12,
    MPM_RESOURCE = 13,
    MPM_UINT32 = 15,
    MPM_UINT16 = 16,
    MPM_INT4 = 17
};

/* Where and why mpm_init or mpm_run stopped. 16 bytes on a 32-bit chip. */
struct mpm_error {
    const char *what; /* static text; empty where built with MPM_NO_TEXT */
    uint32_t at;      /* ARENA_TOO_SMALL: bytes needed; BAD_FILE: offset in the file; NO_KERNEL: builtin operator */
    int32_t tensor;   /* index in the subgraph, -1 if none is to blame */
    int16_t op;       /* index in the subgraph, -1 if none is to blame */
    uint8_t subgraph; /* 0 is the main one */
    uint8_t status;   /* enum mpm_status */
};

/* Memory shared by any number of models that do not run at the same time. Low addresses hold activations and
 * scratch, which all models share; high addresses hold what each keeps. 24 bytes on a 32-bit chip. */
struct mpm_arena {
    uint8_t *scratch;          /* 16-byte aligned */
    uint8_t *persistent;       /* the end of the persistent memory: it is given out downwards */
    uint32_t scratch_bytes;    /* of both, where they share one piece of memory */
    uint32_t persistent_bytes; /* of its own; 0 where both share one piece */
    uint32_t scratch_used;     /* the most that any of the models needs */
    uint32_t persistent_used;  /* the sum over the models */
};

/* One operator, ready to run: 8 bytes on a 32-bit chip. */
struct mpm_interpreter;
struct mpm_op {
    enum mpm_status (*run)(struct mpm_interpreter *m, const void *params);
    const void *params;
};

/* One subgraph, ready to run: 16 bytes on a 32-bit chip. */
struct mpm_graph {
    struct mpm_op *ops;
    void **ends;       /* addresses of the inputs, then of the outputs */
    uint16_t op_count; /* 0..65535 */
    uint16_t input_count, output_count;
    uint16_t done; /* CALL_ONCE has run this subgraph */
};

struct mpm_file {
    const uint8_t *base;
    uint32_t size; /* bytes, 8..2^31 - 1 */
    uint32_t bad;  /* offset of the first read that left the file, + 1; 0 while all is well */
};

struct mpm_kernel;

/* A variable with a name, which operators of any subgraph read and assign. 20 bytes on a 32-bit chip. */
struct mpm_resource {
    struct mpm_resource *next;
    void *data;
    uint32_t id, bytes;
    uint8_t value; /* of each byte, after a reset */
};

/* What a model needs beside its arena: 92 bytes on a 32-bit chip. */
struct mpm_interpreter {
    struct mpm_file file;
    struct mpm_arena *arena;
    struct mpm_graph *graphs;
    const struct mpm_kernel *const *kernels;
    uint32_t kernel_count;
    struct mpm_error error;
    uint32_t (*clock)(void);  /* the profiler's, or null */
    uint32_t *ticks;          /* [op of the main graph]: the sum over runs, the caller's memory */
    uint32_t scratch_bytes;   /* of this model alone: activations and scratch */
    uint32_t persistent_bytes;/* of this model alone */
    uint32_t needed_bytes;    /* the exact size of an arena for this model alone, start-up included */
    uint32_t variable_bytes;  /* part of persistent_bytes: state that mpm_reset clears */
    uint8_t *variables;       /* the lowest address of the variables */
    uint32_t *resets;         /* of each variable, where one is not reset to zeros: its offset / 8 << 8 | the value of
                                 each byte */
    struct mpm_resource *resources; /* a list */
    uint16_t reset_count;
    uint16_t buffer_count;    /* of the plan, which lies at arena->scratch until the first run, where there is room for
                                 it beside all that outlives a run (kernel.h, mpm_buffer) */
    uint16_t graph_count;
    uint16_t depth;           /* subgraphs running now */
    uint32_t rounds_left;     /* rounds of WHILE until mpm_run gives up; UINT32_MAX: any number */
};

/* A tensor, as read from the file. */
struct mpm_tensor {
    void *data;            /* constant: in the file; else in the arena; null where it was not planned */
    uint32_t bytes;
    uint32_t count;        /* elements */
    int32_t dims[MPM_MAX_RANK];
    float scale;           /* of the whole tensor, or of its first channel; 0: not quantised */
    int32_t zero_point;
    const uint8_t *scales; /* float32 [scale_count], in the file, perhaps unaligned; the count is not checked against
                              dims */
    uint32_t scale_count;
    int32_t channel_dim;   /* the dim that the scales belong to */
    uint8_t rank;          /* 0..MPM_MAX_RANK */
    uint8_t type;          /* enum mpm_type */
    uint8_t constant, variable;
};

/* Gives `memory` to any number of models; the beginning is rounded up to a multiple of 16. */
void mpm_arena_init(struct mpm_arena *arena, void *memory, uint32_t bytes);

/* The same with activations and scratch in one piece of memory, and all that outlives a run in another. */
void mpm_arena_init_split(struct mpm_arena *arena, void *scratch, uint32_t scratch_bytes, void *persistent,
                          uint32_t persistent_bytes);

/* Checks the model, plans its memory and makes it ready. `model` must stay where it is, at a multiple of 16.
 * Not MPM_OK: m->error tells why, and nothing but mpm_init may be called on m. */
enum mpm_status mpm_init(struct mpm_interpreter *m, const void *model, uint32_t model_bytes, struct mpm_arena *arena,
                         const struct mpm_kernel *const *kernels, uint32_t kernel_count);

/* One inference. Inputs may be overwritten. */
enum mpm_status mpm_run(struct mpm_interpreter *m);

/* Lets WHILE do no more than so many rounds from now on, over all its loops and all runs until this is called again.
 * The one that is too many ends mpm_run with MPM_BAD_VALUE. There is no limit before the first call. */
void mpm_limit_rounds(struct mpm_interpreter *m, uint32_t rounds);

/* Clears all state: variables to their zero points; CALL_ONCE runs again. */
void mpm_reset(struct mpm_interpreter *m);

uint32_t mpm_input_count(const struct mpm_interpreter *m);
uint32_t mpm_output_count(const struct mpm_interpreter *m);
void *mpm_input(const struct mpm_interpreter *m, uint32_t index);        /* null: no such input */
const void *mpm_output(const struct mpm_interpreter *m, uint32_t index); /* null: no such output */

/* Type, shape and quantisation of an input or output. */
enum mpm_status mpm_input_info(struct mpm_interpreter *m, uint32_t index, struct mpm_tensor *info);
enum mpm_status mpm_output_info(struct mpm_interpreter *m, uint32_t index, struct mpm_tensor *info);

/* Adds clock() around each operator of the main graph to ticks[op]: 4 bytes an operator, the caller's memory,
 * cleared by the caller. */
void mpm_profile(struct mpm_interpreter *m, uint32_t (*clock)(void), uint32_t *ticks);

/* All kernels there are. A program that names its own table instead links only what it names. */
extern const struct mpm_kernel *const mpm_all_kernels[];
extern const uint32_t mpm_all_kernels_count;

#ifdef __cplusplus
}
#endif
#endif
