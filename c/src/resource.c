/* State that has no tensor of its own; apart, because few programs on chips have it. */
#include "kernel.h"

struct mpm_resource *mpm_keep_resource(struct mpm_prep *p, uint32_t bytes, uint8_t value) {
    struct mpm_resource *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return NULL;
    r->data = mpm_keep(p, bytes);
    if (r->data == NULL) return NULL;
    r->id = p->op_table;
    r->bytes = bytes;
    r->value = value;
    if (p->final) { /* what the first round keeps is gone after it */
        r->next = p->m->resources;
        p->m->resources = r;
    }
    return r;
}
