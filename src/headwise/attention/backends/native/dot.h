/* Scores of a few rows, as in decoding: packing the keys would cost more than it saves, so they are read in place. */
#ifndef HEADWISE_DOT_H
#define HEADWISE_DOT_H

#include "pack.h"

enum { KEYS_AHEAD = 8 /* prefetched */ };

/* s (rows x keys, lds floats per row) = q . k for keys `row` bytes apart; rows * keys is 4 or 8, keys 2 or 4. Of the
   last vector of a head, which overlaps the one before, only the new lanes count. Heads smaller than a vector are
   summed element by element. */
INLINE void dot_tile(const int dtype, const int rows, const int keys, const float *q, const char *k, int64_t row,
                     int64_t dim, float *s, int64_t lds) {
    const int64_t size = dtype == F32 ? 4 : 2;
    vfloat sums[8] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vfloat key[4];
        UNROLL for (int j = 0; j < keys; j++) {
            key[j] = load_vector(dtype, k + j * row, i);
            __builtin_prefetch(k + (j + KEYS_AHEAD) * row + i * size); /* harmless past the end */
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vfloat left = load(q + r * dim + i);
            UNROLL for (int j = 0; j < keys; j++) sums[r * keys + j] += left * key[j];
        }
    }
    if (i < dim && dim > LANES) {
        vint is_new = iota() >= (float)(i + LANES - dim);
        vfloat key[4];
        UNROLL for (int j = 0; j < keys; j++)
            key[j] = zero_unless(is_new, load_vector(dtype, k + j * row, dim - LANES));
        UNROLL for (int r = 0; r < rows; r++) {
            vfloat left = zero_unless(is_new, load(q + r * dim + dim - LANES)); /* in both: 0 * infinity is NaN */
            UNROLL for (int j = 0; j < keys; j++) sums[r * keys + j] += left * key[j];
        }
        i = dim;
    }
    UNROLL for (int first = 0; first < rows * keys; first += 4) { /* four keys of a row, or two keys of two rows */
        float4 four = reduce_add_4(sums + first);
        float *to = s + first / keys * lds;
        memcpy(to, &four, 4 * keys);
        if (keys == 2) memcpy(to + lds, (float *)&four + 2, 8);
    }
    for (; i < dim; i++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < keys; j++)
                s[r * lds + j] += q[r * dim + i] * load_scalar(k + j * row + i * size, dtype);
}

INLINE void dot_rows_of(const int dtype, int rows, const float *q, const char *k, const Call *call, float *s,
                        int64_t lds, int64_t count) {
    int64_t dim = call->dim, row = call->k_stride[2] * (dtype == F32 ? 4 : 2), j = 0;
    float rest[4];
    for (; j + 4 <= count; j += 4, k += 4 * row) {
        int r = 0;
        for (; r + 4 <= rows; r += 4) {
            dot_tile(dtype, 4, 2, q + r * dim, k, row, dim, s + r * lds + j, lds);
            dot_tile(dtype, 4, 2, q + r * dim, k + 2 * row, row, dim, s + r * lds + j + 2, lds);
        }
        for (; r + 2 <= rows; r += 2) dot_tile(dtype, 2, 4, q + r * dim, k, row, dim, s + r * lds + j, lds);
        if (r < rows) dot_tile(dtype, 1, 4, q + r * dim, k, row, dim, s + r * lds + j, lds);
    }
    for (; j < count; j++, k += row)
        for (int r = 0; r < rows; r++) { /* the same key four times */
            dot_tile(dtype, 1, 4, q + r * dim, k, 0, dim, rest, 4);
            s[r * lds + j] = rest[0];
        }
}

/* s (rows x count, lds floats per row) = q . k, where the elements of a key are consecutive. */
static void dot_rows(int rows, const float *q, const char *k, const Call *call, float *s, int64_t lds, int64_t count) {
    if (call->dtype == F32) dot_rows_of(F32, rows, q, k, call, s, lds, count);
    else if (call->dtype == BF16) dot_rows_of(BF16, rows, q, k, call, s, lds, count);
    else dot_rows_of(F16, rows, q, k, call, s, lds, count);
}

#endif
