#include "window.h"

/* Output size and the padding before the image, as TensorFlow defines SAME (0) and VALID (1). */
static int32_t size_of(int32_t size, int32_t taps, int32_t stride, int32_t step, uint32_t padding, int32_t *before) {
    const int32_t reach = (taps - 1) * step + 1;
    const int32_t out = padding == 0 ? (size + stride - 1) / stride : (size - reach + stride) / stride;
    const int32_t missing = (out - 1) * stride + reach - size;
    *before = missing > 0 ? missing / 2 : 0;
    return out;
}

MPM_ONCE enum mpm_status mpm_fit_window(struct mpm_prep *p, const struct mpm_tensor *in, const struct mpm_tensor *out,
                               int32_t stride_y, int32_t stride_x, uint32_t padding, struct mpm_window *w) {
    int32_t top, left, i;
    MPM_NEED(p, in->rank == 4 && out->rank == 4, "an image must have 4 dims");
    for (i = 1; i < 3; i++)
        MPM_SUPPORT(p, in->dims[i] >= 1 && in->dims[i] <= 65535 && out->dims[i] >= 1 && out->dims[i] <= 65535,
                    "an image's sides must be 1 to 65,535");
    MPM_SUPPORT(p, stride_y >= 1 && stride_y <= 255 && stride_x >= 1 && stride_x <= 255, "strides must be 1 to 255");
    MPM_NEED(p, padding <= 1, "the padding is neither SAME nor VALID");
    MPM_NEED(p, in->dims[0] == out->dims[0], "input and output differ in batch");
    MPM_NEED(p, size_of(in->dims[1], w->height, stride_y, w->step_y, padding, &top) == out->dims[1] &&
                    size_of(in->dims[2], w->width, stride_x, w->step_x, padding, &left) == out->dims[2],
             "the output's shape does not follow from input, filter and stride");
    MPM_SUPPORT(p, top <= 65535 && left <= 65535, "the filter is too large");
    w->in_height = (uint16_t)in->dims[1];
    w->in_width = (uint16_t)in->dims[2];
    w->out_height = (uint16_t)out->dims[1];
    w->out_width = (uint16_t)out->dims[2];
    w->pad_top = (uint16_t)top;
    w->pad_left = (uint16_t)left;
    w->stride_y = (uint8_t)stride_y;
    w->stride_x = (uint8_t)stride_x;
    return MPM_OK;
}
