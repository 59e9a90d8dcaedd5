/* The arithmetic between the matrix products of a decoder model, on a CPU: norms, rotary embedding, the gated
 * activation, shared-prefix attention, and the softmax over the vocabulary; and whole decoding steps, made of these and of the
 * products of products.c.
 *
 * What comes out for a row does not depend on the rows around it, on the number of threads or on how the work is cut:
 * sums run in an order that only the place in the row decides. Sampler and learner share these functions, so they agree
 * to the bit. */

#include "products.h"
#include "vectors.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BLOCK = 256, QUERIES = 4, TILE = 4 * W };

static float *room_for(i64 numbers) {
    float *room = malloc(numbers * sizeof *room);
    if (!room) {
        fprintf(stderr, "lagrpo: no memory for %lld numbers of attention\n", (long long)numbers);
        abort();
    }
    return room;
}

/* ---- functions of a vector ---- */

INLINE vec choose(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

INLINE vec larger(vec a, vec b) { return choose((a > b) | (a != a), a, b); } /* a NaN in a comes through */

INLINE float sum(vec x) {
    float s[W];
    memcpy(s, &x, sizeof s);
    for (int step = W / 2; step; step /= 2)
        for (int j = 0; j < step; j++) s[j] += s[j + step];
    return s[0];
}

INLINE float largest(vec x) {
    float top = x[0];
    for (int j = 1; j < W; j++) top = x[j] > top || x[j] != x[j] ? x[j] : top;
    return top;
}

INLINE vec exponential(vec x) { /* e^x to 1 unit in the last place; 0 below -87, infinity above 88.3 */
    vec n = (x * all(1.44269504f) + all(12582912.f)) - all(12582912.f); /* nearest integer to x / log 2 */
    n = choose(x < -87.f, all(0), choose(x > 88.3f, all(0), n));
    vec r = x - n * all(0.693359375f) - n * all(-2.12194440e-4f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.f);
    p = (vec)((ivec)p + (__builtin_convertvector(n, ivec) << 23));
    p = choose(x < -87.f, all(0.f), choose(x > 88.3f, all(INFINITY), p));
    return choose(x == x, p, x);
}

INLINE vec sigmoid(vec x) { return all(1.f) / (all(1.f) + exponential(-x)); }

/* ---- root mean square norm ---- */

/* total = x + delta (where there is a delta), y = w * (total / rms(total)), rounded as transformers rounds; rstd = 1 /
 * rms. x, delta, total, y [n, width]; w [width]; rstd [n]. */
INLINE void norm_any(i64 n, i64 width, const void *x, const void *delta, const void *w, float eps, void *total,
                     void *y, float *rstd, int half) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++) {
        i64 first = row * width, stop = first + width;
        vec squares = all(0);
        for (i64 i = first; i < stop; i += W) {
            vec v = load_some(x, i, stop, 0, half);
            if (delta) {
                v = rounded(v + load_some(delta, i, stop, 0, half), half);
                store_some(total, i, stop, v, half);
            }
            squares += v * v;
        }
        const void *source = delta ? total : x;
        float r = 1.f / sqrtf(sum(squares) / (float)width + eps);
        rstd[row] = r;
        for (i64 i = first; i < stop; i += W) {
            vec v = rounded(load_some(source, i, stop, 0, half) * all(r), half);
            store_some(y, i, stop, v * load_some(w, i - first, width, 0, half), half);
        }
    }
}

EXPORT void norm(i64 n, i64 width, const void *x, const void *delta, const void *w, float eps, void *total, void *y,
                 float *rstd, int half) {
    if (half) norm_any(n, width, x, delta, w, eps, total, y, rstd, 1);
    else norm_any(n, width, x, delta, w, eps, total, y, rstd, 0);
}

/* grad_x = grad_total + r (g - xhat mean(g xhat)), g = w grad_y, xhat = r x; grad_w [slices, width] float32: the sums
 * of grad_y xhat over `slices` equal runs of rows, to be added up by the caller in their order. */
INLINE void norm_backward_any(i64 n, i64 width, const void *x, const void *w, const float *rstd, const void *grad_y,
                              const void *grad_total, void *grad_x, float *grad_w, i64 slices, int half) {
#pragma omp parallel for schedule(static)
    for (i64 slice = 0; slice < slices; slice++) {
        float *gw = grad_w + slice * width;
        memset(gw, 0, width * sizeof *gw);
        for (i64 row = n * slice / slices; row < n * (slice + 1) / slices; row++) {
            i64 first = row * width, stop = first + width;
            vec products = all(0), r = all(rstd[row]);
            for (i64 i = first; i < stop; i += W) {
                vec g = load_some(grad_y, i, stop, 0, half), xhat = load_some(x, i, stop, 0, half) * r;
                store_some(gw, i - first, width, load_some(gw, i - first, width, 0, 0) + g * rounded(xhat, half), 0);
                products += g * load_some(w, i - first, width, 0, half) * xhat;
            }
            vec mean = all(sum(products) / (float)width);
            for (i64 i = first; i < stop; i += W) {
                vec g = load_some(grad_y, i, stop, 0, half) * load_some(w, i - first, width, 0, half);
                vec gx = r * (g - load_some(x, i, stop, 0, half) * r * mean);
                if (grad_total) gx += load_some(grad_total, i, stop, 0, half);
                store_some(grad_x, i, stop, gx, half);
            }
        }
    }
}

