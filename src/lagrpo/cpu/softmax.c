/* The softmax over the vocabulary: log-probs of given tokens, their gradient, and drawing tokens.
 *
 * Sums run over blocks of BLOCK numbers in float32 and over the blocks in float64, in an order that only the vocabulary
 * decides. Sampler and trainer share it, so they agree to the bit. */

#include "kernels.h"
#include "vectors.h"

enum { BLOCK = 256 };

/* One row of logits: numbers first .. stop - 1 of x. */
typedef struct {
    void *x;
    i64 first, stop;
    float over_tau;
} Row;

INLINE Row row_of(const Logits *a, i64 row) {
    return (Row){a->x, row * a->width, (row + 1) * a->width, a->over_tau};
}

INLINE i64 block_end(Row r, i64 first) { return first + BLOCK < r.stop ? first + BLOCK : r.stop; }

/* The largest of the row's numbers, over tau. */
INLINE float highest(Row r, int half) {
    vec top = all(-INFINITY);
    for (i64 i = r.first; i < r.stop; i += W) top = larger(load_some(r.x, i, r.stop, -INFINITY, half), top);
    return largest(top) * r.over_tau;
}

/* sum of e = exp(x over_tau - top) over the block from `first` on */
INLINE double block_sum(Row r, i64 first, float top, int half) {
    vec sums[PARTS] = {all(0)};
    i64 stop = block_end(r, first);
    FOR_PARTS(i, p, first, stop)
        sums[p] += exponential(load_some(r.x, i, stop, -INFINITY, half) * all(r.over_tau) - all(top));
    return sum(sums);
}

/* sum of e (x over_tau - top) over the same numbers; where e = 0 the product is 0 */
INLINE double block_moment(Row r, i64 first, float top, int half) {
    vec sums[PARTS] = {all(0)};
    i64 stop = block_end(r, first);
    FOR_PARTS(i, p, first, stop) {
        vec gap = load_some(r.x, i, stop, -INFINITY, half) * all(r.over_tau) - all(top), e = exponential(gap);
        sums[p] += choose(e == 0, all(0), e * gap);
    }
    return sum(sums);
}

/* Number i, over tau. */
INLINE float one(Row r, i64 i, int half) { return load_some(r.x, i, i + 1, 0, half)[0] * r.over_tau; }

/* ---- log-probs of given tokens ---- */

INLINE void token_logp_row(Row r, i64 token, float *lse, float *logp, float *entropy, int half) {
    float top = highest(r, half);
    double total = 0, moment = 0;
    for (i64 i = r.first; i < r.stop; i += BLOCK) {
        total += block_sum(r, i, top, half);
        if (entropy) moment += block_moment(r, i, top, half);
    }
    if (entropy) *entropy = (float)(log(total) - moment / total);
    *lse = (float)(top + log(total));
    *logp = one(r, r.first + token, half) - *lse;
}

/* lse = log sum exp(x / tau) and logp = x[token] / tau - lse of each row. With p the softmax, entropy = - sum p log p;
 * NULL if it is not needed. */
EXPORT void token_logp(const Logits *a, const i64 *tokens, float *lse, float *logp, float *entropy) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < a->rows; row++)
        FOR_DTYPE(a->half, token_logp_row(row_of(a, row), tokens[row], lse + row, logp + row,
                                          entropy ? entropy + row : NULL, HALF));
}

/* The token's own number, g (1 - p), is put last. Adding g to the -g p that is stored would keep its rounding. */
INLINE void token_logp_backward_row(Row r, i64 token, float lse, float g, int half) {
    vec chosen = all(g * (1.f - expf(one(r, r.first + token, half) - lse)));
    for (i64 i = r.first; i < r.stop; i += W) {
        vec p = exponential(load_some(r.x, i, r.stop, 0, half) * all(r.over_tau) - all(lse));
        store_some(r.x, i, r.stop, p * all(-g), half);
    }
    store_some(r.x, r.first + token, r.first + token + 1, chosen, half);
}

