/* Small matrix products whose accumulators stay in registers.

   Matrices are row-major with a leading dimension in floats (lda, ldb, ldc), as in BLAS. Rows of a are broadcast, rows
   of b are read in whole vectors; b and c must be readable, and c writable, up to whole vectors. Within a, the next row
   is lda floats further and the next column `step`, so that lda = 1 multiplies by a transposed matrix. */
#ifndef HEADWISE_MATMUL_H
#define HEADWISE_MATMUL_H

#include "vectors.h"

enum { MAX_TILE_VECTORS = 8, PANEL = TILE_VECTORS * LANES /* columns of a packed panel */, CACHE_LINE_FLOATS = 16 };
enum { INTO_L2 = 2 /* of __builtin_prefetch: more lines can be on their way to the L2 cache than to L1 */ };
/* A prefetch is lost where too many lines are on their way, as happens with floats, which need no conversion: they are
   prefetched once more when they are so many rows ahead. */
enum { ROWS_AHEAD_AGAIN = 8 };

/* c (rows x vectors * LANES) = a (rows x n) b (n x vectors * LANES), or += if `accumulate`. b is of any dtype but
   BOOL8; for BF16 the columns of c come in the order of load_of_pair. If `prefetch`, the cache lines `ahead` elements after
   each row of b are fetched, a few per step, since only few can be in flight. */