EXPORT void norm_backward(i64 n, i64 width, const void *x, const void *w, const float *rstd, const void *grad_y,
                          const void *grad_total, void *grad_x, float *grad_w, i64 slices, int half) {
    if (half) norm_backward_any(n, width, x, w, rstd, grad_y, grad_total, grad_x, grad_w, slices, 1);
    else norm_backward_any(n, width, x, w, rstd, grad_y, grad_total, grad_x, grad_w, slices, 0);
}

/* ---- gated activation: y = silu(gate) * up ---- */

/* gate and up [n, width] with rows `stride` numbers apart; y [n, width]. */
INLINE void swiglu_any(i64 n, i64 width, const void *gate, const void *up, i64 stride, void *y, int half) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++)
        for (i64 i = 0; i < width; i += W) {
            i64 from = row * stride, to = row * width;
            vec g = load_some(gate, from + i, from + width, 0, half), u = load_some(up, from + i, from + width, 0, half);
            store_some(y, to + i, to + width, rounded(g * sigmoid(g), half) * u, half);
        }
}

EXPORT void swiglu(i64 n, i64 width, const void *gate, const void *up, i64 stride, void *y, int half) {
    if (half) swiglu_any(n, width, gate, up, stride, y, 1);
    else swiglu_any(n, width, gate, up, stride, y, 0);
}

/* Gradients of `swiglu`: grad_y, grad_gate and grad_up [n, width]. */
INLINE void swiglu_backward_any(i64 n, i64 width, const void *gate, const void *up, i64 stride, const void *grad_y,
                                void *grad_gate, void *grad_up, int half) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++)
        for (i64 i = 0; i < width; i += W) {
            i64 from = row * stride, to = row * width, stop = to + width;
            vec g = load_some(gate, from + i, from + width, 0, half), u = load_some(up, from + i, from + width, 0, half);
            vec gy = load_some(grad_y, to + i, stop, 0, half), s = sigmoid(g);
            store_some(grad_up, to + i, stop, gy * g * s, half);
            store_some(grad_gate, to + i, stop, gy * u * s * (all(1.f) + g * (all(1.f) - s)), half);
        }
}

EXPORT void swiglu_backward(i64 n, i64 width, const void *gate, const void *up, i64 stride, const void *grad_y,
                            void *grad_gate, void *grad_up, int half) {
    if (half) swiglu_backward_any(n, width, gate, up, stride, grad_y, grad_gate, grad_up, 1);
    else swiglu_backward_any(n, width, gate, up, stride, grad_y, grad_gate, grad_up, 0);
}

/* ---- rotary position embedding ---- */

/* y = x cos + rotate(x) sin, rotate(x) = (-x_second, x_first) of the two halves of a head; sign = -1: its transpose.
 * x [n, heads, d] with rows `stride` numbers apart, y [n, heads, d], cos and sin [n, d]; d a multiple of 2 W. */
INLINE void rotary_any(i64 n, i64 heads, i64 d, const void *x, i64 stride, const void *cosine, const void *sine,
                       float sign, void *y, int half) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++)
        for (i64 head = 0; head < heads; head++) {
            i64 from = row * stride + head * d, to = (row * heads + head) * d, m = d / 2;
            for (i64 i = 0; i < m; i += W) {
                vec a = load(x, from + i, half), b = load(x, from + m + i, half), s = all(sign);
                vec ca = load(cosine, row * d + i, half), cb = load(cosine, row * d + m + i, half);
                vec sa = load(sine, row * d + i, half) * s, sb = load(sine, row * d + m + i, half) * s;
                store(y, to + i, rounded(a * ca, half) + rounded(-b * sa, half), half);
                store(y, to + m + i, rounded(b * cb, half) + rounded(a * sb, half), half);
            }
        }
}

EXPORT void rotary(i64 n, i64 heads, i64 d, const void *x, i64 stride, const void *cosine, const void *sine, float sign,
                   void *y, int half) {
    if (half) rotary_any(n, heads, d, x, stride, cosine, sine, sign, y, 1);
    else rotary_any(n, heads, d, x, stride, cosine, sine, sign, y, 0);
}

/* ---- attention: up to QUERIES queries at a time ---- */

/* Numbers that are multiplied lie in lanes. In bfloat16 that halves the work: a key's pairs run along its numbers, a
 * value's along the tokens, starting with the first token of a segment. Scores and sums are float32, weights are rounded
 * to bfloat16 for their product with the values, as in fused attention elsewhere. */

INLINE void products_tile(int nq, int vectors, i64 d, const float *q, const float *kt, i64 stride, i64 key, float *s,
                          i64 room, int half) {
    vec total[QUERIES][4];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) total[a][j] = all(0);
    for (i64 c = 0; c < d; c++) {
        vec k[4];
        for (int j = 0; j < vectors; j++) k[j] = lanes(kt, c * stride + key + j * W);
        for (int a = 0; a < nq; a++)
            for (int j = 0; j < vectors; j++)
                total[a][j] = add_product(total[a][j], k[j], same_lanes(q, a * d + c), half);
    }
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) memcpy(s + a * room + key + j * W, &total[a][j], sizeof(vec));
}

