/* The kernels against plain loops, without Python: for processors that only an emulator has here. Exit status 1 and a line
 * for what is wrong. */

#include "kernels.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 1;
static int wrong = 0;

static float uniform(void) { /* in [-1, 1) */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(state >> 11) / 4503599627370496.0 - 1.0);
}

static float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint16_t narrow(float x) { /* to nearest, ties to even */
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* n numbers, as bfloat16 (half) or float32; and read back */
static void *numbers(i64 n, int half) {
    void *x = aligned_alloc(64, (n * 4 + 63) / 64 * 64);
    for (i64 i = 0; i < n; i++) {
        if (half) ((uint16_t *)x)[i] = narrow(uniform());
        else ((float *)x)[i] = uniform();
    }
    return x;
}

static double number(const void *x, i64 i, int half) { return half ? wide(((const uint16_t *)x)[i]) : ((const float *)x)[i]; }

static void compare(const char *what, const void *ours, const double *exact, i64 n, int half) {
    double top = 1e-9, off = 0;
    for (i64 i = 0; i < n; i++) {
        double d = fabs(number(ours, i, half) - exact[i]);
        if (fabs(exact[i]) > top) top = fabs(exact[i]);
        if (!(d <= off)) off = d;
    }
    double allowed = (half ? 3.0 / 256 : 1e-5) * top;
    if (off <= allowed) return;
    printf("%s (%s): off by %g, allowed %g\n", what, half ? "bfloat16" : "float32", off, allowed);
    wrong = 1;
}

static void check_norm(int half) {
    enum { N = 5, H = 77 };
    void *x = numbers(N * H, half), *w = numbers(H, half), *y = numbers(N * H, half);
    float rstd[N];
    double exact[N * H];
    norm(&(Norm){.rows = N, .width = H, .x = x, .weight = w, .y = y, .rstd = rstd, .eps = 1e-5f, .half = half});
    for (int n = 0; n < N; n++) {
        double squares = 0;
        for (int i = 0; i < H; i++) squares += pow(number(x, n * H + i, half), 2);
        for (int i = 0; i < H; i++)
            exact[n * H + i] = number(x, n * H + i, half) / sqrt(squares / H + 1e-5) * number(w, i, half);
    }
    compare("norm", y, exact, N * H, half);
}

static void check_swiglu(int half) {
    enum { N = 3, H = 50 };
    void *gate = numbers(N * H, half), *up = numbers(N * H, half), *y = numbers(N * H, half);
    double exact[N * H];
    swiglu(&(Gated){N, H, H, gate, up, half}, y);
    for (int i = 0; i < N * H; i++) {
        double g = number(gate, i, half);
        exact[i] = g / (1 + exp(-g)) * number(up, i, half);
    }
    compare("swiglu", y, exact, N * H, half);
}

static void check_rotary(int half) {
    enum { N = 3, D = 64, M = D / 2 };
    void *x = numbers(N * D, half), *c = numbers(N * D, half), *s = numbers(N * D, half), *y = numbers(N * D, half);
    double exact[N * D];
    rotary(&(Rotary){N, 1, D, D, x, c, s, y, 1, half});
    for (int n = 0; n < N; n++)
        for (int i = 0; i < D; i++) {
            double other = i < M ? -number(x, n * D + i + M, half) : number(x, n * D + i - M, half);
            exact[n * D + i] = number(x, n * D + i, half) * number(c, n * D + i, half) + other * number(s, n * D + i, half);
        }
    compare("rotary", y, exact, N * D, half);
}

/* A prompt of 7 and two completions of 5 and 2 behind it; 4 query heads for 2 heads of keys. */
static void check_attention(int half) {
    enum { ROWS = 14, H = 4, KV = 2, D = 32, STRIDE = 48 };
    const Segment segments[3] = {{0, 7, 0, 0}, {7, 5, 0, 7}, {12, 2, 0, 7}};
    void *q = numbers(ROWS * H * D, half), *k = numbers(ROWS * KV * D, half), *v = numbers(ROWS * KV * D, half);
    void *out = numbers(ROWS * H * D, half);
    uint32_t *kt = calloc(KV * D * STRIDE, 4), *pairs = calloc(ROWS * KV * D, 4);
    float lse[ROWS * H];
    static double exact[ROWS * H * D];
    transpose(ROWS, KV, half ? D / 2 : D, k, kt, STRIDE);
    if (half) pair_rows(ROWS, KV * D, v, pairs);
    attention(&(Attention){.count = 3, .heads = H, .kv_heads = KV, .d = D, .stride = STRIDE, .segments = segments, .q = q,
                           .k_t = (float *)kt, .v = half ? (float *)pairs : v, .out = out, .lse = lse, .scaling = 0.25f,
                           .half = half});
    for (int s = 0; s < 3; s++)
        for (i64 row = segments[s].first; row < segments[s].first + segments[s].length; row++)
            for (int h = 0; h < H; h++) {
                double total = 0, *sum = exact + (row * H + h) * D;
                memset(sum, 0, D * sizeof *sum);
                for (i64 key = 0; key <= row; key++) {
                    int seen = key >= segments[s].first || key < segments[s].prefix_length;
                    if (!seen) continue;
                    double score = 0;
                    for (int d = 0; d < D; d++)
                        score += number(q, (row * H + h) * D + d, half) * number(k, (key * KV + h / 2) * D + d, half);
                    double weight = exp(0.25 * score);
                    total += weight;
                    for (int d = 0; d < D; d++) sum[d] += weight * number(v, (key * KV + h / 2) * D + d, half);
                }
                for (int d = 0; d < D; d++) sum[d] /= total;
            }
    compare("attention", out, exact, ROWS * H * D, half);
}

static void check_softmax(int half) {
    enum { N = 3, V = 700 };
    void *x = numbers(N * V, half);
    const i64 tokens[N] = {0, 350, 699};
    const double uniforms[N] = {0.0, 0.5, 0.999};
    float lse[N], logp[N], entropy[N], sampled_logp[N];
    double ends[N * 3], exact[N];
    i64 sampled[N];
    Logits logits = {N, V, x, 2.0f, half};
    token_logp(&logits, tokens, lse, logp, entropy);
    sample_tokens(&logits, uniforms, ends, sampled, sampled_logp);
    for (int n = 0; n < N; n++) {
        double total = 0, before = 0;
        for (int i = 0; i < V; i++) total += exp(2 * number(x, n * V + i, half));
        exact[n] = 2 * number(x, n * V + tokens[n], half) - log(total);
        for (int i = 0; i < sampled[n]; i++) before += exp(2 * number(x, n * V + i, half)) / total;
        double end = before + exp(2 * number(x, n * V + sampled[n], half)) / total;
        if (uniforms[n] < before - 1e-5 || uniforms[n] > end + 1e-5) {
            printf("sample_tokens: token %lld holds %g .. %g, not %g\n", (long long)sampled[n], before, end, uniforms[n]);
            wrong = 1;
        }
    }
    compare("log-probs", logp, exact, N, 0);
}

static void check_product(i64 m, i64 n, i64 k) {
    uint16_t *x = numbers(m * k, 1), *w = numbers(n * k, 1), *plain = numbers(m * n, 1), *y = numbers(m * n, 1);
    float *bias = numbers((n + panel_width()) / panel_width() * panel_width(), 0);
    char *packed = aligned_alloc(64, (pack_bytes(n, k) + 63) / 64 * 64);
    memset(packed, 0, pack_bytes(n, k));
    pack(0, n, k, w, packed);
    plain_product(m, n, k, x, w, bias, plain);
    for (i64 first = 0; first < m; first++) { /* whatever the rows beside a row */
        product(m - first, n, k, x + first * k, packed, bias, y);
        if (memcmp(y, plain + first * n, (m - first) * n * 2)) {
            printf("product of %lld rows, %lld outputs, %lld inputs: other bits\n", (long long)(m - first), (long long)n, (long long)k);
            wrong = 1;
        }
    }
}

int main(void) {
    if (!products_by(1)) return printf("no products by vectors\n"), 1;
    for (int half = 0; half < 2; half++) {
        check_norm(half);
        check_swiglu(half);
        check_rotary(half);
        check_attention(half);
        check_softmax(half);
    }
    check_product(1, 5, 2);
    check_product(19, 37, 64);
    check_product(9, 50, 202);
    return wrong;
}
