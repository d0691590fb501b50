/* Reading, converting, packing and writing rows of tensors of any dtype and stride. */
#ifndef HEADWISE_PACK_H
#define HEADWISE_PACK_H

#include "call.h"
#include "matmul.h"
#include "vectors.h"

INLINE float load_scalar(const char *x, int64_t dtype) {
    if (dtype == F32) return *(const float *)x;
    return dtype == BF16 ? bf16_to_f32(*(const uint16_t *)x) : f16_to_f32(*(const uint16_t *)x);
}

enum { ROWS_AHEAD = 8 /* rows of a tensor are prefetched so long before they are read or written */ };

/* Rows of a tensor may lie far apart: waiting for each of them would cost more than the work on it. Harmless past the
   end of a tensor. */
INLINE void prefetch_row(const char *x, int64_t bytes, const int writing) {
    for (int64_t i = 0; i < bytes; i += 4 * CACHE_LINE_FLOATS) __builtin_prefetch(x + i, writing);
}

/* Prefetch the row that is read `ahead` rows after x, unless rows follow each other (`step` bytes from row to row):
   those the processor prefetches by itself, and asking for them too takes time. */
INLINE void prefetch_distant_row(const char *x, int64_t ahead, int64_t step, int64_t bytes) {
    if (step != bytes) prefetch_row(x + ahead * step, bytes, 0);
}

/* y = factor * x for n >= LANES consecutive elements, in whole vectors; the last one may overlap the one before. */
INLINE void read_vectors(const int dtype, float *y, const char *x, int64_t n, float factor) {
    for (int64_t i = 0; i + LANES <= n; i += LANES) store(y + i, load_vector(dtype, x, i) * factor);
    if (n % LANES) store(y + n - LANES, load_vector(dtype, x, n - LANES) * factor);
}

/* y = factor * x for n elements of any dtype but BOOL8 and any stride. */
static void read_row(float *y, const char *x, int64_t dtype, int64_t stride, int64_t n, float factor) {
    if (stride != 1 || n < LANES)
        for (int64_t i = 0, size = dtype_size(dtype); i < n; i++)
            y[i] = load_scalar(x + i * stride * size, dtype) * factor;
    else if (dtype == F32) read_vectors(F32, y, x, n, factor);
    else if (dtype == BF16) read_vectors(BF16, y, x, n, factor);
    else read_vectors(F16, y, x, n, factor);
}

/* Put n floats, in place, into the order in which load_of_pair reads BF16 (split), or back. */
INLINE void reorder_pairs(float *x, int64_t n, const int split) {
    float y[2 * LANES];
    for (; n >= 2 * LANES; n -= 2 * LANES, x += 2 * LANES) {
        memcpy(y, x, sizeof y);
        for (int i = 0; i < 2 * LANES; i++) {
            int64_t to = index_in_pairs(i, 2 * LANES);
            if (split) x[to] = y[i];
            else x[i] = y[to];
        }
    }
}

/* y = factor * x for n consecutive elements, rounded to a dtype. */
static void write_row(char *y, const float *x, int64_t dtype, int64_t n, float factor) {
    if (dtype == F32)
        for (int64_t i = 0; i < n; i++) ((float *)y)[i] = x[i] * factor;
    else if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = f32_to_bf16(x[i] * factor);
    else
        for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = f32_to_f16(x[i] * factor);
}

/* LANES keys, `row` bytes apart, into LANES columns of a panel, by transposing squares. Of fewer keys (count) the last
   is repeated; the last square overlaps the one before. dim >= LANES. */
INLINE void pack_columns(const int dtype, float *y, const char *x, int64_t row, int64_t dim, int64_t count) {
    for (int64_t i = 0; i < dim; i += LANES) {
        int64_t from = min(i, dim - LANES);
        vfloat square[LANES];
        UNROLL for (int r = 0; r < LANES; r++) square[r] = load_vector(dtype, x + min(r, count - 1) * row, from);
        transpose(square);
        UNROLL for (int r = 0; r < LANES; r++) store(y + (from + r) * PANEL, square[r]);
    }
}

