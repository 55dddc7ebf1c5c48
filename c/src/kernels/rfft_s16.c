/* SignalRfft of int16: the Fourier transform of real numbers, of a length that is a power of two, 4 to 1,024. Each
 * stage divides by its radix, and rounds where TFLM's does: the steps and their order are those of Kiss FFT. It keeps
 * nothing: factors come from a quarter of a cosine in flash. */
#include "custom.h"

#define LONGEST 1024

/* floor(1/2 + 32767 cos(2 pi i / 1024)), i = 0..256. */
static const int16_t cosine[LONGEST / 4 + 1] = {
    32767, 32766, 32765, 32761, 32757, 32752, 32745, 32737, 32728, 32717, 32705, 32692, 32678, 32663, 32646, 32628,
    32609, 32589, 32567, 32545, 32521, 32495, 32469, 32441, 32412, 32382, 32351, 32318, 32285, 32250, 32213, 32176,
    32137, 32098, 32057, 32014, 31971, 31926, 31880, 31833, 31785, 31736, 31685, 31633, 31580, 31526, 31470, 31414,
    31356, 31297, 31237, 31176, 31113, 31050, 30985, 30919, 30852, 30783, 30714, 30643, 30571, 30498, 30424, 30349,
    30273, 30195, 30117, 30037, 29956, 29874, 29791, 29706, 29621, 29534, 29447, 29358, 29268, 29177, 29085, 28992,
    28898, 28803, 28706, 28609, 28510, 28411, 28310, 28208, 28105, 28001, 27896, 27790, 27683, 27575, 27466, 27356,
    27245, 27133, 27019, 26905, 26790, 26674, 26556, 26438, 26319, 26198, 26077, 25955, 25832, 25708, 25582, 25456,
    25329, 25201, 25072, 24942, 24811, 24680, 24547, 24413, 24279, 24143, 24007, 23870, 23731, 23592, 23452, 23311,
    23170, 23027, 22884, 22739, 22594, 22448, 22301, 22154, 22005, 21856, 21705, 21554, 21403, 21250, 21096, 20942,
    20787, 20631, 20475, 20317, 20159, 20000, 19841, 19680, 19519, 19357, 19195, 19032, 18868, 18703, 18537, 18371,
    18204, 18037, 17869, 17700, 17530, 17360, 17189, 17018, 16846, 16673, 16499, 16325, 16151, 15976, 15800, 15623,
    15446, 15269, 15090, 14912, 14732, 14553, 14372, 14191, 14010, 13828, 13645, 13462, 13279, 13094, 12910, 12725,
    12539, 12353, 12167, 11980, 11793, 11605, 11417, 11228, 11039, 10849, 10659, 10469, 10278, 10087, 9896, 9704,
    9512, 9319, 9126, 8933, 8739, 8545, 8351, 8157, 7962, 7767, 7571, 7375, 7179, 6983, 6786, 6590, 6393, 6195,
    5998, 5800, 5602, 5404, 5205, 5007, 4808, 4609, 4410, 4210, 4011, 3811, 3612, 3412, 3212, 3012, 2811, 2611,
    2410, 2210, 2009, 1809, 1608, 1407, 1206, 1005, 804, 603, 402, 201, 0};

struct number {
    int16_t re, im;
};

/* 24 bytes on a 32-bit chip. */
struct rfft {
    const int16_t *in;
    struct number *out;  /* [rows][length / 2 + 1] */
    struct number *half; /* scratch: [length / 2] */
    uint32_t rows, in_count;
    uint16_t length;
};

static int16_t rounded(int32_t x) { return (int16_t)((x + (1 << 14)) >> 15); }

static struct number divided(struct number a, int32_t by) {
    const struct number q = {rounded(a.re * (32767 / by)), rounded(a.im * (32767 / by))};
    return q;
}

static struct number product(struct number a, struct number b) {
    const struct number p = {rounded(a.re * b.re - a.im * b.im), rounded(a.re * b.im + a.im * b.re)};
    return p;
}

static struct number sum(struct number a, struct number b) {
    const struct number s = {(int16_t)(a.re + b.re), (int16_t)(a.im + b.im)};
    return s;
}

static struct number difference(struct number a, struct number b) {
    const struct number d = {(int16_t)(a.re - b.re), (int16_t)(a.im - b.im)};
    return d;
}

static int16_t cosine_at(uint32_t i) {
    i &= LONGEST - 1;
    if (i > LONGEST / 2) i = LONGEST - i;
    return (int16_t)(i <= LONGEST / 4 ? cosine[i] : -cosine[LONGEST / 2 - i]);
}

/* exp(-2 pi j i / 1024) */
static struct number factor(uint32_t i) {
    const struct number f = {cosine_at(i), (int16_t)-cosine_at(i - LONGEST / 4)};
    return f;
}

static void radix_2(struct number *x, uint32_t m, uint32_t step) {
    uint32_t k;
    for (k = 0; k < m; k++, x++) {
        const struct number a = divided(x[0], 2), b = product(divided(x[m], 2), factor(k * step));
        x[m] = difference(a, b);
        x[0] = sum(a, b);
    }
}

