/* Matrix products by AMX's tiles: two by two tiles of sums at a time, from two tiles of x and two of weights.
 *
 * A double tile is 2 SIDE = 32 rows of x, or the 32 outputs of a panel. A step is DEPTH = 32 numbers of k. */

#include "products.h"

#if TILES

#include <stdio.h>
#include <stdlib.h>
#if defined(EMULATED_TILES)
#include "emulated_tiles.h"
#else
#include <immintrin.h>
#endif

/* A band is up to BAND double tiles of rows, whose sums are in hand. A part is up to PART steps: a panel's numbers for
 * them stay in the first cache while the rows of the band pass. */
enum { BAND = 8, PART = 16 };

/* The operand of _tile_loadconfig. */
typedef struct __attribute__((packed)) {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* Eight tiles of SIDE rows of 64 bytes: 0 to 3 are sums, 4 and 5 of x, 6 and 7 of weights. */
static void configure_tiles(void) {
    Tiles t;
    memset(&t, 0, sizeof t);
    t.palette = 1;
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = LINE;
        t.rows[i] = SIDE;
    }
    _tile_loadconfig(&t);
}

/* Adds `steps` steps of k to two by two tiles of sums, `total`. a [steps, 2 SIDE, DEPTH] is a double tile of x, b
 * [steps, SIDE pairs, 2 SIDE, 2] a part of a panel. With `first` the sums start at 0. With `low` there are no rows
 * in the second tile of x, and its sums are not computed. */
static void tiles_of_sums(float (*total)[SIDE * SIDE], const uint16_t *a, const uint16_t *b, i64 steps, int first,
                          int low) {
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, total[0], LINE);
        _tile_loadd(1, total[1], LINE);
        _tile_loadd(2, total[2], LINE);
        _tile_loadd(3, total[3], LINE);
    }
    for (i64 step = 0; step < steps; step++, a += 2 * SIDE * DEPTH, b += 2 * SIDE * DEPTH) {
        _tile_loadd(4, a, LINE);
        _tile_loadd(6, b, 2 * LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + DEPTH, 2 * LINE);
        _tile_dpbf16ps(1, 4, 7);
        if (low) continue;
        _tile_loadd(5, a + SIDE * DEPTH, LINE);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, total[0], LINE);
    _tile_stored(1, total[1], LINE);
    _tile_stored(2, total[2], LINE);
    _tile_stored(3, total[3], LINE);
}

/* Rounds four tiles of sums, with the bias, to up to 2 SIDE rows and columns of y, whose rows are n apart. */
static void store_tiles(float (*total)[SIDE * SIDE], i64 rows, i64 columns, const float *bias, uint16_t *y, i64 n) {
    for (i64 r = 0; r < rows; r++)
        for (i64 c = 0; c < 2 * SIDE && c < columns; c += W) {
            vec x = load(total[r / SIDE * 2 + c / SIDE], r % SIDE * SIDE + c % SIDE, 0);
            if (bias) x += load(bias, c, 0);
            store_some(y, r * n + c, r * n + columns, x, 1);
        }
}

/* The steps of k, the last one filled up with zeros. */
static i64 steps_of(i64 k) { return (k + DEPTH - 1) / DEPTH; }

/* Copies x [m, k] into double tiles [blocks, steps, 2 SIDE, DEPTH], with zeros beyond m and k. Blocks lie `apart` steps
 * from each other, which leaves room for an adapter's steps behind. Called by all threads of a team. */
static void x_in_tiles(i64 m, i64 k, const uint16_t *x, uint16_t *tiles, i64 apart) {
#pragma omp for schedule(static)
    for (i64 block = 0; block < (m + 2 * SIDE - 1) / (2 * SIDE); block++)
        for (i64 step = 0; step < steps_of(k); step++)
            for (i64 r = 0; r < 2 * SIDE; r++) {
                uint16_t *to = tiles + ((block * apart + step) * 2 * SIDE + r) * DEPTH;
                i64 row = block * 2 * SIDE + r;
                i64 some = k - step * DEPTH < DEPTH ? k - step * DEPTH : DEPTH; /* numbers of the row in this step */
                if (row >= m) some = 0;
                if (some) memcpy(to, x + row * k + step * DEPTH, some * 2);
                if (some < DEPTH) memset(to + some, 0, (DEPTH - some) * 2);
            }
}

/* A band of double tiles of rows, first .. stop - 1, against one panel: part after part of k, then of the adapter's
 * rank. `total` has the sums of the whole band. */
static void band_by_tiles(const Product *a, const uint16_t *tiles, i64 first, i64 stop, i64 panel,
                          float (*total)[4][SIDE * SIDE]) {
    i64 own = steps_of(a->k), steps = own + steps_of(a->rank); /* of k, and with the rank behind */
    i64 column = panel * 2 * SIDE;                             /* the panel's first output */
    i64 count;                                                 /* the steps of a part, which k or the rank ends */
    const uint16_t *weights = (const uint16_t *)(a->packed + panel * panel_bytes(2 * SIDE, a->k));
    const uint16_t *up = a->rank ? (const uint16_t *)(a->up + panel * panel_bytes(2 * SIDE, a->rank)) : NULL;
    for (i64 part = 0; part < steps; part += count) {
        i64 left = (part < own ? own : steps) - part;
        const uint16_t *b = part < own ? weights + part * 2 * SIDE * DEPTH : up + (part - own) * 2 * SIDE * DEPTH;
        count = left < PART ? left : PART;
        for (i64 block = first; block < stop; block++) {
            i64 rows = a->m - block * 2 * SIDE;
            tiles_of_sums(total[block - first], tiles + (block * steps + part) * 2 * SIDE * DEPTH, b, count, part == 0,
                          rows <= SIDE);
            if (part + count < steps) continue;
            store_tiles(total[block - first], rows < 2 * SIDE ? rows : 2 * SIDE, a->n - column,
                        a->bias ? a->bias + column : NULL, a->y + block * 2 * SIDE * a->n + column, a->n);
        }
    }
}

/* Bands of BAND double tiles of rows against panel after panel. */
void product_by_tiles(const Product *a) {
    i64 own = steps_of(a->k), steps = own + steps_of(a->rank), panels = (a->n + 2 * SIDE - 1) / (2 * SIDE);
    i64 blocks = (a->m + 2 * SIDE - 1) / (2 * SIDE), bands = (blocks + BAND - 1) / BAND;
    uint16_t *tiles = aligned_alloc(LINE, blocks * steps * 2 * SIDE * DEPTH * 2);
    if (!tiles) {
        fprintf(stderr, "lagrpo: no memory for a product of %lld rows\n", (long long)a->m);
        abort();
    }
#pragma omp parallel
    {
        float total[BAND][4][SIDE * SIDE] __attribute__((aligned(64)));
        configure_tiles();
        x_in_tiles(a->m, a->k, a->x, tiles, steps);
        if (a->rank) x_in_tiles(a->m, a->rank, a->low, tiles + own * 2 * SIDE * DEPTH, steps);
#pragma omp for schedule(static)
        for (i64 task = 0; task < bands * panels; task++) {
            i64 band = task / panels;
            band_by_tiles(a, tiles, blocks * band / bands, blocks * (band + 1) / bands, task % panels, total);
        }
        _tile_release();
    }
    free(tiles);
}

#endif
