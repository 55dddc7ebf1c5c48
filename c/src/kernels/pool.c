#include "pool.h"

MPM_ONCE enum mpm_status mpm_prepare_pool(struct mpm_prep *p, struct mpm_pool **made) {
    struct mpm_tensor in, out;
    struct mpm_file *f = &p->m->file;
    struct mpm_pool *pool = mpm_keep(p, sizeof *pool);
    int32_t height, width;
    uint32_t activation;
    if (pool == NULL) return MPM_ARENA_TOO_SMALL;
    *made = pool;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    /* Pool2DOptions: padding, stride_w, stride_h, filter_width, filter_height, activation */
    height = mpm_field_i32(f, p->options, 4, 0);
    width = mpm_field_i32(f, p->options, 3, 0);
    MPM_SUPPORT(p, height >= 1 && height <= 65535 && width >= 1 && width <= 65535,
                "the window must be 1 to 65,535 a side");
    pool->window.height = (uint16_t)height;
    pool->window.width = (uint16_t)width;
    pool->window.step_x = pool->window.step_y = 1;
    MPM_TRY(mpm_fit_window(p, &in, &out, mpm_field_i32(f, p->options, 2, 0), mpm_field_i32(f, p->options, 1, 0),
                           mpm_field_u8(f, p->options, 0, 0), &pool->window));
    MPM_NEED(p, in.dims[3] == out.dims[3] && in.type == out.type, "input and output differ in channels or type");
    activation = mpm_field_u8(f, p->options, 5, 0);
    if (in.type == MPM_FLOAT32) {
        MPM_TRY(mpm_activation_range_f32(p, activation, &pool->low_f32, &pool->high_f32));
    } else {
        MPM_NEED(p, activation == 0 || out.scale > 0, "the output has no scale");
        MPM_TRY(mpm_activation_range(p, activation, &out, &pool->low, &pool->high));
    }
    pool->batch = (uint32_t)in.dims[0];
    pool->depth = (uint32_t)in.dims[3];
    pool->in = in.data;
    pool->out = out.data;
    p->params = pool;
    return MPM_OK;
}

void mpm_each_tile(const struct mpm_pool *p, uint32_t element_bytes,
                   void (*reduce)(const struct mpm_pool *p, const struct mpm_tile *tile, void *out)) {
    const struct mpm_window *w = &p->window;
    const uint8_t *image = p->in;
    uint8_t *out = p->out;
    struct mpm_tile tile;
    uint32_t b;
    int32_t oy, ox;
    tile.row = (ptrdiff_t)w->in_width * (ptrdiff_t)p->depth;
    for (b = 0; b < p->batch; b++, image += (size_t)w->in_height * w->in_width * p->depth * element_bytes) {
        for (oy = 0; oy < w->out_height; oy++) {
            const struct mpm_range y = mpm_taps(oy, w->stride_y, w->pad_top, 1, w->height, w->in_height);
            tile.rows = y.end - y.begin;
            for (ox = 0; ox < w->out_width; ox++, out += (size_t)p->depth * element_bytes) {
                const struct mpm_range x = mpm_taps(ox, w->stride_x, w->pad_left, 1, w->width, w->in_width);
                tile.columns = x.end - x.begin;
                tile.at = image + ((size_t)(y.at + y.begin) * w->in_width + (size_t)(x.at + x.begin)) * p->depth *
                                      element_bytes;
                reduce(p, &tile, out);
            }
        }
    }
}
