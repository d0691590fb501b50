/* Random calls of the kernel against plain loops in double precision, on every path that this processor can run.

   Every tensor ends at a page that may not be touched, and what nobody may look at is NaN. Then several threads call at
   once. `make sanitize` runs it under ASan, UBSan and TSan, `make neon` under an emulator. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "call.h"

int headwise_run(const Call *, int);
const char *headwise_path(int);

typedef struct {
    void *pages, *start;
    size_t size;
} Block;

static __thread uint64_t state;

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int64_t between(int64_t low, int64_t high) { return low + (int64_t)(draw() % (uint64_t)(high - low + 1)); }
static double uniform(void) { return (draw() >> 11) * 0x1p-53; }
static int chance(double share) { return uniform() < share; }

static Block block(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), size = (bytes + page - 1) / page * page;
    char *pages = mmap(NULL, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) abort();
    mprotect(pages + size, page, PROT_NONE);
    return (Block){pages, pages + size - bytes, size + page};
}

static void release(Block b) { munmap(b.pages, b.size); }

static float rounded(float x, int64_t kind) { /* to bf16, which every test number also fits as f16 */
    uint32_t bits;
    if (kind == F32) return x;
    memcpy(&bits, &x, 4);
    bits &= 0xffff0000u;
    memcpy(&x, &bits, 4);
    return x;
}

static uint16_t half(float x) { /* exact: few bits, exponents that fit */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7e00;
    if (fabsf(x) < 0x1p-14f) return 0;
    return (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10));
}

static void put(char *at, int64_t kind, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t small = kind == BF16 ? bits >> 16 : half(x);
    if (kind == F32) memcpy(at, &x, 4);
    else memcpy(at, &small, 2);
}

static float get(const char *at, int64_t kind) {
    uint16_t small;
    uint32_t bits;
    float x;
    if (kind == F32) {
        memcpy(&x, at, 4);
        return x;
    }
    memcpy(&small, at, 2);
    if (kind == BF16) bits = (uint32_t)small << 16;
    else bits = (uint32_t)(small & 0x8000) << 16 | ((uint32_t)(small & 0x7fff) ? ((uint32_t)(small & 0x7fff) << 13) + (112u << 23) : 0);
    if (kind == F16 && (small & 0x7c00) == 0x7c00) return NAN;
    memcpy(&x, &bits, 4);
    return x;
}

/* A tensor (b, h, t, d) in one of three layouts, with numbers that 16 bits hold. */
static Block tensor(int64_t kind, int64_t b, int64_t h, int64_t t, int64_t d, int64_t stride[4]) {
    int64_t size = kind == F32 ? 4 : 2, step = 1, layout = between(0, 2);
    if (layout == 2) step = 2;
    stride[3] = step;
    stride[2] = layout == 1 ? h * d : d * step;
    stride[1] = layout == 1 ? d : t * d * step;
    stride[0] = h * t * d * step;
    Block x = block(b * h * t * d * step * size);
    for (int64_t i = 0; i < b * h * t * d * step; i++) {
        float value = rounded((float)(uniform() * 4 - 2), BF16);
        put((char *)x.start + i * size, kind, fabsf(value) < 0x1p-13f ? 0 : value);
    }
    return x;
}

static int sees(const Call *c, int64_t b, int64_t h, int64_t i, int64_t j, double *bias) {
    int64_t place = i + (c->offsets ? c->offsets[b] : c->offset), end = c->ends ? c->ends[b] : c->end;
    *bias = 0;
    if (j >= end || (c->left >= 0 && j < place - c->left) || (c->right >= 0 && j > place + c->right)) return 0;
    if (!c->mask) return 1;
    const int64_t *s = c->mask_stride, at = b * s[0] + h * s[1] + i * s[2] + j * s[3];
    if (c->mask_kind == BOOL) return c->mask[at];
    *bias = ((const float *)c->mask)[at];
    return *bias != -INFINITY;
}

static float element(const Call *c, const char *x, const int64_t *s, int64_t b, int64_t h, int64_t t, int64_t d) {
    return get(x + (b * s[0] + h * s[1] + t * s[2] + d * s[3]) * (c->kind == F32 ? 4 : 2), c->kind);
}