/* Keys (count x dim) into panels [div_up(count, PANEL)][dim][PANEL]. Scores on the padding of the last are ignored. */
static void pack_keys(float *y, const char *x, const Call *call, int64_t count) {
    int64_t dtype = call->dtype, dim = call->dim, size = dtype_size(dtype), row = call->k_stride[2] * size;
    for (int64_t j = 0; j < count; j += LANES) {
        float *to = y + j / PANEL * PANEL * dim + j % PANEL;
        const char *from = x + j * row;
        int64_t columns = min(LANES, count - j);
        for (int64_t r = LANES; r < min(2 * LANES, count - j); r++) prefetch_distant_row(from, r, row, dim * size);
        if (call->k_stride[3] != 1 || dim < LANES) {
            for (int64_t i = 0; i < dim; i++)
                for (int64_t r = 0; r < columns; r++)
                    to[i * PANEL + r] = load_scalar(from + r * row + i * call->k_stride[3] * size, dtype);
        } else if (dtype == F32) pack_columns(F32, to, from, row, dim, columns);
        else if (dtype == BF16) pack_columns(BF16, to, from, row, dim, columns);
        else pack_columns(F16, to, from, row, dim, columns);
    }
}

/* Values (count x value_dim) into rows of `width` floats, padded with zeros. */
static void pack_values(float *y, int64_t width, const char *x, const Call *call, int64_t count) {
    int64_t size = dtype_size(call->dtype), row = call->v_stride[2] * size;
    for (int64_t j = 0; j < count; j++, y += width) {
        prefetch_distant_row(x + j * row, ROWS_AHEAD, row, call->value_dim * size);
        read_row(y, x + j * row, call->dtype, call->v_stride[3], call->value_dim, 1);
        for (int64_t i = call->value_dim; i < width; i++) y[i] = 0;
    }
}

INLINE int all_finite_of(const int dtype, const char *x, int64_t row, int64_t rows, int64_t n) {
    vfloat zero[4] = {{0}}; /* 0 * x is 0 if x is finite, else NaN */
    for (int64_t j = 0; j < rows; j++, x += row * dtype_size(dtype)) {
        int64_t i = 0;
        for (; i + 4 * LANES <= n; i += 4 * LANES)
            UNROLL for (int u = 0; u < 4; u++) zero[u] += load_vector(dtype, x, i + u * LANES) * 0.0f;
        for (; i + LANES <= n; i += LANES) zero[0] += load_vector(dtype, x, i) * 0.0f;
        if (n % LANES) zero[1] += load_vector(dtype, x, n - LANES) * 0.0f;
    }
    return reduce_add(zero[0] + zero[1] + zero[2] + zero[3]) == 0;
}

/* Whether all of rows x n elements are finite, in rows of `row` elements; n >= LANES, or rows = 0. */
static int all_finite(int64_t dtype, const char *x, int64_t row, int64_t rows, int64_t n) {
    if (dtype == F32) return all_finite_of(F32, x, row, rows, n);
    return dtype == BF16 ? all_finite_of(BF16, x, row, rows, n) : all_finite_of(F16, x, row, rows, n);
}

/* The maximum of |x| over n floats, rounded up to whole vectors. A NaN is ignored or makes it infinite. */
static float max_abs(const float *x, int64_t n) {
    vfloat size[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) UNROLL for (int u = 0; u < 4; u++)
        size[u] = vec_max(vec_abs(load(x + i + u * LANES)), size[u]); /* in this order a NaN hides no infinity */
    for (; i < n; i += LANES) size[0] = vec_max(vec_abs(load(x + i)), size[0]);
    vfloat top = vec_max(vec_max(size[0], size[1]), vec_max(size[2], size[3]));
    return any_true(~(top <= splat(FLT_MAX))) ? INFINITY : reduce_max(top);
}

#endif
