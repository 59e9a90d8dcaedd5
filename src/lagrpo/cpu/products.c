/* Matrix products y = x wᵀ + bias of bfloat16: the forward products of trainer and sampler.
 *
 * Every output is one sum in float32 over k from first to last, rounded to bfloat16 once. Neither the number of rows,
 * nor the rows beside a row, nor the number of threads can change it. The order within that sum is the instruction's:
 *
 *   by vectors  pair after pair of k: the second product of a pair, then the first, each added and rounded. That is
 *               AVX512-BF16's instruction; without it two multiplications and additions do the same.
 *   by tiles    32 numbers of k at a time: the sum of their 16 first halves of pairs, the sum of the 16 second halves,
 *               and these two added up, to the total. That is AMX's instruction.
 *
 * A linear layer with an adapter is one such sum, too: over k, then over the rank of the adapter.
 *
 * Which of the two computes is decided once in a process (`products_by`), for all products. They are in
 * products_by_vectors.c and products_by_tiles.c. */

#include "products.h"
#if TILES && !defined(EMULATED_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ---- what this processor and its operating system grant ---- */

enum { BY_VECTORS = 1, BY_TILES = 2 }; /* panels.py has the same numbers */

static int by = BY_VECTORS;

/* Linux lets a process use tiles only after it has asked for them. */
static int granted(int way) {
    if (way == BY_VECTORS) return 1;
#if defined(EMULATED_TILES)
    return 1;
#elif TILES
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
    return 0;
#endif
}

/* Computes products by vectors (1) or tiles (2) from now on. Returns 0, and changes nothing, if that is not
 * possible here. Weights that were packed before are of no use afterward: panels have another width. */
EXPORT i64 products_by(i64 way) {
    if (!granted((int)way)) return 0;
    by = (int)way;
    return 1;
}

/* 1 if the vectors have an instruction for products of bfloat16. */
EXPORT int has_dot_products(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

/* ---- weights in the order of the products ---- */

/* Packed weights [panels, pairs, panel_width, 2]: panels of `panel_width` rows of w [n, k], the last one filled up
 * with zeros; in each, pair after pair of k, filled up with zeros to a multiple of SIDE pairs. So one load has the
 * same pair of k for all outputs of a vector, or of a row of a tile, and a panel is read from first to last. */
EXPORT i64 panel_width(void) { return by == BY_TILES ? 2 * SIDE : COLUMNS * W; }

EXPORT i64 pack_bytes(i64 n, i64 k) { return (n + panel_width() - 1) / panel_width() * panel_bytes(panel_width(), k); }

/* Puts the rows of w [n, k], k even, into packed weights as their rows from `first` on. The memory must be zeros where
 * nothing is put. A panel is the work of one thread. */
EXPORT void pack(i64 first, i64 n, i64 k, const void *w, void *packed) {
    i64 width = panel_width(), pairs = k / 2;
#pragma omp parallel for schedule(static)
    for (i64 panel = first / width; panel < (first + n + width - 1) / width; panel++) {
        /* The rows of w that are in this panel, as rows of the packed weights. */
        i64 from = panel * width > first ? panel * width : first, stop = (panel + 1) * width;
        if (stop > first + n) stop = first + n;
        const uint32_t *source = (const uint32_t *)w + (from - first) * pairs;
        uint32_t *to = (uint32_t *)((char *)packed + panel * panel_bytes(width, k)) + from % width;
        for (i64 pair = 0; pair < pairs; pair++)
            for (i64 row = 0; row < stop - from; row++) to[pair * width + row] = source[row * pairs + pair];
    }
}

/* ---- the products ---- */

static void multiply(const Product *p) {
#if TILES
    if (by == BY_TILES) {
        product_by_tiles(p);
        return;
    }
#endif
    product_by_vectors(p);
}

EXPORT void product(i64 m, i64 n, i64 k, const uint16_t *x, const char *packed, const float *bias, uint16_t *y) {
    multiply(&(Product){.m = m, .n = n, .k = k, .x = x, .packed = packed, .bias = bias, .y = y});
}

/* y [m, n] of linear layers of x [m, k]. With an adapter, low [m, rank] becomes x downᵀ, rounded to bfloat16, and y has
 * low upᵀ in its sums. */
EXPORT void linear(i64 m, i64 n, i64 k, const uint16_t *x, const Linear *l, uint16_t *low, uint16_t *y) {
    if (l->rank) product(m, l->rank, k, x, l->down, NULL, low);
    multiply(&(Product){.m = m,
                        .n = n,
                        .k = k,
                        .x = x,
                        .packed = l->weights,
                        .bias = l->bias,
                        .y = y,
                        .rank = l->rank,
                        .low = low,
                        .up = l->up});
}

/* ---- what the products must give, number after number: panels.py compares at the start ---- */

static float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The sum of one output, written down as the head of this file says it; a product of two bfloat16 is exact. */
static float plain_sum(i64 k, const uint16_t *x, const uint16_t *w) {
    float total = 0;
    if (by == BY_VECTORS) {
        /* i ^ 1: the second number of a pair, then the first. Of two statements a pair GCC 12 makes something else. */
        for (i64 i = 0; i < k; i++) total += wide(x[i ^ 1]) * wide(w[i ^ 1]);
        return total;
    }
    for (i64 i = 0; i < k; i += DEPTH) {
        float first = 0, second = 0;
        for (i64 j = i; j < k && j < i + DEPTH; j += 2) {
            first += wide(x[j]) * wide(w[j]);
            second += wide(x[j + 1]) * wide(w[j + 1]);
        }
        total += first + second;
    }
    return total;
}

/* As `product`, with w [n, k] as it is. */
EXPORT void plain_product(i64 m, i64 n, i64 k, const uint16_t *x, const uint16_t *w, const float *bias, uint16_t *y) {
    for (i64 i = 0; i < m; i++)
        for (i64 j = 0; j < n; j++) {
            float total = plain_sum(k, x + i * k, w + j * k);
            y[i * n + j] = (uint16_t)bf16_bits(all(bias ? total + bias[j] : total))[0];
        }
}
