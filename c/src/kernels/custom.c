#include "custom.h"

#include <string.h>

#define FLEX_MAP 9
#define FLEX_VECTOR 10
#define FLEX_INT 1
#define FLEX_UINT 2
#define FLEX_FLOAT 3
#define FLEX_BOOL 26

/* The values of the options: their number stands before them, the type of each behind them. */
struct values {
    uint32_t at, count, width;
};

static uint32_t little_endian(struct mpm_file *f, uint32_t at, uint32_t bytes) {
    uint32_t value = 0, i;
    for (i = 0; i < bytes && i < 4; i++) value |= mpm_u8(f, at + i) << (8 * i);
    return value;
}

static MPM_ONCE enum mpm_status find_values(struct mpm_prep *p, struct values *v) {
    struct mpm_file *f = &p->m->file;
    const struct mpm_vector all = mpm_vector(f, p->op_table, OP_CUSTOM, 1);
    uint32_t root, kind, bytes, base;
    MPM_NEED(p, all.count >= 4, "the operator has no options");
    bytes = mpm_u8(f, all.at + all.count - 1); /* of the root, which is the distance of the values */
    kind = mpm_u8(f, all.at + all.count - 2);
    MPM_NEED(p, (kind >> 2 == FLEX_MAP || kind >> 2 == FLEX_VECTOR) && bytes <= 8 && bytes + 2 <= all.count,
             "the options are no map");
    v->width = 1u << (kind & 3);
    root = all.count - 2 - bytes;
    base = little_endian(f, all.at + root, bytes);
    MPM_NEED(p, base <= root && root - base >= v->width, "the options are no map");
    base = root - base; /* from the beginning of the options */
    v->at = all.at + base;
    v->count = little_endian(f, v->at - v->width, v->width);
    MPM_NEED(p, v->count < 256 && base + v->count * (v->width + 1) <= all.count, "an option is missing");
    return MPM_OK;
}

static uint32_t type_of(struct mpm_file *f, const struct values *v, uint32_t index) {
    return mpm_u8(f, v->at + v->count * v->width + index) >> 2;
}

static int32_t whole(struct mpm_file *f, const struct values *v, uint32_t index) {
    int32_t value = (int32_t)little_endian(f, v->at + index * v->width, v->width);
    if (type_of(f, v, index) == FLEX_INT && v->width < 4 && (value >> (8 * v->width - 1) & 1) != 0)
        value -= (int32_t)(1u << (8 * v->width));
    return value;
}

MPM_ONCE enum mpm_status mpm_custom_number(struct mpm_prep *p, uint32_t index, int32_t *value) {
    struct mpm_file *f = &p->m->file;
    struct values v;
    uint32_t type;
    MPM_TRY(find_values(p, &v));
    MPM_NEED(p, index < v.count, "an option is missing");
    type = type_of(f, &v, index);
    MPM_NEED(p, type == FLEX_INT || type == FLEX_UINT || type == FLEX_BOOL, "an option is not a whole number");
    *value = whole(f, &v, index);
    return MPM_OK;
}

/* Whether the text that ends with a 0 at `at` is this name. */
static MPM_ONCE int is_name(struct mpm_file *f, uint32_t at, const char *name) {
    while (*name != 0 && mpm_u8(f, at) == (uint8_t)*name) {
        at++;
        name++;
    }
    return *name == 0 && mpm_u8(f, at) == 0;
}

static MPM_ONCE float real(struct mpm_file *f, const struct values *v, uint32_t index) {
    const uint32_t at = v->at + index * v->width;
    uint32_t low = little_endian(f, at, 4), high;
    uint64_t bits;
    float single;
    double wide;
    if (v->width == 4) {
        memcpy(&single, &low, sizeof single);
        return single;
    }
    high = little_endian(f, at + 4, 4);
    bits = (uint64_t)high << 32 | low;
    memcpy(&wide, &bits, sizeof wide);
    return (float)wide;
}

MPM_ONCE enum mpm_status mpm_custom_named(struct mpm_prep *p, const char *name, float otherwise, float *value) {
    struct mpm_file *f = &p->m->file;
    struct values v;
    uint32_t keys, key_width, i, type;
    MPM_TRY(find_values(p, &v));
    key_width = little_endian(f, v.at - 2 * v.width, v.width);
    keys = v.at - 3 * v.width - little_endian(f, v.at - 3 * v.width, v.width);
    MPM_NEED(p, key_width == 1 || key_width == 2 || key_width == 4 || key_width == 8, "the options are no map");
    *value = otherwise;
    for (i = 0; i < v.count; i++) {
        const uint32_t at = keys + i * key_width;
        if (!is_name(f, at - little_endian(f, at, key_width), name)) continue;
        type = type_of(f, &v, i);
        if (type == FLEX_FLOAT && v.width >= 4) *value = real(f, &v, i);
        else {
            MPM_NEED(p, type == FLEX_INT || type == FLEX_UINT || type == FLEX_BOOL, "an option is not a number");
            *value = (float)whole(f, &v, i);
        }
    }
    MPM_NEED(p, !f->bad, "the options reach beyond the file");
    return MPM_OK;
}
