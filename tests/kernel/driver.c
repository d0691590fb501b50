/* Random calls of the kernel against plain loops in double precision, on every path that this processor can run: outputs,
   links, logarithms and every statistic. `driver CALLS SEED`.

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

enum { MOST_DIM = 64, MOST_HEADS = 9, MOST_BATCH = 2 };

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
    if (isinf(x)) return x < 0 ? 0xfc00 : 0x7c00;
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
    if (kind == F16 && (small & 0x7c00) == 0x7c00) return small & 0x3ff ? NAN : small >> 15 ? -INFINITY : INFINITY;
    memcpy(&x, &bits, 4);
    return x;
}

static int64_t width_of(int64_t kind) { return kind == F32 ? 4 : kind == BOOL ? 1 : 2; }

/* A number that 16 bits of either kind hold. */
static float short_number(double low, double high) {
    float value = rounded((float)(low + uniform() * (high - low)), BF16);
    return fabsf(value) < 0x1p-13f ? 0 : value;
}

/* A tensor (b, h, t, d): dense, heads inside of tokens, with gaps between numbers, numbers of a token far apart, or
   expanded (a stride of 0 wherever chance says). */
static Block tensor(int64_t kind, int64_t b, int64_t h, int64_t t, int64_t d, int64_t stride[4]) {
    int64_t layout = between(0, 4), step = layout == 2 ? 2 : 1, count = b * h * t * d * step;
    int64_t dense[4] = {h * t * d * step, t * d * step, d * step, step};
    if (layout == 1) dense[1] = d, dense[2] = h * d;
    if (layout == 3) dense[2] = 1, dense[3] = t;
    for (int i = 0; i < 4; i++) stride[i] = layout == 4 && chance(0.4) ? 0 : dense[i];
    Block x = block(count * width_of(kind));
    for (int64_t i = 0; i < count; i++) put((char *)x.start + i * width_of(kind), kind, short_number(-2, 2));
    return x;
}

static int expanded(const int64_t stride[4]) { return !stride[0] || !stride[1] || !stride[2] || !stride[3]; }

/* What the mask adds, -inf where it hides. */
static double masked(const Call *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!c->mask) return 0;
    const int64_t *s = c->mask_stride;
    const char *at = c->mask + (b * s[0] + h * s[1] + i * s[2] + j * s[3]) * width_of(c->mask_kind);
    if (c->mask_kind == BOOL) return *at ? 0 : -INFINITY;
    return get(at, c->mask_kind);
}

static int64_t end_of(const Call *c, int64_t b) { return c->ends ? c->ends[b] : c->end; }
static int64_t place_of(const Call *c, int64_t b, int64_t i) { return i + (c->offsets ? c->offsets[b] : c->offset); }
static int asked(const Call *c, int64_t b, int64_t i) { return !c->asked || c->asked[b * c->queries + i]; }

static int sees(const Call *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    int64_t place = place_of(c, b, i);
    if (j >= end_of(c, b) || (c->left >= 0 && j < place - c->left) || (c->right >= 0 && j > place + c->right)) return 0;
    return masked(c, b, h, i, j) != -INFINITY;
}

static float element(const Call *c, const char *x, const int64_t *s, int64_t b, int64_t h, int64_t t, int64_t d) {
    return get(x + (b * s[0] + h * s[1] + t * s[2] + d * s[3]) * width_of(c->kind), c->kind);
}

/* The first key that the mask shows to some query that counts; band and window do not matter. */
static int64_t first_key(const Call *c, int64_t b) {
    for (int64_t j = 0; c->mask && j < end_of(c, b); j++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int64_t i = 0; i < c->queries; i++)
                if (asked(c, b, i) && masked(c, b, h, i, j) != -INFINITY) return j;
    return c->mask ? -1 : 0;
}

/* One row by plain loops. */
typedef struct {
    int sees, vague; /* vague: the order of its scores hangs on the last bits of single precision */
    double out[MOST_DIM], lse, sums[SUMS];
    double *weights; /* (keys) */
    double error;    /* how far single precision may be off in a score, which is also the weights' relative error */
} Expected;

