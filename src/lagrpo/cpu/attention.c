/* Shared-prefix attention along a packed row, forward and backward.
 *
 * Each query has one softmax over the keys of its prompt and its own segment together, key after key in the order
 * of the sequence. Neither the rows around a row nor the number of threads can change it.
 *
 * In a row of scores, the prompt's P keys come first. The segment's own keys begin at even(P), where a pair of
 * weights begins (attention.h). Shapes: rows of the packed row, Q queries of a block, d numbers of a head. */

#include "attention.h"

/* y[h][c][row] = x[row][h][c]: x [rows, heads, d lanes], y [heads, d lanes, stride] with stride >= rows + LANES.
 * A TILE of rows at a time, so that the cache lines of x are used whole. */
EXPORT void transpose(i64 rows, i64 heads, i64 d, const uint32_t *x, uint32_t *y, i64 stride) {
#pragma omp parallel for schedule(static) collapse(2)
    for (i64 h = 0; h < heads; h++)
        for (i64 first = 0; first < rows; first += TILE)
            for (i64 c = 0; c < d; c++)
                for (i64 row = first; row < first + TILE && row < rows; row++)
                    y[(h * d + c) * stride + row] = x[(row * heads + h) * d + c];
}

/* y[row] = the pairs of x[row] and x[row + 1]; of the last row and 0. x bfloat16 [rows, width], y lanes [rows, width].
 * A pair for every row, because a segment may begin at any row. */
EXPORT void pair_rows(i64 rows, i64 width, const uint16_t *x, uint32_t *y) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < rows; row++)
        for (i64 c = 0; c < width; c++)
            y[row * width + c] = x[row * width + c] | (row + 1 < rows ? (uint32_t)x[(row + 1) * width + c] << 16 : 0);
}

/* A block of up to QUERIES queries of a segment that share a key head. */
typedef struct {
    int nq;            /* the number of queries */
    i64 row[QUERIES];  /* of each query: its row, */
    i64 head[QUERIES]; /* its query head, */
    i64 keys[QUERIES]; /* and how many of the segment's own keys it attends to */
    i64 own;           /* the largest of these, which is the last */
} Queries;

/* The queries from number `block` on: token after token, and within a token the `repeats` query heads of the key
 * head. */
INLINE Queries queries_of(const Segment *s, i64 block, i64 repeats, i64 kv_head) {
    Queries q = {.nq = 0};
    for (i64 f = block; f < s->length * repeats && q.nq < QUERIES; f++, q.nq++) {
        i64 t = f / repeats; /* the token in the segment */
        q.row[q.nq] = s->first + t;
        q.head[q.nq] = kv_head * repeats + f % repeats;
        q.keys[q.nq] = q.own = t + 1;
    }
    return q;
}

/* The tokens of the longest prompt and segment. */
static i64 longest_of(const Segment *segments, i64 n) {
    i64 longest = 0;
    for (i64 i = 0; i < n; i++)
        if (segments[i].prefix_length + segments[i].length > longest)
            longest = segments[i].prefix_length + segments[i].length;
    return longest;
}

/* ---- forward ---- */

