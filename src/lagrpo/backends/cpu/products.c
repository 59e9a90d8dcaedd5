/* Matrix products y = x wᵀ + bias of bfloat16: the forward products of learner and sampler.
 *
 * Every output is one sum in float32 over k from first to last, rounded to bfloat16 once. Neither the number of rows nor
 * the rows beside a row nor the number of threads can change it. The order within that sum is the instruction's:
 *
 *   by vectors  pair after pair of k: the second product of a pair, then the first, each added and rounded. That is
 *               AVX512-BF16's instruction; without it two multiplications and additions do the same.
 *   by tiles    32 numbers of k at a time: the sum of their 16 first halves of pairs, the sum of the 16 second halves,
 *               and these two added up, to the total. That is AMX's instruction.
 *
 * Which of the two computes is decided once in a process (`products_by`), for all products. */

#include "products.h"
#include "vectors.h"
#include <stdio.h>
#include <stdlib.h>
#if defined(EMULATED_TILES)
#include "emulated_tiles.h"
#define TILES 1
#elif defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#else
#define TILES 0
#endif



#if defined(__AVX512F__)
enum { COLUMNS = 3, ROWS = 8 }; /* of sums that stay in registers: vectors of outputs, rows */
#else
enum { COLUMNS = 1, ROWS = 4 };
#endif
enum { LINE = 64, CACHE = 1 << 19, DEPTH = 32, SIDE = 16, BAND = 8 };

/* ---- what this processor and its operating system grant ---- */

enum { BY_VECTORS = 1, BY_TILES = 2 };

static int by = BY_VECTORS;

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

/* From now on products are computed by vectors (1) or tiles (2); whether that is possible here. Packs made before are of
 * no use afterward. */
EXPORT i64 products_by(i64 way) {
    if (!granted((int)way)) return 0;
    by = (int)way;
    return 1;
}

/* Whether the vectors have an instruction for products of bfloat16. */
EXPORT int has_dot_products(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

/* ---- weights in the order of the products ---- */

/* A pack: panels of `panel_width` rows of w, the last one filled up with zeros; in each, pair after pair of k, the pairs
 * filled up with zeros to a multiple of SIDE: [panels, pairs, panel_width, 2]. */
EXPORT i64 panel_width(void) { return by == BY_TILES ? 2 * SIDE : COLUMNS * W; }

static i64 pairs_of(i64 k) { return (k / 2 + SIDE - 1) / SIDE * SIDE; }

static i64 panel_bytes(i64 k) { return pairs_of(k) * panel_width() * 4; }

EXPORT i64 pack_bytes(i64 n, i64 k) { return (n + panel_width() - 1) / panel_width() * panel_bytes(k); }

/* Rows of w [n, k], k even, as rows `first` .. of a pack that is zeros where nothing was put. */
EXPORT void pack(i64 first, i64 n, i64 k, const void *w, void *packed) {
    i64 width = panel_width(), pairs = k / 2;
#pragma omp parallel for schedule(static)
    for (i64 panel = first / width; panel < (first + n + width - 1) / width; panel++) {
        i64 from = panel * width > first ? panel * width : first, stop = (panel + 1) * width;
        if (stop > first + n) stop = first + n;
        const uint32_t *source = (const uint32_t *)w + (from - first) * pairs;
        uint32_t *to = (uint32_t *)((char *)packed + panel * panel_bytes(k)) + from % width;
        for (i64 pair = 0; pair < pairs; pair++)
            for (i64 row = 0; row < stop - from; row++) to[pair * width + row] = source[row * pairs + pair];
    }
}

/* ---- by vectors ---- */

/* `rows` rows of x against one panel; meanwhile `lines` cache lines at `ahead` are fetched, `each` per pair. */
INLINE void strip(const int rows, i64 k, const uint16_t *x, const char *panel, const float *bias, const char *ahead,
                  i64 lines, i64 each, uint16_t *y, i64 n, i64 stop) {
    vec total[ROWS][COLUMNS];
    const char *end = ahead + lines * LINE;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) total[r][c] = all(0);
    for (i64 pair = 0; pair < k / 2; pair++) {
        vec w[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) memcpy(&w[c], panel + (pair * COLUMNS + c) * LINE, sizeof(vec));
        if (ahead < end) {
            for (i64 line = 0; line < each; line++) __builtin_prefetch(ahead + line * LINE, 0, 2);
            ahead += each * LINE;
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++)
                total[r][c] = add_product(total[r][c], same_lanes(x, r * k / 2 + pair), w[c], 1);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS && c * W < stop; c++)
            store_some(y, r * n + c * W, r * n + stop, bias ? total[r][c] + load(bias, c * W, 0) : total[r][c], 1);
}