/* s[a][key] = q[a] . k[key] for keys 0 .. n-1 (up to W - 1 more are written). q [nq, d] and kt [d, n] in d lanes, rows of
 * kt `stride` lanes apart; s float32, its rows `room` apart. */
INLINE void products(int nq, i64 d, const float *q, const float *kt, i64 stride, i64 n, float *s, i64 room, int half) {
    i64 key = 0;
    for (; key + 3 * W < n; key += TILE) products_tile(nq, 4, d, q, kt, stride, key, s, room, half);
    if (key + 2 * W < n) products_tile(nq, 3, d, q, kt, stride, key, s, room, half);
    else if (key + W < n) products_tile(nq, 2, d, q, kt, stride, key, s, room, half);
    else if (key < n) products_tile(nq, 1, d, q, kt, stride, key, s, room, half);
}

INLINE void mixture_tile(int nq, int vectors, i64 d, const float *p, i64 room, const float *v, i64 stride, i64 n,
                         float *out, i64 c, int half) {
    vec total[QUERIES][4];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) total[a][j] = load(out, a * d + c + j * W, 0);
    for (i64 key = 0; key < n; key++) {
        vec x[4];
        for (int j = 0; j < vectors; j++) x[j] = lanes(v, key * stride + c + j * W);
        for (int a = 0; a < nq; a++)
            for (int j = 0; j < vectors; j++)
                total[a][j] = add_product(total[a][j], x[j], same_lanes(p, a * room + key), half);
    }
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) memcpy(out + a * d + c + j * W, &total[a][j], sizeof(vec));
}

/* out[a] += sum over keys of p[a][key] v[key], lane after lane: of `n` tokens, in the rows of p and from row to row of v,
 * `room` and `stride` lanes apart. out float32 [nq, d]. */
INLINE void mixture(int nq, i64 d, const float *p, i64 room, const float *v, i64 stride, i64 n, float *out, int half) {
    i64 c = 0, rows = half ? (n + 1) / 2 : n;
    for (; c + TILE <= d; c += TILE) mixture_tile(nq, 4, d, p, room, v, stride, rows, out, c, half);
    for (; c < d; c += W) mixture_tile(nq, 1, d, p, room, v, stride, rows, out, c, half);
}

/* one copy of the code for each number of queries, so that their sums stay in registers */
#define FOR_QUERIES(nq, call)                                                                                          \
    switch (nq) {                                                                                                      \
        case 1: { enum { Q = 1 }; call; break; }                                                                       \
        case 2: { enum { Q = 2 }; call; break; }                                                                       \
        case 3: { enum { Q = 3 }; call; break; }                                                                       \
        default: { enum { Q = 4 }; call; break; }                                                                      \
    }

/* s <- exp(scaling s - max) over n numbers, zeros up to the next multiple of W, in the place of s as bfloat16 (half);
 * returns log sum exp, and the sum. */
INLINE float softmax(float *s, i64 n, float scaling, float *total, int half) {
    vec top = all(-INFINITY), sums = all(0);
    for (i64 i = n; i % W; i++) s[i] = -INFINITY;
    for (i64 i = 0; i < n; i += W) {
        vec x = load(s, i, 0) * all(scaling);
        top = larger(x, top);
        store(s, i, x, 0);
    }
    float highest = largest(top);
    for (i64 i = 0; i < n; i += W) {
        vec e = exponential(load(s, i, 0) - all(highest));
        sums += e;
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

/* kt[h][c][row] = k[row][h][c] in lanes, rows of kt `stride` >= n + W apart. */
EXPORT void transpose(i64 n, i64 heads, i64 d, const uint32_t *k, uint32_t *kt, i64 stride) {
#pragma omp parallel for schedule(static) collapse(2)
    for (i64 h = 0; h < heads; h++)
        for (i64 first = 0; first < n; first += TILE)
            for (i64 c = 0; c < d; c++)
                for (i64 row = first; row < first + TILE && row < n; row++)
                    kt[(h * d + c) * stride + row] = k[(row * heads + h) * d + c];
}

/* y[row] = the pairs of x[row] and x[row + 1], of x[n - 1] and 0: x bfloat16 [n, width], y lanes [n, width]. */
EXPORT void pair_rows(i64 n, i64 width, const uint16_t *x, uint32_t *y) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++)
        for (i64 c = 0; c < width; c++)
            y[row * width + c] = x[row * width + c] | (row + 1 < n ? (uint32_t)x[(row + 1) * width + c] << 16 : 0);
}

/* A segment of a packed row: rows first .. first + length - 1, attending causally to themselves and to all of
 * prefix_first .. prefix_first + prefix_length - 1. */
typedef struct { i64 first, length, prefix_first, prefix_length; } Segment;

/* The QUERIES or fewer queries number `block` .. of a segment and a key head: token after token, and within a token the
 * `repeats` query heads of the key head. keys: how many of the segment's own each attends to; own: the most of these. */
typedef struct { int nq; i64 row[QUERIES], head[QUERIES], keys[QUERIES], own; } Queries;

INLINE Queries queries_of(const Segment *s, i64 block, i64 repeats, i64 kv_head) {
    Queries q = {.nq = 0};
    for (i64 f = block; f < s->length * repeats && q.nq < QUERIES; f++, q.nq++) {
        i64 t = f / repeats;
        q.row[q.nq] = s->first + t;
        q.head[q.nq] = kv_head * repeats + f % repeats;
        q.keys[q.nq] = q.own = t + 1;
    }
    return q;
}

