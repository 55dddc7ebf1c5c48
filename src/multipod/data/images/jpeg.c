/* Decodes the part of a JPEG that a crop shows, no finer than needed, and resizes it: libjpeg-turbo's partial
 * decompression (jpeg_crop_scanline, jpeg_skip_scanlines), its scaled inverse DCT, and `resize.c`.
 *
 * What is skipped: rows below the crop altogether; of rows above and columns beside it all but the entropy decoding;
 * of the DCT's frequencies those that the resized crop cannot show. No globals; safe in any number of threads.
 */
#include <stddef.h>
#include <stdio.h>
#include <jpeglib.h>
#include <jerror.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "resize.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 1005000
#error "needs libjpeg-turbo 1.5 or newer: jpeg_crop_scanline"
#endif

enum { MP_OK = 0, MP_DAMAGED = 1, MP_OTHER_COLOURS = 2, MP_NO_MEMORY = 3 };

struct failure {
    struct jpeg_error_mgr base; /* first, so that cinfo->err is also this */
    jmp_buf out;
    char *message; /* JMSG_LENGTH_MAX bytes, the caller's */
};

static void stop(j_common_ptr cinfo)
{
    struct failure *failure = (struct failure *)cinfo->err;
    cinfo->err->format_message(cinfo, failure->message);
    longjmp(failure->out, 1);
}

/* libjpeg calls it for traces (level >= 0) and for warnings. Those that say that pixels are missing are failures. */
static void warned(j_common_ptr cinfo, int level)
{
    if (level >= 0)
        return;
    switch (cinfo->err->msg_code) {
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_JPEG_EOF:
    case JWRN_MUST_RESYNC:
    case JWRN_ARITH_BAD_CODE:
        stop(cinfo);
        break;
    default:
        cinfo->err->num_warnings++;
    }
}

static void begin(struct jpeg_decompress_struct *cinfo, struct failure *failure, char *message)
{
    cinfo->err = jpeg_std_error(&failure->base);
    failure->base.error_exit = stop;
    failure->base.emit_message = warned;
    failure->message = message;
    message[0] = '\0';
}

static unsigned at16(const uint8_t *p, int little) { return little ? p[0] | p[1] << 8 : p[0] << 8 | p[1]; }

static unsigned long at32(const uint8_t *p, int little)
{
    return little ? at16(p, 1) | (unsigned long)at16(p + 2, 1) << 16 : (unsigned long)at16(p, 0) << 16 | at16(p + 2, 0);
}

/* The orientation, 1 to 8, of an Exif marker; 1 if there is none or it cannot be read. */
static int orientation(jpeg_saved_marker_ptr marker)
{
    for (; marker; marker = marker->next) {
        const uint8_t *tiff = marker->data + 6;
        unsigned long size = marker->data_length, at;
        unsigned count;
        if (marker->marker != JPEG_APP0 + 1 || size < 20 || memcmp(marker->data, "Exif\0\0", 6))
            continue;
        size -= 6;
        int little = tiff[0] == 'I';
        at = at32(tiff + 4, little);
        if (at > size - 2)
            continue;
        count = at16(tiff + at, little);
        for (at += 2; count > 0 && at + 12 <= size; count--, at += 12)
            if (at16(tiff + at, little) == 0x0112) {
                unsigned value = at16(tiff + at + 8, little);
                return value >= 1 && value <= 8 ? (int)value : 1;
            }
    }
    return 1;
}