INLINE void tile(const int dtype, const int rows, const int vectors, const float *restrict a, int64_t lda, int64_t step,
                 const char *restrict b, int64_t ldb, float *restrict c, int64_t ldc, int64_t n, const int accumulate,
                 const int prefetch, int64_t ahead) {
    const int size = dtype_size(dtype);
    vfloat sum[TILE_ROWS][MAX_TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int x = 0; x < vectors; x++)
        sum[r][x] = accumulate ? load(c + r * ldc + x * LANES) : splat(0);
    UNROLL_2 for (int64_t i = 0; i < n; i++, b += ldb * size) {
        vfloat right[MAX_TILE_VECTORS];
        UNROLL for (int x = 0; x < vectors; x++)
            right[x] = (x | 1) < vectors ? load_of_pair(dtype, b, x / 2 * 2 * LANES, x % 2)
                                         : load_vector(dtype, b, x * LANES);
        if (prefetch) UNROLL for (int x = 0; x < vectors * LANES * size; x += 4 * CACHE_LINE_FLOATS) {
            __builtin_prefetch(b + ahead * size + x, 0, INTO_L2);
            if (dtype == F32) __builtin_prefetch(b + ROWS_AHEAD_AGAIN * ldb * size + x, 0, INTO_L2);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vfloat left = splat(a[r * lda + i * step]);
            UNROLL for (int x = 0; x < vectors; x++) sum[r][x] += left * right[x];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int x = 0; x < vectors; x++)
        store(c + r * ldc + x * LANES, sum[r][x]);
}

/* A row of tiles: the next one is b_step elements further in b, PANEL in c. */
INLINE void tile_row(const int dtype, const int rows, int64_t vectors, const float *a, int64_t lda, int64_t step,
                     const char *b, int64_t ldb, int64_t b_step, float *c, int64_t ldc, int64_t n,
                     const int accumulate, const int prefetch, int64_t ahead) {
    for (; vectors >= TILE_VECTORS; vectors -= TILE_VECTORS, b += b_step * dtype_size(dtype), c += PANEL)
        tile(dtype, rows, TILE_VECTORS, a, lda, step, b, ldb, c, ldc, n, accumulate, prefetch, ahead);
    if (vectors == 1) tile(dtype, rows, 1, a, lda, step, b, ldb, c, ldc, n, accumulate, prefetch, ahead);
    if (TILE_VECTORS > 2 && vectors == 2)
        tile(dtype, rows, 2, a, lda, step, b, ldb, c, ldc, n, accumulate, prefetch, ahead);
    if (TILE_VECTORS > 2 && vectors == 3)
        tile(dtype, rows, TILE_VECTORS > 2 ? 3 : 1, a, lda, step, b, ldb, c, ldc, n, accumulate, prefetch, ahead);
}

/* The number of rows is a constant inside of a tile. */
#define CASE(r)                                                                                                   \
    case r:                                                                                                       \
        tile_row(dtype, r <= TILE_ROWS ? r : 1, vectors, a, lda, step, b, ldb, b_step, c, ldc, n, accumulate,     \
                 prefetch, ahead);                                                                                \
        break;

INLINE void multiply_of(const int dtype, int rows, int64_t vectors, const float *a, int64_t lda, int64_t step,
                        const char *b, int64_t ldb, int64_t b_step, float *c, int64_t ldc, int64_t n,
                        const int accumulate, const int prefetch, int64_t ahead) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TALL_TILES
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
#undef CASE

INLINE void multiply_with(int rows, int64_t vectors, const float *a, int64_t lda, int64_t step, const float *b,
                          int64_t ldb, int64_t b_step, float *c, int64_t ldc, int64_t n, const int accumulate,
                          const int prefetch, int64_t ahead) {
    multiply_of(F32, rows, vectors, a, lda, step, (const char *)b, ldb, b_step, c, ldc, n, accumulate, prefetch, ahead);
}

/* c (rows x vectors * LANES) = a (rows x n) b for 1 to TILE_ROWS rows, where b consists of panels [n][PANEL]. */
static void multiply_panels(int rows, int64_t vectors, const float *a, int64_t lda, const float *b, float *c,
                            int64_t ldc, int64_t n) {
    multiply_with(rows, vectors, a, lda, 1, b, PANEL, PANEL * n, c, ldc, n, 0, 0, 0);
}

/* c (rows x vectors * LANES) += a (rows x n) b for 1 to TILE_ROWS rows. */
static void multiply_add(int rows, int64_t vectors, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                         int64_t ldc, int64_t n) {
    multiply_with(rows, vectors, a, lda, 1, b, ldb, PANEL, c, ldc, n, 1, 0, 0);
}

/* o (rows x vectors * LANES) += e (rows x n) v (n x vectors * LANES) for up to four rows, in wide tiles: values that
   are not cached are read in memory order, and enough independent sums are in flight. */
INLINE void accumulate_wide(const int dtype, const int rows, const int width, int64_t vectors, const float *e,
                            int64_t lde, const char *v, int64_t ldv, float *o, int64_t ldo, int64_t n, int64_t ahead) {
    const int64_t vector = LANES * dtype_size(dtype);
    for (; vectors >= width; vectors -= width, v += width * vector, o += width * LANES)
        tile(dtype, rows, width, e, lde, 1, v, ldv, o, ldo, n, 1, 1, ahead);
    if (width > 4 && vectors & 4) {
        tile(dtype, rows, 4, e, lde, 1, v, ldv, o, ldo, n, 1, 1, ahead);
        v += 4 * vector, o += 4 * LANES;
    }
    if (vectors & 2) {
        tile(dtype, rows, 2, e, lde, 1, v, ldv, o, ldo, n, 1, 1, ahead);
        v += 2 * vector, o += 2 * LANES;
    }
    if (vectors & 1) tile(dtype, rows, 1, e, lde, 1, v, ldv, o, ldo, n, 1, 1, ahead);
}

INLINE void accumulate_of(const int dtype, int rows, int64_t vectors, const float *e, int64_t lde, const char *v,
                          int64_t ldv, float *o, int64_t ldo, int64_t n, int64_t ahead) {
    const int width_of_two = REGISTERS > 16 ? MAX_TILE_VECTORS : MAX_TILE_VECTORS / 2;
    const int only_wide = REGISTERS > 16 && dtype != F32; /* converting twice costs less than narrow tiles */
    for (; only_wide && rows > 4; rows -= 4, e += 4 * lde, o += 4 * ldo)
        accumulate_wide(dtype, 4, MAX_TILE_VECTORS / 2, vectors, e, lde, v, ldv, o, ldo, n, ahead);
    if (rows == 1) {
        accumulate_wide(dtype, 1, MAX_TILE_VECTORS, vectors, e, lde, v, ldv, o, ldo, n, ahead);
    } else if (rows == 2) {
        accumulate_wide(dtype, 2, width_of_two, vectors, e, lde, v, ldv, o, ldo, n, ahead);
    } else if (REGISTERS > 16 && rows == 3) {
        accumulate_wide(dtype, 3, MAX_TILE_VECTORS / 2, vectors, e, lde, v, ldv, o, ldo, n, ahead);
    } else if (REGISTERS > 16 && rows == 4) {
        accumulate_wide(dtype, 4, MAX_TILE_VECTORS / 2, vectors, e, lde, v, ldv, o, ldo, n, ahead);
    } else if (!only_wide) {
        int height = rows > TILE_ROWS ? (rows + 1) / 2 : rows;
        for (int r = 0; r < rows; r += height, e += height * lde, o += height * ldo, ahead = 0) {
            int count = min(height, rows - r);
            if (ahead || dtype != F32)
                multiply_of(dtype, count, vectors, e, lde, 1, v, ldv, PANEL, o, ldo, n, 1, 1, ahead);
            else multiply_add(count, vectors, e, lde, (const float *)v, ldv, o, ldo, n);
        }
    }
}

/* o += e v for a strip of rows, o in the order of load_of_pair where v is of BF16. If `ahead` is not 0, the values so
   many elements further on are needed next. */
static void accumulate_values(int64_t dtype, int rows, int64_t vectors, const float *e, int64_t lde, const char *v,
                              int64_t ldv, float *o, int64_t ldo, int64_t n, int64_t ahead) {
    if (dtype == F32) accumulate_of(F32, rows, vectors, e, lde, v, ldv, o, ldo, n, ahead);
    else if (dtype == BF16) accumulate_of(BF16, rows, vectors, e, lde, v, ldv, o, ldo, n, ahead);
    else accumulate_of(F16, rows, vectors, e, lde, v, ldv, o, ldo, n, ahead);
}

#endif
