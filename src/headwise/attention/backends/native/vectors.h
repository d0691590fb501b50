/* Vectors of the width of the instruction set that this file is compiled for: GCC's vector extensions, which Clang has
   as well, and the few operations that they lack. */
#ifndef HEADWISE_VECTORS_H
#define HEADWISE_VECTORS_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "call.h"

/* LANES: floats per vector. A register tile of a matrix product has TILE_ROWS x TILE_VECTORS accumulators. */
#if defined(HEADWISE_PLAIN)
#undef __ARM_NEON
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#define ISA avx512
#define TALL_TILES 1 /* TILE_ROWS > 6 */
enum { LANES = 16, TILE_ROWS = 12, TILE_VECTORS = 2, REGISTERS = 32 };
#elif defined(__AVX2__)
#include <immintrin.h>
#define ISA avx2
enum { LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2, REGISTERS = 16 };
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define ISA neon
enum { LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 4, REGISTERS = 32 };
#else
#define ISA plain
enum { LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 2, REGISTERS = 16 };
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#if TALL_TILES
#define UNROLL_2 _Pragma("nounroll") /* Clang starts both steps at once and runs out of registers */
#else
#define UNROLL_2 _Pragma("unroll 2")
#endif
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_2 _Pragma("GCC unroll 2")
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4))); /* comparisons give -1 (true) or 0 per lane */
typedef float float4 __attribute__((vector_size(16)));
typedef float vfloat_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t a, int64_t multiple) { return div_up(a, multiple) * multiple; }

INLINE vfloat load(const float *x) { return *(const vfloat_unaligned *)x; }
INLINE void store(float *x, vfloat y) { *(vfloat_unaligned *)x = y; }
INLINE vfloat splat(float x) { return x - (vfloat){0}; }
INLINE vfloat blend(vint condition, vfloat yes, vfloat no) {
    return (vfloat)((condition & (vint)yes) | (~condition & (vint)no));
}
INLINE vfloat zero_unless(vint condition, vfloat x) { return (vfloat)(condition & (vint)x); }

/* The maximum per lane. A NaN in b is kept, one in a may be lost. */
INLINE vfloat vec_max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__ARM_NEON)
    return (vfloat)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return blend(a > b, a, b);
#endif
}

INLINE vfloat vec_abs(vfloat x) { return (vfloat)((vuint)x & 0x7fffffffu); }

INLINE float reduce_add(vfloat x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

INLINE float reduce_max(vfloat x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

INLINE int any_true(vint x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    int bits = 0;
    for (int i = 0; i < LANES; i++) bits |= x[i];
    return bits != 0;
#endif
}

INLINE vfloat iota(void) { /* 0, 1, 2, ... */
    vfloat x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

enum { MIN_EXPONENT = -126 };

/* 2^x for MIN_EXPONENT <= x <= 127; 0 at MIN_EXPONENT; NaN for NaN. The relative error is 1e-7.
   With n = round(x) and |f| <= 1/2, 2^x = 2^n 2^f. Adding MAGIC leaves n + 126 in the lowest bits of the sum; shifted
   into the exponent they give 2^(n - 1). MAGIC is even, so that ties round as in the processor's own rounding. The
   polynomial is 2 * 2^f. */
INLINE vfloat vec_exp2(vfloat x) {
    const float MAGIC = 12582912.0f + 126;
    vfloat shifted = x + MAGIC;
#if defined(__AVX512F__)
    vfloat f = (vfloat)_mm512_reduce_ps((__m512)x, 8); /* x - round(x) */
#else
    vfloat f = x - (shifted - MAGIC);
#endif
    vfloat p = f * 0.002652945462f + 0.019343025982f;
    p = p * f + 0.11101467162f;
    p = p * f + 0.4804448486f;
    p = p * f + 1.3862940074f;
    return (p * f + 2.0f) * (vfloat)((vuint)shifted << 23);
}

/* tanh(x) = 1 - 2 / (e^2x + 1), which is 1 in single precision from x = 9 on. Near 0 this cancels: there a series. */
INLINE vfloat vec_tanh(vfloat x) {
    vfloat clamped = -vec_max(splat(-9.01f), -vec_max(splat(-9.01f), x)), square = x * x;
    vfloat far = 1.0f - 2.0f / (vec_exp2(clamped * 2.885390082f) + 1.0f);
    vfloat near = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315))));
    return blend(square < 0.04f, near, far);
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vint){__VA_ARGS__})
#endif

/* The lower halves of a and b, interleaved: a0 b0 a1 b1 ... */
INLINE vfloat interleave_low(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}