static void expect(const Call *c, int64_t b, int64_t h, int64_t i, int64_t first, Expected *row) {
    int64_t kv = h / (c->heads / c->kv_heads), place = place_of(c, b, i);
    double *s = row->weights, sink = c->sinks ? c->sinks[h] : -INFINITY, top = sink, total = 0;
    double gate = c->gates ? c->gates[b * c->gates_stride + h] : 1, *sums = row->sums;
    row->sees = row->vague = 0, row->error = 0;
    for (int64_t j = 0; j < c->keys; j++) {
        s[j] = -INFINITY;
        if (!sees(c, b, h, i, j)) continue;
        double dot = 0, size = 0;
        for (int64_t d = 0; d < c->dim; d++) {
            double x = (double)element(c, c->q, c->q_stride, b, h, i, d) * element(c, c->k, c->k_stride, b, kv, j, d);
            dot += x, size += fabs(x) * c->scale;
        }
        double error = c->scale > 1 ? 0 : size * (1 + c->dim / 4.0); /* scores that overflow are redone exactly */
        if (c->slopes) error += 2 * c->slopes[h] * fabs((double)(place - j));
        row->error = fmax(row->error, error * 0x1p-23);
        dot = fmax(-1e38, fmin(dot * c->scale, 1e38));
        if (c->softcap > 0) dot = c->softcap * tanh(dot / c->softcap);
        if (c->slopes) dot -= c->slopes[h] * fabs((double)(place - j));
        s[j] = dot + masked(c, b, h, i, j);
        if (s[j] > top) top = s[j];
        row->sees = 1;
    }
    for (int64_t j = 0; j < c->keys; j++) {
        if (c->scale > 1 && s[j] < top && top - s[j] < 1e-4 * fabs(top)) row->vague = 1;
        s[j] = s[j] == -INFINITY ? 0 : exp(s[j] - top);
        total += s[j];
    }
    if (c->sinks) total += exp(sink - top);
    row->lse = total > 0 ? top + log(total) : -INFINITY;
    memset(row->out, 0, sizeof row->out);
    memset(sums, 0, sizeof row->sums);
    if (!row->sees) return;
    sums[COUNT] = 1;
    sums[SINK] = c->sinks ? exp(sink - top) / total : 0;
    for (int64_t j = 0; j < c->keys; j++) {
        double a = s[j] /= total;
        if (a == 0) continue;
        sums[ENTROPY] -= a * log(a);
        sums[CONFIDENCE] = fmax(sums[CONFIDENCE], a);
        sums[FIRST] += j == first ? a : 0;
        sums[DISTANCE] += a * fabs((double)(place - j));
        sums[PREVIOUS] += j == place - 1 ? a : 0;
        sums[NEXT] += j == place + 1 ? a : 0;
        sums[SELF] += j == place ? a : 0;
        for (int64_t x = 0; x < c->class_count; x++)
            sums[CLASS + x] += a * c->classes[(b * c->class_count + x) * c->keys + j];
        for (int64_t d = 0; d < c->value_dim; d++)
            row->out[d] += gate * a * element(c, c->v, c->v_stride, b, kv, j, d);
    }
}

/* NaN into every key and value that nobody may look at. */
static void spoil(const Call *c) {
    int64_t group = c->heads / c->kv_heads, size = width_of(c->kind);
    const int64_t *ks = c->k_stride, *vs = c->v_stride;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t kv = 0; kv < c->kv_heads; kv++)
            for (int64_t j = 0; j < c->keys; j++) {
                int seen = 0;
                for (int64_t h = kv * group; h < (kv + 1) * group; h++)
                    for (int64_t i = 0; i < c->queries && !seen; i++) seen = sees(c, b, h, i, j);
                if (seen) continue;
                for (int64_t d = 0; d < c->dim && !expanded(ks); d++)
                    put((char *)c->k + (b * ks[0] + kv * ks[1] + j * ks[2] + d * ks[3]) * size, c->kind, NAN);
                for (int64_t d = 0; d < c->value_dim && !expanded(vs); d++)
                    put((char *)c->v + (b * vs[0] + kv * vs[1] + j * vs[2] + d * vs[3]) * size, c->kind, NAN);
            }
}

static int far(double got, double want, double close) { return !(fabs(got - want) <= close || got == want); }

/* Links are the largest weights, the largest first, each with its key. Of nearly equal ones either may come first. */
static int wrong_links(const Call *c, int64_t row, const Expected *want, double close) {
    const float *weight = c->link_weight + row * c->link_count;
    const int32_t *key = c->link_key + row * c->link_count;
    char *taken = calloc(1, c->keys + 1);
    int wrong = 0;
    for (int64_t i = 0; i < c->link_count; i++) {
        if (key[i] < -1 || key[i] >= c->keys || (key[i] >= 0 && taken[key[i]])) {
            wrong++;
            break;
        }
        double largest = 0; /* of those that are left */
        for (int64_t j = 0; j < c->keys; j++)
            if (!taken[j] && want->weights[j] > largest) largest = want->weights[j];
        wrong += far(weight[i], want->sees ? largest : 0, close);
        if (key[i] < 0) continue;
        wrong += far(weight[i], want->weights[key[i]], close);
        taken[key[i]] = 1;
    }
    free(taken);
    return wrong;
}

static const char *NAMES[] = {"entropy", "confidence", "first", "distance", "previous", "next", "self", "sink", "count"};
enum { OUTPUT, LOGARITHM, LINKS, STATISTICS, KINDS_OF_WRONG = STATISTICS + SUMS };

