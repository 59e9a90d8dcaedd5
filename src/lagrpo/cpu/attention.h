/* What attention is made of, up to QUERIES queries at a time.
 *
 * Numbers that are multiplied lie in lanes. In bfloat16 that halves the work: a key's pairs run along its numbers, a
 * value's along the tokens, starting with the first token of a segment. Scores and sums are float32; weights are rounded
 * to bfloat16 for their product with the values, as in fused attention elsewhere. */

#ifndef LAGRPO_ATTENTION_H
#define LAGRPO_ATTENTION_H

#include "kernels.h"
#include "vectors.h"
#include <stdio.h>
#include <stdlib.h>

#if defined(__AVX512F__)
enum { VECTORS = 4 };
#else
enum { VECTORS = 2 };
#endif
enum { QUERIES = 4, TILE = VECTORS * W }; /* QUERIES * VECTORS sums stay in registers */

/* Rows of lanes, `stride` lanes apart. */
typedef struct {
    const float *at;
    i64 stride;
} Lanes;

/* Rows of one query each: scores that become weights, queries, and weighted sums of values. */
typedef struct {
    float *scores, *queries, *mix;
    i64 room; /* between rows of scores */
} Scratch;

static inline float *room_for(i64 numbers) {
    float *room = malloc(numbers * sizeof *room);
    if (!room) {
        fprintf(stderr, "lagrpo: no memory for %lld numbers of attention\n", (long long)numbers);
        abort();
    }
    return room;
}

/* For sequences of up to `tokens` tokens; to be freed by its scores. */
static inline Scratch scratch_for(i64 tokens, i64 d) {
    i64 room = tokens + 2 * LANES;
    float *s = room_for(QUERIES * room + 2 * QUERIES * d);
    return (Scratch){s, s + QUERIES * room, s + QUERIES * room + QUERIES * d, room};
}

/* one copy of the code for each number of queries, so that their sums stay in registers */
#define FOR_QUERIES(nq, call)                                                                                          \
    switch (nq) {                                                                                                      \
        case 1: { enum { Q = 1 }; call; break; }                                                                       \
        case 2: { enum { Q = 2 }; call; break; }                                                                       \
        case 3: { enum { Q = 3 }; call; break; }                                                                       \
        default: { enum { Q = 4 }; call; break; }                                                                      \
    }

INLINE void products_tile(int nq, int vectors, i64 d, const float *q, Lanes kt, float *s, i64 room, int half) {
    vec total[QUERIES][VECTORS];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) total[a][j] = all(0);
    for (i64 c = 0; c < d; c++) {
        vec k[VECTORS];
        for (int j = 0; j < vectors; j++) k[j] = lanes(kt.at, c * kt.stride + j * W);
        for (int a = 0; a < nq; a++)
            for (int j = 0; j < vectors; j++)
                total[a][j] = add_product(total[a][j], k[j], same_lanes(q, a * d + c), half);
    }
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) memcpy(s + a * room + j * W, &total[a][j], sizeof(vec));
}

/* s[a][key] = q[a] . k[key] for keys 0 .. n-1 (up to W - 1 more are written). q [nq, d] and kt [d, n] in d lanes; s
 * float32, its rows `room` apart. */
INLINE void products(int nq, i64 d, const float *q, Lanes kt, i64 n, float *s, i64 room, int half) {
    for (; n > TILE - W; n -= TILE, kt.at += TILE, s += TILE) products_tile(nq, VECTORS, d, q, kt, s, room, half);
    if (VECTORS > 3 && n > 2 * W) products_tile(nq, 3, d, q, kt, s, room, half);
    else if (VECTORS > 2 && n > W) products_tile(nq, 2, d, q, kt, s, room, half);
    else if (n > 0) products_tile(nq, 1, d, q, kt, s, room, half);
}

INLINE void mixture_tile(int nq, int vectors, i64 d, Lanes p, Lanes v, i64 n, float *out, int half) {
    vec total[QUERIES][VECTORS];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) total[a][j] = load(out, a * d + j * W, 0);
    for (i64 key = 0; key < n; key++) {
        vec x[VECTORS];
        for (int j = 0; j < vectors; j++) x[j] = lanes(v.at, key * v.stride + j * W);
        for (int a = 0; a < nq; a++)
            for (int j = 0; j < vectors; j++)
                total[a][j] = add_product(total[a][j], x[j], same_lanes(p.at, a * p.stride + key), half);
    }
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) memcpy(out + a * d + j * W, &total[a][j], sizeof(vec));
}

/* out[a] += sum over keys of p[a][key] v[key], lane after lane, of n tokens: in the rows of p, and from row to row of v.
 * out float32 [nq, d]. */
INLINE void mixture(int nq, i64 d, Lanes p, Lanes v, i64 n, float *out, int half) {
    i64 c = 0, rows = half ? (n + 1) / 2 : n;
    for (; c + TILE <= d; c += TILE) mixture_tile(nq, VECTORS, d, p, (Lanes){v.at + c, v.stride}, rows, out + c, half);
    for (; c < d; c += W) mixture_tile(nq, 1, d, p, (Lanes){v.at + c, v.stride}, rows, out + c, half);
}

/* s <- exp(scaling s - max) over n numbers, zeros up to the next multiple of LANES, in the place of s as bfloat16 (half);
 * returns log sum exp, and the sum. */
INLINE float softmax(float *s, i64 n, float scaling, float *total, int half) {
    vec top = all(-INFINITY), sums[PARTS] = {all(0)};
    for (i64 i = n; i % LANES; i++) s[i] = -INFINITY;
    for (i64 i = 0; i < n; i += W) {
        vec x = load(s, i, 0) * all(scaling);
        top = larger(x, top);
        store(s, i, x, 0);
    }
    float highest = largest(top);
    FOR_PARTS(i, p, 0, n) {
        vec e = exponential(load(s, i, 0) - all(highest));
        sums[p] += e;
        store(s, i, e, half);
    }
    *total = sum(sums);
    return highest + logf(*total);
}

/* Numbers `first` .. `stop` - 1 of x are 0. */
INLINE void clear(void *x, i64 first, i64 stop, int half) {
    if (first < stop) memset((void *)at(x, first, half), 0, (stop - first) * (half ? 2 : 4));
}

/* A segment's own tokens come behind its prefix where a pair begins. */
INLINE i64 even(i64 n) { return n + n % 2; }

/* A row of sums, divided, as d numbers of out from `to` on. */
INLINE void store_quotient(void *out, i64 to, const float *sums, float divisor, i64 d, int half) {
    for (i64 c = 0; c < d; c += W) store(out, to + c, load(sums, c, 0) / all(divisor), half);
}

#endif
