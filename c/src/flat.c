#include "flat.h"

#include <string.h>

void mpm_mark_bad(struct mpm_file *f, uint32_t at) {
    if (f->bad == 0) f->bad = at + 1 == 0 ? at : at + 1;
}

static inline int inside(struct mpm_file *f, uint32_t at, uint32_t bytes) {
    if (at <= f->size && bytes <= f->size - at) return 1;
    mpm_mark_bad(f, at);
    return 0;
}

uint32_t mpm_u32(struct mpm_file *f, uint32_t at) {
    uint32_t value;
    if (!inside(f, at, 4)) return 0;
    memcpy(&value, f->base + at, 4);
    return value;
}

uint32_t mpm_u16(struct mpm_file *f, uint32_t at) {
    uint16_t value;
    if (!inside(f, at, 2)) return 0;
    memcpy(&value, f->base + at, 2);
    return value;
}

uint32_t mpm_u8(struct mpm_file *f, uint32_t at) { return inside(f, at, 1) ? f->base[at] : 0; }

uint32_t mpm_field(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t bytes) {
    uint32_t vtable, size, offset;
    if (table == 0) return 0;
    /* Unsigned arithmetic wraps, and an offset that leaves the file in either direction is too large. */
    vtable = table - mpm_u32(f, table);
    size = mpm_u16(f, vtable);
    if (4 + 2 * id + 2 > size) return 0;
    offset = mpm_u16(f, vtable + 4 + 2 * id);
    if (offset == 0 || f->bad != 0 || !inside(f, table + offset, bytes)) return 0;
    return table + offset;
}

int32_t mpm_field_i32(struct mpm_file *f, uint32_t table, uint32_t id, int32_t otherwise) {
    const uint32_t at = mpm_field(f, table, id, 4);
    return at == 0 ? otherwise : (int32_t)mpm_u32(f, at);
}

uint32_t mpm_field_u8(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t otherwise) {
    const uint32_t at = mpm_field(f, table, id, 1);
    return at == 0 ? otherwise : mpm_u8(f, at);
}

float mpm_field_f32(struct mpm_file *f, uint32_t table, uint32_t id, float otherwise) {
    const uint32_t at = mpm_field(f, table, id, 4);
    if (at != 0) memcpy(&otherwise, f->base + at, 4);
    return otherwise;
}

uint32_t mpm_follow(struct mpm_file *f, uint32_t at) {
    const uint32_t offset = mpm_u32(f, at);
    if (offset == 0 || !inside(f, at, 4) || !inside(f, at + offset, 4)) {
        mpm_mark_bad(f, at);
        return 0;
    }
    return at + offset;
}

uint32_t mpm_child(struct mpm_file *f, uint32_t table, uint32_t id) {
    const uint32_t at = mpm_field(f, table, id, 4);
    return at == 0 ? 0 : mpm_follow(f, at);
}

struct mpm_vector mpm_vector(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t element_bytes) {
    struct mpm_vector found = {0, 0};
    const uint32_t at = mpm_child(f, table, id);
    if (at == 0) return found;
    found.count = mpm_u32(f, at);
    found.at = at + 4;
    if (found.count > (f->size - found.at) / element_bytes) {
        mpm_mark_bad(f, at);
        found.count = 0;
    }
    return found;
}

uint32_t mpm_element(struct mpm_file *f, uint32_t table, uint32_t id, uint32_t index) {
    const struct mpm_vector all = mpm_vector(f, table, id, 4);
    if (index >= all.count) {
        mpm_mark_bad(f, all.at);
        return 0;
    }
    return mpm_follow(f, all.at + 4 * index);
}