/* The same, with e times the derivative of the row's entropy H, which is -p (log p + H); where p = 0 it is 0. */
INLINE void with_entropy_backward_row(Row r, i64 token, float lse, float g, float entropy, float e, int half) {
    float log_chosen = one(r, r.first + token, half) - lse, p_chosen = expf(log_chosen);
    float slope = p_chosen == 0 ? 0 : p_chosen * (log_chosen + entropy);
    vec chosen = all(g * (1.f - p_chosen) - e * slope);
    for (i64 i = r.first; i < r.stop; i += W) {
        vec log_p = load_some(r.x, i, r.stop, 0, half) * all(r.over_tau) - all(lse), p = exponential(log_p);
        vec grad = p * (all(-g) - all(e) * (log_p + all(entropy)));
        store_some(r.x, i, r.stop, choose(p == 0, all(0), grad), half);
    }
    store_some(r.x, r.first + token, r.first + token + 1, chosen, half);
}

/* x <- (grad (onehot(token) - p) - grad_entropy p (log p + entropy)) / tau in place, with log p = x / tau - lse. */
EXPORT void token_logp_backward(const Logits *a, const i64 *tokens, const float *lse, const float *grad,
                                const float *entropy, const float *grad_entropy) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < a->rows; row++) {
        float g = grad[row] * a->over_tau;
        if (grad_entropy) {
            float e = grad_entropy[row] * a->over_tau;
            FOR_DTYPE(a->half,
                      with_entropy_backward_row(row_of(a, row), tokens[row], lse[row], g, entropy[row], e, HALF));
        } else {
            FOR_DTYPE(a->half, token_logp_backward_row(row_of(a, row), tokens[row], lse[row], g, HALF));
        }
    }
}

/* ---- drawing tokens ---- */

/* The first token of a block at which the cumulative sum, `before` at the block's start, passes the target. */
INLINE i64 token_in_block(Row r, i64 first, float top, double before, double target, int half) {
    i64 token = -1;
    for (i64 i = first; i < r.stop && i < first + BLOCK; i += W) {
        vec e = exponential(load_some(r.x, i, r.stop, -INFINITY, half) * all(r.over_tau) - all(top));
        for (int j = 0; j < W; j++) {
            if (e[j] > 0) token = i + j; /* the last one that has a probability, should rounding reach the end */
            before += e[j];
            if (before > target) return token;
        }
    }
    return token;
}

/* A token of one row: the block in which the cumulative sum passes uniform * total, then the token in the block. `ends`
 * [blocks] is room for the cumulative sums at the ends of blocks. */
INLINE i64 draw_row(Row r, double uniform, double *ends, float *logp, int half) {
    i64 blocks = (r.stop - r.first + BLOCK - 1) / BLOCK, block = 0;
    float top = highest(r, half);
    double total = 0;
    for (i64 b = 0; b < blocks; b++) ends[b] = total += block_sum(r, r.first + b * BLOCK, top, half);
    double target = uniform * total;
    while (block < blocks - 1 && ends[block] <= target) block++;
    i64 token = token_in_block(r, r.first + block * BLOCK, top, block ? ends[block - 1] : 0, target, half);
    if (token < 0) token = r.first; /* no number of the block has a probability: the logits are not finite */
    *logp = one(r, token, half) - (float)(top + log(total));
    return token - r.first;
}

/* A token of each row by inverting the cumulative distribution at uniform[row] in [0, 1): first over the sums of
 * blocks, then inside one; both in float64. `ends` [rows, blocks] is room for the former. */
EXPORT void sample_tokens(const Logits *a, const double *uniform, double *ends, i64 *tokens, float *logp) {
    i64 blocks = (a->width + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < a->rows; row++)
        FOR_DTYPE(a->half,
                  tokens[row] = draw_row(row_of(a, row), uniform[row], ends + row * blocks, logp + row, HALF));
}