/* One row by plain loops: its output, and its entropy and mean distance; gives whether it sees anything. */
static int expected(const Call *c, int64_t b, int64_t h, int64_t i, double *out, double *entropy, double *distance) {
    int64_t kv = h / (c->heads / c->kv_heads), place = i + (c->offsets ? c->offsets[b] : c->offset);
    double *s = malloc((c->keys + 1) * sizeof *s), top = c->sinks ? c->sinks[h] : -INFINITY, total = 0, bias;
    int any = 0;
    for (int64_t j = 0; j < c->keys; j++) {
        s[j] = -INFINITY;
        if (!sees(c, b, h, i, j, &bias)) continue;
        double dot = 0;
        for (int64_t d = 0; d < c->dim; d++)
            dot += (double)element(c, c->q, c->q_stride, b, h, i, d) * element(c, c->k, c->k_stride, b, kv, j, d);
        dot *= c->scale;
        if (c->softcap > 0) dot = c->softcap * tanh(dot / c->softcap);
        s[j] = dot + bias;
        if (s[j] > top) top = s[j];
        any = 1;
    }
    for (int64_t j = 0; j < c->keys; j++) total += s[j] == -INFINITY ? 0 : exp(s[j] - top);
    if (c->sinks) total += exp(c->sinks[h] - top);
    *entropy = *distance = 0;
    for (int64_t d = 0; d < c->value_dim; d++) out[d] = 0;
    for (int64_t j = 0; j < c->keys && any; j++) {
        double a = s[j] == -INFINITY ? 0 : exp(s[j] - top) / total;
        if (a == 0) continue;
        *entropy -= a * log(a);
        *distance += a * fabs((double)(place - j));
        for (int64_t d = 0; d < c->value_dim; d++) out[d] += a * element(c, c->v, c->v_stride, b, kv, j, d);
    }
    free(s);
    return any;
}

/* NaN into every key and value that nobody may look at. */
static void spoil(const Call *c) {
    int64_t group = c->heads / c->kv_heads, size = c->kind == F32 ? 4 : 2;
    double bias;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t kv = 0; kv < c->kv_heads; kv++)
            for (int64_t j = 0; j < c->keys; j++) {
                int seen = 0;
                for (int64_t h = kv * group; h < (kv + 1) * group; h++)
                    for (int64_t i = 0; i < c->queries && !seen; i++) seen = sees(c, b, h, i, j, &bias);
                if (seen) continue;
                for (int64_t d = 0; d < c->dim; d++)
                    put((char *)c->k + (b * c->k_stride[0] + kv * c->k_stride[1] + j * c->k_stride[2] + d * c->k_stride[3]) * size, c->kind, NAN);
                for (int64_t d = 0; d < c->value_dim; d++)
                    put((char *)c->v + (b * c->v_stride[0] + kv * c->v_stride[1] + j * c->v_stride[2] + d * c->v_stride[3]) * size, c->kind, NAN);
            }
}