/* Every number of a call that was run; counts what is wrong by kind. */
static void check(const Call *c, int64_t wrong[KINDS_OF_WRONG]) {
    double rounding = c->kind == F32 ? 0 : 2e-2, fine = 2e-5;
    Expected want = {.weights = malloc((c->keys + 1) * sizeof(double))};
    for (int64_t b = 0; b < c->batch; b++) {
        int64_t first = first_key(c, b);
        for (int64_t h = 0; h < c->heads; h++) {
            double sums[SUMS] = {0}, error = 0;
            int vague = 0;
            for (int64_t i = 0; i < c->queries; i++) {
                int64_t row = (b * c->heads + h) * c->queries + i;
                expect(c, b, h, i, first, &want);
                if (asked(c, b, i)) {
                    for (int x = 0; x < SUMS; x++) sums[x] += want.sums[x];
                    vague |= want.vague, error += want.error;
                }
                if (want.vague) continue;
                double close = rounding + fine + 4 * want.error;
                for (int64_t x = 0; x < c->value_dim; x++)
                    wrong[OUTPUT] += far(element(c, c->out, c->out_stride, b, h, i, x), want.out[x], close);
                if (c->lse) wrong[LOGARITHM] += far(c->lse[row], want.lse, fine * (1 + fabs(want.lse)) + want.error);
                if (c->link_count) wrong[LINKS] += wrong_links(c, row, &want, fine + want.error);
            }
            for (int64_t x = 0; c->sums && !vague && x < CLASS + c->class_count; x++) {
                double got = c->sums[x * c->batch * c->heads + b * c->heads + h];
                double rough = x == COUNT ? 0 : fine * (1 + sums[COUNT]) + (x == ENTROPY ? 10 : 1) * error;
                if (x == DISTANCE) rough = 1e-4 * (1 + sums[x]) + error * c->keys;
                wrong[STATISTICS + x] += far(got, sums[x], rough);
            }
        }
    }
    free(want.weights);
}

static void report(const Call *c, int path, const int64_t wrong[KINDS_OF_WRONG]) {
    printf("%s: wrong", headwise_path(path));
    for (int x = 0; x < KINDS_OF_WRONG; x++)
        if (wrong[x])
            printf(" %s %ld", x == OUTPUT ? "output" : x == LOGARITHM ? "lse" : x == LINKS ? "links"
                   : x < STATISTICS + CLASS ? NAMES[x - STATISTICS] : "class", (long)wrong[x]);
    printf(": B %ld H %ld/%ld T %ld/%ld D %ld/%ld kind %ld mask %ld scale %g softcap %g left %ld right %ld%s%s%s%s%s%s\n",
           (long)c->batch, (long)c->heads, (long)c->kv_heads, (long)c->queries, (long)c->keys, (long)c->dim,
           (long)c->value_dim, (long)c->kind, c->mask ? (long)c->mask_kind : -1L, c->scale, c->softcap, (long)c->left,
           (long)c->right, c->gates ? " gates" : "", c->slopes ? " slopes" : "", c->sinks ? " sinks" : "",
           c->asked ? " asked" : "", c->ends ? " ends" : "", c->offsets ? " offsets" : "");
}

static Block floats(int64_t count, double low, double high) {
    Block x = block(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) ((float *)x.start)[i] = (float)(low + uniform() * (high - low));
    return x;
}

static Block mask_for(Call *c) {
    int64_t b = chance(0.5) ? c->batch : 1, h = chance(0.5) ? c->heads : 1, i = chance(0.7) ? c->queries : 1;
    c->mask_kind = between(F32, BOOL);
    Block mask = block(b * h * i * c->keys * width_of(c->mask_kind));
    int padding = i == 1 && h == 1 && chance(0.5);
    int64_t only = chance(0.5) ? between(0, i) : -1; /* the one query that the first keys exist for */
    for (int64_t x = 0; x < b * h * i * c->keys; x++) {
        int shown = padding ? x % c->keys >= 3 : chance(0.6);
        if (only >= 0 && x % c->keys < 4 && x / c->keys % i != only) shown = 0;
        if (c->mask_kind == BOOL) ((char *)mask.start)[x] = shown;
        else put((char *)mask.start + x * width_of(c->mask_kind), c->mask_kind, shown ? short_number(0, 1) : -INFINITY);
    }
    int64_t stride[4] = {b > 1 ? h * i * c->keys : 0, h > 1 ? i * c->keys : 0, i > 1 ? c->keys : 0, 1};
    memcpy(c->mask_stride, stride, sizeof stride);
    c->mask = mask.start;
    return mask;
}

