/* The parts of attention, for up to QUERIES queries at a time: they share the loads of keys and values.
 *
 * Numbers that are multiplied lie in lanes (vectors.h). In bfloat16 a lane is a pair, which halves the work: the pairs
 * of a key run along its numbers, the pairs of a value along the tokens, from the first token of a segment on. Scores
 * and sums are float32. Weights are rounded to bfloat16 for their product with the values, as in fused attention
 * elsewhere.
 *
 * Shapes in the comments: Q queries, d numbers of a head, n keys. "d lanes" are d / 2 pairs in bfloat16. */

#ifndef LAGRPO_ATTENTION_H
#define LAGRPO_ATTENTION_H

#include "kernels.h"
#include "vectors.h"
#include <stdio.h>
#include <stdlib.h>

/* QUERIES * VECTORS sums stay in registers: AVX-512 has 32 of them, other processors 16. */
#if defined(__AVX512F__)
enum { VECTORS = 4 };
#else
enum { VECTORS = 2 };
#endif
enum { QUERIES = 4, TILE = VECTORS * W };

/* Rows of lanes, `stride` lanes apart. */
typedef struct {
    const float *at;
    i64 stride;
} Lanes;

/* Room of one thread: for each query a row of scores, which become weights; the query [d]; its weighted sum of values
 * [d]. Rows of scores are `room` numbers apart. */
typedef struct {
    float *scores, *queries, *mix;
    i64 room;
} Scratch;

static inline float *room_for(i64 numbers) {
    float *room = malloc(numbers * sizeof *room);
    if (!room) {
        fprintf(stderr, "lagrpo: no memory for %lld numbers of attention\n", (long long)numbers);
        abort();
    }
    return room;
}

/* Room for sequences of up to `tokens` tokens. free(scores) frees all of it. A row has one number more if the prompt is
 * odd, and whole vectors are written behind the last key: 2 LANES are enough for both. */
static inline Scratch scratch_for(i64 tokens, i64 d) {
    i64 room = tokens + 2 * LANES;
    float *s = room_for(QUERIES * room + 2 * QUERIES * d);
    return (Scratch){.scores = s,
                     .queries = s + QUERIES * room,
                     .mix = s + QUERIES * room + QUERIES * d,
                     .room = room};
}

/* `call` with Q = nq as a constant: one copy of the code for each number of queries, so that their sums stay in
 * registers. */
#define FOR_QUERIES(nq, call)                                                                                          \
    switch (nq) {                                                                                                      \
        case 1: { enum { Q = 1 }; call; break; }                                                                       \
        case 2: { enum { Q = 2 }; call; break; }                                                                       \
        case 3: { enum { Q = 3 }; call; break; }                                                                       \
        default: { enum { Q = 4 }; call; break; }                                                                      \
    }

/* ---- scores: queries times keys ---- */

/* The scores of `vectors` * W keys. */
INLINE void products_tile(int nq, int vectors, i64 d, const float *q, Lanes kt, float *s, i64 room, int half) {
    vec total[QUERIES][VECTORS];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) total[a][j] = all(0);
    for (i64 c = 0; c < d; c++) {
        vec k[VECTORS]; /* lane c of each key */
        for (int j = 0; j < vectors; j++) k[j] = lanes(kt.at, c * kt.stride + j * W);
        for (int a = 0; a < nq; a++)
            for (int j = 0; j < vectors; j++)
                total[a][j] = add_product(total[a][j], k[j], same_lanes(q, a * d + c), half);
    }
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) memcpy(s + a * room + j * W, &total[a][j], sizeof(vec));
}

/* s[a][key] = q[a] . k[key] for keys 0 .. n - 1; up to W - 1 more are written. q [Q, d lanes]; kt [d lanes, n] as
 * `transpose` leaves it; s float32 [Q, n], its rows `room` apart. A score is one sum over c, in whichever tile it
 * is. */
INLINE void products(int nq, i64 d, const float *q, Lanes kt, i64 n, float *s, i64 room, int half) {
    for (; n > TILE - W; n -= TILE, kt.at += TILE, s += TILE) products_tile(nq, VECTORS, d, q, kt, s, room, half);
    if (VECTORS > 3 && n > 2 * W) products_tile(nq, 3, d, q, kt, s, room, half);
    else if (VECTORS > 2 && n > W) products_tile(nq, 2, d, q, kt, s, room, half);
    else if (n > 0) products_tile(nq, 1, d, q, kt, s, room, half);
}

/* ---- outputs: weights times values ---- */

/* `vectors` * W numbers of each output. */
INLINE void mixture_tile(int nq, int vectors, i64 d, Lanes p, Lanes v, i64 n, float *out, int half) {
    vec total[QUERIES][VECTORS];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) total[a][j] = load(out, a * d + j * W, 0);
    for (i64 key = 0; key < n; key++) {
        vec x[VECTORS]; /* the numbers of a value, or of a pair of values */
        for (int j = 0; j < vectors; j++) x[j] = lanes(v.at, key * v.stride + j * W);
        for (int a = 0; a < nq; a++)
            for (int j = 0; j < vectors; j++)
                total[a][j] = add_product(total[a][j], x[j], same_lanes(p.at, a * p.stride + key), half);
    }
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) memcpy(out + a * d + j * W, &total[a][j], sizeof(vec));
}

/* out[a] += sum over keys of p[a][key] v[key], lane after lane. p [Q, n tokens] and v [n tokens, d] in lanes along the
 * tokens; out float32 [Q, d]. */
INLINE void mixture(int nq, i64 d, Lanes p, Lanes v, i64 n, float *out, int half) {
    i64 rows = half ? (n + 1) / 2 : n; /* of lanes; behind an odd n the weight is 0 */
    i64 c = 0;
    for (; c + TILE <= d; c += TILE) mixture_tile(nq, VECTORS, d, p, (Lanes){v.at + c, v.stride}, rows, out + c, half);
    for (; c < d; c += W) mixture_tile(nq, 1, d, p, (Lanes){v.at + c, v.stride}, rows, out + c, half);
}

/* ---- between the two ---- */

/* s <- exp(scaling s - max) over n numbers, and zeros up to the next multiple of LANES. With `half` the results are
 * bfloat16, in the place of s: they take half the room, so nothing is overwritten before it is read. Returns
 * log sum exp(scaling s), and in `total` the sum of the results before they are rounded. */
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

/* Numbers `first` .. `stop` - 1 of x become 0. */
INLINE void clear(void *x, i64 first, i64 stop, int half) {
    if (first < stop) memset((void *)at(x, first, half), 0, (stop - first) * (half ? 2 : 4));
}

/* The smallest even number that is not less than n. In a row of scores, a segment's own keys come behind `even` of its
 * prompt's: there a pair of weights begins, as the pairs of values do. The score between is -infinity. */
INLINE i64 even(i64 n) { return n + n % 2; }

/* d numbers of out, from `to` on, become the sums divided by `divisor`. */
INLINE void store_quotient(void *out, i64 to, const float *sums, float divisor, i64 d, int half) {
    for (i64 c = 0; c < d; c += W) store(out, to + c, load(sums, c, 0) / all(divisor), half);
}

#endif
