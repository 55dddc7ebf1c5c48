/* Rows first, then columns, LANES output rows at a time: blended rows are turned on their side, so that one instruction
 * adds a column to all of them, and turned back as bytes. The loops are plain, for the compiler to vectorise.
 *
 * Numbers are of 16 bits without a sign: a pixel has 8 bits behind the point, a weight 16, and of a product the upper
 * half is kept. A sum of products can then not overflow; what it lost, half of 1/256 for each on average, is added.
 * More than MANY taps go through 32 bits, slowly. */
#include "resize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, POINT = 8, ONE = 65535, LEAST = 4, MANY = 64 };

typedef uint16_t eight __attribute__((vector_size(16)));
typedef uint8_t sixteen __attribute__((vector_size(16)));

/* Of one output row or column: its first input, and the weights of `taps` inputs from there. */
struct window {
    int first;
    uint16_t *weight;
};

/* Weights that a window has room for: those behind its own are zero, so that few taps may be taken for LEAST. */
static int room_of(int taps) { return taps < LEAST ? LEAST : taps; }

/* Triangle filter from [start, start + length) of `size` inputs to `count` outputs, as wide as two inputs or, when
 * shrinking, two outputs: out[i] = sum over k of weight[k] * in[first + k], the weights of each summing to ONE. */
static void windows(double start, double length, int size, int count, int taps, struct window *of, uint16_t *weight)
{
    int room = room_of(taps);
    double scale = length / count, support = scale > 1 ? scale : 1, narrow = 1 / support;
    for (int i = 0; i < count; i++, weight += room) {
        double centre = start + (i + 0.5) * scale, sum = 0, told = 0;
        int first = (int)floor(centre - support - 0.5) + 1; /* the first input with a weight above 0 */
        first = first < 0 ? 0 : first > size - taps ? size - taps : first;
        for (int k = 0; k < taps; k++) {
            double share = 1 - fabs(first + k + 0.5 - centre) * narrow;
            sum += share > 0 ? share : 0;
        }
        double each = ONE / sum;
        int given = 0;
        for (int k = 0; k < taps; k++) { /* what rounding leaves over goes to the next */
            double share = 1 - fabs(first + k + 0.5 - centre) * narrow;
            told += share > 0 ? share * each : 0;
            weight[k] = (uint16_t)((int)(told + 0.5) - given);
            given += weight[k];
        }
        for (int k = taps; k < room; k++)
            weight[k] = 0;
        of[i] = (struct window){first, weight};
    }
}

static int taps_of(double length, int count, int size)
{
    double scale = length / count;
    int taps = (int)ceil(2 * (scale > 1 ? scale : 1));
    return taps < size ? taps : size;
}

static inline uint16_t product(uint16_t pixel, uint16_t weight) { return (uint16_t)((uint32_t)pixel * weight >> 16); }

static inline uint16_t of_byte(uint8_t pixel, uint16_t weight) { return product((uint16_t)(pixel << POINT), weight); }

/* What `taps` products lost, so that there is room for it. */
static inline uint16_t mended(uint16_t sum, uint16_t lost)
{
    uint16_t most = (uint16_t)(UINT16_MAX - lost);
    return (uint16_t)((sum < most ? sum : most) + lost);
}