/* info: width, height, components, whether they become RGB here, Exif orientation. Returns MP_OK or MP_DAMAGED. */
int mp_jpeg_header(const uint8_t *data, size_t size, int info[5], char *message)
{
    struct jpeg_decompress_struct cinfo;
    struct failure failure;
    begin(&cinfo, &failure, message);
    jpeg_create_decompress(&cinfo);
    if (setjmp(failure.out)) {
        jpeg_destroy_decompress(&cinfo);
        return MP_DAMAGED;
    }
    jpeg_save_markers(&cinfo, JPEG_APP0 + 1, 0xFFFF);
    jpeg_mem_src(&cinfo, (unsigned char *)data, (unsigned long)size);
    jpeg_read_header(&cinfo, TRUE);
    info[0] = (int)cinfo.image_width;
    info[1] = (int)cinfo.image_height;
    info[2] = cinfo.num_components;
    info[3] = cinfo.jpeg_color_space == JCS_GRAYSCALE || cinfo.jpeg_color_space == JCS_YCbCr ||
              cinfo.jpeg_color_space == JCS_RGB;
    info[4] = orientation(cinfo.marker_list);
    jpeg_destroy_decompress(&cinfo);
    return MP_OK;
}

/* The least of 8, 4, 2, 1 (eighths) at which the box still has as many pixels as the output, both ways. */
static int eighths(const double box[4], int height, int width)
{
    int scale = 8;
    while (scale > 1 && box[2] * (scale / 2) >= 8.0 * width && box[3] * (scale / 2) >= 8.0 * height)
        scale /= 2;
    return scale;
}

/* out[height][width][3] = the box (x, y, width, height in pixels of the whole image) of a JPEG, resized and, if `flip`,
 * mirrored. `exact`: decode at full size whatever the box. Returns one of the codes above; `message` has
 * JMSG_LENGTH_MAX bytes. The pixels differ from those of a whole decode only by libjpeg's choice of scale. */
int mp_jpeg_crop(const uint8_t *data, size_t size, const double box[4], int height, int width, int flip, int exact,
                 uint8_t *out, char *message)
{
    struct jpeg_decompress_struct cinfo;
    struct failure failure;
    uint8_t *volatile pixels = NULL;
    int code;
    begin(&cinfo, &failure, message);
    jpeg_create_decompress(&cinfo);
    if (setjmp(failure.out)) {
        jpeg_destroy_decompress(&cinfo);
        free(pixels);
        return MP_DAMAGED;
    }
    jpeg_mem_src(&cinfo, (unsigned char *)data, (unsigned long)size);
    jpeg_read_header(&cinfo, TRUE);
    if (cinfo.jpeg_color_space != JCS_GRAYSCALE && cinfo.jpeg_color_space != JCS_YCbCr &&
        cinfo.jpeg_color_space != JCS_RGB) {
        jpeg_destroy_decompress(&cinfo);
        return MP_OTHER_COLOURS;
    }
    cinfo.out_color_space = JCS_RGB;
    cinfo.dct_method = JDCT_ISLOW;
    cinfo.scale_num = exact ? 8 : (unsigned)eighths(box, height, width);
    cinfo.scale_denom = 8;
    jpeg_start_decompress(&cinfo);

    /* The box in decoded pixels, and the rows and columns that the filter reaches; two more at the sides, because
     * chroma next to a cut is interpolated without what was cut off. */
    double fx = (double)cinfo.output_width / cinfo.image_width, fy = (double)cinfo.output_height / cinfo.image_height;
    double in[4] = {box[0] * fx, box[1] * fy, box[2] * fx, box[3] * fy};
    double reach_x = in[2] / width > 1 ? in[2] / width : 1, reach_y = in[3] / height > 1 ? in[3] / height : 1;
    int left = (int)floor(in[0] - reach_x) - 2, right = (int)ceil(in[0] + in[2] + reach_x) + 2;
    int top = (int)floor(in[1] - reach_y) - 1, bottom = (int)ceil(in[1] + in[3] + reach_y) + 1;
    left = left < 0 ? 0 : left, top = top < 0 ? 0 : top;
    right = right > (int)cinfo.output_width ? (int)cinfo.output_width : right;
    bottom = bottom > (int)cinfo.output_height ? (int)cinfo.output_height : bottom;

    JDIMENSION first = (JDIMENSION)left, columns = (JDIMENSION)(right - left);
    if (columns < cinfo.output_width)
        jpeg_crop_scanline(&cinfo, &first, &columns);
    pixels = malloc((size_t)columns * (size_t)(bottom - top) * 3);
    if (!pixels) {
        jpeg_destroy_decompress(&cinfo);
        return MP_NO_MEMORY;
    }
    if (top > 0)
        jpeg_skip_scanlines(&cinfo, (JDIMENSION)top);
    while (cinfo.output_scanline < (JDIMENSION)bottom) {
        JSAMPROW row = pixels + (size_t)(cinfo.output_scanline - (JDIMENSION)top) * columns * 3;
        jpeg_read_scanlines(&cinfo, &row, 1);
    }
    jpeg_destroy_decompress(&cinfo); /* not jpeg_finish_decompress, which would read the rest */
    in[0] -= first;
    in[1] -= top;
    struct resize_memory memory = {NULL, 0};
    code = mp_resize(pixels, bottom - top, (int)columns, (size_t)columns * 3, in, height, width, flip, out, &memory);
    mp_resize_free(&memory);
    free(pixels);
    return code ? MP_NO_MEMORY : MP_OK;
}