static int one(int path, int64_t longest) {
    int64_t offsets[3], ends[3], group = between(1, 3), wrong = 0;
    float sinks[9];
    Call c = {.batch = between(1, 2), .kv_heads = between(1, 3), .queries = between(0, chance(0.3) ? 60 : 7),
              .keys = between(0, chance(0.3) ? longest : 40), .dim = between(1, 40), .value_dim = between(1, 40),
              .kind = between(0, 2), .left = -1, .right = -1, .scale = uniform(), .threads = between(1, 3)};
    if (chance(0.5)) c.dim = 16 * between(1, 4), c.value_dim = 16 * between(1, 4);
    c.heads = c.kv_heads * group;
    c.offset = c.keys - c.queries;
    c.end = c.keys;
    Block q = tensor(c.kind, c.batch, c.heads, c.queries, c.dim, c.q_stride);
    Block k = tensor(c.kind, c.batch, c.kv_heads, c.keys, c.dim, c.k_stride);
    Block v = tensor(c.kind, c.batch, c.kv_heads, c.keys, c.value_dim, c.v_stride);
    Block out = block(c.batch * c.heads * c.queries * c.value_dim * (c.kind == F32 ? 4 : 2));
    Block sums = block((CLASS + 1) * c.batch * c.heads * sizeof(double)), mask = {0};
    Block classes = block(c.batch * c.keys * sizeof(float));
    c.q = q.start, c.k = k.start, c.v = v.start, c.out = out.start, c.sums = sums.start;
    for (int64_t i = 0; i < c.batch * c.keys; i++) ((float *)classes.start)[i] = chance(0.5);
    if (chance(0.5)) c.classes = classes.start, c.class_count = 1;
    c.out_stride[0] = c.queries * c.heads * c.value_dim;
    c.out_stride[1] = c.value_dim, c.out_stride[2] = c.heads * c.value_dim, c.out_stride[3] = 1;
    if (chance(0.4)) c.right = between(0, 5);
    if (chance(0.3)) c.left = between(0, 30);
    if (chance(0.3)) {
        for (int b = 0; b < 3; b++) ends[b] = between(0, c.keys);
        c.ends = ends;
    }
    if (chance(0.3)) {
        for (int b = 0; b < 3; b++) offsets[b] = between(-5, c.keys);
        c.offsets = offsets;
    }
    if (chance(0.3)) c.softcap = 1 + uniform();
    for (int h = 0; h < 9; h++) sinks[h] = (float)uniform();
    if (chance(0.3)) c.sinks = sinks;
    if (chance(0.4)) {
        int64_t b = chance(0.5) ? c.batch : 1, h = chance(0.5) ? c.heads : 1, i = chance(0.7) ? c.queries : 1;
        c.mask_kind = chance(0.5) ? BOOL : F32;
        mask = block(b * h * i * c.keys * (c.mask_kind == BOOL ? 1 : 4));
        c.mask = mask.start;
        for (int64_t x = 0; x < b * h * i * c.keys; x++)
            if (c.mask_kind == BOOL) ((char *)mask.start)[x] = chance(0.6);
            else ((float *)mask.start)[x] = chance(0.4) ? -INFINITY : (float)uniform();
        int64_t stride[4] = {b > 1 ? h * i * c.keys : 0, h > 1 ? i * c.keys : 0, i > 1 ? c.keys : 0, 1};
        memcpy(c.mask_stride, stride, sizeof stride);
    }
    spoil(&c);
    if (headwise_run(&c, path)) wrong++;
    double *want = malloc((c.value_dim + 1) * sizeof *want), close = c.kind == F32 ? 2e-5 : 2e-2;
    for (int64_t b = 0; b < c.batch; b++)
        for (int64_t h = 0; h < c.heads; h++) {
            double entropy = 0, distance = 0, count = 0, e, d;
            for (int64_t i = 0; i < c.queries; i++) {
                int any = expected(&c, b, h, i, want, &e, &d);
                if (any) count++, entropy += e, distance += d;
                for (int64_t x = 0; x < c.value_dim; x++)
                    if (!(fabs(element(&c, c.out, c.out_stride, b, h, i, x) - want[x]) <= close)) wrong++;
            }
            const double *got = c.sums + b * c.heads + h;
            int64_t column = c.batch * c.heads;
            if (got[COUNT * column] != count) wrong++;
            if (!(fabs(got[ENTROPY * column] - entropy) <= 1e-3)) wrong++;
            if (!(fabs(got[DISTANCE * column] - distance) <= 1e-4 * (1 + distance))) wrong++;
        }
    if (wrong)
        printf("%s: %ld wrong: B %ld H %ld/%ld T %ld/%ld D %ld/%ld kind %ld mask %d\n", headwise_path(path), (long)wrong,
               (long)c.batch, (long)c.heads, (long)c.kv_heads, (long)c.queries, (long)c.keys, (long)c.dim,
               (long)c.value_dim, (long)c.kind, c.mask != NULL);
    free(want);
    release(q), release(k), release(v), release(out), release(sums), release(classes);
    if (mask.pages) release(mask);
    return wrong != 0;
}

static void *many(void *seed) {
    state = (uintptr_t)seed;
    intptr_t wrong = 0;
    for (int i = 0; i < 20; i++) wrong += one(0, 900);
    return (void *)wrong;
}

int main(int count, char **words) {
    int calls = count > 1 ? atoi(words[1]) : 300, wrong = 0;
    for (int path = 0; headwise_path(path); path++) {
        state = 1;
        for (int i = 0; i < calls; i++) wrong += one(path, i % 50 ? 700 : 3000);
        printf("%s: %d calls\n", headwise_path(path), calls);
    }
    pthread_t threads[4];
    for (intptr_t i = 0; i < 4; i++) pthread_create(threads + i, NULL, many, (void *)(i + 1));
    for (int i = 0; i < 4; i++) {
        void *more;
        pthread_join(threads[i], &more);
        wrong += (int)(intptr_t)more;
    }
    printf("%d wrong\n", wrong);
    return wrong != 0;
}