/* The upper halves of a and b, interleaved. */
INLINE vfloat interleave_high(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

/* Transpose a LANES x LANES matrix in place. Each round is a perfect shuffle; log2(LANES) of them transpose. */
INLINE void transpose(vfloat x[LANES]) {
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        vfloat y[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = interleave_low(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = interleave_high(x[i], x[i + LANES / 2]);
        }
        UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

/* The sums of the lanes of four vectors: transposed and added within every 128 bits, then added across them. */
INLINE float4 reduce_add_4(const vfloat x[4]) {
#if defined(__AVX512F__)
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[0], (__m512)x[1]),
                             _mm512_unpackhi_ps((__m512)x[0], (__m512)x[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[2], (__m512)x[3]),
                             _mm512_unpackhi_ps((__m512)x[2], (__m512)x[3]));
    __m512 whole = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
    return (float4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
    __m256 a = _mm256_add_ps(_mm256_unpacklo_ps((__m256)x[0], (__m256)x[1]),
                             _mm256_unpackhi_ps((__m256)x[0], (__m256)x[1]));
    __m256 b = _mm256_add_ps(_mm256_unpacklo_ps((__m256)x[2], (__m256)x[3]),
                             _mm256_unpackhi_ps((__m256)x[2], (__m256)x[3]));
    __m256 half = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    return (float4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    vfloat a = interleave_low(x[0], x[2]) + interleave_high(x[0], x[2]);
    vfloat b = interleave_low(x[1], x[3]) + interleave_high(x[1], x[3]);
    return interleave_low(a, b) + interleave_high(a, b);
#endif
}

INLINE float bf16_to_f32(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE float f16_to_f32(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#elif defined(__ARM_NEON)
    __fp16 y;
    memcpy(&y, &x, 2);
    return y;
#else
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023, bits;
    float y;
    if (exponent == 0) {
        y = fraction * 0x1p-24f;
        return sign ? -y : y;
    }
    bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    memcpy(&y, &bits, 4);
    return y;
#endif
}

INLINE uint16_t f32_to_f16(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__ARM_NEON)
    __fp16 y = x;
    uint16_t z;
    memcpy(&z, &y, 2);
    return z;
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    float size = fabsf(x), shifted;
    if (x != x) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) { /* subnormal: adding 1/2 rounds to a multiple of 2^-24 */
        shifted = size + 0.5f;
        memcpy(&bits, &shifted, 4);
        return sign | (bits - 0x3f000000u);
    }
    memcpy(&bits, &size, 4);
    bits += 0xfff + (bits >> 13 & 1);
    return sign | ((bits >> 13) - (112u << 10));
#endif
}

/* LANES numbers of 16 bits each, in lanes of 32. */
INLINE vuint load_16_bits(const uint16_t *x) {
    typedef uint16_t vshort __attribute__((vector_size(LANES * 2)));
    vshort halves;
    memcpy(&halves, x, sizeof halves);
    return __builtin_convertvector(halves, vuint);
}

INLINE vfloat load_bf16(const uint16_t *x) { return (vfloat)(load_16_bits(x) << 16); }

INLINE vfloat load_f16(const uint16_t *x) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif defined(__AVX2__)
    return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#elif defined(__ARM_NEON)
    return (vfloat)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    vuint half = load_16_bits(x), size = (half & 0x7fff) << 13, exponent = half & 0x7c00;
    vuint normal = size + ((vuint)(exponent == 0x7c00) & (112u << 23)) + (112u << 23); /* or infinite, or NaN */
    const float least = 0x1p-14f; /* of the normal numbers; a subnormal one is a fraction of it */
    vfloat subnormal = (vfloat)(size | 0x38800000u) - least;
    return (vfloat)((vuint)blend(exponent == 0, subnormal, (vfloat)normal) | (half & 0x8000) << 16);
#endif
}

INLINE int64_t dtype_size(int64_t dtype) { return dtype == F32 ? 4 : dtype == BOOL8 ? 1 : 2; }

/* LANES consecutive elements from x[i] on. */
INLINE vfloat load_vector(const int dtype, const char *x, int64_t i) {
    if (dtype == F32) return load((const float *)x + i);
    return dtype == BF16 ? load_bf16((const uint16_t *)x + i) : load_f16((const uint16_t *)x + i);
}

/* One of the two vectors of the 2 * LANES elements from x[i] on. For BF16 these are the elements of even and those of
   odd index, each only a shift or a mask away from single precision; for other dtypes the first and the last LANES. */
INLINE vfloat load_of_pair(const int dtype, const char *x, int64_t i, const int second) {
    if (dtype != BF16) return load_vector(dtype, x, i + second * LANES);
    vuint pairs;
    memcpy(&pairs, x + 2 * i, sizeof pairs);
    return (vfloat)(second ? pairs & 0xffff0000u : pairs << 16);
}

/* Where load_of_pair puts element i of n elements of BF16, of which an odd last vector is read by load_vector. */
INLINE int64_t index_in_pairs(int64_t i, int64_t n) {
    int64_t start = i / (2 * LANES) * (2 * LANES);
    return start + 2 * LANES > n ? i : start + i % 2 * LANES + (i - start) / 2;
}

#endif
