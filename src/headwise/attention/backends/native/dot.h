/* Scores of a few rows, as in decoding: packing the keys would cost more than it saves, so they are read in place. */
#ifndef HEADWISE_DOT_H
#define HEADWISE_DOT_H

#include "pack.h"

enum { KEYS_AHEAD = 16, BYTES_AHEAD = 4096 /* so many keys are prefetched, and so many bytes at least */ };

/* s (rows x keys, lds floats per row) = q . k for keys `row` bytes apart; rows * keys is 4, 8 or 16, keys 2 or 4. Of
   BF16, q is in the order of load_of_pair. The keys `ahead` bytes further on are needed next. Of the last vector of a
   head, which overlaps the one before, only the new lanes count. Heads smaller than a vector are summed element by
   element. */
INLINE void dot_tile(const int dtype, const int rows, const int keys, const float *q, const char *k, int64_t row,
                     int64_t dim, float *s, int64_t lds, int64_t ahead) {
    const int64_t size = dtype_size(dtype);
    vfloat sums[16] = {{0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= dim; i += 2 * LANES) {
        UNROLL for (int j = 0; j < keys; j++)
            UNROLL for (int64_t x = 0; x < 2 * LANES * size; x += 4 * CACHE_LINE_FLOATS) {
                __builtin_prefetch(k + j * row + ahead + i * size + x, 0, INTO_L2); /* harmless past the end */
                if (dtype == F32) __builtin_prefetch(k + (j + ROWS_AHEAD_AGAIN) * row + i * size + x, 0, INTO_L2);
            }
        UNROLL for (int second = 0; second < 2; second++) {
            vfloat key[4];
            UNROLL for (int j = 0; j < keys; j++) key[j] = load_of_pair(dtype, k + j * row, i, second);
            UNROLL for (int r = 0; r < rows; r++) {
                vfloat left = load(q + r * dim + i + second * LANES);
                UNROLL for (int j = 0; j < keys; j++) sums[r * keys + j] += left * key[j];
            }
        }
    }
    if (i + LANES <= dim) {
        vfloat key[4];
        UNROLL for (int j = 0; j < keys; j++) key[j] = load_vector(dtype, k + j * row, i);
        UNROLL for (int r = 0; r < rows; r++) {
            vfloat left = load(q + r * dim + i);
            UNROLL for (int j = 0; j < keys; j++) sums[r * keys + j] += left * key[j];
        }
        i += LANES;
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
                        int64_t lds, int64_t count, int heads, int64_t next_head) {
    int64_t dim = call->dim, size = dtype_size(dtype), row = call->k_stride[2] * size, head = call->k_stride[1] * size;
    int64_t ahead = row * max(KEYS_AHEAD, BYTES_AHEAD / max(1, dim * size)), turn = heads > 1 ? 4 : count; /* keys */
    const int wide = REGISTERS > 16 ? 4 : 2; /* keys of a tile of four rows */
    float rest[4];
    for (int64_t from = 0; from < count; from += turn)
        for (int h = 0; h < heads; h++) {
            const float *left = q + h * next_head;
            const char *right = k + h * head + from * row;
            float *to = s + h * next_head + from, *end = to + min(turn, count - from);
            for (; to + 4 <= end; to += 4, right += 4 * row) {
                int r = 0;
                for (; r + 4 <= rows; r += 4)
                    UNROLL for (int x = 0; x < 4; x += wide)
                        dot_tile(dtype, 4, wide, left + r * dim, right + x * row, row, dim, to + r * lds + x, lds,
                                 ahead);
                for (; r + 2 <= rows; r += 2)
                    dot_tile(dtype, 2, 4, left + r * dim, right, row, dim, to + r * lds, lds, ahead);
                if (r < rows) dot_tile(dtype, 1, 4, left + r * dim, right, row, dim, to + r * lds, lds, ahead);
            }
            for (; to < end; to++, right += row)
                for (int r = 0; r < rows; r++) { /* the same key four times */
                    dot_tile(dtype, 1, 4, left + r * dim, right, 0, dim, rest, 4, 0);
                    to[r * lds] = rest[0];
                }
        }
}

/* s (rows x count, lds floats per row) = q . k, where the elements of a key are consecutive; of BF16, q is in the order
   of load_of_pair. The same for further KV heads, whose q and s are next_head floats further on each: they take turns
   on every four keys. */
static void dot_rows(int rows, const float *q, const char *k, const Call *call, float *s, int64_t lds, int64_t count,
                     int heads, int64_t next_head) {
    if (call->dtype == F32) dot_rows_of(F32, rows, q, k, call, s, lds, count, heads, next_head);
    else if (call->dtype == BF16) dot_rows_of(BF16, rows, q, k, call, s, lds, count, heads, next_head);
    else dot_rows_of(F16, rows, q, k, call, s, lds, count, heads, next_head);
}

#endif
