/* Matrix products by vectors: strips of up to ROWS rows against panels of COLUMNS vectors of outputs.
 *
 * A panel is read from memory once for a block of rows. What limits a product of few rows is that reading, so each
 * strip fetches a share of the next panel into the cache while it computes. */

#include "products.h"

/* CACHE: bytes of x that stay in a core's cache. PAIR: cache lines of one pair of k of a panel. */
enum { CACHE = 1 << 19, PAIR = COLUMNS * W * 4 / LINE };

/* One panel. */
typedef struct {
    const char *weights; /* [k / 2, COLUMNS * W, 2] */
    const char *up;      /* the adapter's: [rank / 2, COLUMNS * W, 2]; NULL without one */
    const float *bias;   /* [COLUMNS * W], or NULL */
    i64 k, rank;
    i64 n;    /* between rows of y */
    i64 stop; /* the outputs that are left from this panel on: the last panel has fewer than its width */
} Panel;

/* What is fetched into the cache meanwhile: `lines` cache lines, `each` per pair of k. */
typedef struct {
    const char *at;
    i64 lines, each;
} Ahead;

/* `rows` rows of x [rows, k], and of the adapter's low [rows, rank], against one panel. */
INLINE void strip(const int rows, Panel p, const uint16_t *x, const uint16_t *low, Ahead ahead, uint16_t *y) {
    vec total[ROWS][COLUMNS];
    const char *end = ahead.at + ahead.lines * LINE;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) total[r][c] = all(0);
    for (i64 pair = 0; pair < p.k / 2; pair++) {
        vec w[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) memcpy(&w[c], p.weights + (pair * COLUMNS + c) * sizeof(vec), sizeof(vec));
        if (ahead.at < end) {
            for (i64 line = 0; line < ahead.each; line++) __builtin_prefetch(ahead.at + line * LINE, 0, 2);
            ahead.at += ahead.each * LINE;
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++)
                total[r][c] = add_product(total[r][c], same_lanes(x, r * p.k / 2 + pair), w[c], 1);
    }
    for (i64 pair = 0; pair < p.rank / 2; pair++) {
        vec w[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) memcpy(&w[c], p.up + (pair * COLUMNS + c) * sizeof(vec), sizeof(vec));
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++)
                total[r][c] = add_product(total[r][c], same_lanes(low, r * p.rank / 2 + pair), w[c], 1);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS && c * W < p.stop; c++) {
            vec sum = p.bias ? total[r][c] + load(p.bias, c * W, 0) : total[r][c];
            store_some(y, r * p.n + c * W, r * p.n + p.stop, sum, 1);
        }
}

/* one copy of the code for each number of rows, so that their sums stay in registers */
static void strip_of(i64 rows, Panel p, const uint16_t *x, const uint16_t *low, Ahead ahead, uint16_t *y) {
#define STRIP(R)                                                                                                       \
    case R:                                                                                                            \
        strip(R, p, x, low, ahead, y);                                                                                 \
        break;
    switch (rows) {
        STRIP(1) STRIP(2) STRIP(3) STRIP(4)
#if defined(__AVX512F__)
        STRIP(5) STRIP(6) STRIP(7) STRIP(8)
#endif
    }
#undef STRIP
}

/* Rows `from` .. `to` - 1 against one panel; meanwhile the next panel is fetched. */
static void rows_by_vectors(const Product *a, i64 from, i64 to, i64 panel) {
    i64 size = panel_bytes(COLUMNS * W, a->k);
    i64 m = to - from, strips = (m + ROWS - 1) / ROWS;
    i64 column = panel * COLUMNS * W; /* the panel's first output */
    i64 next = column + COLUMNS * W < a->n ? size / LINE : 0; /* cache lines of the next panel, if there is one */
    i64 each = strips < PAIR ? PAIR - strips + 1 : 1;         /* so many lines a pair that the strips fetch all of it */
    Panel p = {a->packed + panel * size, a->rank ? a->up + panel * panel_bytes(COLUMNS * W, a->rank) : NULL,
               a->bias ? a->bias + column : NULL, a->k, a->rank, a->n, a->n - column};
    for (i64 s = 0; s < strips; s++) {
        /* Strips are of equal length, or one row longer than others, and so are their shares of the next panel. */
        i64 first = m * s / strips, lines = next * s / strips;
        Ahead ahead = {p.weights + size + lines * LINE, next * (s + 1) / strips - lines, each};
        const uint16_t *low = a->rank ? a->low + (from + first) * a->rank : NULL;
        uint16_t *y = a->y + (from + first) * a->n + column;
        strip_of(m * (s + 1) / strips - first, p, a->x + (from + first) * a->k, low, ahead, y);
    }
}

/* Blocks of rows that stay in a core's cache, against panel after panel. If there are fewer panels than threads, as
 * in an adapter's first product, there are more blocks, so that every thread has work. */
void product_by_vectors(const Product *a) {
    i64 panels = (a->n + COLUMNS * W - 1) / (COLUMNS * W), threads = omp_get_max_threads();
    i64 fit = CACHE / (2 * a->k) > ROWS ? CACHE / (2 * a->k) : ROWS, blocks = (a->m + fit - 1) / fit;
    i64 wanted = (threads + panels - 1) / panels, strips = (a->m + ROWS - 1) / ROWS;
    if (blocks < wanted) blocks = wanted < strips ? wanted : strips;
#pragma omp parallel for schedule(static)
    for (i64 task = 0; task < blocks * panels; task++) {
        i64 block = task / panels;
        rows_by_vectors(a, a->m * block / blocks, a->m * (block + 1) / blocks, task % panels);
    }
}
