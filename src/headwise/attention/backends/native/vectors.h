/* Vectors of the width that this file is compiled for: GCC's vector extensions, and the few operations they lack. */
#ifndef HEADWISE_VECTORS_H
#define HEADWISE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(HEADWISE_PLAIN)
#undef __ARM_NEON
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#define ISA avx512
#define TALL 1 /* tiles of more than 6 rows */
enum { W = 16, TILE_ROWS = 12, TILE_VECTORS = 2, REGISTERS = 32 };
#elif defined(__AVX2__)
#include <immintrin.h>
#define ISA avx2
enum { W = 8, TILE_ROWS = 6, TILE_VECTORS = 2, REGISTERS = 16 };
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define ISA neon
enum { W = 4, TILE_ROWS = 6, TILE_VECTORS = 4, REGISTERS = 32 };
#else
#define ISA plain
enum { W = 4, TILE_ROWS = 6, TILE_VECTORS = 2, REGISTERS = 16 };
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#define UNROLL_SOME _Pragma("unroll 2")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_SOME _Pragma("GCC unroll 2")
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float v4 __attribute__((vector_size(16)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias)); /* wherever it lies */

INLINE vf load(const float *x) { return *(const vf_any *)x; }
INLINE void store(float *x, vf y) { *(vf_any *)x = y; }
INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf only(vi where, vf x) { return (vf)(where & (vi)x); }
INLINE vf either(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }

/* The larger; NaN in b stays. */
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__ARM_NEON)
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return either(a > b, a, b);
#endif
}

INLINE vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

INLINE float sum(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float t = 0;
    for (int i = 0; i < W; i++) t += x[i];
    return t;
#endif
}

INLINE float largest(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float t = x[0];
    for (int i = 1; i < W; i++) t = x[i] > t ? x[i] : t;
    return t;
#endif
}

INLINE int any(vi x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    int t = 0;
    for (int i = 0; i < W; i++) t |= x[i];
    return t != 0;
#endif
}

INLINE vf count_up(void) { /* 0, 1, 2, ... */
    vf x;
    for (int i = 0; i < W; i++) x[i] = i;
    return x;
}

enum { LOWEST = -126 }; /* 2^x is 0 from here on */

/* 2^x for -126 <= x <= 127, 0 at -126; NaN stays. 2^x = 2^n 2^f with n whole and |f| <= 1/2: adding MAGIC leaves n in
   the lowest bits of the sum, from where a shift brings it into the exponent, as 2^(n - 1): an even MAGIC rounds halves
   as the processor does. The polynomial is 2 2^f, off by 1e-7. */
INLINE vf power_of_two(vf x) {
    const float MAGIC = 12582912.0f + 126;
    vf shifted = x + MAGIC;
#if defined(__AVX512F__)
    vf f = (vf)_mm512_reduce_ps((__m512)x, 8); /* x less the nearest whole number */
#else
    vf f = x - (shifted - MAGIC);
#endif
    vf p = f * 0.002652945462f + 0.019343025982f;
    p = p * f + 0.11101467162f;
    p = p * f + 0.4804448486f;
    p = p * f + 1.3862940074f;
    return (p * f + 2.0f) * (vf)((vu)shifted << 23);
}

/* tanh(x) = 1 - 2 / (e^2x + 1); past 9 it is 1 in single precision. Near 0 that cancels, and a series is used. */
INLINE vf hyperbolic_tangent(vf x) {
    vf held = -larger(all(-9.01f), -larger(all(-9.01f), x)), square = x * x;
    vf far = 1.0f - 2.0f / (power_of_two(held * 2.885390082f) + 1.0f);
    vf near = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315))));
    return either(square < 0.04f, near, far);
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* The lower or the upper halves of a and b, number by number in turn. */
INLINE vf lower(vf a, vf b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}

INLINE vf upper(vf a, vf b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

/* W vectors of W numbers, turned: each round is a perfect shuffle, and log2(W) of them exchange rows and columns. */
INLINE void transpose(vf x[W]) {
    UNROLL for (int round = 1; round < W; round *= 2) {
        vf y[W];
        UNROLL for (int i = 0; i < W / 2; i++) {
            y[2 * i] = lower(x[i], x[i + W / 2]);
            y[2 * i + 1] = upper(x[i], x[i + W / 2]);
        }
        UNROLL for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

/* The sums of four vectors. Within every four numbers they are turned and added, then the fours are added up. */
INLINE v4 sum_of_four(const vf x[4]) {
#if defined(__AVX512F__)
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[0], (__m512)x[1]),
                             _mm512_unpackhi_ps((__m512)x[0], (__m512)x[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[2], (__m512)x[3]),
                             _mm512_unpackhi_ps((__m512)x[2], (__m512)x[3]));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return (v4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
    __m256 a = _mm256_add_ps(_mm256_unpacklo_ps((__m256)x[0], (__m256)x[1]),
                             _mm256_unpackhi_ps((__m256)x[0], (__m256)x[1]));
    __m256 b = _mm256_add_ps(_mm256_unpacklo_ps((__m256)x[2], (__m256)x[3]),
                             _mm256_unpackhi_ps((__m256)x[2], (__m256)x[3]));
    __m256 half = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    return (v4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    vf a = lower(x[0], x[2]) + upper(x[0], x[2]), b = lower(x[1], x[3]) + upper(x[1], x[3]);
    return lower(a, b) + upper(a, b);
#endif
}

/* 16-bit numbers, one by one. */
INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE float from_f16(uint16_t x) {
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

INLINE uint16_t to_f16(float x) {
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
    float size = fabsf(x), whole;
    if (x != x) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) { /* subnormal: adding rounds to multiples of 2^-24 */
        whole = size + 0.5f;
        memcpy(&bits, &whole, 4);
        return sign | (bits - 0x3f000000u);
    }
    memcpy(&bits, &size, 4);
    bits += 0xfff + (bits >> 13 & 1);
    return sign | ((bits >> 13) - (112u << 10));
#endif
}

/* W numbers of 16 bits. */
INLINE vf load_bf16(const uint16_t *x) {
    vu bits;
    UNROLL for (int i = 0; i < W; i++) bits[i] = (uint32_t)x[i] << 16;
    return (vf)bits;
}

INLINE vf load_f16(const uint16_t *x) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#else
    vf y;
    for (int i = 0; i < W; i++) y[i] = from_f16(x[i]);
    return y;
#endif
}

#endif