static i64 longest_of(const Segment *segments, i64 n) {
    i64 longest = 0;
    for (i64 i = 0; i < n; i++)
        if (segments[i].prefix_length + segments[i].length > longest)
            longest = segments[i].prefix_length + segments[i].length;
    return longest;
}

/* q, out [rows, heads, d]; k_t as `transpose` leaves it, v as `pair_rows` does (float32: as it is); lse [rows, heads]. */
INLINE void attention_any(i64 count, const Segment *segments, i64 heads, i64 kv_heads, i64 d, const void *q,
                          const float *k_t, i64 stride, const float *v, float scaling, void *out, float *lse, int half) {
    i64 repeats = heads / kv_heads, room = longest_of(segments, count) + 2 * W, dl = half ? d / 2 : d;
#pragma omp parallel
    {
        float *s = room_for(QUERIES * room + 2 * QUERIES * d), *qs = s + QUERIES * room, *mix = qs + QUERIES * d;
#pragma omp for schedule(dynamic, 1)
        for (i64 task = 0; task < count * kv_heads; task++) {
            const Segment *g = segments + task / kv_heads;
            i64 h = task % kv_heads, width = kv_heads * d, step = half ? 2 * width : width;
            i64 P = g->prefix_length, own = even(P), split = half ? own / 2 : own;
            const float *kt = k_t + h * dl * stride, *vh = v + h * d;
            for (i64 block = 0; block < g->length * repeats; block += QUERIES) {
                Queries b = queries_of(g, block, repeats, h);
                for (int a = 0; a < b.nq; a++)
                    memcpy(qs + a * dl, at(q, (b.row[a] * heads + b.head[a]) * d, half), dl * 4);
                FOR_QUERIES(b.nq, products(Q, dl, qs, kt + g->prefix_first, stride, P, s, room, half);
                            products(Q, dl, qs, kt + g->first, stride, b.own, s + own, room, half))
                float total[QUERIES];
                for (int a = 0; a < b.nq; a++) {
                    if (P < own) s[a * room + P] = -INFINITY;
                    lse[b.row[a] * heads + b.head[a]] = softmax(s + a * room, own + b.keys[a], scaling, total + a, half);
                    clear(s + a * room, own + b.keys[a], own + even(b.own), half);
                }
                memset(mix, 0, QUERIES * d * sizeof *mix);
                FOR_QUERIES(b.nq, mixture(Q, d, s, room, vh + g->prefix_first * width, step, P, mix, half);
                            mixture(Q, d, s + split, room, vh + g->first * width, step, b.own, mix, half))
                for (int a = 0; a < b.nq; a++)
                    for (i64 c = 0; c < d; c += W)
                        store(out, (b.row[a] * heads + b.head[a]) * d + c, load(mix, a * d + c, 0) / all(total[a]), half);
            }
        }
        free(s);
    }
}

EXPORT void attention(i64 count, const Segment *segments, i64 heads, i64 kv_heads, i64 d, const void *q, const float *k_t,
                      i64 stride, const float *v, float scaling, void *out, float *lse, int half) {
    if (half) attention_any(count, segments, heads, kv_heads, d, q, k_t, stride, v, scaling, out, lse, 1);
    else attention_any(count, segments, heads, kv_heads, d, q, k_t, stride, v, scaling, out, lse, 0);
}

INLINE void spread_tile(int nq, int vectors, i64 d, const float *p, i64 room, const float *x, i64 n, float *sums,
                        i64 stride, i64 c, int half) {
    vec xs[QUERIES][4];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) xs[a][j] = lanes(x, a * d + c + j * W);
    for (i64 key = 0; key < n; key++) {
        vec total[4];
        for (int j = 0; j < vectors; j++) total[j] = load(sums, key * stride + c + j * W, 0);
        for (int a = 0; a < nq; a++) {
            vec weight = same_lanes(p, a * room + key);
            for (int j = 0; j < vectors; j++) total[j] = add_product(total[j], weight, xs[a][j], half);
        }
        for (int j = 0; j < vectors; j++) store(sums, key * stride + c + j * W, total[j], 0);
    }
}

/* sums[key] += sum over queries of p[a][key] x[a], pairs of queries (half): p [., n] and x [., d] in lanes, sums [n, d]
 * float32 with rows `stride` apart. */
INLINE void spread(int nq, i64 d, const float *p, i64 room, const float *x, i64 n, float *sums, i64 stride, int half) {
    i64 c = 0, rows = half ? (nq + 1) / 2 : nq;
    for (; c + TILE <= d; c += TILE) spread_tile(rows, 4, d, p, room, x, n, sums, stride, c, half);
    for (; c < d; c += W) spread_tile(rows, 1, d, p, room, x, n, sums, stride, c, half);
}

/* Rows of x, bfloat16 [nq, n] and `room` lanes apart, two by two as lanes [., n], `y_room` apart; a missing row is
 * zeros. float32: x itself. n up to the next multiple of W. */
INLINE const float *two_by_two(int nq, i64 n, const float *x, i64 room, float *y, i64 y_room, int half) {
    if (!half) return x;
    for (int a = 0; a < nq; a += 2)
        for (i64 i = 0; i < n; i += W) {
            uvec second = a + 1 < nq ? (uvec)load(x + (a + 1) * room, i, 1) : (uvec){};
            store(y, a / 2 * y_room + i, (vec)((uvec)load(x + a * room, i, 1) >> 16 | second), 0);
        }
    return y;
}