/* Rows `from` .. `to` - 1 against panel p. */
static void rows_by_vectors(i64 from, i64 to, i64 p, i64 n, i64 k, const uint16_t *x, const char *packed,
                            const float *bias, uint16_t *y) {
    i64 size = panel_bytes(k), m = to - from, strips = (m + ROWS - 1) / ROWS, column = p * COLUMNS * W;
    i64 next = column + COLUMNS * W < n ? size / LINE : 0, each = strips < COLUMNS ? COLUMNS - strips + 1 : 1;
    for (i64 s = 0; s < strips; s++) {
        i64 first = m * s / strips, lines = next * s / strips;
        const uint16_t *xs = x + (from + first) * k;
        const char *panel = packed + p * size, *ahead = panel + size + lines * LINE;
        uint16_t *to_y = y + (from + first) * n + column;
        const float *b = bias ? bias + column : NULL;
        lines = next * (s + 1) / strips - lines;
#define STRIP(R)                                                                                                       \
    case R:                                                                                                            \
        strip(R, k, xs, panel, b, ahead, lines, each, to_y, n, n - column);                                            \
        break;
        switch (m * (s + 1) / strips - first) {
            STRIP(1) STRIP(2) STRIP(3) STRIP(4)
#if defined(__AVX512F__)
            STRIP(5) STRIP(6) STRIP(7) STRIP(8)
#endif
        }
#undef STRIP
    }
}

/* Blocks of rows that stay in a core's cache, against panel after panel. */
static void product_by_vectors(i64 m, i64 n, i64 k, const uint16_t *x, const char *packed, const float *bias,
                               uint16_t *y) {
    i64 panels = (n + COLUMNS * W - 1) / (COLUMNS * W), fit = CACHE / (2 * k) > ROWS ? CACHE / (2 * k) : ROWS;
    i64 blocks = (m + fit - 1) / fit;
#pragma omp parallel for schedule(static)
    for (i64 task = 0; task < blocks * panels; task++) {
        i64 block = task / panels;
        rows_by_vectors(m * block / blocks, m * (block + 1) / blocks, task % panels, n, k, x, packed, bias, y);
    }
}

/* ---- by tiles ---- */

#if TILES

typedef struct __attribute__((packed)) { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } Tiles;

static void configure_tiles(void) { /* eight of SIDE rows of 64 bytes */
    Tiles t;
    memset(&t, 0, sizeof t);
    t.palette = 1;
    for (int i = 0; i < 8; i++) t.bytes[i] = LINE, t.rows[i] = SIDE;
    _tile_loadconfig(&t);
}

/* Two by two tiles of sums, `total`, go on over `steps` times DEPTH numbers of k: a, two tiles of x after the other, and
 * b, a part of a panel. The first steps of a sum start at 0; `low`: the lower two have no rows. */
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

/* Four tiles of sums to the outputs of up to 2 SIDE rows and columns. */
static void store_tiles(float (*total)[SIDE * SIDE], i64 rows, i64 columns, const float *bias, uint16_t *y, i64 n) {
    for (i64 r = 0; r < rows; r++)
        for (i64 c = 0; c < 2 && c * SIDE < columns; c++) {
            vec x = load(total[r / SIDE * 2 + c], r % SIDE * SIDE, 0);
            if (bias) x += load(bias, c * SIDE, 0);
            store_some(y, r * n + c * SIDE, r * n + columns, x, 1);
        }
}