static void radix_4(struct number *x, uint32_t m, uint32_t step) {
    uint32_t k;
    for (k = 0; k < m; k++, x++) {
        const struct number a = divided(x[0], 4), b = product(divided(x[m], 4), factor(k * step));
        const struct number c = product(divided(x[2 * m], 4), factor(2 * k * step)),
                            d = product(divided(x[3 * m], 4), factor(3 * k * step));
        const struct number even = sum(a, c), odd = difference(a, c), both = sum(b, d), turned = difference(b, d);
        x[2 * m] = difference(even, both);
        x[0] = sum(even, both);
        x[m].re = (int16_t)(odd.re + turned.im);
        x[m].im = (int16_t)(odd.im - turned.re);
        x[3 * m].re = (int16_t)(odd.re - turned.im);
        x[3 * m].im = (int16_t)(odd.im + turned.re);
    }
}

/* The place of input i: its digits in base 4, the lowest of them first, and a last one in base 2 where n is no
 * power of 4. */
static uint32_t turned(uint32_t i, uint32_t n) {
    uint32_t to = 0;
    for (; n > 1; ) {
        const uint32_t radix = n % 4 == 0 ? 4 : 2;
        n /= radix;
        to += i % radix * n;
        i /= radix;
    }
    return to;
}

/* The transform of n complex numbers, gathered in the order in which it wants them. */
static void transform(struct number *x, uint32_t n) {
    uint32_t m = 1, at;
    uint32_t radix = 4;
    for (at = n; at % 4 == 0; at /= 4) { }
    if (at == 2) radix = 2; /* the innermost stage */
    for (; m < n; m *= radix, radix = 4) {
        for (at = 0; at < n; at += radix * m) {
            if (radix == 2) radix_2(x + at, m, LONGEST / (2 * m));
            else radix_4(x + at, m, LONGEST / (4 * m));
        }
    }
}

static void row(const struct rfft *r, const int16_t *in, struct number *out) {
    const uint32_t n = r->length / 2u, step = LONGEST / r->length;
    struct number zero;
    uint32_t k;
    for (k = 0; k < n; k++) { /* pairs of real numbers as complex ones; zeros behind the input */
        struct number *to = &r->half[turned(k, n)];
        to->re = (int16_t)(2 * k < r->in_count ? in[2 * k] : 0);
        to->im = (int16_t)(2 * k + 1 < r->in_count ? in[2 * k + 1] : 0);
    }
    transform(r->half, n);
    zero = divided(r->half[0], 2);
    out[0].re = (int16_t)(zero.re + zero.im);
    out[n].re = (int16_t)(zero.re - zero.im);
    out[0].im = out[n].im = 0;
    for (k = 1; k <= n / 2; k++) {
        const struct number mirror = {r->half[n - k].re, (int16_t)-r->half[n - k].im};
        const struct number a = divided(r->half[k], 2), b = divided(mirror, 2), both = sum(a, b);
        const struct number t = product(difference(a, b), factor(k * step + LONGEST / 4));
        out[k].re = (int16_t)((both.re + t.re) >> 1);
        out[k].im = (int16_t)((both.im + t.im) >> 1);
        out[n - k].re = (int16_t)((both.re - t.re) >> 1);
        out[n - k].im = (int16_t)((t.im - both.im) >> 1);
    }
}

static enum mpm_status run(struct mpm_interpreter *m, const void *params) {
    const struct rfft *r = params;
    uint32_t i;
    (void)m;
    for (i = 0; i < r->rows; i++) row(r, r->in + (size_t)i * r->in_count, r->out + (size_t)i * (r->length / 2u + 1u));
    return MPM_OK;
}

static MPM_ONCE enum mpm_status prepare(struct mpm_prep *p) {
    struct mpm_tensor in, out;
    int32_t length;
    struct rfft *r = mpm_keep(p, sizeof *r);
    if (r == NULL) return MPM_ARENA_TOO_SMALL;
    MPM_TRY(mpm_in(p, 0, &in));
    MPM_TRY(mpm_out(p, 0, &out));
    MPM_TRY(mpm_custom_number(p, 1, &length)); /* number 0 is the type */
    MPM_SUPPORT(p, in.type == MPM_INT16 && out.type == MPM_INT16, "int16 only");
    MPM_SUPPORT(p, length >= 4 && length <= LONGEST && (length & (length - 1)) == 0,
                "the length must be a power of two, 4 to 1,024");
    MPM_NEED(p, in.rank >= 1 && in.dims[in.rank - 1] >= 1 && in.dims[in.rank - 1] <= length,
             "the input is longer than the transform");
    r->in_count = (uint32_t)in.dims[in.rank - 1];
    r->rows = in.count / r->in_count;
    MPM_NEED(p, out.count == (uint64_t)r->rows * ((uint32_t)length + 2u), "the output's shape does not follow");
    r->length = (uint16_t)length;
    r->half = mpm_scratch(p, (uint32_t)length / 2u * (uint32_t)sizeof *r->half);
    if (r->half == NULL) return MPM_ARENA_TOO_SMALL;
    r->in = in.data;
    r->out = out.data;
    p->run = run;
    p->params = r;
    return MPM_OK;
}

const struct mpm_kernel mpm_signal_rfft_s16 = {MPM_OP_CUSTOM, MPM_INT16, 0, "SignalRfft", prepare};
