/* AMX's tile instructions in plain C, as Intel's manual describes them: what runs products.c's tiles in tests on
 * processors without any. Numbers too small for a normal float32 are not flushed to 0 here. */

#include <stdint.h>
#include <string.h>

typedef struct { uint8_t row[16][64]; } EmulatedTile;

static __thread EmulatedTile emulated_tiles[8];

static void emulated_loadconfig(const void *config) { (void)config; }
static void emulated_release(void) {}
static void emulated_zero(int t) { memset(&emulated_tiles[t], 0, sizeof emulated_tiles[t]); }

static void emulated_loadd(int t, const void *base, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(emulated_tiles[t].row[r], (const char *)base + r * stride, 64);
}

static void emulated_stored(int t, void *base, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)base + r * stride, emulated_tiles[t].row[r], 64);
}

static float emulated_number(const uint8_t *row, int i) {
    uint16_t half;
    memcpy(&half, row + 2 * i, 2);
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static void emulated_dpbf16ps(int sums, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float first = 0, second = 0, total;
            for (int k = 0; k < 16; k++) {
                const uint8_t *x = emulated_tiles[a].row[m], *y = emulated_tiles[b].row[k];
                first += emulated_number(x, 2 * k) * emulated_number(y, 2 * n);
                second += emulated_number(x, 2 * k + 1) * emulated_number(y, 2 * n + 1);
            }
            memcpy(&total, emulated_tiles[sums].row[m] + 4 * n, 4);
            total += first + second;
            memcpy(emulated_tiles[sums].row[m] + 4 * n, &total, 4);
        }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
