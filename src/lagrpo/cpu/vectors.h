/* W numbers at a time, as many as a register of this machine holds, by GCC's vector extensions.
 *
 * A sum along a row has LANES partial sums whatever W is, so every machine adds up in the same order. In memory numbers
 * are float32 or bfloat16 (`half`: bfloat16), in registers float32. */

#ifndef LAGRPO_VECTORS_H
#define LAGRPO_VECTORS_H

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif
enum { LANES = 16, PARTS = LANES / W }; /* partial sums of a sum, and the registers that they take */

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* For each vector i of `first` .. stop - 1, and up to LANES - W numbers more: p is the number of its partial sums. */
#define FOR_PARTS(i, p, first, stop)                                                                                   \
    for (i64 i = (first); i < (stop);)                                                                                 \
        _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++, i += W)

/* `call`, compiled for either dtype: HALF is a constant in it. */
#define FOR_DTYPE(half, call)                                                                                          \
    do {                                                                                                               \
        if (half) { enum { HALF = 1 }; call; }                                                                         \
        else { enum { HALF = 0 }; call; }                                                                              \
    } while (0)

/* ---- numbers in memory ---- */

INLINE vec all(float x) { return x - (vec){}; } /* W times x; -0 stays -0, which x + 0 would not keep */

/* The address of number i. */
INLINE const void *at(const void *p, i64 i, int half) { return (const char *)p + i * (half ? 2 : 4); }

/* Numbers i .. i + W - 1. memcpy is one instruction here, and p need not be aligned. */
INLINE vec load(const void *p, i64 i, int half) {
    vec x;
    if (half) {
        hvec h;
        memcpy(&h, at(p, i, 1), sizeof h);
        x = (vec)(__builtin_convertvector(h, uvec) << 16);
    } else {
        memcpy(&x, at(p, i, 0), sizeof x);
    }
    return x;
}

/* x rounded to bfloat16, to nearest, ties to even, as the low 16 bits of each element; NaN stays NaN. */
INLINE uvec bf16_bits(vec x) {
    uvec u = (uvec)x, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (uvec)(x != x);
    return (nan & 0x7fc0) | (~nan & rounded);
}

/* x as it would be read back after a store. */
INLINE vec rounded(vec x, int half) { return half ? (vec)(bf16_bits(x) << 16) : x; }

INLINE void store(void *p, i64 i, vec x, int half) {
    if (half) {
        hvec h = __builtin_convertvector(bf16_bits(x), hvec);
        memcpy((void *)at(p, i, 1), &h, sizeof h);
    } else {
        memcpy((void *)at(p, i, 0), &x, sizeof x);
    }
}

/* As `load`, with `fill` in the place of the numbers from `stop` on, which are not read. */
INLINE vec load_some(const void *p, i64 i, i64 stop, float fill, int half) {
    if (i + W <= stop) return load(p, i, half);
    float some[W];
    for (int j = 0; j < W; j++) {
        some[j] = fill;
        if (i + j < stop) {
            if (half) {
                uint32_t u = (uint32_t)((const uint16_t *)p)[i + j] << 16;
                memcpy(&some[j], &u, 4);
            } else {
                some[j] = ((const float *)p)[i + j];
            }
        }
    }
    return load(some, 0, 0);
}

/* As `store`; the numbers from `stop` on are not written. */
INLINE void store_some(void *p, i64 i, i64 stop, vec x, int half) {
    if (i + W <= stop) {
        store(p, i, x, half);
        return;
    }
    uvec bits = half ? bf16_bits(x) : (uvec)x;
    for (int j = 0; i + j < stop; j++) {
        if (half) ((uint16_t *)p)[i + j] = (uint16_t)bits[j];
        else memcpy((float *)p + i + j, (uint32_t *)&bits + j, 4);
    }
}

/* ---- lanes: one float32, or two bfloat16 that are neighbors in a sum ---- */

INLINE vec lanes(const void *p, i64 i) { return load(p, i, 0); }

INLINE vec same_lanes(const void *p, i64 i) { /* one lane, W times */
    int32_t lane;
    memcpy(&lane, (const char *)p + i * 4, sizeof lane);
    return (vec)((ivec){} + lane);
}

/* total + x y for each lane. Of a pair first the second product is added, then the first, each rounded, as
 * AVX512-BF16's instruction does it. */
INLINE vec add_product(vec total, vec x, vec y, int half) {
    if (!half) return total + x * y;
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)y);
#else
    uvec a = (uvec)x, b = (uvec)y, high = (uvec){} + 0xffff0000u;
    total += (vec)(a & high) * (vec)(b & high);
    return total + (vec)(a << 16) * (vec)(b << 16);
#endif
}

/* ---- functions of a vector ---- */

/* a where the mask is set, else b. */
INLINE vec choose(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

INLINE vec larger(vec a, vec b) { return choose((a > b) | (a != a), a, b); } /* a NaN in a comes through */

/* The sum of PARTS vectors: LANES partial sums, halved four times. */
INLINE float sum(const vec *parts) {
    float s[LANES];
    memcpy(s, parts, sizeof s);
    for (int step = LANES / 2; step; step /= 2)
        for (int j = 0; j < step; j++) s[j] += s[j + step];
    return s[0];
}

INLINE float largest(vec x) {
    float top = x[0];
    for (int j = 1; j < W; j++) top = x[j] > top || x[j] != x[j] ? x[j] : top;
    return top;
}

/* e^x to 1 unit in the last place; 0 below -87, infinity above 88.3. e^x = 2^n e^r, with n the integer nearest to
 * x / log 2 and r the rest, for which a polynomial of degree 7 is enough (the coefficients of Cephes' expf). */
INLINE vec exponential(vec x) {
    /* 1.5 * 2^23: a float32 of that size has no fraction, so adding it rounds. */
    vec n = (x * all(1.44269504f) + all(12582912.f)) - all(12582912.f);
    n = choose(x < -87.f, all(0), choose(x > 88.3f, all(0), n));
    vec r = x - n * all(0.693359375f) - n * all(-2.12194440e-4f); /* log 2 in two parts: the first product is exact */
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.f);
    p = (vec)((ivec)p + (__builtin_convertvector(n, ivec) << 23)); /* n more in the exponent: times 2^n */
    p = choose(x < -87.f, all(0.f), choose(x > 88.3f, all(INFINITY), p));
    return choose(x == x, p, x);
}

INLINE vec sigmoid(vec x) { return all(1.f) / (all(1.f) + exponential(-x)); }

#endif