/* x [m, k] in tiles, zeros beyond m and k: [m / 2 SIDE, k / DEPTH, 2 SIDE, DEPTH]. Called by all threads of a team. */
static void x_in_tiles(i64 m, i64 k, const uint16_t *x, uint16_t *tiles) {
    i64 steps = (k + DEPTH - 1) / DEPTH;
#pragma omp for schedule(static)
    for (i64 block = 0; block < (m + 2 * SIDE - 1) / (2 * SIDE); block++)
        for (i64 step = 0; step < steps; step++)
            for (i64 r = 0; r < 2 * SIDE; r++) {
                uint16_t *to = tiles + ((block * steps + step) * 2 * SIDE + r) * DEPTH;
                i64 row = block * 2 * SIDE + r, some = k - step * DEPTH < DEPTH ? k - step * DEPTH : DEPTH;
                if (row >= m) some = 0;
                if (some) memcpy(to, x + row * k + step * DEPTH, some * 2);
                if (some < DEPTH) memset(to + some, 0, (DEPTH - some) * 2);
            }
}

/* Bands of BAND double tiles of rows against panel after panel; k in parts of which a panel's stays in the first cache. */
static void product_by_tiles(i64 m, i64 n, i64 k, const uint16_t *x, const char *packed, const float *bias, uint16_t *y) {
    enum { PART = 16 };
    i64 steps = (k + DEPTH - 1) / DEPTH, panels = (n + 2 * SIDE - 1) / (2 * SIDE);
    i64 blocks = (m + 2 * SIDE - 1) / (2 * SIDE), bands = (blocks + BAND - 1) / BAND;
    uint16_t *tiles = aligned_alloc(LINE, blocks * steps * 2 * SIDE * DEPTH * 2);
    if (!tiles) {
        fprintf(stderr, "lagrpo: no memory for a product of %lld rows\n", (long long)m);
        abort();
    }
#pragma omp parallel
    {
        float total[BAND][4][SIDE * SIDE] __attribute__((aligned(64)));
        configure_tiles();
        x_in_tiles(m, k, x, tiles);
#pragma omp for schedule(static)
        for (i64 task = 0; task < bands * panels; task++) {
            i64 band = task / panels, p = task % panels, first = blocks * band / bands, stop = blocks * (band + 1) / bands;
            for (i64 part = 0; part < steps; part += PART)
                for (i64 block = first; block < stop; block++) {
                    i64 rows = m - block * 2 * SIDE, count = steps - part < PART ? steps - part : PART;
                    tiles_of_sums(total[block - first], tiles + (block * steps + part) * 2 * SIDE * DEPTH,
                                  (const uint16_t *)(packed + p * panel_bytes(k)) + part * 2 * SIDE * DEPTH, count,
                                  part == 0, rows <= SIDE);
                    if (part + count < steps) continue;
                    store_tiles(total[block - first], rows < 2 * SIDE ? rows : 2 * SIDE, n - p * 2 * SIDE,
                                bias ? bias + p * 2 * SIDE : NULL, y + block * 2 * SIDE * n + p * 2 * SIDE, n);
                }
        }
        _tile_release();
    }
    free(tiles);
}

#endif

/* y [m, n] = x [m, k] packed weights [n, k] transposed + bias float32 [n up to a multiple of a panel], or none. */
EXPORT void product(i64 m, i64 n, i64 k, const uint16_t *x, const char *packed, const float *bias, uint16_t *y) {
#if TILES
    if (by == BY_TILES) {
        product_by_tiles(m, n, k, x, packed, bias, y);
        return;
    }
#endif
    product_by_vectors(m, n, k, x, packed, bias, y);
}

/* ---- what the products must give, number after number ---- */

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
        for (i64 i = 0; i < k; i++) total += wide(x[i ^ 1]) * wide(w[i ^ 1]); /* GCC 12 gets two lines a pair wrong */
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

/* As `product`, of w [n, k] as it is. */
EXPORT void plain_product(i64 m, i64 n, i64 k, const uint16_t *x, const uint16_t *w, const float *bias, uint16_t *y) {
    for (i64 i = 0; i < m; i++)
        for (i64 j = 0; j < n; j++) {
            float total = plain_sum(k, x + i * k, w + j * k);
            y[i * n + j] = (uint16_t)bf16_bits(all(bias ? total + bias[j] : total))[0];
        }
}