/* line[j] = sum over k of weight[k] * in[k][j]. Up to four taps are one pass. */
static void add_rows(const uint8_t *in, size_t stride, const uint16_t *weight, int taps, size_t count,
                     uint16_t *restrict line)
{
    const uint8_t *a = in, *b = taps > 1 ? a + stride : a; /* weights of rows that are none are zero */
    const uint8_t *c = taps > 2 ? b + stride : a, *d = taps > 3 ? c + stride : a;
    uint16_t lost = (uint16_t)(taps / 2), u = weight[0], v = weight[1], w = weight[2], z = weight[3];
    if (taps <= 2) {
        for (size_t j = 0; j < count; j++)
            line[j] = mended((uint16_t)(of_byte(a[j], u) + of_byte(b[j], v)), lost);
        return;
    }
    for (size_t j = 0; taps > MANY && j < count; j++) {
        uint32_t sum = 0;
        for (int k = 0; k < taps; k++)
            sum += (uint32_t)in[(size_t)k * stride + j] * weight[k];
        line[j] = (uint16_t)(sum >> (16 - POINT));
    }
    if (taps > MANY)
        return;
    for (size_t j = 0; j < count; j++)
        line[j] = (uint16_t)(of_byte(a[j], u) + of_byte(b[j], v) + of_byte(c[j], w) + of_byte(d[j], z));
    for (int k = 4; k < taps; k++) {
        a = in + (size_t)k * stride, u = weight[k];
        for (size_t j = 0; j < count; j++)
            line[j] = (uint16_t)(line[j] + of_byte(a[j], u));
    }
    for (size_t j = 0; j < count; j++)
        line[j] = mended(line[j], lost);
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(kind, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(kind, a, b, ...) __builtin_shuffle(a, b, (kind){__VA_ARGS__})
#endif
#define LOW(a, b) SHUFFLED(eight, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLED(eight, a, b, 4, 12, 5, 13, 6, 14, 7, 15)

/* out[j][r] = in[r][j] for 8 x 8 numbers. */
static inline void turn_eight(const uint16_t *in, size_t stride, uint16_t *out, size_t out_stride)
{
    eight a[8], b[8];
    for (int r = 0; r < 8; r++)
        memcpy(&a[r], in + (size_t)r * stride, sizeof a[r]);
    for (int r = 0; r < 4; r++)
        b[2 * r] = LOW(a[r], a[r + 4]), b[2 * r + 1] = HIGH(a[r], a[r + 4]);
    for (int r = 0; r < 4; r++)
        a[2 * r] = LOW(b[r], b[r + 4]), a[2 * r + 1] = HIGH(b[r], b[r + 4]);
    for (int r = 0; r < 4; r++)
        b[2 * r] = LOW(a[r], a[r + 4]), b[2 * r + 1] = HIGH(a[r], a[r + 4]);
    for (int r = 0; r < 8; r++)
        memcpy(out + (size_t)r * out_stride, &b[r], sizeof b[r]);
}

#define LOWS(a, b) SHUFFLED(sixteen, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGHS(a, b) SHUFFLED(sixteen, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* a[j][r] becomes a[r][j], 16 x 16 bytes. */
static inline void turn_sixteen(sixteen a[LANES])
{
    sixteen b[LANES];
    for (int round = 0; round < 2; round++) {
        for (int r = 0; r < 8; r++)
            b[2 * r] = LOWS(a[r], a[r + 8]), b[2 * r + 1] = HIGHS(a[r], a[r + 8]);
        for (int r = 0; r < 8; r++)
            a[2 * r] = LOWS(b[r], b[r + 8]), a[2 * r + 1] = HIGHS(b[r], b[r + 8]);
    }
}

/* to[r] = sum over k of weight[k] * from[k][r], a column of LANES rows. Up to four taps are one pass. */
static inline void add_column(const uint16_t *from, const uint16_t *weight, int taps, uint16_t lost,
                              uint8_t *restrict to)
{
    const uint16_t *a = from, *b = a + 3 * LANES, *c = b + 3 * LANES, *d = c + 3 * LANES;
    uint16_t u = weight[0], v = weight[1], w = weight[2], z = weight[3], sum[LANES];
    if (taps <= 2) {
#pragma GCC unroll 1 /* a loop that is unrolled first is not vectorized */
        for (int r = 0; r < LANES; r++)
            to[r] = (uint8_t)(mended((uint16_t)(product(a[r], u) + product(b[r], v)), lost) >> POINT);
        return;
    }
    for (int r = 0; taps > MANY && r < LANES; r++) {
        uint32_t whole = 0;
        for (int k = 0; k < taps; k++)
            whole += (uint32_t)from[(size_t)k * 3 * LANES + (size_t)r] * weight[k];
        to[r] = (uint8_t)(mended((uint16_t)(whole >> 16), 1 << (POINT - 1)) >> POINT);
    }
    if (taps > MANY)
        return;
#pragma GCC unroll 1
    for (int r = 0; r < LANES; r++)
        sum[r] = (uint16_t)(product(a[r], u) + product(b[r], v) + product(c[r], w) + product(d[r], z));
    for (int k = 4; k < taps; k++) {
        a = from + (size_t)k * 3 * LANES, u = weight[k];
#pragma GCC unroll 1
        for (int r = 0; r < LANES; r++)
            sum[r] = (uint16_t)(sum[r] + product(a[r], u));
    }
#pragma GCC unroll 1
    for (int r = 0; r < LANES; r++)
        to[r] = (uint8_t)(mended(sum[r], lost) >> POINT);
}

/* side[j][r] = sum over k of weight[k] * turned[first + k][r], rounded to whole steps, for `width` pixels. */
static void add_columns(const uint16_t *turned, const struct window *x, int taps, int width, uint8_t *restrict side)
{
    uint16_t lost = (uint16_t)(taps / 2 + (1 << (POINT - 1)));
    for (int j = 0; j < width; j++)
        for (int colour = 0; colour < 3; colour++, side += LANES)
            add_column(turned + ((size_t)x[j].first * 3 + (size_t)colour) * LANES, x[j].weight, taps, lost, side);
}

/* out[r][j] = side[j][r] for `rows` rows of `bytes` each. */
static void turn_back(const uint8_t *side, int rows, size_t bytes, uint8_t *out)
{
    for (size_t j = 0; j < bytes; j += LANES, side += LANES * LANES) {
        size_t size = bytes - j < LANES ? bytes - j : LANES;
        sixteen block[LANES];
        memcpy(block, side, sizeof block);
        turn_sixteen(block);
        for (int r = 0; r < rows; r++)
            memcpy(out + (size_t)r * bytes + j, &block[r], size);
    }
}

static size_t rounded(size_t size) { return (size + 63) / 64 * 64; }

static int reserve(struct resize_memory *memory, size_t size)
{
    if (memory->size >= size)
        return 0;
    free(memory->bytes);
    memory->bytes = aligned_alloc(64, size);
    memory->size = memory->bytes ? size : 0;
    if (memory->bytes)
        memset(memory->bytes, 0, size); /* what lies behind a row is turned with it, and never shown */
    return memory->bytes ? 0 : -1;
}

void mp_resize_free(struct resize_memory *memory)
{
    free(memory->bytes);
    *memory = (struct resize_memory){NULL, 0};
}

int mp_resize(const uint8_t *in, int rows, int columns, size_t stride, const double box[4], int height, int width,
              int flip, uint8_t *out, struct resize_memory *memory)
{
    int xtaps = taps_of(box[2], width, columns), ytaps = taps_of(box[3], height, rows);
    size_t numbers = (size_t)columns * 3, bytes = (size_t)width * 3;
    size_t padded = rounded(numbers + 3 * LEAST), sides = rounded(bytes) * LANES;
    size_t window = rounded(sizeof(struct window) * (size_t)(width + height));
    size_t xroom = (size_t)width * (size_t)room_of(xtaps), yroom = (size_t)height * (size_t)room_of(ytaps);
    size_t weight = rounded(sizeof(uint16_t) * (xroom + yroom));
    size_t line = sizeof(uint16_t) * padded * LANES;
    if (reserve(memory, window + weight + 2 * line + sides))
        return -1;
    uint8_t *place = memory->bytes;
    struct window *x = (struct window *)(void *)place, *y = x + width;
    uint16_t *xw = (uint16_t *)(void *)(place += window), *yw = xw + xroom;
    uint16_t *lines = (uint16_t *)(void *)(place += weight), *turned = lines + padded * LANES;
    uint8_t *side = place + 2 * line;

    windows(box[0], box[2], columns, width, xtaps, x, xw);
    windows(box[1], box[3], rows, height, ytaps, y, yw);
    for (int i = 0, j = width - 1; flip && i < j; i++, j--) {
        struct window left = x[i];
        x[i] = x[j], x[j] = left;
    }
    for (int i = 0; i < height; i += LANES) {
        int own = height - i < LANES ? height - i : LANES;
        for (int r = 0; r < own; r++) {
            const struct window *of = &y[i + r];
            add_rows(in + (size_t)of->first * stride, stride, of->weight, ytaps, numbers,
                     lines + (size_t)r * padded);
        }
        for (size_t j = 0; j < numbers; j += 8)
            for (int r = 0; r < own; r += 8)
                turn_eight(lines + (size_t)r * padded + j, padded, turned + j * LANES + r, LANES);
        add_columns(turned, x, xtaps, width, side);
        turn_back(side, own, bytes, out + (size_t)i * bytes);
    }
    return 0;
}