/* The whole image at `scale` eighths of its size, each side rounded up: out[height][width][3]. Codes as above. */
int mp_jpeg_decode(const uint8_t *data, size_t size, int scale, uint8_t *out, char *message)
{
    struct jpeg_decompress_struct cinfo;
    struct failure failure;
    begin(&cinfo, &failure, message);
    jpeg_create_decompress(&cinfo);
    if (setjmp(failure.out)) {
        jpeg_destroy_decompress(&cinfo);
        return MP_DAMAGED;
    }
    jpeg_mem_src(&cinfo, (unsigned char *)data, (unsigned long)size);
    jpeg_read_header(&cinfo, TRUE);
    cinfo.out_color_space = JCS_RGB;
    cinfo.dct_method = JDCT_ISLOW;
    cinfo.scale_num = (unsigned)scale;
    cinfo.scale_denom = 8;
    jpeg_start_decompress(&cinfo);
    while (cinfo.output_scanline < cinfo.output_height) {
        JSAMPROW row = out + (size_t)cinfo.output_scanline * cinfo.output_width * 3;
        jpeg_read_scanlines(&cinfo, &row, 1);
    }
    jpeg_destroy_decompress(&cinfo);
    return MP_OK;
}

static int crop_pixels(const uint8_t *image, int rows, int columns, const double box[4], int height, int width,
                       int flip, uint8_t *out, struct resize_memory *memory)
{
    double reach_x = box[2] / width > 1 ? box[2] / width : 1, reach_y = box[3] / height > 1 ? box[3] / height : 1;
    int left = (int)floor(box[0] - reach_x) - 1, right = (int)ceil(box[0] + box[2] + reach_x) + 1;
    int top = (int)floor(box[1] - reach_y) - 1, bottom = (int)ceil(box[1] + box[3] + reach_y) + 1;
    left = left < 0 ? 0 : left, top = top < 0 ? 0 : top;
    right = right > columns ? columns : right, bottom = bottom > rows ? rows : bottom;
    double in[4] = {box[0] - left, box[1] - top, box[2], box[3]};
    size_t stride = (size_t)columns * 3;
    return mp_resize(image + (size_t)top * stride + (size_t)left * 3, bottom - top, right - left, stride, in, height,
                     width, flip, out, memory);
}

/* The same from pixels in memory: `count` boxes of as many images, images[i] of sizes[i] = (rows, columns) pixels, the
 * i-th to outs[i], mirrored where flips[i]. The decoded cache. */
int mp_pixels_crop(int count, const uint8_t *const *images, const int (*sizes)[2], const double (*boxes)[4],
                   const uint8_t *flips, int height, int width, uint8_t *const *outs)
{
    struct resize_memory memory = {NULL, 0};
    int code = 0;
    for (int i = 0; i < count && !code; i++)
        code = crop_pixels(images[i], sizes[i][0], sizes[i][1], boxes[i], height, width, flips[i], outs[i], &memory);
    mp_resize_free(&memory);
    return code ? MP_NO_MEMORY : MP_OK;
}