/* A random call, checked; gives whether anything was wrong. */
static int one(int path, int64_t longest) {
    int64_t offsets[MOST_BATCH], ends[MOST_BATCH], group = between(1, 3), wrong[KINDS_OF_WRONG] = {0}, total = 0;
    Call c = {.batch = between(1, MOST_BATCH), .kv_heads = between(1, 3), .queries = between(0, chance(0.3) ? 60 : 7),
              .keys = between(0, chance(0.3) ? longest : 40), .dim = between(1, 40), .value_dim = between(1, 40),
              .kind = between(0, 2), .left = -1, .right = -1, .scale = uniform(), .threads = between(1, 3)};
    if (chance(0.5)) c.dim = 16 * between(1, 4), c.value_dim = 16 * between(1, 4);
    if (longest > 1000) c.keys = between(1000, longest), c.queries = between(1, 3); /* in parts, which are merged */
    if (chance(0.1)) c.scale = 3e38; /* almost every score overflows */
    c.heads = c.kv_heads * group;
    c.offset = c.keys - c.queries;
    c.end = c.keys;
    int64_t rows = c.batch * c.heads * c.queries;
    Block used[16];
    int blocks = 0;
#define USE(x) (used[blocks++] = (x)).start
    c.q = USE(tensor(c.kind, c.batch, c.heads, c.queries, c.dim, c.q_stride));
    c.k = USE(tensor(c.kind, c.batch, c.kv_heads, c.keys, c.dim, c.k_stride));
    c.v = USE(tensor(c.kind, c.batch, c.kv_heads, c.keys, c.value_dim, c.v_stride));
    c.out = USE(block(rows * c.value_dim * width_of(c.kind)));
    c.out_stride[0] = c.queries * c.heads * c.value_dim;
    c.out_stride[1] = c.value_dim, c.out_stride[2] = c.heads * c.value_dim, c.out_stride[3] = 1;
    if (chance(0.8)) {
        c.class_count = chance(0.5) ? between(1, MOST_CLASSES) : 0;
        c.sums = USE(block((CLASS + c.class_count) * c.batch * c.heads * sizeof(double)));
    }
    if (c.class_count) {
        float *member = USE(block(c.batch * c.class_count * c.keys * sizeof(float)));
        for (int64_t i = 0; i < c.batch * c.class_count * c.keys; i++) member[i] = chance(0.5);
        c.classes = member;
    }
    if (chance(0.4)) {
        uint8_t *rows_asked = USE(block(c.batch * c.queries));
        for (int64_t i = 0; i < c.batch * c.queries; i++) rows_asked[i] = chance(0.6);
        c.asked = rows_asked;
    }
    if (chance(0.4)) c.lse = USE(block(rows * sizeof(float)));
    if (chance(0.4)) {
        c.link_count = between(1, MOST_LINKS);
        c.link_weight = USE(block(rows * c.link_count * sizeof(float)));
        c.link_key = USE(block(rows * c.link_count * sizeof(int32_t)));
    }
    if (chance(0.4)) c.right = between(0, 5);
    if (chance(0.3)) c.left = between(0, 30);
    for (int b = 0; b < MOST_BATCH; b++) ends[b] = between(0, c.keys), offsets[b] = between(-5, c.keys);
    if (chance(0.3)) c.ends = ends;
    if (chance(0.3)) c.offsets = offsets;
    if (chance(0.3)) c.softcap = 1 + uniform();
    if (chance(0.3)) c.sinks = USE(floats(c.heads, 0, 1));
    if (chance(0.3)) c.slopes = USE(floats(c.heads, 0, 0.5));
    if (chance(0.4)) {
        c.gates_stride = chance(0.5) ? c.heads : 0;
        c.gates = USE(floats(c.gates_stride ? c.batch * c.heads : c.heads, -1, 1));
    }
    if (chance(0.4)) used[blocks++] = mask_for(&c);
    spoil(&c);
    if (headwise_run(&c, path)) printf("%s: refused\n", headwise_path(path)), total++;
    else check(&c, wrong);
    for (int x = 0; x < KINDS_OF_WRONG; x++) total += wrong[x];
    if (total) report(&c, path, wrong);
    while (blocks) release(used[--blocks]);
    return total != 0;
}

static uint64_t seed = 1;

static void *many(void *number) {
    state = seed * 1000 + (uintptr_t)number;
    intptr_t wrong = 0;
    for (int i = 0; i < 20; i++) wrong += one(0, 900);
    return (void *)wrong;
}

int main(int count, char **words) {
    int calls = count > 1 ? atoi(words[1]) : 300, wrong = 0;
    if (count > 2) seed = strtoull(words[2], NULL, 10);
    for (int path = 0; headwise_path(path); path++) {
        state = seed;
        for (int i = 0; i < calls; i++) wrong += one(path, i % 5 ? 700 : 3000);
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