/* Gradients of `attention`. `groups` [n_groups + 1]: which segments belong to a group, whose rows no other group
 * touches; a group and a key head are one task. k as `pair_rows` leaves it (float32: as it is), k_t and v_t as
 * `transpose` does; grad_k and grad_v float32 [rows, kv_heads, d], zeros at the start. */
INLINE void attention_backward_any(i64 n_groups, const i64 *groups, const Segment *segments, i64 heads, i64 kv_heads,
                                   i64 d, const void *q, const float *k, const float *k_t, i64 stride, const float *v_t,
                                   const void *out, const float *lse, const void *grad_out, float scaling, void *grad_q,
                                   float *grad_k, float *grad_v, int half) {
    i64 repeats = heads / kv_heads, room = longest_of(segments, groups[n_groups]) + 2 * W, width = kv_heads * d;
    i64 dl = half ? d / 2 : d, step = half ? 2 * width : width;
#pragma omp parallel
    {
        float *p = room_for(3 * QUERIES * room + 4 * QUERIES * d), *ds = p + QUERIES * room, *zip = ds + QUERIES * room;
        float *qs = zip + QUERIES * room, *gs = qs + QUERIES * d, *mix = gs + QUERIES * d, *zip_d = mix + QUERIES * d;
#pragma omp for schedule(dynamic, 1)
        for (i64 task = 0; task < n_groups * kv_heads; task++)
            for (i64 segment = groups[task / kv_heads]; segment < groups[task / kv_heads + 1]; segment++) {
                const Segment *g = segments + segment;
                i64 h = task % kv_heads, P = g->prefix_length, own = even(P), split = half ? own / 2 : own;
                i64 before = g->prefix_first, first = g->first;
                const float *kt = k_t + h * dl * stride, *vt = v_t + h * dl * stride, *kh = k + h * d, *weights, *x;
                float *gk = grad_k + h * d, *gv = grad_v + h * d;
                for (i64 block = 0; block < g->length * repeats; block += QUERIES) {
                    Queries b = queries_of(g, block, repeats, h);
                    float inner[QUERIES];
                    for (int a = 0; a < b.nq; a++) {
                        i64 from = (b.row[a] * heads + b.head[a]) * d;
                        memcpy(qs + a * dl, at(q, from, half), dl * 4);
                        memcpy(gs + a * dl, at(grad_out, from, half), dl * 4);
                        vec total = all(0);
                        for (i64 c = 0; c < d; c += W) total += load(out, from + c, half) * load(grad_out, from + c, half);
                        inner[a] = sum(total);
                    }
                    FOR_QUERIES(b.nq, products(Q, dl, qs, kt + before, stride, P, p, room, half);
                                products(Q, dl, qs, kt + first, stride, b.own, p + own, room, half);
                                products(Q, dl, gs, vt + before, stride, P, ds, room, half);
                                products(Q, dl, gs, vt + first, stride, b.own, ds + own, room, half))
                    for (int a = 0; a < b.nq; a++) {
                        float *pa = p + a * room, *dsa = ds + a * room;
                        vec norm = all(lse[b.row[a] * heads + b.head[a]]);
                        if (P < own) pa[P] = -INFINITY, dsa[P] = 0;
                        for (i64 i = 0; i < own + b.keys[a]; i += W) {
                            vec e = exponential(load(pa, i, 0) * all(scaling) - norm);
                            store(dsa, i, (load(dsa, i, 0) - all(inner[a])) * e * all(scaling), half);
                            store(pa, i, e, half);
                        }
                        clear(pa, own + b.keys[a], own + b.own + W, half);
                        clear(dsa, own + b.keys[a], own + b.own + W, half);
                    }
                    memset(mix, 0, QUERIES * d * sizeof *mix);
                    FOR_QUERIES(b.nq, mixture(Q, d, ds, room, kh + before * width, step, P, mix, half);
                                mixture(Q, d, ds + split, room, kh + first * width, step, b.own, mix, half);
                                weights = two_by_two(Q, own + b.own, ds, room, zip, room, half);
                                x = two_by_two(Q, d, qs, dl, zip_d, d, half);
                                spread(Q, d, weights, room, x, P, gk + before * width, width, half);
                                spread(Q, d, weights + own, room, x, b.own, gk + first * width, width, half);
                                weights = two_by_two(Q, own + b.own, p, room, zip, room, half);
                                x = two_by_two(Q, d, gs, dl, zip_d, d, half);
                                spread(Q, d, weights, room, x, P, gv + before * width, width, half);
                                spread(Q, d, weights + own, room, x, b.own, gv + first * width, width, half))
                    for (int a = 0; a < b.nq; a++)
                        for (i64 c = 0; c < d; c += W)
                            store(grad_q, (b.row[a] * heads + b.head[a]) * d + c, load(mix, a * d + c, 0), half);
                }
            }
        free(p);
    }
}

