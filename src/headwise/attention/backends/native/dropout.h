/* Dropout: which weights are retained, by random numbers that depend on the seed and a weight's place alone.

   Philox4x32 with 7 rounds, keyed by the seed. A counter (key / 128 * 16 + key % 16, query, head, sequence) gives eight
   numbers of 16 bits, for keys that are 16 apart: the lower and the upper half of each of its four words. A weight is
   retained if its number is below DROPOUT_RANGE - Call.dropped. attention/dropout.py is the specification. */
#ifndef HEADWISE_DROPOUT_H
#define HEADWISE_DROPOUT_H

#include "call.h"
#include "vectors.h"

enum { DROPOUT_ROUNDS = 7, DROPOUT_LANES = 16, DROPOUT_HALVES = 8, DROPOUT_KEYS = DROPOUT_LANES * DROPOUT_HALVES };
static const uint32_t PHILOX_MULTIPLIER[2] = {0xD2511F53u, 0xCD9E8D57u}, PHILOX_STEP[2] = {0x9E3779B9u, 0xBB67AE85u};

/* Numbers of 32 bits in lanes of 64, whose upper halves may hold anything: products of two need no shuffles. */
typedef uint64_t vlong __attribute__((vector_size(LANES * 4)));

/* The products of the lower halves of the lanes. */
INLINE vlong multiply_low(vlong a, uint32_t b) {
#if defined(__AVX512F__)
    return (vlong)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (vlong)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__ARM_NEON)
    return (vlong)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(b));
#else
    return (a & 0xffffffffu) * (uint64_t)b;
#endif
}

/* One vector of counters becomes random words, in place. */
INLINE void philox(vlong x[4], uint64_t seed) {
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    UNROLL for (int round = 0; round < DROPOUT_ROUNDS; round++) {
        vlong a = multiply_low(x[0], PHILOX_MULTIPLIER[0]), b = multiply_low(x[2], PHILOX_MULTIPLIER[1]);
        x[0] = (b >> 32) ^ x[1] ^ (uint64_t)key[0];
        x[1] = b;
        x[2] = (a >> 32) ^ x[3] ^ (uint64_t)key[1];
        x[3] = a;
        key[0] += PHILOX_STEP[0], key[1] += PHILOX_STEP[1];
    }
}

/* The random words of the counters first, first + 1 ... of a row, one per lane of 32 bits. */
INLINE void random_words(vuint words[4], uint64_t seed, int64_t batch, int64_t head, int64_t query, int64_t first) {
    vlong zero = {0}, lane = zero;
    for (int i = 0; i < LANES / 2; i++) lane[i] = 2 * i;
    vlong even[4] = {lane + (uint64_t)first, zero + (uint64_t)query, zero + (uint64_t)head, zero + (uint64_t)batch};
    vlong odd[4] = {even[0] + 1, even[1], even[2], even[3]};
    philox(even, seed);
    philox(odd, seed);
    UNROLL for (int i = 0; i < 4; i++) words[i] = (vuint)((even[i] & 0xffffffffu) | odd[i] << 32);
}

/* Set the dropped ones among n numbers (whole vectors) of a row to 0; x[0] belongs to key `from`, a multiple of
   LANES. */
static void drop_weights(float *x, const Call *call, int64_t batch, int64_t head, int64_t query, int64_t from,
                         int64_t n) {
    int64_t end = from + n;
    vuint retained = (vuint){0} + (uint32_t)((DROPOUT_RANGE - call->dropped) << 16); /* compared with the upper half */
    for (int64_t block = from / DROPOUT_KEYS; block * DROPOUT_KEYS < end; block++)
        for (int64_t lane = 0; lane < DROPOUT_LANES; lane += LANES) {
            vuint words[4];
            random_words(words, call->seed, batch, head, query, block * DROPOUT_LANES + lane);
            UNROLL for (int i = 0; i < DROPOUT_HALVES; i++) {
                int64_t key = block * DROPOUT_KEYS + i * DROPOUT_LANES + lane;
                if (key < from || key >= end) continue;
                vuint number = i % 2 ? words[i / 2] : words[i / 2] << 16;
                /* an upper half below the limit: the lower half does not matter, as that of the limit is 0 */
                store(x + key - from, zero_unless((vint)(number < retained), load(x + key - from)));
            }
        }
}

/* Whether one weight is retained. */
static int is_retained(const Call *call, int64_t batch, int64_t head, int64_t query, int64_t key) {
    float x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = 1;
    if (call->dropped) drop_weights(x, call, batch, head, query, key / LANES * LANES, LANES);
    return x[key % LANES] != 0;
}

/* What retained weights are multiplied by: one over the probability of being retained. */
static float dropout_factor(const Call *call) {
    return call->dropped < DROPOUT_RANGE ? (float)DROPOUT_RANGE / (DROPOUT_RANGE - call->dropped) : 0;
}

#endif
