/* The kernels that Python calls, and the arguments of each.
 *
 * kernels.py declares the same structs for ctypes, field by field. Their fields come in one order: int64 numbers,
 * pointers, floats, `half`. A `void *` has bfloat16 if `half` is 1, and float32 if it is 0. A `float *` has float32
 * either way, or lanes (vectors.h) where a comment says so. Tensors are contiguous, except that rows may be a
 * `stride` of numbers apart. Pointers may be NULL only where a comment says so. */

#ifndef LAGRPO_KERNELS_H
#define LAGRPO_KERNELS_H

#include <stdint.h>

typedef int64_t i64;

/* ---- layer.c ---- */

/* x, delta, total, y [rows, width]; weight [width]; rstd [rows]. delta may be NULL: then total is not written. */
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

/* x [rows, heads, d] with its stride; y [rows, heads, d]; cosine, sine [rows, d]; d a multiple of 2 LANES. sign: 1,
 * or -1 for the transpose. */
typedef struct {
    i64 rows, heads, d, stride;
    const void *x, *cosine, *sine;
    void *y;
    float sign;
    int half;
} Rotary;

void rotary(const Rotary *a);

/* ---- softmax.c ---- */

/* Logits x [rows, width], width the vocabulary, and 1 / tau. */
typedef struct {
    i64 rows, width;
    void *x;
    float over_tau;
    int half;
} Logits;

/* tokens [rows]; lse, logp, grad [rows]; entropy, grad_entropy [rows] or NULL; uniform [rows]; ends [rows, blocks of
 * the vocabulary]. */
void token_logp(const Logits *a, const i64 *tokens, float *lse, float *logp, float *entropy);
void token_logp_backward(const Logits *a, const i64 *tokens, const float *lse, const float *grad, const float *entropy,
                         const float *grad_entropy);
void sample_tokens(const Logits *a, const double *uniform, double *ends, i64 *tokens, float *logp);

/* ---- attention.c ---- */

/* Rows first .. first + length - 1 of a packed row attend causally to themselves, and to all rows prefix_first ..
 * prefix_first + prefix_length - 1. */
typedef struct {
    i64 first, length, prefix_first, prefix_length;
} Segment;

/* segments [count]; q, out [rows, heads, d]; lse [rows, heads]. In lanes: k_t [kv_heads, d lanes, stride] as
 * `transpose` leaves it; v [rows, kv_heads, d] as `pair_rows` leaves it (float32: v itself). */
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

/* groups [n_groups + 1]: the number of segments before each group; no group touches the rows of another. q, out,
 * grad_out, grad_q [rows, heads, d]; lse [rows, heads]; grad_k, grad_v float32 [rows, kv_heads, d], zeros at the
 * start. In lanes: k [rows, kv_heads, d] as `pair_rows` leaves it (float32: k itself); k_t, v_t [kv_heads, d lanes,
 * stride] as `transpose` leaves them. */
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

/* The rows of a decoding step, one new token each, and their caches. Tokens of one sequence are rows with the same
 * cache.
 *
 * Caches are in lanes: in bfloat16 half as many along d of a key, and along the tokens of a value. Capacities are
 * in tokens, multiples of LANES. The caches begin at the step's first layer. */
typedef struct {
    i64 n_groups;
    i64 own_batch; /* the number of own caches in a layer */
    i64 own_capacity, prompt_capacity;
    const i64 *groups;          /* [n_groups + 1]: the number of members before each group */
    const i64 *members;         /* [rows]: the rows, group after group */
    const i64 *prompts;         /* [n_groups]: the tokens of each group's prompt */
    const i64 *lengths;         /* [rows]: the tokens before this one in the row's own cache */
    const i64 *caches;          /* [rows]: the index of that cache */
    float *own_keys;            /* lanes [own_batch, kv_heads, d, own_capacity] */
    float *own_values;          /* lanes [own_batch, kv_heads, own_capacity, d] */
    const float *prompt_keys;   /* lanes [n_groups, kv_heads, d, prompt_capacity] */
    const float *prompt_values; /* lanes [n_groups, kv_heads, prompt_capacity, d] */
} Live;

/* The new queries q [rows, heads, d], keys k [rows, kv_heads, d], values v [rows, kv_heads, d] whose rows are v_stride
 * apart; out [rows, heads, d]. */
typedef struct {
    i64 heads, kv_heads, d, v_stride;
    const void *q, *k, *v;
    void *out;
    float scaling;
    int half;
} NewTokens;

void decode(const Live *live, const NewTokens *a);

/* Linear layers with the same input, bfloat16, as one product of n outputs. */
typedef struct {
    i64 rank;            /* of the adapter, even; 0 without one */
    const void *weights; /* [n, k], packed (products.c) */
    const float *bias;   /* [n up to a whole panel], or NULL */
    const void *down;    /* [rank, k], packed; NULL without an adapter */
    const void *up;      /* [n, rank], packed; NULL without an adapter */
} Linear;

/* Weights of a decoder layer, bfloat16. Every field has 8 bytes: kernels.py writes an array of them. */
typedef struct {
    const void *input_norm;             /* [width] */
    const void *query_norm, *key_norm;  /* [d]; NULL in most families */
    const void *mlp_norm;               /* [width] */
    Linear qkv, output, gate_up, down;
} Layer;

/* All layers, alike: `width` is the hidden size, `inner` the width of the MLP, `rank` the largest of an adapter. */
typedef struct {
    i64 count, width, inner, heads, kv_heads, d, rank;
    const Layer *layers;
    float scaling, eps;
} Stack;

void decode_step(const Stack *s, const Live *live, i64 rows, const void *cosine, const void *sine, uint16_t *x,
                 uint16_t *delta);

/* ---- products.c ---- */

/* x [m, k], y [m, n], low [m, rank]; w [n, k] as it is, or packed; bias [n up to a whole panel] or NULL. */
i64 products_by(i64 way);
int has_dot_products(void);
i64 panel_width(void);
i64 pack_bytes(i64 n, i64 k);
void pack(i64 first, i64 n, i64 k, const void *w, void *packed);
void product(i64 m, i64 n, i64 k, const uint16_t *x, const char *packed, const float *bias, uint16_t *y);
void linear(i64 m, i64 n, i64 k, const uint16_t *x, const Linear *l, uint16_t *low, uint16_t *y);
void plain_product(i64 m, i64 n, i64 k, const uint16_t *x, const uint16_t *w, const float *bias, uint16_t *y);

#endif
