/* Reads a flatbuffer in place. Every read is checked against the end of the file; one that leaves it marks the
 * file as bad and gives 0, so callers need to look at `bad` only once, before they believe what they read. */
#ifndef MPM_FLAT_H
#define MPM_FLAT_H

#include <mpm.h>

/* A vector in the file; empty where absent. */
struct mpm_vector {
    uint32_t at; /* offset of the first element */
    uint32_t count;
};

uint32_t mpm_u32(struct mpm_file *f, uint32_t at);
uint32_t mpm_u16(struct mpm_file *f, uint32_t at);
uint32_t mpm_u8(struct mpm_file *f, uint32_t at);

/* The offset of field `id` of the table at `table`, of which `bytes` must lie in the file; 0 where it is absent. */
uint32_t mpm_field(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t bytes);

/* Scalars of a table, or `otherwise` where absent. */
int32_t mpm_field_i32(struct mpm_file *f, uint32_t table, uint32_t id, int32_t otherwise);
uint32_t mpm_field_u8(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t otherwise);
float mpm_field_f32(struct mpm_file *f, uint32_t table, uint32_t id, float otherwise);

/* The table or vector that a field points to; 0 where absent. */
uint32_t mpm_follow(struct mpm_file *f, uint32_t at);
uint32_t mpm_child(struct mpm_file *f, uint32_t table, uint32_t id);
struct mpm_vector mpm_vector(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t element_bytes);

/* Element `index` of a vector of tables; 0, and the file is bad, where there is none. */
uint32_t mpm_element(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t index);

void mpm_mark_bad(struct mpm_file *f, uint32_t at);

/* The fields that are used, by their numbers in the schema. */
enum {
    MODEL_VERSION = 0, MODEL_CODES = 1, MODEL_SUBGRAPHS = 2, MODEL_BUFFERS = 4, MODEL_METADATA = 6,
    CODE_OLD = 0, CODE_CUSTOM = 1, CODE_BUILTIN = 3,
    GRAPH_TENSORS = 0, GRAPH_INPUTS = 1, GRAPH_OUTPUTS = 2, GRAPH_OPS = 3,
    TENSOR_SHAPE = 0, TENSOR_TYPE = 1, TENSOR_BUFFER = 2, TENSOR_QUANTIZATION = 4, TENSOR_VARIABLE = 5,
    TENSOR_SPARSITY = 6,
    QUANT_SCALE = 2, QUANT_ZERO = 3, QUANT_DIM = 6,
    OP_CODE = 0, OP_INPUTS = 1, OP_OUTPUTS = 2, OP_OPTIONS = 4, OP_CUSTOM = 5, OP_OPTIONS_2 = 12,
    BUFFER_DATA = 0, BUFFER_OFFSET = 1, BUFFER_SIZE = 2,
    METADATA_NAME = 0, METADATA_BUFFER = 1
};

#endif
