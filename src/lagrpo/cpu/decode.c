/* New tokens of the active rows: their attention to prompts and to the rows' own tokens, and whole decoding steps.
 *
 * A step uses the functions of the trainer's forward pass, so sampler and trainer agree to the bit. "Row" here is a
 * new token: several tokens of one sequence are rows with the same cache. A row of scores has the prompt's P keys
 * first; the own keys begin at even(P) (attention.h). */

#include "attention.h"

/* ---- attention ---- */

/* Where the keys, and the values, of a row and a key head begin in the caches. dl: lanes of a head. */
INLINE i64 own_cache(const Live *l, NewTokens a, i64 row, i64 h, i64 dl) {
    return (l->caches[row] * a.kv_heads + h) * dl * l->own_capacity;
}

/* Put the new key and value of a row and a key head in their caches. */
INLINE void put(const Live *l, NewTokens a, i64 row, i64 h, int half) {
    i64 dl = half ? a.d / 2 : a.d;
    i64 slot = l->lengths[row];
    i64 cache = own_cache(l, a, row, h, dl);
    const char *key = at(a.k, (row * a.kv_heads + h) * a.d, half);
    const char *value = at(a.v, row * a.v_stride + h * a.d, half);
    /* Keys [dl, capacity]: the tokens of a lane side by side. Values [capacity, d], or [capacity / 2, d] of pairs of
     * tokens, of which the new one is the first or the second. */
    for (i64 c = 0; c < dl; c++) memcpy(l->own_keys + cache + c * l->own_capacity + slot, key + c * 4, 4);
    uint16_t *pairs = (uint16_t *)(l->own_values + cache + slot / 2 * a.d);
    if (half)
        for (i64 c = 0; c < a.d; c++) pairs[2 * c + slot % 2] = ((const uint16_t *)value)[c];
    else memcpy(l->own_values + cache + slot * a.d, value, a.d * 4);
}

/* Up to QUERIES queries of a group and a key head, row after row: the row of each, and where its numbers begin. */
typedef struct {
    int nq;
    i64 row[QUERIES], from[QUERIES];
} LiveQueries;

INLINE LiveQueries live_queries_of(const Live *l, NewTokens a, i64 group, i64 h, i64 block) {
    i64 repeats = a.heads / a.kv_heads, first = l->groups[group], queries = (l->groups[group + 1] - first) * repeats;
    LiveQueries b = {.nq = 0};
    for (i64 f = block; f < queries && b.nq < QUERIES; f++, b.nq++) {
        b.row[b.nq] = l->members[first + f / repeats];
        b.from[b.nq] = (b.row[b.nq] * a.heads + h * repeats + f % repeats) * a.d;
    }
    return b;
}

/* How many queries from number i on are of the same row, and so share its keys. */
INLINE int same_row(LiveQueries b, int i) {
    int same = 1;
    while (i + same < b.nq && b.row[i + same] == b.row[i]) same++;
    return same;
}

/* One block of queries of group g and key head h. The prompt is read once for all of them, a row's own cache for the
 * queries of that row. */
