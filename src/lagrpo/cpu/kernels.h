/* What Python calls: the arguments of each kernel, and the kernels.
 *
 * kernels.py declares the same structs for ctypes, field by field. Their fields come in one order: int64 numbers,
 * pointers, floats, `half`. Numbers are bfloat16 where `half` is 1 and float32 where it is 0; `float *` is float32 either
 * way, or lanes (see vectors.h) where it says so. Tensors are contiguous but for rows that a `stride`, in numbers, sets
 * apart. Pointers may be NULL only where it says so. */

#ifndef LAGRPO_KERNELS_H
#define LAGRPO_KERNELS_H

#include <stdint.h>

typedef int64_t i64;

/* ---- layer.c ---- */

/* x, delta, total, y [rows, width]; weight [width]; rstd [rows]. delta may be NULL: then total is x and not written. */
typedef struct {
    i64 rows, width;
    const void *x, *delta, *weight;
    void *total, *y;
    float *rstd, eps;
    int half;
} Norm;

void norm(const Norm *a);

/* x, grad_y, grad_total, grad_x [rows, width]; weight [width]; rstd [rows]; grad_weight float32 [slices, width up to a
 * multiple of LANES]. grad_total may be NULL. */
typedef struct {
    i64 rows, width, slices;
    const void *x, *weight, *grad_y, *grad_total;
    const float *rstd;
    void *grad_x;
    float *grad_weight;
    int half;
} NormBackward;

void norm_backward(const NormBackward *a);

/* gate and up [rows, width], both with the same stride. */
typedef struct {
    i64 rows, width, stride;
    const void *gate, *up;
    int half;
} Gated;

void swiglu(const Gated *a, void *y);
void swiglu_backward(const Gated *a, const void *grad_y, void *y, void *grad_gate, void *grad_up);

/* x [rows, heads, d] with its stride; y [rows, heads, d]; cosine, sine [rows, d]; d a multiple of 2 LANES. sign: 1, or -1 for
 * the transpose. */
typedef struct {
    i64 rows, heads, d, stride;
    const void *x, *cosine, *sine;
    void *y;
    float sign;
    int half;
} Rotary;

void rotary(const Rotary *a);

/* ---- softmax.c ---- */

/* Logits [rows, width] and 1 / tau. */
typedef struct {
    i64 rows, width;
    void *x;
    float over_tau;
    int half;
} Logits;

void token_logp(const Logits *a, const i64 *tokens, float *lse, float *logp, float *entropy);
void token_logp_backward(const Logits *a, const i64 *tokens, const float *lse, const float *grad);
void sample_tokens(const Logits *a, const double *uniform, double *ends, i64 *tokens, float *logp);

/* ---- attention.c ---- */

/* Rows first .. first + length - 1 of a packed row attend causally to themselves, and to all rows prefix_first ..
 * prefix_first + prefix_length - 1. */
typedef struct {
    i64 first, length, prefix_first, prefix_length;
} Segment;

/* q, out [rows, heads, d]; lse [rows, heads]. In lanes: k_t as `transpose` leaves it, its rows `stride` apart; v as
 * `pair_rows` does (float32: v itself, [rows, kv_heads, d]). */
typedef struct {
    i64 count, heads, kv_heads, d, stride;
    const Segment *segments;
    const void *q;
    const float *k_t, *v;
    void *out;
    float *lse, scaling;
    int half;
} Attention;

void transpose(i64 rows, i64 heads, i64 d, const uint32_t *x, uint32_t *y, i64 stride);
void pair_rows(i64 rows, i64 width, const uint16_t *x, uint32_t *y);
void attention(const Attention *a);

/* groups [n_groups + 1]: the number of segments before each group; no group touches the rows of another. q, out, grad_out,
 * grad_q [rows, heads, d]; lse [rows, heads]; grad_k, grad_v float32 [rows, kv_heads, d], zeros at the start. In lanes: k
 * as `pair_rows` leaves it (float32: k itself), k_t and v_t as `transpose` does. */
typedef struct {
    i64 n_groups, heads, kv_heads, d, stride;
    const i64 *groups;
    const Segment *segments;
    const void *q;
    const float *k, *k_t, *v_t;
    const void *out, *grad_out;
    const float *lse;
    void *grad_q;
    float *grad_k, *grad_v, scaling;
    int half;
} AttentionBackward;

void attention_backward(const AttentionBackward *a);

/* ---- decode.c ---- */

/* The rows of a decoding step and their caches. Group g has the rows members[groups[g]] .. members[groups[g + 1] - 1] and
 * a prompt of prompts[g] tokens. Row r has the cache number caches[r], and lengths[r] tokens of its own there; rows that
 * are several tokens of one sequence have the same cache.
 *
 * Caches are in lanes, their capacities in tokens, multiples of 2 LANES. float32: keys [rows, kv_heads, d, own_capacity] and values
 * [rows, kv_heads, own_capacity, d]; bfloat16: half as many lanes along d of a key and along the tokens of a value. Prompts
 * likewise, [n_groups, kv_heads, ., .]. own_batch: the number of a layer's own caches. */
typedef struct {
    i64 n_groups, own_batch, own_capacity, prompt_capacity;
    const i64 *groups, *members, *prompts, *lengths, *caches;
    float *own_keys, *own_values;
    const float *prompt_keys, *prompt_values;
} Live;

/* The new queries q [rows, heads, d], keys and values k, v [rows, kv_heads, d], v with its stride; out [rows, heads, d]. */
typedef struct {
    i64 heads, kv_heads, d, v_stride;
    const void *q, *k, *v;
    void *out;
    float scaling;
    int half;
} NewTokens;

void decode(const Live *live, const NewTokens *a);

/* Linear layers with the same input, bfloat16: panels (products.c) of their weights [n, k] and float32 biases, NULL where
 * there is none. With a rank, which is even, an adapter: panels `down` [rank, k] and `up` [n, rank]. */
typedef struct {
    i64 rank;
    const void *weights;
    const float *bias;
    const void *down, *up;
} Linear;

/* Weights of a decoder layer, bfloat16. */
typedef struct {
    const void *input_norm, *query_norm, *key_norm, *mlp_norm; /* query_norm, key_norm: NULL in most families */
    Linear qkv, output, gate_up, down;
} Layer;

/* All layers, alike: `inner` is the width of the MLP, `rank` the largest of an adapter. */
typedef struct {
    i64 count, width, inner, heads, kv_heads, d, rank;
    const Layer *layers;
    float scaling, eps;
} Stack;

void decode_step(const Stack *s, const Live *live, i64 rows, const void *cosine, const void *sine, uint16_t *x,
                 uint16_t *delta);

/* ---- products.c ---- */

i64 products_by(i64 way);
int has_dot_products(void);
i64 panel_width(void);
i64 pack_bytes(i64 n, i64 k);
void pack(i64 first, i64 n, i64 k, const void *w, void *packed);
void product(i64 m, i64 n, i64 k, const uint16_t *x, const char *packed, const float *bias, uint16_t *y);
void linear(i64 m, i64 n, i64 k, const uint16_t *x, const Linear *l, uint16_t *low, uint16_t *y);
void plain_product(i64 m, i64 n, i64 k, const uint16_t *x, const uint16_t *w, const float *bias, uint16_t *y);

#endif