EXPORT void attention_backward(i64 n_groups, const i64 *groups, const Segment *segments, i64 heads, i64 kv_heads, i64 d,
                               const void *q, const float *k, const float *k_t, i64 stride, const float *v_t,
                               const void *out, const float *lse, const void *grad_out, float scaling, void *grad_q,
                               float *grad_k, float *grad_v, int half) {
    if (half)
        attention_backward_any(n_groups, groups, segments, heads, kv_heads, d, q, k, k_t, stride, v_t, out, lse, grad_out,
                               scaling, grad_q, grad_k, grad_v, 1);
    else
        attention_backward_any(n_groups, groups, segments, heads, kv_heads, d, q, k, k_t, stride, v_t, out, lse, grad_out,
                               scaling, grad_q, grad_k, grad_v, 0);
}

/* ---- one token of each active row against its prompt and its own tokens ---- */

/* Puts the new keys and values in their caches and attends. Rows of group g are members[groups[g]] ..; q, out [rows,
 * heads, d]; k, v [rows, kv_heads, d], rows of v `v_stride` numbers apart. Caches in lanes: own keys [rows, kv_heads, d,
 * own_room] and values [rows, kv_heads, own_room, d], of which lengths[row] tokens are filled, half as many lanes along d
 * and along own_room in bfloat16; prompts' likewise [n_groups, kv_heads, ., .]; rooms, in tokens, multiples of 2 W. */
INLINE void decode_any(i64 n_groups, const i64 *groups, const i64 *members, const i64 *prompts, const i64 *lengths,
                       i64 heads, i64 kv_heads, i64 d, const void *q, const void *k, const void *v, i64 v_stride,
                       float *own_keys, float *own_values, i64 own_room, const float *prompt_keys,
                       const float *prompt_values, i64 prompt_room, float scaling, void *out, int half) {
    i64 repeats = heads / kv_heads, room = own_room + prompt_room + 2 * W, dl = half ? d / 2 : d;
#pragma omp parallel
    {
        float *s = room_for(QUERIES * room + 2 * QUERIES * d), *qs = s + QUERIES * room, *mix = qs + QUERIES * d;
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (i64 g = 0; g < n_groups; g++)
            for (i64 h = 0; h < kv_heads; h++) {
                i64 P = prompts[g], own = even(P), split = half ? own / 2 : own, members_of_g = groups[g + 1] - groups[g];
                const float *pk = prompt_keys + (g * kv_heads + h) * dl * prompt_room;
                const float *pv = prompt_values + (g * kv_heads + h) * dl * prompt_room;
                for (i64 m = 0; m < members_of_g; m++) {
                    i64 row = members[groups[g] + m], slot = lengths[row], cache = (row * kv_heads + h) * dl * own_room;
                    const char *new_key = at(k, (row * kv_heads + h) * d, half);
                    const char *new_value = at(v, row * v_stride + h * d, half);
                    for (i64 c = 0; c < dl; c++) memcpy(own_keys + cache + c * own_room + slot, new_key + c * 4, 4);
                    uint16_t *pairs = (uint16_t *)(own_values + cache + slot / 2 * d);
                    if (half)
                        for (i64 c = 0; c < d; c++) pairs[2 * c + slot % 2] = ((const uint16_t *)new_value)[c];
                    else memcpy(own_values + cache + slot * d, new_value, d * 4);
                }
                for (i64 block = 0; block < members_of_g * repeats; block += QUERIES) {
                    i64 row[QUERIES], from[QUERIES], cache[QUERIES];
                    int nq = 0;
                    for (i64 f = block; f < members_of_g * repeats && nq < QUERIES; f++, nq++) {
                        row[nq] = members[groups[g] + f / repeats];
                        from[nq] = (row[nq] * heads + h * repeats + f % repeats) * d;
                        cache[nq] = (row[nq] * kv_heads + h) * dl * own_room;
                        memcpy(qs + nq * dl, at(q, from[nq], half), dl * 4);
                    }
                    FOR_QUERIES(nq, products(Q, dl, qs, pk, prompt_room, P, s, room, half))
                    float total[QUERIES];
                    for (int a = 0, same; a < nq; a += same) { /* the queries of one row share its keys */
                        for (same = 1; a + same < nq && row[a + same] == row[a];) same++;
                        i64 tokens = lengths[row[a]] + 1;
                        FOR_QUERIES(same, products(Q, dl, qs + a * dl, own_keys + cache[a], own_room, tokens,
                                                   s + a * room + own, room, half))
                        for (int b = a; b < a + same; b++) {
                            if (P < own) s[b * room + P] = -INFINITY;
                            softmax(s + b * room, own + tokens, scaling, total + b, half);
                            clear(s + b * room, own + tokens, own + even(tokens), half);
                        }
                    }
                    memset(mix, 0, QUERIES * d * sizeof *mix);
                    FOR_QUERIES(nq, mixture(Q, d, s, room, pv, d, P, mix, half))
                    for (int a = 0, same; a < nq; a += same) {
                        for (same = 1; a + same < nq && row[a + same] == row[a];) same++;
                        FOR_QUERIES(same, mixture(Q, d, s + a * room + split, room, own_values + cache[a], d,
                                                  lengths[row[a]] + 1, mix + a * d, half))
                    }
                    for (int a = 0; a < nq; a++)
                        for (i64 c = 0; c < d; c += W)
                            store(out, from[a] + c, load(mix, a * d + c, 0) / all(total[a]), half);
                }
            }
        free(s);
    }
}