INLINE void decode_block(const Live *l, NewTokens a, i64 g, i64 h, LiveQueries b, Scratch t, int half) {
    i64 d = a.d, room = t.room;
    i64 dl = half ? d / 2 : d;        /* lanes of a head */
    i64 P = l->prompts[g];
    i64 own = even(P);                /* where the own keys begin among the scores, */
    i64 split = half ? own / 2 : own; /* and, in lanes, among the weights */
    i64 prompt = (g * a.kv_heads + h) * dl * l->prompt_capacity; /* where the prompt's cache begins */
    for (int i = 0; i < b.nq; i++) memcpy(t.queries + i * dl, at(a.q, b.from[i], half), dl * 4);
    Lanes prompt_keys = {l->prompt_keys + prompt, l->prompt_capacity};
    FOR_QUERIES(b.nq, products(Q, dl, t.queries, prompt_keys, P, t.scores, room, half))
    float total[QUERIES]; /* sums of weights */
    for (int i = 0, same; i < b.nq; i += same) {
        same = same_row(b, i);
        i64 tokens = l->lengths[b.row[i]] + 1;
        Lanes keys = {l->own_keys + own_cache(l, a, b.row[i], h, dl), l->own_capacity};
        FOR_QUERIES(same, products(Q, dl, t.queries + i * dl, keys, tokens, t.scores + i * room + own, room, half))
        for (int j = i; j < i + same; j++) {
            float *s = t.scores + j * room;
            if (P < own) s[P] = -INFINITY;
            softmax(s, own + tokens, a.scaling, total + j, half);
            clear(s, own + tokens, own + even(tokens), half);
        }
    }
    memset(t.mix, 0, QUERIES * d * sizeof *t.mix);
    Lanes weights = {t.scores, room}, prompt_values = {l->prompt_values + prompt, d};
    FOR_QUERIES(b.nq, mixture(Q, d, weights, prompt_values, P, t.mix, half))
    for (int i = 0, same; i < b.nq; i += same) {
        same = same_row(b, i);
        Lanes own_weights = {t.scores + i * room + split, room};
        Lanes values = {l->own_values + own_cache(l, a, b.row[i], h, dl), d};
        FOR_QUERIES(same, mixture(Q, d, own_weights, values, l->lengths[b.row[i]] + 1, t.mix + i * d, half))
    }
    for (int i = 0; i < b.nq; i++) store_quotient(a.out, b.from[i], t.mix + i * d, total[i], d, half);
}

/* All members of a group. All keys are put first: of several tokens of one sequence, the later ones attend to the
 * earlier ones. A row's own tokens are the first lengths[row] + 1 of its cache, so no token sees a later one. */
INLINE void decode_group(const Live *l, NewTokens a, i64 g, i64 h, Scratch t, int half) {
    for (i64 m = l->groups[g]; m < l->groups[g + 1]; m++) put(l, a, l->members[m], h, half);
    i64 queries = (l->groups[g + 1] - l->groups[g]) * (a.heads / a.kv_heads);
    for (i64 block = 0; block < queries; block += QUERIES)
        decode_block(l, a, g, h, live_queries_of(l, a, g, h, block), t, half);
}

/* Put the new keys and values in their caches and attend. */
EXPORT void decode(const Live *l, const NewTokens *a) {
#pragma omp parallel
    {
        Scratch t = scratch_for(l->own_capacity + l->prompt_capacity, a->d);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (i64 g = 0; g < l->n_groups; g++)
            for (i64 h = 0; h < a->kv_heads; h++) FOR_DTYPE(a->half, decode_group(l, *a, g, h, t, HALF));
        free(t.scores);
    }
}

/* ---- a decoding step through all layers, bfloat16 ---- */

/* Room for what lies between the parts of a layer, for all rows: bfloat16 but for rstd. free(h) frees all of it. */
typedef struct {
    uint16_t *h;        /* [rows, width]: the norm of the residual stream */
    uint16_t *qkv;      /* [rows, q + 2 kv]: queries, keys, values side by side */
    uint16_t *q;        /* [rows, q]: queries turned by the rotary embedding */
    uint16_t *k;        /* [rows, kv]: keys turned by it */
    uint16_t *attended; /* [rows, q]: the output of attention */
    uint16_t *gate_up;  /* [rows, 2 inner]: gates and ups side by side */
    uint16_t *active;   /* [rows, inner]: silu(gate) * up */
    uint16_t *low;      /* [rows, rank]: the input of an adapter's second product */
    float *rstd;        /* [rows, heads]: 1 / rms of a norm, which nobody reads */
} Rooms;

static Rooms rooms_for(const Stack *s, i64 rows) {
    i64 q = s->heads * s->d, kv = s->kv_heads * s->d; /* numbers of a row's queries, and of its keys or values */
    i64 numbers = s->width + (q + 2 * kv) + 2 * q + kv + 3 * s->inner + s->rank;
    Rooms r;
    /* In float32, of which each has room for two bfloat16. */
    r.h = (uint16_t *)room_for(rows * (numbers / 2 + 1 + s->heads));
    r.qkv = r.h + rows * s->width;
    r.q = r.qkv + rows * (q + 2 * kv);
    r.k = r.q + rows * q;
    r.attended = r.k + rows * kv;
    r.gate_up = r.attended + rows * q;
    r.active = r.gate_up + rows * 2 * s->inner;
    r.low = r.active + rows * s->inner;
    r.rstd = (float *)r.h + rows * (numbers / 2 + 1);
    return r;
}