/* One block of queries of segment g and key head h. */
INLINE void attend_block(Attention a, Segment g, i64 h, Queries b, Scratch t, int half) {
    i64 dl = half ? a.d / 2 : a.d;           /* lanes of a head */
    i64 width = a.kv_heads * a.d;            /* numbers of a row of keys or values */
    i64 step = half ? 2 * width : width;     /* from a row, or a pair of rows, of values to the next one */
    i64 P = g.prefix_length;
    i64 own = even(P);                       /* where the own keys begin among the scores, */
    i64 split = half ? own / 2 : own;        /* and, in lanes, among the weights */
    const float *kt = a.k_t + h * dl * a.stride; /* [dl, stride] */
    const float *v = a.v + h * a.d;
    for (int i = 0; i < b.nq; i++)
        memcpy(t.queries + i * dl, at(a.q, (b.row[i] * a.heads + b.head[i]) * a.d, half), dl * 4);
    Lanes prefix_keys = {kt + g.prefix_first, a.stride}, own_keys = {kt + g.first, a.stride};
    FOR_QUERIES(b.nq, products(Q, dl, t.queries, prefix_keys, P, t.scores, t.room, half);
                products(Q, dl, t.queries, own_keys, b.own, t.scores + own, t.room, half))
    float total[QUERIES]; /* sums of weights */
    for (int i = 0; i < b.nq; i++) {
        float *s = t.scores + i * t.room;
        if (P < own) s[P] = -INFINITY;
        a.lse[b.row[i] * a.heads + b.head[i]] = softmax(s, own + b.keys[i], a.scaling, total + i, half);
        /* The other queries of the block see later keys, too: the weights for them are 0. */
        clear(s, own + b.keys[i], own + even(b.own), half);
    }
    memset(t.mix, 0, QUERIES * a.d * sizeof *t.mix);
    Lanes prefix_weights = {t.scores, t.room}, own_weights = {t.scores + split, t.room};
    Lanes prefix_values = {v + g.prefix_first * width, step}, own_values = {v + g.first * width, step};
    FOR_QUERIES(b.nq, mixture(Q, a.d, prefix_weights, prefix_values, P, t.mix, half);
                mixture(Q, a.d, own_weights, own_values, b.own, t.mix, half))
    for (int i = 0; i < b.nq; i++)
        store_quotient(a.out, (b.row[i] * a.heads + b.head[i]) * a.d, t.mix + i * a.d, total[i], a.d, half);
}

INLINE void attend_segment(Attention a, i64 segment, i64 h, Scratch t, int half) {
    i64 repeats = a.heads / a.kv_heads;
    Segment g = a.segments[segment];
    for (i64 block = 0; block < g.length * repeats; block += QUERIES)
        attend_block(a, g, h, queries_of(&g, block, repeats, h), t, half);
}

EXPORT void attention(const Attention *a) {
    i64 longest = longest_of(a->segments, a->count);
#pragma omp parallel
    {
        Scratch t = scratch_for(longest, a->d);
#pragma omp for schedule(dynamic, 1)
        for (i64 task = 0; task < a->count * a->kv_heads; task++)
            FOR_DTYPE(a->half, attend_segment(*a, task / a->kv_heads, task % a->kv_heads, t, HALF));
        free(t.scores);
    }
}

/* ---- backward ---- */

/* `vectors` * W numbers of each sum. */
INLINE void spread_tile(int nq, int vectors, Lanes p, Lanes x, i64 n, float *sums, i64 stride, int half) {
    vec xs[QUERIES][VECTORS];
    for (int a = 0; a < nq; a++)
        for (int j = 0; j < vectors; j++) xs[a][j] = lanes(x.at, a * x.stride + j * W);
    for (i64 key = 0; key < n; key++) {
        vec total[VECTORS];
        for (int j = 0; j < vectors; j++) total[j] = load(sums, key * stride + j * W, 0);
        for (int a = 0; a < nq; a++) {
            vec weight = same_lanes(p.at, a * p.stride + key);
            for (int j = 0; j < vectors; j++) total[j] = add_product(total[j], weight, xs[a][j], half);
        }
        for (int j = 0; j < vectors; j++) store(sums, key * stride + j * W, total[j], 0);
    }
}

/* sums[key] += sum over queries of p[a][key] x[a]. p [Q, n] and x [Q, d] in lanes along the queries: pairs of queries
 * with `half`. sums float32 [n, d] with rows `stride` apart. */
INLINE void spread(int nq, i64 d, Lanes p, const float *x, i64 n, float *sums, i64 stride, int half) {
    i64 rows = half ? (nq + 1) / 2 : nq; /* of lanes */
    i64 c = 0;
    for (; c + TILE <= d; c += TILE) spread_tile(rows, VECTORS, p, (Lanes){x + c, d}, n, sums + c, stride, half);
    for (; c < d; c += W) spread_tile(rows, 1, p, (Lanes){x + c, d}, n, sums + c, stride, half);
}

/* Rows of x, bfloat16 [Q, n] and `room` lanes apart, in pairs of rows: lanes [Q / 2, n], `y_room` apart. If Q is
 * odd, the last row is paired with zeros. float32: x itself. Numbers up to the next multiple of W are read and
 * written. */
