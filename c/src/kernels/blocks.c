/* SPACE_TO_BATCH_ND and BATCH_TO_SPACE_ND: an image [batch][height][width][depth], or a line [batch][length][depth],
 * cut into the pixels whose place has one remainder by the block's sides, each set of them an image of its own. */
#include "move.h"

#include <string.h>

/* 68 bytes on a 32-bit chip. "Wide" is the side with the larger images. */
struct blocks {
    const uint8_t *in;
    uint8_t *out;
    uint32_t bytes, pixel; /* of the output, of a pixel */
    int32_t wide_batch, wide_height, wide_width;
    int32_t deep_batch, deep_height, deep_width;
    int32_t block_height, block_width;
    int32_t top, left;     /* pixels of the blocks that lie before the wide image */
    int8_t outside;        /* each byte of what lies outside the wide image */
    uint8_t to_batch;
};

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct blocks *o = params;
    int32_t b, y, x;
    (void)m;
    if (o->to_batch) memset(o->out, o->outside, o->bytes);
    for (b = 0; b < o->deep_batch; b++) {
        const int32_t part = b / o->wide_batch, dy = part / o->block_width - o->top,
                      dx = part % o->block_width - o->left;
        for (y = 0; y < o->deep_height; y++)
            for (x = 0; x < o->deep_width; x++) {
                const int32_t wy = y * o->block_height + dy, wx = x * o->block_width + dx;
                const size_t deep =
                    (((size_t)b * (size_t)o->deep_height + (size_t)y) * (size_t)o->deep_width + (size_t)x) * o->pixel;
                size_t wide;
                if (wy < 0 || wy >= o->wide_height || wx < 0 || wx >= o->wide_width) continue;
                wide = ((((size_t)b % (size_t)o->wide_batch) * (size_t)o->wide_height + (size_t)wy) *
                            (size_t)o->wide_width +
                        (size_t)wx) *
                       o->pixel;
                if (o->to_batch) memcpy(o->out + deep, o->in + wide, o->pixel);
                else memcpy(o->out + wide, o->in + deep, o->pixel);
            }
    }
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p, int to_batch) {
    struct mpm_tensor in, out, border;
    const struct mpm_tensor *wide = to_batch ? &in : &out, *deep = to_batch ? &out : &in;
    int32_t block[MPM_MAX_RANK], around[4] = {0, 0, 0, 0};
    uint32_t i, sides;
    struct blocks *o = mpm_keep(p, sizeof *o);
    if (o == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_in(p, 2, &border));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_SUPPORT(p, (in.rank == 3 || in.rank == 4) && out.rank == in.rank, "3 or 4 dims are supported");
    sides = in.rank - 2u;
    MPM_TRY(mpm_values(p, 1, sides, block, NULL));
    MPM_SUPPORT(p, border.constant && border.type == MPM_INT32,
                "dynamic shapes are not supported: the border is no int32 constant");
    MPM_NEED(p, border.count == 2 * sides && in.type == out.type && in.dims[in.rank - 1] == out.dims[in.rank - 1],
             "border, input and output do not fit");
    MPM_SUPPORT(p, in.type != MPM_INT4, "int4 is not supported here");
    memcpy(around, border.data, border.bytes);
    if (sides == 1) block[1] = 1;
    for (i = 0; i < sides; i++) {
        const int32_t all = wide->dims[1 + i];
        MPM_SUPPORT(p, block[i] >= 1 && block[i] <= 32767 && deep->dims[1 + i] <= 65535,
                    "blocks must have 1 to 32,767 pixels a side");
        MPM_NEED(p,
                 around[2 * i] >= 0 && around[2 * i + 1] >= 0 && around[2 * i] <= 0x7ffffff &&
                     around[2 * i + 1] <= 0x7ffffff &&
                     (int64_t)all + around[2 * i] + around[2 * i + 1] == (int64_t)deep->dims[1 + i] * block[i],
                 "the output's shape does not follow");
    }
    MPM_NEED(p, wide->dims[0] > 0 && (int64_t)wide->dims[0] * block[0] * block[1] == deep->dims[0],
             "the output's batch does not follow");
    o->wide_batch = wide->dims[0], o->wide_height = wide->dims[1], o->wide_width = sides == 2 ? wide->dims[2] : 1;
    o->deep_batch = deep->dims[0], o->deep_height = deep->dims[1], o->deep_width = sides == 2 ? deep->dims[2] : 1;
    o->block_height = block[0], o->block_width = block[1];
    o->top = around[0], o->left = around[2];
    o->pixel = (uint32_t)in.dims[in.rank - 1] * mpm_type_bytes(in.type);
    o->bytes = out.bytes;
    /* TFLM's kernel leaves it to chance; TFLite does this. */
    o->outside = (int8_t)(in.type == MPM_INT8 ? out.zero_point : 0);
    o->to_batch = (uint8_t)to_batch;
    o->in = in.data;
    o->out = out.data;
    p->run = run;
    p->params = o;
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare_space_to_batch(struct mpm_prep *p) { return prepare(p, 1); }
static MPM_ONCE enum mpm_status prepare_batch_to_space(struct mpm_prep *p) { return prepare(p, 0); }

const struct mpm_kernel mpm_space_to_batch_nd = {MPM_OP_SPACE_TO_BATCH_ND, MPM_ANY_TYPE, 0, NULL,
                                                 prepare_space_to_batch};
const struct mpm_kernel mpm_batch_to_space_nd = {MPM_OP_BATCH_TO_SPACE_ND, MPM_ANY_TYPE, 0, NULL,
                                                 prepare_batch_to_space};