EXPORT void decode(i64 n_groups, const i64 *groups, const i64 *members, const i64 *prompts, const i64 *lengths, i64 heads,
                   i64 kv_heads, i64 d, const void *q, const void *k, const void *v, i64 v_stride, float *own_keys,
                   float *own_values, i64 own_room, const float *prompt_keys, const float *prompt_values,
                   i64 prompt_room, float scaling, void *out, int half) {
    if (half)
        decode_any(n_groups, groups, members, prompts, lengths, heads, kv_heads, d, q, k, v, v_stride, own_keys,
                   own_values, own_room, prompt_keys, prompt_values, prompt_room, scaling, out, 1);
    else
        decode_any(n_groups, groups, members, prompts, lengths, heads, kv_heads, d, q, k, v, v_stride, own_keys,
                   own_values, own_room, prompt_keys, prompt_values, prompt_room, scaling, out, 0);
}

/* ---- a decoding step through all layers, bfloat16 ---- */

typedef struct {
    const void *input_norm, *query_norm, *key_norm, *mlp_norm; /* query_norm, key_norm: none in most families */
    const void *qkv, *output, *gate_up, *down;                 /* packs */
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
} Layer;

typedef struct { i64 layers, width, inner, heads, kv_heads, d; } Sizes;

/* What is left of a strided [rows, heads, d] after its heads' norm, if they have one, and rotary embedding. */
static void turn(i64 rows, i64 heads, i64 d, const uint16_t *x, i64 stride, const void *head_norm, float eps,
                 const void *cosine, const void *sine, uint16_t *y, float *rstd) {
    if (head_norm) {
        for (i64 row = 0; row < rows; row++) memcpy(y + row * heads * d, x + row * stride, heads * d * sizeof *y);
        norm(rows * heads, d, y, NULL, head_norm, eps, NULL, y, rstd, 1);
        x = y, stride = heads * d;
    }
    rotary(rows, heads, d, x, stride, cosine, sine, 1, y, 1);
}

/* x [rows, width], the embeddings of one token per row, becomes the residual stream before the last layer's last
 * addition, delta [rows, width] what is to be added. The other arguments are those of `decode`, caches of all layers:
 * a layer's own keys are own_batch * kv_heads * d / 2 * own_room lanes, those of the prompts n_groups times. */
EXPORT void decode_step(const Sizes *s, const Layer *layers, i64 rows, i64 n_groups, const i64 *groups, const i64 *members,
                        const i64 *prompts, const i64 *lengths, float *own_keys, float *own_values, i64 own_batch,
                        i64 own_room, const float *prompt_keys, const float *prompt_values, i64 prompt_room,
                        float scaling, float eps, const void *cosine, const void *sine, uint16_t *x, uint16_t *delta) {
    i64 q_width = s->heads * s->d, kv_width = s->kv_heads * s->d, qkv_width = q_width + 2 * kv_width;
    i64 own = own_batch * kv_width / 2 * own_room, prompt = n_groups * kv_width / 2 * prompt_room;
    i64 numbers = s->width + qkv_width + 2 * q_width + kv_width + 3 * s->inner;
    uint16_t *h = (uint16_t *)room_for(rows * (numbers / 2 + 1 + s->heads)), *qkv = h + rows * s->width;
    uint16_t *q = qkv + rows * qkv_width, *k = q + rows * q_width, *attended = k + rows * kv_width;
    uint16_t *gate_up = attended + rows * q_width, *active = gate_up + rows * 2 * s->inner;
    float *rstd = (float *)h + rows * (numbers / 2 + 1);
    for (i64 n = 0; n < s->layers; n++) {
        const Layer *layer = layers + n;
        norm(rows, s->width, x, n ? delta : NULL, layer->input_norm, eps, x, h, rstd, 1);
        product(rows, qkv_width, s->width, h, layer->qkv, layer->qkv_bias, qkv);
        turn(rows, s->heads, s->d, qkv, qkv_width, layer->query_norm, eps, cosine, sine, q, rstd);
        turn(rows, s->kv_heads, s->d, qkv + q_width, qkv_width, layer->key_norm, eps, cosine, sine, k, rstd);
        decode(n_groups, groups, members, prompts, lengths, s->heads, s->kv_heads, s->d, q, k, qkv + q_width + kv_width,
               qkv_width, own_keys + n * own, own_values + n * own, own_room, prompt_keys + n * prompt,
               prompt_values + n * prompt, prompt_room, scaling, attended, 1);
        product(rows, s->width, q_width, attended, layer->output, layer->output_bias, delta);
        norm(rows, s->width, x, delta, layer->mlp_norm, eps, x, h, rstd, 1);
        product(rows, 2 * s->inner, s->width, h, layer->gate_up, layer->gate_up_bias, gate_up);
        swiglu(rows, s->inner, gate_up, gate_up + s->inner, 2 * s->inner, active, 1);
        product(rows, s->width, s->inner, active, layer->down, layer->down_bias, delta);
    }
    free(h);
}

/* ---- softmax over the vocabulary ---- */

INLINE float highest(const void *x, i64 first, i64 stop, float over_tau, int half) {
    vec top = all(-INFINITY);
    for (i64 i = first; i < stop; i += W) top = larger(load_some(x, i, stop, -INFINITY, half), top);
    return largest(top) * over_tau;
}