/* Turn by the rotary embedding, after the norm of each head if there is one: x [rows, heads, d] with a stride -> y. */
static void turn(Rotary a, const void *head_norm, float eps, float *rstd) {
    i64 width = a.heads * a.d;
    if (head_norm) {
        /* To rows without gaps, in which each head is a row of the norm. */
        for (i64 row = 0; row < a.rows; row++)
            memcpy((uint16_t *)a.y + row * width, (const uint16_t *)a.x + row * a.stride, width * 2);
        norm(&(Norm){.rows = a.rows * a.heads, .width = a.d, .x = a.y, .weight = head_norm, .y = a.y, .rstd = rstd,
                     .eps = eps, .half = 1});
        a.x = a.y, a.stride = width;
    }
    rotary(&a);
}

/* The caches of layer n. */
static Live layer_of(const Live *live, const Stack *s, i64 n) {
    Live l = *live;
    i64 token = s->kv_heads * s->d / 2; /* lanes of one token's key, or value */
    i64 own = l.own_batch * l.own_capacity * token;
    i64 prompt = l.n_groups * l.prompt_capacity * token;
    l.own_keys += n * own;
    l.own_values += n * own;
    l.prompt_keys += n * prompt;
    l.prompt_values += n * prompt;
    return l;
}

/* Attention of one layer: from the residual stream's norm r.h to r.attended. */
static void attend_layer(const Stack *s, const Live *live, i64 n, Rotary turned, Rooms r) {
    const Layer *layer = s->layers + n;
    i64 rows = turned.rows, q = s->heads * s->d, kv = s->kv_heads * s->d;
    linear(rows, q + 2 * kv, s->width, r.h, &layer->qkv, r.low, r.qkv);
    turned.heads = s->heads, turned.x = r.qkv, turned.y = r.q;
    turn(turned, layer->query_norm, s->eps, r.rstd);
    turned.heads = s->kv_heads, turned.x = r.qkv + q, turned.y = r.k;
    turn(turned, layer->key_norm, s->eps, r.rstd);
    Live caches = layer_of(live, s, n);
    decode(&caches, &(NewTokens){.heads = s->heads,
                                 .kv_heads = s->kv_heads,
                                 .d = s->d,
                                 .v_stride = q + 2 * kv,
                                 .q = r.q,
                                 .k = r.k,
                                 .v = r.qkv + q + kv, /* where they were computed */
                                 .out = r.attended,
                                 .scaling = s->scaling,
                                 .half = 1});
}

/* x [rows, width], the embeddings of new tokens, becomes the residual stream before the last layer's last addition,
 * and delta [rows, width] what is to be added. cosine, sine [rows, d]. An addition is left to the next norm, which
 * reads both anyway. */
EXPORT void decode_step(const Stack *s, const Live *live, i64 rows, const void *cosine, const void *sine, uint16_t *x,
                        uint16_t *delta) {
    Rooms r = rooms_for(s, rows);
    Norm sum = {.rows = rows, .width = s->width, .x = x, .total = x, .y = r.h, .rstd = r.rstd, .eps = s->eps,
                .half = 1};
    Rotary turned = {.rows = rows, .d = s->d, .stride = (s->heads + 2 * s->kv_heads) * s->d, .cosine = cosine,
                     .sine = sine, .sign = 1, .half = 1};
    for (i64 n = 0; n < s->count; n++) {
        const Layer *layer = s->layers + n;
        sum.weight = layer->input_norm, sum.delta = n ? delta : NULL;
        norm(&sum);
        attend_layer(s, live, n, turned, r);
        linear(rows, s->width, s->heads * s->d, r.attended, &layer->output, r.low, delta);
        sum.weight = layer->mlp_norm, sum.delta = delta;
        norm(&sum);
        linear(rows, 2 * s->inner, s->width, r.h, &layer->gate_up, r.low, r.gate_up);
        Gated gated = {.rows = rows, .width = s->inner, .stride = 2 * s->inner, .gate = r.gate_up,
                       .up = r.gate_up + s->inner, .half = 1};
        swiglu(&gated, r.active);
        linear(rows, s->width, s->inner, r.active, &layer->down, r.low, delta);
    }
    free(r.h);
}
