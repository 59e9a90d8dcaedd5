/* The parts of a decoder layer between its matrix products and attention: norm, gated activation, rotary embedding.
 *
 * What comes out for a row does not depend on the rows around it, on the number of threads or on how the work is cut:
 * sums run in an order that only the place in the row decides. */

#include "kernels.h"
#include "vectors.h"

/* ---- root mean square norm ---- */

/* total = x + delta (x if delta is NULL), y = weight * (total / rms(total)), rstd = 1 / rms. Rounded where transformers
 * rounds: the sum, and total / rms before it is multiplied by the weight. */
INLINE void norm_row(Norm a, i64 row, int half) {
    i64 first = row * a.width, stop = first + a.width; /* the row's numbers */
    vec squares[PARTS] = {all(0)};
    FOR_PARTS(i, p, first, stop) {
        vec v = load_some(a.x, i, stop, 0, half);
        if (a.delta) {
            v = rounded(v + load_some(a.delta, i, stop, 0, half), half);
            store_some(a.total, i, stop, v, half);
        }
        squares[p] += v * v;
    }
    const void *source = a.delta ? a.total : a.x;
    float r = 1.f / sqrtf(sum(squares) / (float)a.width + a.eps);
    a.rstd[row] = r;
    for (i64 i = first; i < stop; i += W) {
        vec v = rounded(load_some(source, i, stop, 0, half) * all(r), half);
        store_some(a.y, i, stop, v * load_some(a.weight, i - first, a.width, 0, half), half);
    }
}

EXPORT void norm(const Norm *a) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < a->rows; row++) FOR_DTYPE(a->half, norm_row(*a, row, HALF));
}

/* grad_x = grad_total + r (g - xhat mean(g xhat)), with r = rstd, g = weight grad_y, xhat = r x. grad_weight
 * [slices, padded]: the sums of grad_y xhat over `slices` equal runs of rows, which the caller adds up in their
 * order. A slice is the work of one thread, so no two threads add to the same sums. */
INLINE void norm_backward_slice(NormBackward a, i64 slice, int half) {
    i64 width = a.width, padded = (width + LANES - 1) / LANES * LANES;
    float *gw = a.grad_weight + slice * padded;
    memset(gw, 0, padded * sizeof *gw);
    for (i64 row = a.rows * slice / a.slices; row < a.rows * (slice + 1) / a.slices; row++) {
        i64 first = row * width, stop = first + width;
        vec products[PARTS] = {all(0)}, r = all(a.rstd[row]);
        FOR_PARTS(i, p, first, stop) {
            vec g = load_some(a.grad_y, i, stop, 0, half), xhat = load_some(a.x, i, stop, 0, half) * r;
            store(gw, i - first, load(gw, i - first, 0) + g * rounded(xhat, half), 0);
            products[p] += g * load_some(a.weight, i - first, width, 0, half) * xhat;
        }
        vec mean = all(sum(products) / (float)width);
        for (i64 i = first; i < stop; i += W) {
            vec g = load_some(a.grad_y, i, stop, 0, half) * load_some(a.weight, i - first, width, 0, half);
            vec gx = r * (g - load_some(a.x, i, stop, 0, half) * r * mean);
            if (a.grad_total) gx += load_some(a.grad_total, i, stop, 0, half);
            store_some(a.grad_x, i, stop, gx, half);
        }
    }
}

EXPORT void norm_backward(const NormBackward *a) {
#pragma omp parallel for schedule(static)
    for (i64 slice = 0; slice < a->slices; slice++) FOR_DTYPE(a->half, norm_backward_slice(*a, slice, HALF));
}

/* ---- gated activation: y = silu(gate) * up ---- */

/* y = silu(gate) rounded, times up: as transformers rounds. */
INLINE void swiglu_row(Gated a, void *y, i64 row, int half) {
    i64 from = row * a.stride, to = row * a.width, end = from + a.width;
    for (i64 i = 0; i < a.width; i += W) {
        vec g = load_some(a.gate, from + i, end, 0, half), u = load_some(a.up, from + i, end, 0, half);
        store_some(y, to + i, to + a.width, rounded(g * sigmoid(g), half) * u, half);
    }
}

/* y [rows, width]. */
EXPORT void swiglu(const Gated *a, void *y) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < a->rows; row++) FOR_DTYPE(a->half, swiglu_row(*a, y, row, HALF));
}

INLINE void swiglu_backward_row(Gated a, const void *grad_y, void *y, void *grad_gate, void *grad_up, i64 row,
                                int half) {
    i64 from = row * a.stride, to = row * a.width, end = from + a.width, stop = to + a.width;
    for (i64 i = 0; i < a.width; i += W) {
        vec g = load_some(a.gate, from + i, end, 0, half), u = load_some(a.up, from + i, end, 0, half);
        vec gy = load_some(grad_y, to + i, stop, 0, half);
        vec s = sigmoid(g); /* silu(g) = g s, and its derivative is s (1 + g (1 - s)) */
        store_some(y, to + i, stop, rounded(g * s, half) * u, half);
        store_some(grad_up, to + i, stop, gy * g * s, half);
        store_some(grad_gate, to + i, stop, gy * u * s * (all(1.f) + g * (all(1.f) - s)), half);
    }
}

/* y of `swiglu` again, and its gradients: grad_y, grad_gate and grad_up [rows, width]. */
EXPORT void swiglu_backward(const Gated *a, const void *grad_y, void *y, void *grad_gate, void *grad_up) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < a->rows; row++)
        FOR_DTYPE(a->half, swiglu_backward_row(*a, grad_y, y, grad_gate, grad_up, row, HALF));
}

/* ---- rotary position embedding ---- */

/* y = x cos + rotate(x) sin, rotate(x) = (-x_second, x_first) of the two halves of a head; sign = -1: its transpose. */
INLINE void rotary_head(Rotary a, i64 row, i64 head, int half) {
    i64 from = row * a.stride + head * a.d, to = (row * a.heads + head) * a.d;
    i64 m = a.d / 2;
    for (i64 i = 0; i < m; i += W) {
        i64 first = row * a.d + i, second = first + m;
        vec x = load(a.x, from + i, half), z = load(a.x, from + m + i, half); /* of the first half, of the second */
        vec s = all(a.sign);
        vec cx = load(a.cosine, first, half), cz = load(a.cosine, second, half);
        vec sx = load(a.sine, first, half) * s, sz = load(a.sine, second, half) * s;
        store(a.y, to + i, rounded(x * cx, half) + rounded(-z * sx, half), half);
        store(a.y, to + m + i, rounded(z * cz, half) + rounded(x * sz, half), half);
    }
}

EXPORT void rotary(const Rotary *a) {
#pragma omp parallel for schedule(static)
    for (i64 row = 0; row < a->rows; row++)
        for (i64 head = 0; head < a->heads; head++) FOR_DTYPE(a->half, rotary_head(*a, row, head, HALF));
}
