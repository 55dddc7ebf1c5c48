#include "custom.h"

#define FLEX_MAP 9
#define FLEX_VECTOR 10

static uint32_t little_endian(struct mpm_file *f, uint32_t at, uint32_t bytes) {
    uint32_t value = 0, i;
    for (i = 0; i < bytes && i < 4; i++) value |= mpm_u8(f, at + i) << (8 * i);
    return value;
}

MPM_ONCE enum mpm_status mpm_custom_number(struct mpm_prep *p, uint32_t index, int32_t *value) {
    struct mpm_file *f = &p->m->file;
    const struct mpm_vector all = mpm_vector(f, p->op_table, OP_CUSTOM, 1);
    uint32_t root, kind, bytes, width, base, count, type;
    MPM_NEED(p, all.count >= 4, "the operator has no options");
    bytes = mpm_u8(f, all.at + all.count - 1); /* of the root, which is the distance of the values */
    kind = mpm_u8(f, all.at + all.count - 2);
    MPM_NEED(p, (kind >> 2 == FLEX_MAP || kind >> 2 == FLEX_VECTOR) && bytes <= 8 && bytes + 2 <= all.count,
             "the options are no map");
    width = 1u << (kind & 3);
    root = all.count - 2 - bytes;
    base = little_endian(f, all.at + root, bytes);
    MPM_NEED(p, base <= root && root - base >= width, "the options are no map");
    base = root - base; /* of the values, from the beginning of the options; their number stands before them */
    count = little_endian(f, all.at + base - width, width);
    MPM_NEED(p, index < count && count < 256 && base + count * (width + 1) <= all.count, "an option is missing");
    type = mpm_u8(f, all.at + base + count * width + index) >> 2;
    MPM_NEED(p, type == 1 || type == 2 || type == 26, "an option is not a whole number"); /* int, uint, bool */
    *value = (int32_t)little_endian(f, all.at + base + index * width, width);
    if (type == 1 && width < 4 && (*value >> (8 * width - 1) & 1) != 0) *value -= (int32_t)(1u << (8 * width));
    return MPM_OK;
}
