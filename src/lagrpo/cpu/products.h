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

#if defined(__AVX512F__)
enum { COLUMNS = 3, ROWS = 8 }; /* of sums that stay in registers: vectors of outputs, rows */
#else
enum { COLUMNS = PARTS, ROWS = 4 };
#endif
enum { LINE = 64, DEPTH = 32, SIDE = 16 }; /* bytes of a cache line; numbers and rows of a tile */

/* y [m, n] = x [m, k] packed weights [n, k] transposed + bias float32 [n up to a multiple of a panel], or NULL. With a
 * `rank` the same sums go on over low [m, rank] packed `up` [n, rank] transposed. */
typedef struct {
    i64 m, n, k;
    const uint16_t *x;
    const char *packed;
    const float *bias;
    uint16_t *y;
    i64 rank;
    const uint16_t *low;
    const char *up;
} Product;

/* Bytes of a panel of `width` rows of w: pairs of k, filled up with zeros to a multiple of SIDE. */
INLINE i64 panel_bytes(i64 width, i64 k) { return (k / 2 + SIDE - 1) / SIDE * SIDE * width * 4; }

void product_by_vectors(const Product *p);
void product_by_tiles(const Product *p);

#endif