INLINE const float *two_by_two(int nq, i64 n, const float *x, i64 room, float *y, i64 y_room, int half) {
    if (!half) return x;
    for (int a = 0; a < nq; a += 2)
        for (i64 i = 0; i < n; i += W) {
            uvec second = a + 1 < nq ? (uvec)load(x + (a + 1) * room, i, 1) : (uvec){};
            store(y, a / 2 * y_room + i, (vec)((uvec)load(x + a * room, i, 1) >> 16 | second), 0);
        }
    return y;
}

/* Room of one thread, for a block of queries. Rows of keys are `room` numbers apart. free(p) frees all of it. */
typedef struct {
    float *p, *ds;          /* [Q, keys]: weights, and the gradients of scores */
    float *zip;             /* [Q / 2, keys]: one of these in pairs of queries */
    float *queries, *grads; /* [Q, d]: queries, and the gradients of their outputs */
    float *mix;             /* [Q, d]: the gradients of queries */
    float *zip_d;           /* [Q / 2, d]: queries or grads in pairs of queries */
    i64 room;
} BackwardScratch;

static BackwardScratch backward_scratch_for(i64 tokens, i64 d) {
    i64 room = tokens + 2 * LANES, scores = QUERIES * room, heads = QUERIES * d;
    float *p = room_for(3 * scores + 4 * heads), *q = p + 3 * scores;
    return (BackwardScratch){.p = p,
                             .ds = p + scores,
                             .zip = p + 2 * scores,
                             .queries = q,
                             .grads = q + heads,
                             .mix = q + 2 * heads,
                             .zip_d = q + 3 * heads,
                             .room = room};
}

/* The weights of one query and the gradients of its scores, over the keys. `p` has scores s and `ds` products do . v,
 * where do is the gradient of the output. They become
 *
 *     p = exp(scaling s - lse)    and    ds = scaling p (do . v - do . out)
 *
 * The query's numbers begin at `from`. It sees P keys of the prompt and `keys` of its own segment; its block sees up to
 * `own_keys` of these, for which the query's numbers become 0. */
INLINE void weigh(AttentionBackward a, i64 from, i64 P, i64 keys, i64 own_keys, float *p, float *ds, int half) {
    i64 own = even(P); /* where the own keys begin */
    vec total[PARTS] = {all(0)}, norm = all(a.lse[from / a.d]);
    FOR_PARTS(c, part, 0, a.d) total[part] += load(a.out, from + c, half) * load(a.grad_out, from + c, half);
    float inner = sum(total);
    if (P < own) p[P] = -INFINITY, ds[P] = 0;
    for (i64 i = 0; i < own + keys; i += W) {
        vec e = exponential(load(p, i, 0) * all(a.scaling) - norm);
        store(ds, i, (load(ds, i, 0) - all(inner)) * e * all(a.scaling), half);
        store(p, i, e, half);
    }
    clear(p, own + keys, own + own_keys + LANES, half);
    clear(ds, own + keys, own + own_keys + LANES, half);
}

