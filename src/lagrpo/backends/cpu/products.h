/* Matrix products of bfloat16: see products.c. */

#ifndef LAGRPO_PRODUCTS_H
#define LAGRPO_PRODUCTS_H

#include <stdint.h>

void product(int64_t m, int64_t n, int64_t k, const uint16_t *x, const char *packed, const float *bias, uint16_t *y);

#endif
