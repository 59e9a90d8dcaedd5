/* What the matrix products of bfloat16 share: see products.c. */

#ifndef LAGRPO_PRODUCTS_H
#define LAGRPO_PRODUCTS_H

#include "kernels.h"
#include "vectors.h"

#if defined(EMULATED_TILES) || (defined(__AMX_BF16__) && defined(__linux__))
#define TILES 1
#else
#define TILES 0
#endif

/* By vectors: sums of ROWS rows and COLUMNS vectors of outputs stay in registers. */
#if defined(__AVX512F__)
enum { COLUMNS = 3, ROWS = 8 };
#else
enum { COLUMNS = PARTS, ROWS = 4 };
#endif
/* Bytes of a cache line. By tiles: a tile has SIDE rows of DEPTH bfloat16, or of SIDE float32: one line each. */
enum { LINE = 64, DEPTH = 32, SIDE = 16 };

/* y = x wᵀ + bias. With a `rank` that is not 0 the same sums go on over the adapter: + low upᵀ. */
typedef struct {
    i64 m, n, k;
    const uint16_t *x;   /* [m, k] */
    const char *packed;  /* w [n, k], packed (products.c) */
    const float *bias;   /* [n up to a whole panel], or NULL */
    uint16_t *y;         /* [m, n] */
    i64 rank;            /* even */
    const uint16_t *low; /* [m, rank] */
    const char *up;      /* [n, rank], packed */
} Product;

/* Bytes of a panel of `width` rows of w: pairs of k, filled up with zeros to a multiple of SIDE. */
INLINE i64 panel_bytes(i64 width, i64 k) { return (k / 2 + SIDE - 1) / SIDE * SIDE * width * 4; }

void product_by_vectors(const Product *p);
void product_by_tiles(const Product *p);

#endif
