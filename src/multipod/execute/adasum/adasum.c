/* The arithmetic of Adasum on a host: dots in double, sums that are rounded once, and a check for what is not finite.
 *
 * A piece of a vector is cut where its tensors end: `cuts` has a row (tensor, from, to) for each part, counted from the
 * beginning of the piece. Reductions may be done in any order (`omp simd`), so their last bits depend on the
 * processor's vectors.
 */
#include <stdint.h>

#define BLOCK 256 /* elements of each vector that are made double at a time: 16 KiB of 8 vectors */
#define MOST 16   /* vectors; `GRAM_MOST` in ranks.py is not larger */

#define DEFINE(NAME, REAL)                                                                                   \
    static void products_##NAME(const REAL *a, const REAL *b, int64_t n, double *out)                        \
    {                                                                                                        \
        double ab = 0, aa = 0, bb = 0;                                                                       \
        _Pragma("omp simd reduction(+ : ab, aa, bb)") for (int64_t i = 0; i < n; i++)                        \
        {                                                                                                    \
            const double x = (double)a[i], y = (double)b[i];                                                 \
            ab += x * y;                                                                                     \
            aa += x * x;                                                                                     \
            bb += y * y;                                                                                     \
        }                                                                                                    \
        out[0] += ab;                                                                                        \
        out[1] += aa;                                                                                        \
        out[2] += bb;                                                                                        \
    }                                                                                                        \
                                                                                                             \
    /* Adds a.b, a.a, b.b of each part to dots[tensor]. */                                                   \
    void dots_##NAME(const REAL *a, const REAL *b, int64_t parts, const int64_t (*cuts)[3],                  \
                     double (*dots)[3])                                                                      \
    {                                                                                                        \
        for (int64_t k = 0; k < parts; k++) {                                                                \
            products_##NAME(a + cuts[k][1], b + cuts[k][1], cuts[k][2] - cuts[k][1], dots[cuts[k][0]]);      \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    static void blend_##NAME(REAL *restrict mine, const REAL *restrict theirs, int64_t n, double own,        \
                             double other)                                                                   \
    {                                                                                                        \
        for (int64_t i = 0; i < n; i++) {                                                                    \
            mine[i] = (REAL)(own * (double)mine[i] + other * (double)theirs[i]);                             \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* mine = own[tensor] * mine + other[tensor] * theirs, part by part. */                                  \
    void blends_##NAME(REAL *mine, const REAL *theirs, int64_t parts, const int64_t (*cuts)[3],              \
                       const double *own, const double *other)                                               \
    {                                                                                                        \
        for (int64_t k = 0; k < parts; k++) {                                                                \
            const int64_t tensor = cuts[k][0], begin = cuts[k][1];                                           \
            blend_##NAME(mine + begin, theirs + begin, cuts[k][2] - begin, own[tensor], other[tensor]);      \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* Adds the dots of all pairs of `p` vectors to gram [tensor][p][p], part by part. */                    \
    void gram_##NAME(const REAL *const *rows, int64_t p, int64_t parts, const int64_t (*cuts)[3],            \
                     double *gram)                                                                           \
    {                                                                                                        \
        double wide[MOST][BLOCK];                                                                            \
        for (int64_t k = 0; k < parts; k++) {                                                                \
            double *const own = gram + cuts[k][0] * p * p;                                                   \
            for (int64_t begin = cuts[k][1]; begin < cuts[k][2]; begin += BLOCK) {                           \
                const int64_t n = cuts[k][2] - begin < BLOCK ? cuts[k][2] - begin : BLOCK;                   \
                for (int64_t r = 0; r < p; r++) {                                                            \
                    for (int64_t i = 0; i < n; i++) {                                                        \
                        wide[r][i] = (double)rows[r][begin + i];                                             \
                    }                                                                                        \
                }                                                                                            \
                for (int64_t r = 0; r < p; r++) {                                                            \
                    for (int64_t s = 0; s <= r; s++) {                                                       \
                        double sum = 0;                                                                      \
                        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++)               \
                        {                                                                                    \
                            sum += wide[r][i] * wide[s][i];                                                  \
                        }                                                                                    \
                        own[r * p + s] += sum;                                                               \
                    }                                                                                        \
                }                                                                                            \
            }                                                                                                \
            for (int64_t r = 0; r < p; r++) {                                                                \
                for (int64_t s = 0; s < r; s++) {                                                            \
                    own[s * p + r] = own[r * p + s];                                                         \
                }                                                                                            \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* out = sum over r of weights[tensor][r] * rows[r], part by part; `out` may be one of the rows. */      \
    void mix_##NAME(REAL *out, const REAL *const *rows, int64_t p, int64_t parts, const int64_t (*cuts)[3],  \
                    const double *weights)                                                                   \
    {                                                                                                        \
        double sum[BLOCK];                                                                                   \
        for (int64_t k = 0; k < parts; k++) {                                                                \
            const double *const own = weights + cuts[k][0] * p;                                              \
            for (int64_t begin = cuts[k][1]; begin < cuts[k][2]; begin += BLOCK) {                           \
                const int64_t n = cuts[k][2] - begin < BLOCK ? cuts[k][2] - begin : BLOCK;                   \
                for (int64_t i = 0; i < n; i++) {                                                            \
                    sum[i] = own[0] * (double)rows[0][begin + i];                                            \
                }                                                                                            \
                for (int64_t r = 1; r < p; r++) {                                                            \
                    for (int64_t i = 0; i < n; i++) {                                                        \
                        sum[i] += own[r] * (double)rows[r][begin + i];                                       \
                    }                                                                                        \
                }                                                                                            \
                for (int64_t i = 0; i < n; i++) {                                                            \
                    out[begin + i] = (REAL)sum[i];                                                           \
                }                                                                                            \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* Whether no element's size is above `most`, and none is NaN. */                                        \
    int within_##NAME(const REAL *v, int64_t n, REAL most)                                                   \
    {                                                                                                        \
        int bad = 0;                                                                                         \
        _Pragma("omp simd reduction(| : bad)") for (int64_t i = 0; i < n; i++)                               \
        {                                                                                                    \
            bad |= (v[i] <= most && v[i] >= -most) ? 0 : 1;                                                  \
        }                                                                                                    \
        return !bad;                                                                                         \
    }

DEFINE(float32, float)
DEFINE(float64, double)