/* One block of queries of segment g and key head h: adds to the gradients of keys and values. */
INLINE void attend_backward_block(AttentionBackward a, Segment g, i64 h, Queries b, BackwardScratch t, int half) {
    i64 d = a.d, room = t.room;
    i64 dl = half ? d / 2 : d;           /* lanes of a head */
    i64 width = a.kv_heads * d;          /* numbers of a row of keys or values */
    i64 step = half ? 2 * width : width; /* from a row, or a pair of rows, of keys to the next one */
    i64 P = g.prefix_length;
    i64 own = even(P);                   /* where the own keys begin among the scores, */
    i64 split = half ? own / 2 : own;    /* and, in lanes, among the gradients */
    i64 before = g.prefix_first * width + h * d; /* where the keys of the prompt and the segment begin */
    i64 first = g.first * width + h * d;
    const float *kt = a.k_t + h * dl * a.stride; /* [dl, stride] */
    const float *vt = a.v_t + h * dl * a.stride;
    const float *weights, *x;
    for (int i = 0; i < b.nq; i++) {
        i64 from = (b.row[i] * a.heads + b.head[i]) * d;
        memcpy(t.queries + i * dl, at(a.q, from, half), dl * 4);
        memcpy(t.grads + i * dl, at(a.grad_out, from, half), dl * 4);
    }
    Lanes prefix_keys = {kt + g.prefix_first, a.stride}, own_keys = {kt + g.first, a.stride};
    Lanes prefix_values = {vt + g.prefix_first, a.stride}, own_values = {vt + g.first, a.stride};
    FOR_QUERIES(b.nq, products(Q, dl, t.queries, prefix_keys, P, t.p, room, half);
                products(Q, dl, t.queries, own_keys, b.own, t.p + own, room, half);
                products(Q, dl, t.grads, prefix_values, P, t.ds, room, half);
                products(Q, dl, t.grads, own_values, b.own, t.ds + own, room, half))
    for (int i = 0; i < b.nq; i++)
        weigh(a, (b.row[i] * a.heads + b.head[i]) * d, P, b.keys[i], b.own, t.p + i * room, t.ds + i * room, half);
    memset(t.mix, 0, QUERIES * d * sizeof *t.mix);
    Lanes prefix_ds = {t.ds, room}, own_ds = {t.ds + split, room};
    FOR_QUERIES(b.nq, mixture(Q, d, prefix_ds, (Lanes){a.k + before, step}, P, t.mix, half);
                mixture(Q, d, own_ds, (Lanes){a.k + first, step}, b.own, t.mix, half);
                weights = two_by_two(Q, own + b.own, t.ds, room, t.zip, room, half);
                x = two_by_two(Q, d, t.queries, dl, t.zip_d, d, half);
                spread(Q, d, (Lanes){weights, room}, x, P, a.grad_k + before, width, half);
                spread(Q, d, (Lanes){weights + own, room}, x, b.own, a.grad_k + first, width, half);
                weights = two_by_two(Q, own + b.own, t.p, room, t.zip, room, half);
                x = two_by_two(Q, d, t.grads, dl, t.zip_d, d, half);
                spread(Q, d, (Lanes){weights, room}, x, P, a.grad_v + before, width, half);
                spread(Q, d, (Lanes){weights + own, room}, x, b.own, a.grad_v + first, width, half))
    for (int i = 0; i < b.nq; i++)
        for (i64 c = 0; c < d; c += W)
            store(a.grad_q, (b.row[i] * a.heads + b.head[i]) * d + c, load(t.mix, i * d + c, 0), half);
}

INLINE void attend_backward_group(AttentionBackward a, i64 group, i64 h, BackwardScratch t, int half) {
    i64 repeats = a.heads / a.kv_heads;
    for (i64 segment = a.groups[group]; segment < a.groups[group + 1]; segment++) {
        Segment g = a.segments[segment];
        for (i64 block = 0; block < g.length * repeats; block += QUERIES)
            attend_backward_block(a, g, h, queries_of(&g, block, repeats, h), t, half);
    }
}

/* One function per dtype: GCC takes minutes for both in one. */
static __attribute__((noinline)) void backward_group_float32(const AttentionBackward *a, i64 g, i64 h,
                                                             BackwardScratch t) {
    attend_backward_group(*a, g, h, t, 0);
}

static __attribute__((noinline)) void backward_group_bfloat16(const AttentionBackward *a, i64 g, i64 h,
                                                              BackwardScratch t) {
    attend_backward_group(*a, g, h, t, 1);
}

/* Gradients of `attention`. A group and a key head are one task, so that no two threads add to the same sums. */
EXPORT void attention_backward(const AttentionBackward *a) {
    i64 longest = longest_of(a->segments, a->groups[a->n_groups]);
#pragma omp parallel
    {
        BackwardScratch t = backward_scratch_for(longest, a->d);
#pragma omp for schedule(dynamic, 1)
        for (i64 task = 0; task < a->n_groups * a->kv_heads; task++)
            (a->half ? backward_group_bfloat16 : backward_group_float32)(a, task / a->kv_heads, task % a->kv_heads, t);
        free(t.p);
    }
}
