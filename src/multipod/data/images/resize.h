/* Resizing of boxes of images with a triangle filter: Pillow's `BILINEAR`, in numbers of 16 bits. */
#ifndef MULTIPOD_RESIZE_H
#define MULTIPOD_RESIZE_H

#include <stddef.h>
#include <stdint.h>

/* Memory that one call after the other uses; all zero before the first, given back by `mp_resize_free`. */
struct resize_memory {
    void *bytes;
    size_t size;
};

/* Resizes box (x, y, width, height) of `in`, [rows][columns] pixels of three bytes with `stride` bytes a row, to
 * out[height][width][3], mirrored if `flip`. Returns 0, or -1 without memory. The exact value is missed by less
 * than a quarter of a step of 255, then rounded. */
int mp_resize(const uint8_t *in, int rows, int columns, size_t stride, const double box[4], int height, int width,
              int flip, uint8_t *out, struct resize_memory *memory);

void mp_resize_free(struct resize_memory *memory);

#endif
