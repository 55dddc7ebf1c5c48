/* Sizes and padding of a window that moves over an image: convolutions and pooling. */
#ifndef MPM_WINDOW_H
#define MPM_WINDOW_H

#include "../kernel.h"

/* 22 bytes. Elements; images of more than 65,535 a side are refused. */
struct mpm_window {
    uint16_t in_height, in_width, out_height, out_width;
    uint16_t height, width; /* of the filter */
    uint16_t pad_top, pad_left;
    uint8_t stride_y, stride_x;
    uint8_t step_y, step_x; /* dilation */
};

/* Fills in all but filter and steps, which the caller has set; checks `out`'s shape against it. Images are
 * [batch][height][width][channel]. `same`: the padding option. */
enum mpm_status mpm_fit_window(struct mpm_prep *p, const struct mpm_tensor *in, const struct mpm_tensor *out,
                               int32_t stride_y, int32_t stride_x, uint32_t padding, struct mpm_window *w);

/* The part of the filter that lies inside the image for one output row or column. */
struct mpm_range {
    int32_t begin, end; /* taps */
    int32_t at;         /* of tap 0 in the image; may be negative */
};

static inline struct mpm_range mpm_taps(int32_t out, int32_t stride, int32_t pad, int32_t step, int32_t taps,
                                        int32_t size) {
    struct mpm_range r;
    r.at = out * stride - pad;
    r.begin = r.at < 0 ? (step == 1 ? -r.at : (-r.at + step - 1) / step) : 0;
    r.end = taps;
    if (r.at + (taps - 1) * step >= size) r.end = (size - r.at + step - 1) / step;
    if (r.end < r.begin) r.end = r.begin;
    return r;
}

#endif
