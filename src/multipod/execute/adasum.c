/* The arithmetic of Adasum on a host: dots in double, a blend that is rounded once, and a check for what is not finite.
 *
 * The reductions may be done in any order (`omp simd`), so their last bits depend on the processor's vectors.
 */
#include <stdint.h>

#define DEFINE(NAME, REAL)                                                                     \
    /* out: a.b, a.a, b.b of n elements. */                                                    \
    void products_##NAME(const REAL *a, const REAL *b, int64_t n, double out[3])               \
    {                                                                                          \
        double ab = 0, aa = 0, bb = 0;                                                         \
        _Pragma("omp simd reduction(+ : ab, aa, bb)") for (int64_t i = 0; i < n; i++)          \
        {                                                                                      \
            const double x = (double)a[i], y = (double)b[i];                                   \
            ab += x * y;                                                                       \
            aa += x * x;                                                                       \
            bb += y * y;                                                                       \
        }                                                                                      \
        out[0] = ab;                                                                           \
        out[1] = aa;                                                                           \
        out[2] = bb;                                                                           \
    }                                                                                          \
                                                                                               \
    /* mine = own * mine + other * theirs. */                                                  \
    void blend_##NAME(REAL *restrict mine, const REAL *restrict theirs, int64_t n, double own, \
                      double other)                                                            \
    {                                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                      \
            mine[i] = (REAL)(own * (double)mine[i] + other * (double)theirs[i]);               \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    /* Whether no element's size is above `most`, and none is NaN. */                          \
    int within_##NAME(const REAL *v, int64_t n, REAL most)                                     \
    {                                                                                          \
        int bad = 0;                                                                           \
        _Pragma("omp simd reduction(| : bad)") for (int64_t i = 0; i < n; i++)                 \
        {                                                                                      \
            bad |= (v[i] <= most && v[i] >= -most) ? 0 : 1;                                    \
        }                                                                                      \
        return !bad;                                                                           \
    }

DEFINE(float32, float)
DEFINE(float64, double)