/* sum of e = exp(x over_tau - top) over at most BLOCK numbers */
INLINE double block_sum(const void *x, i64 first, i64 stop, float over_tau, float top, int half) {
    vec sums = all(0);
    for (i64 i = first; i < stop; i += W)
        sums += exponential(load_some(x, i, stop, -INFINITY, half) * all(over_tau) - all(top));
    return sum(sums);
}

/* sum of e (x over_tau - top) over the same numbers; where e = 0 the product is 0 */
INLINE double block_moment(const void *x, i64 first, i64 stop, float over_tau, float top, int half) {
    vec sums = all(0);
    for (i64 i = first; i < stop; i += W) {
        vec gap = load_some(x, i, stop, -INFINITY, half) * all(over_tau) - all(top), e = exponential(gap);
        sums += choose(e == 0, all(0), e * gap);
    }
    return sum(sums);
}

INLINE float one(const void *x, i64 i, float over_tau, int half) { return load_some(x, i, i + 1, 0, half)[0] * over_tau; }

/* lse = log sum exp(x / tau) and logp = x[token] / tau - lse of each row: x [n, width]; with p the softmax, entropy = -
 * sum p log p where it is asked for. */
INLINE void token_logp_any(i64 n, i64 width, const void *x, const i64 *tokens, float over_tau, float *lse, float *logp,
                           float *entropy, int half) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++) {
        i64 first = row * width, stop = first + width;
        float top = highest(x, first, stop, over_tau, half);
        double total = 0, moment = 0;
        for (i64 i = first; i < stop; i += BLOCK) {
            i64 end = i + BLOCK < stop ? i + BLOCK : stop;
            total += block_sum(x, i, end, over_tau, top, half);
            if (entropy) moment += block_moment(x, i, end, over_tau, top, half);
        }
        if (entropy) entropy[row] = (float)(log(total) - moment / total);
        lse[row] = (float)(top + log(total));
        logp[row] = one(x, first + tokens[row], over_tau, half) - lse[row];
    }
}

EXPORT void token_logp(i64 n, i64 width, const void *x, const i64 *tokens, float over_tau, float *lse, float *logp,
                       float *entropy, int half) {
    if (half) token_logp_any(n, width, x, tokens, over_tau, lse, logp, entropy, 1);
    else token_logp_any(n, width, x, tokens, over_tau, lse, logp, entropy, 0);
}

/* x <- grad / tau (onehot(token) - exp(x / tau - lse)), in place. */
INLINE void token_logp_backward_any(i64 n, i64 width, void *x, const i64 *tokens, float over_tau, const float *lse,
                                    const float *grad, int half) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++) {
        i64 first = row * width, stop = first + width, token = first + tokens[row];
        float g = grad[row] * over_tau;
        vec chosen = all(g * (1.f - expf(one(x, token, over_tau, half) - lse[row])));
        for (i64 i = first; i < stop; i += W) {
            vec p = exponential(load_some(x, i, stop, 0, half) * all(over_tau) - all(lse[row]));
            store_some(x, i, stop, p * all(-g), half);
        }
        store_some(x, token, token + 1, chosen, half);
    }
}

EXPORT void token_logp_backward(i64 n, i64 width, void *x, const i64 *tokens, float over_tau, const float *lse,
                                const float *grad, int half) {
    if (half) token_logp_backward_any(n, width, x, tokens, over_tau, lse, grad, 1);
    else token_logp_backward_any(n, width, x, tokens, over_tau, lse, grad, 0);
}

/* A token of each row by inverting the cumulative distribution at uniform[row] in [0, 1): first over the sums of blocks
 * of BLOCK tokens, then inside one; both in float64. `ends` [n, blocks] is room for the first. */
INLINE void sample_any(i64 n, i64 width, const void *x, float over_tau, const double *uniform, double *ends, i64 *tokens,
                     float *logp, int half) {
    i64 blocks = (width + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < n; row++) {
        i64 first = row * width, stop = first + width, block = 0, token = -1;
        double *end = ends + row * blocks, total = 0;
        float top = highest(x, first, stop, over_tau, half);
        for (i64 b = 0; b < blocks; b++) {
            i64 from = first + b * BLOCK;
            total += block_sum(x, from, from + BLOCK < stop ? from + BLOCK : stop, over_tau, top, half);
            end[b] = total;
        }
        double target = uniform[row] * total;
        while (block < blocks - 1 && end[block] <= target) block++;
        double before = block ? end[block - 1] : 0;
        for (i64 i = first + block * BLOCK; i < stop && i < first + (block + 1) * BLOCK; i += W) {
            vec e = exponential(load_some(x, i, stop, -INFINITY, half) * all(over_tau) - all(top));
            for (int j = 0; j < W; j++) {
                if (e[j] > 0) token = i + j; /* the last one that has a probability, should rounding reach the end */
                before += e[j];
                if (before > target) goto found;
            }
        }
    found:
        tokens[row] = token < 0 ? 0 : token - first;
        logp[row] = one(x, first + tokens[row], over_tau, half) - (float)(top + log(total));
    }
}

EXPORT void sample_tokens(i64 n, i64 width, const void *x, float over_tau, const double *uniform, double *ends, i64 *tokens,
                 float *logp, int half) {
    if (half) sample_any(n, width, x, over_tau, uniform, ends, tokens, logp, 1);
    else sample_any(n, width, x, over_tau, uniform, ends, tokens, logp, 0);
}
