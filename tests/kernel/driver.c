/* Compares random calls of the kernel with plain loops in double precision, in every instruction set that this machine
   can run: outputs, strongest keys, log-sum-exp, every statistic, and gradients. `driver CALLS SEED`.

   Every tensor ends at an inaccessible page, and keys and values that no row may see are NaN. At the end, several
   threads call at once. `make sanitize` runs it under ASan, UBSan and TSan, `make neon` under an emulator. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "cpu.h"
#include "gradients.h"
#include "system.h"

int headwise_run(const Call *, int);
int headwise_backward(const Call *, const Gradients *, int);
const char *headwise_path(int);

enum { MAX_DIM = 64, MAX_BATCH = 2 };

static __thread uint64_t state;

static uint64_t next_random(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int64_t random_int(int64_t low, int64_t high) { /* both included */
    return low + (int64_t)(next_random() % (uint64_t)(high - low + 1));
}

static double uniform(void) { return (next_random() >> 11) * 0x1p-53; }
static int chance(double probability) { return uniform() < probability; }

static float truncate_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xffff0000u;
    memcpy(&x, &bits, 4);
    return x;
}

static uint16_t to_f16(float x) { /* for numbers of random_value, NaN and infinities */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7e00;
    if (isinf(x)) return x < 0 ? 0xfc00 : 0x7c00;
    if (fabsf(x) < 0x1p-14f) return 0;
    return (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10));
}

static void store_element(char *at, int64_t dtype, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t small = dtype == BF16 ? bits >> 16 : to_f16(x);
    if (dtype == F32) memcpy(at, &x, 4);
    else memcpy(at, &small, 2);
}

static float load_element(const char *at, int64_t dtype) {
    uint16_t small;
    uint32_t bits;
    float x;
    if (dtype == F32) {
        memcpy(&x, at, 4);
        return x;
    }
    memcpy(&small, at, 2);
    uint32_t sign = (uint32_t)(small & 0x8000) << 16, size = small & 0x7fff;
    if (dtype == BF16) bits = (uint32_t)small << 16;
    else bits = sign | (size ? (size << 13) + (112u << 23) : 0);
    if (dtype == F16 && size < 0x400) return (sign ? -1 : 1) * (float)size * 0x1p-24f; /* subnormal */
    if (dtype == F16 && size >= 0x7c00) return size > 0x7c00 ? NAN : sign ? -INFINITY : INFINITY;
    memcpy(&x, &bits, 4);
    return x;
}

static int64_t dtype_size(int64_t dtype) { return dtype == F32 ? 4 : dtype == BOOL8 ? 1 : 2; }

/* A number that is exact in bf16 and in f16. */
static float random_value(double low, double high) {
    float value = truncate_to_bf16((float)(low + uniform() * (high - low)));
    return fabsf(value) < 0x1p-13f ? 0 : value;
}

/* A tensor (b, h, t, d) in one of five layouts: dense, (b, t, h, d) transposed, with gaps between elements,
   (b, h, d, t) transposed, or expanded (some strides are 0). */
static Buffer random_tensor(int64_t dtype, int64_t b, int64_t h, int64_t t, int64_t d, int64_t stride[4]) {
    int64_t layout = random_int(0, 4), step = layout == 2 ? 2 : 1, count = b * h * t * d * step;
    int64_t dense[4] = {h * t * d * step, t * d * step, d * step, step};
    if (layout == 1) dense[1] = d, dense[2] = h * d;
    if (layout == 3) dense[2] = 1, dense[3] = t;
    for (int i = 0; i < 4; i++) stride[i] = layout == 4 && chance(0.4) ? 0 : dense[i];
    Buffer x = allocate(count * dtype_size(dtype));
    for (int64_t i = 0; i < count; i++)
        store_element((char *)x.start + i * dtype_size(dtype), dtype, random_value(-2, 2));
    return x;
}

static int is_expanded(const int64_t stride[4]) { return !stride[0] || !stride[1] || !stride[2] || !stride[3]; }

/* What the mask adds to a score; -inf where it hides the key. */
static double mask_bias(const Call *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!c->mask) return 0;
    const int64_t *s = c->mask_stride;
    const char *at = c->mask + (b * s[0] + h * s[1] + i * s[2] + j * s[3]) * dtype_size(c->mask_dtype);
    if (c->mask_dtype == BOOL8) return *at ? 0 : -INFINITY;
    return load_element(at, c->mask_dtype);
}

static int64_t start_of(const Call *c, int64_t b) { return c->starts ? c->starts[b] : c->start; }
static int64_t keep_start_of(const Call *c, int64_t b) { return c->keep_starts ? c->keep_starts[b] : c->keep_start; }
static int64_t end_of(const Call *c, int64_t b) { return c->ends ? c->ends[b] : c->end; }
static int64_t position_of(const Call *c, int64_t b, int64_t i) {
    return i + (c->offsets ? c->offsets[b] : c->offset);
}
static int is_counted(const Call *c, int64_t b, int64_t i) { return !c->counted || c->counted[b * c->queries + i]; }

static int is_visible(const Call *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    int64_t position = position_of(c, b, i), first = keep_start_of(c, b);
    int64_t left = c->windows ? c->windows[3 * h] : c->left, right = c->windows ? c->windows[3 * h + 1] : c->right;
    int64_t keep_first = c->windows ? c->windows[3 * h + 2] : c->keep_first;
    if (j < start_of(c, b) || j >= end_of(c, b)) return 0;
    int in_band = (left < 0 || j >= position - left) && (right < 0 || j <= position + right);
    int is_kept = j >= first && j < first + keep_first && (!c->causal || j <= position);
    if (!in_band && !is_kept) return 0;
    return mask_bias(c, b, h, i, j) != -INFINITY;
}

static float element(const Call *c, const char *x, const int64_t *s, int64_t b, int64_t h, int64_t t, int64_t d) {
    return load_element(x + (b * s[0] + h * s[1] + t * s[2] + d * s[3]) * dtype_size(c->dtype), c->dtype);
}

/* The first key that the mask shows to some counted query, whatever the window. -1: none. */
static int64_t first_key(const Call *c, int64_t b) {
    for (int64_t j = start_of(c, b); c->mask && j < end_of(c, b); j++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int64_t i = 0; i < c->queries; i++)
                if (is_counted(c, b, i) && mask_bias(c, b, h, i, j) != -INFINITY) return j;
    return c->mask ? -1 : start_of(c, b);
}

/* One row, computed by plain loops. */
typedef struct {
    int visible;   /* whether any key is */
    int ambiguous; /* the order of its scores depends on rounding in single precision */
    double out[MAX_DIM], lse, sums[MAX_STATS];
    double *weights; /* (keys) */
    double error;    /* bound of the error of a score in single precision, and of the relative error of a weight */
} Reference;

/* The factor that dropout gives a weight: 0, or one over the probability of being retained. */
static double dropout_factor(const Call *c, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!c->dropped) return 1;
    uint32_t x[4] = {(uint32_t)(j / 128 * 16 + j % 16), (uint32_t)i, (uint32_t)h, (uint32_t)b};
    uint32_t key[2] = {(uint32_t)c->seed, (uint32_t)(c->seed >> 32)};
    for (int round = 0; round < 7; round++) {
        uint64_t first = (uint64_t)x[0] * 0xD2511F53u, second = (uint64_t)x[2] * 0xCD9E8D57u;
        x[0] = (uint32_t)(second >> 32) ^ x[1] ^ key[0], x[1] = (uint32_t)second;
        x[2] = (uint32_t)(first >> 32) ^ x[3] ^ key[1], x[3] = (uint32_t)first;
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    int64_t half = j % 128 / 16, retained = DROPOUT_RANGE - c->dropped;
    return (int64_t)(x[half / 2] >> 16 * (half % 2) & 0xffff) < retained ? (double)DROPOUT_RANGE / retained : 0;
}

static void reference_row(const Call *c, int64_t b, int64_t h, int64_t i, int64_t first, Reference *row) {
    int64_t kv = h / (c->heads / c->kv_heads), position = position_of(c, b, i);
    double *s = row->weights, sink = c->sinks ? c->sinks[h] : -INFINITY, top = sink, total = 0;
    double gate = c->gates ? c->gates[b * c->gates_stride + h] : 1, *sums = row->sums;
    row->visible = row->ambiguous = 0, row->error = 0;
    double max_logit = -INFINITY;
    for (int64_t j = 0; j < c->keys; j++) {
        s[j] = -INFINITY;
        if (!is_visible(c, b, h, i, j)) continue;
        double dot = 0, size = 0;
        for (int64_t d = 0; d < c->dim; d++) {
            double x = (double)element(c, c->q, c->q_stride, b, h, i, d) * element(c, c->k, c->k_stride, b, kv, j, d);
            dot += x, size += fabs(x) * c->scale;
        }
        double error = c->scale > 1 ? 0 : size * (1 + c->dim / 4.0); /* scores that overflow are recomputed exactly */
        if (c->slopes) error += 2 * c->slopes[h] * fabs((double)(position - j));
        row->error = fmax(row->error, error * 0x1p-23);
        dot = fmax(-1e38, fmin(dot * c->scale, 1e38));
        max_logit = fmax(max_logit, dot);
        if (c->softcap > 0) dot = c->softcap * tanh(dot / c->softcap);
        if (c->slopes) dot -= c->slopes[h] * fabs((double)(position - j));
        s[j] = dot + mask_bias(c, b, h, i, j);
        if (s[j] > top) top = s[j];
        row->visible = 1;
    }
    for (int64_t j = 0; j < c->keys; j++) {
        if (c->scale > 1 && s[j] < top && top - s[j] < 1e-4 * fabs(top)) row->ambiguous = 1;
        s[j] = s[j] == -INFINITY ? 0 : exp(s[j] - top);
        total += s[j];
    }
    if (c->sinks) total += exp(sink - top);
    row->lse = total > 0 ? top + log(total) : -INFINITY;
    memset(row->out, 0, sizeof row->out);
    memset(sums, 0, sizeof row->sums);
    sums[STAT_MAX_LOGIT] = max_logit;
    if (!row->visible) return;
    sums[STAT_COUNT] = 1;
    sums[STAT_LSE] = row->lse;
    sums[STAT_SINK] = c->sinks ? exp(sink - top) / total : 0;
    for (int64_t j = 0; j < c->keys; j++) {
        double a = s[j] /= total;
        if (a == 0) continue;
        sums[STAT_ENTROPY] -= a * log(a);
        sums[STAT_CONFIDENCE] = fmax(sums[STAT_CONFIDENCE], a);
        sums[STAT_FIRST] += j == first ? a : 0;
        sums[STAT_DISTANCE] += a * fabs((double)(position - j));
        sums[STAT_PREVIOUS] += j == position - 1 ? a : 0;
        sums[STAT_NEXT] += j == position + 1 ? a : 0;
        sums[STAT_SELF] += j == position ? a : 0;
        for (int64_t x = 0; x < c->class_count; x++)
            sums[STAT_CLASS + x] += a * c->classes[(b * c->class_count + x) * c->keys + j];
        double weight = gate * a * dropout_factor(c, b, h, i, j);
        for (int64_t d = 0; d < c->value_dim; d++)
            row->out[d] += weight * element(c, c->v, c->v_stride, b, kv, j, d);
    }
}

/* Store NaN in every key and value that no row may see. */
static void poison_hidden(const Call *c) {
    int64_t group = c->heads / c->kv_heads, size = dtype_size(c->dtype);
    const int64_t *ks = c->k_stride, *vs = c->v_stride;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t kv = 0; kv < c->kv_heads; kv++)
            for (int64_t j = 0; j < c->keys; j++) {
                int seen = 0;
                for (int64_t h = kv * group; h < (kv + 1) * group; h++)
                    for (int64_t i = 0; i < c->queries && !seen; i++) seen = is_visible(c, b, h, i, j);
                if (seen) continue;
                char *k = (char *)c->k + (b * ks[0] + kv * ks[1] + j * ks[2]) * size;
                char *v = (char *)c->v + (b * vs[0] + kv * vs[1] + j * vs[2]) * size;
                for (int64_t d = 0; d < c->dim && !is_expanded(ks); d++)
                    store_element(k + d * ks[3] * size, c->dtype, NAN);
                for (int64_t d = 0; d < c->value_dim && !is_expanded(vs); d++)
                    store_element(v + d * vs[3] * size, c->dtype, NAN);
            }
}

static int differs(double got, double want, double tolerance) {
    return !(fabs(got - want) <= tolerance || got == want);
}

/* Count the errors in a row's largest weights and their keys. Nearly equal weights may come in any order. */
static int check_strongest(const Call *c, int64_t row, const Reference *want, double tolerance) {
    const float *weight = c->strongest_weight + row * c->strongest_count;
    const int32_t *key = c->strongest_key + row * c->strongest_count;
    char *taken = calloc(1, c->keys + 1);
    int wrong = 0;
    for (int64_t i = 0; i < c->strongest_count; i++) {
        if (key[i] < -1 || key[i] >= c->keys || (key[i] >= 0 && taken[key[i]])) {
            wrong++;
            break;
        }
        double largest = 0; /* of the keys that are not taken */
        for (int64_t j = 0; j < c->keys; j++)
            if (!taken[j] && want->weights[j] > largest) largest = want->weights[j];
        wrong += differs(weight[i], want->visible ? largest : 0, tolerance);
        if (key[i] < 0) continue;
        wrong += differs(weight[i], want->weights[key[i]], tolerance);
        taken[key[i]] = 1;
    }
    free(taken);
    return wrong;
}

enum { OUTPUT, LSE, ROW, STRONGEST, DQ, DK, DV, DMASK, DELTA, STATUS, FIRST_STATISTIC };
enum { CHECKS = FIRST_STATISTIC + MAX_STATS };

static const char *check_name(int check) {
#define NAME(id, name) name,
    static const char *names[] = {"output", "lse",   "row",   "strongest", "dq",
                                  "dk",     "dv",    "dmask", "delta",     "status", STATISTICS(NAME)};
#undef NAME
    return check < FIRST_STATISTIC + STAT_CLASS ? names[check] : "class";
}

/* How many of the sums of a row give other statistics than the reference has. */
static int64_t check_row_sums(const Call *c, int64_t row, const Reference *want, double tolerance) {
    int64_t rows = c->batch * c->heads * c->queries, wrong = 0;
    const float *x = c->rows + row;
    wrong += x[ROW_HAS_KEYS * rows] != want->visible;
    double max_logit = want->sums[STAT_MAX_LOGIT], others = 1 - want->sums[STAT_SINK], sum = x[ROW_TOTAL * rows];
    if (!want->visible) return wrong + (sum != 0) + (x[ROW_LARGEST * rows] != -INFINITY);
    wrong += differs(x[ROW_LARGEST_LOGIT * rows], max_logit, tolerance * (1 + fabs(max_logit)));
    if (others < 1e-3) return wrong; /* the sink takes nearly all */
    double total = sum / others, lse = x[ROW_LARGEST * rows] + log(total);
    wrong += differs(lse, want->lse, tolerance * (1 + fabs(want->lse)) / others);
    double entropy = (sum * log(total) - x[ROW_WEIGHTED_SCORES * rows]) / total;
    wrong += differs(entropy, want->sums[STAT_ENTROPY], 10 * tolerance / others);
    const int sums[][2] = {{ROW_FIRST, STAT_FIRST}, {ROW_PREVIOUS, STAT_PREVIOUS}, {ROW_NEXT, STAT_NEXT},
                           {ROW_SELF, STAT_SELF}, {ROW_DISTANCES, STAT_DISTANCE}};
    for (int i = 0; i < 5; i++)
        wrong += differs(x[sums[i][0] * rows] / total, want->sums[sums[i][1]],
                         tolerance * (1 + (i == 4 ? c->keys + fabs(want->sums[STAT_DISTANCE]) : 0)));
    for (int64_t i = 0; i < c->class_count; i++)
        wrong += differs(x[(ROW_CLASS + i) * rows] / total, want->sums[STAT_CLASS + i], tolerance);
    return wrong;
}

/* Check everything that a call wrote; counts what is wrong per kind of check. */
static void check(const Call *c, int64_t wrong[CHECKS]) {
    double rounding = c->dtype == F32 ? 0 : 2e-2, base = 2e-5;
    Reference want = {.weights = malloc((c->keys + 1) * sizeof(double))};
    for (int64_t b = 0; b < c->batch; b++) {
        int64_t first = first_key(c, b);
        for (int64_t h = 0; h < c->heads; h++) {
            double sums[MAX_STATS] = {[STAT_MAX_LOGIT] = -INFINITY}, error = 0, lse_size = 0, max_error = 0;
            int ambiguous = 0;
            for (int64_t i = 0; i < c->queries; i++) {
                int64_t row = (b * c->heads + h) * c->queries + i;
                reference_row(c, b, h, i, first, &want);
                if (is_counted(c, b, i)) {
                    for (int x = 0; x < MAX_STATS; x++)
                        sums[x] = x == STAT_MAX_LOGIT ? fmax(sums[x], want.sums[x]) : sums[x] + want.sums[x];
                    ambiguous |= want.ambiguous, error += want.error, lse_size += fabs(want.sums[STAT_LSE]);
                    max_error = fmax(max_error, want.error);
                }
                if (want.ambiguous) continue;
                double tolerance = rounding + base + 4 * want.error;
                if (c->dropped) tolerance *= DROPOUT_RANGE / fmax(1, DROPOUT_RANGE - c->dropped);
                for (int64_t x = 0; x < c->value_dim; x++)
                    wrong[OUTPUT] += differs(element(c, c->out, c->out_stride, b, h, i, x), want.out[x], tolerance);
                if (c->lse) wrong[LSE] += differs(c->lse[row], want.lse, base * (1 + fabs(want.lse)) + want.error);
                if (c->rows) wrong[ROW] += check_row_sums(c, row, &want, base + want.error);
                if (c->strongest_count) wrong[STRONGEST] += check_strongest(c, row, &want, base + want.error);
            }
            for (int64_t x = 0; c->sums && !ambiguous && x < STAT_CLASS + c->class_count; x++) {
                double got = c->sums[x * c->batch * c->heads + b * c->heads + h];
                double tolerance = base * (1 + sums[STAT_COUNT]) + (x == STAT_ENTROPY ? 10 : 1) * error;
                if (x == STAT_COUNT) tolerance = 0;
                if (x == STAT_LSE) tolerance += base * lse_size;
                if (x == STAT_MAX_LOGIT) tolerance = base * (1 + fabs(sums[x])) + max_error;
                if (x == STAT_DISTANCE) tolerance = 1e-4 * (1 + sums[x]) + error * c->keys;
                wrong[FIRST_STATISTIC + x] += differs(got, sums[x], tolerance);
            }
        }
    }
    free(want.weights);
}

static void report(const Call *c, int path, const int64_t wrong[CHECKS]) {
    printf("%s: wrong", headwise_path(path));
    for (int x = 0; x < CHECKS; x++)
        if (wrong[x]) printf(" %s %ld", check_name(x), (long)wrong[x]);
    printf(": B %ld H %ld/%ld T %ld/%ld D %ld/%ld dtype %ld mask %ld scale %g softcap %g left %ld right %ld"
           "%s%s%s%s%s%s%s%s%s%s\n",
           (long)c->batch, (long)c->heads, (long)c->kv_heads, (long)c->queries, (long)c->keys, (long)c->dim,
           (long)c->value_dim, (long)c->dtype, c->mask ? (long)c->mask_dtype : -1L, c->scale, c->softcap, (long)c->left,
           (long)c->right, c->gates ? " gates" : "", c->slopes ? " slopes" : "", c->sinks ? " sinks" : "",
           c->counted ? " counted" : "", c->ends ? " ends" : "", c->offsets ? " offsets" : "",
           c->starts ? " starts" : "", c->keep_first ? " keep_first" : "", c->keep_starts ? " keep_starts" : "",
           c->windows ? " windows" : "");
}

static Buffer random_floats(int64_t count, double low, double high) {
    Buffer x = allocate(count * sizeof(float));
    for (int64_t i = 0; i < count; i++) ((float *)x.start)[i] = (float)(low + uniform() * (high - low));
    return x;
}

static Buffer random_mask(Call *c) {
    int64_t b = chance(0.5) ? c->batch : 1, h = chance(0.5) ? c->heads : 1, i = chance(0.7) ? c->queries : 1;
    c->mask_dtype = random_int(F32, BOOL8);
    Buffer mask = allocate(b * h * i * c->keys * dtype_size(c->mask_dtype));
    int padding = i == 1 && h == 1 && chance(0.5);
    int64_t only = chance(0.5) ? random_int(0, i) : -1; /* the only query that may see the first keys */
    for (int64_t x = 0; x < b * h * i * c->keys; x++) {
        int shown = padding ? x % c->keys >= 3 : chance(0.6);
        if (only >= 0 && x % c->keys < 4 && x / c->keys % i != only) shown = 0;
        if (c->mask_dtype == BOOL8) ((char *)mask.start)[x] = shown;
        else {
            float bias = shown ? random_value(0, 1) : -INFINITY;
            store_element((char *)mask.start + x * dtype_size(c->mask_dtype), c->mask_dtype, bias);
        }
    }
    int64_t stride[4] = {b > 1 ? h * i * c->keys : 0, h > 1 ? i * c->keys : 0, i > 1 ? c->keys : 0, 1};
    memcpy(c->mask_stride, stride, sizeof stride);
    c->mask = mask.start;
    return mask;
}

/* A random call and the memory that it points to. */
typedef struct {
    Call call;
    int64_t offsets[MAX_BATCH], starts[MAX_BATCH], keep_starts[MAX_BATCH], ends[MAX_BATCH];
    Buffer buffers[24];
    int count;
} Case;

static void *own(Case *x, Buffer buffer) {
    x->buffers[x->count++] = buffer;
    return buffer.start;
}

static void choose_sizes(Call *c, int64_t max_keys) {
    c->batch = random_int(1, MAX_BATCH);
    c->kv_heads = random_int(1, 3);
    c->heads = c->kv_heads * random_int(1, 3);
    c->dtype = random_int(F32, F16);
    c->queries = random_int(0, chance(0.3) ? 60 : 7);
    c->keys = random_int(0, chance(0.3) ? max_keys : 40);
    c->dim = random_int(1, 40), c->value_dim = random_int(1, 40);
    if (chance(0.5)) c->dim = 16 * random_int(1, 4), c->value_dim = 16 * random_int(1, 4);
    if (max_keys > 1000) c->keys = random_int(1000, max_keys), c->queries = random_int(1, 3); /* merged parts */
    c->scale = chance(0.1) ? 3e38 : uniform(); /* 3e38: almost every score overflows */
    c->threads = random_int(1, 3);
}

static void make_tensors(Case *x) {
    Call *c = &x->call;
    c->q = own(x, random_tensor(c->dtype, c->batch, c->heads, c->queries, c->dim, c->q_stride));
    c->k = own(x, random_tensor(c->dtype, c->batch, c->kv_heads, c->keys, c->dim, c->k_stride));
    c->v = own(x, random_tensor(c->dtype, c->batch, c->kv_heads, c->keys, c->value_dim, c->v_stride));
    c->out = own(x, allocate(c->batch * c->heads * c->queries * c->value_dim * dtype_size(c->dtype)));
    c->out_stride[0] = c->queries * c->heads * c->value_dim;
    c->out_stride[1] = c->value_dim, c->out_stride[2] = c->heads * c->value_dim, c->out_stride[3] = 1;
}

static void request_statistics(Case *x) {
    Call *c = &x->call;
    int64_t rows = c->batch * c->heads * c->queries;
    if (chance(0.8)) {
        c->class_count = chance(0.5) ? random_int(1, MAX_CLASSES) : 0;
        c->sums = own(x, allocate((STAT_CLASS + c->class_count) * c->batch * c->heads * sizeof(double)));
    }
    if (c->class_count) {
        float *member = own(x, allocate(c->batch * c->class_count * c->keys * sizeof(float)));
        for (int64_t i = 0; i < c->batch * c->class_count * c->keys; i++) member[i] = chance(0.5);
        c->classes = member;
    }
    if (chance(0.4)) {
        uint8_t *counted = own(x, allocate(c->batch * c->queries));
        for (int64_t i = 0; i < c->batch * c->queries; i++) counted[i] = chance(0.6);
        c->counted = counted;
    }
    if (c->sums && chance(0.5)) c->rows = own(x, allocate((ROW_CLASS + c->class_count) * rows * sizeof(float)));
    if (chance(0.4)) c->lse = own(x, allocate(rows * sizeof(float)));
    if (chance(0.4)) {
        c->strongest_count = random_int(1, MAX_STRONGEST);
        c->strongest_weight = own(x, allocate(rows * c->strongest_count * sizeof(float)));
        c->strongest_key = own(x, allocate(rows * c->strongest_count * sizeof(int32_t)));
    }
}

static void choose_options(Case *x) {
    Call *c = &x->call;
    c->right = chance(0.4) ? random_int(0, 5) : -1;
    c->left = chance(0.3) ? random_int(0, 30) : -1;
    c->offset = c->keys - c->queries;
    c->end = c->keys;
    for (int b = 0; b < MAX_BATCH; b++) {
        x->ends[b] = random_int(0, c->keys), x->offsets[b] = random_int(-5, c->keys);
        x->starts[b] = random_int(0, 9), x->keep_starts[b] = random_int(0, c->keys);
    }
    if (chance(0.3)) c->start = random_int(0, 5);
    if (chance(0.2)) c->starts = x->starts;
    if (chance(0.3)) c->keep_first = random_int(0, 20), c->causal = chance(0.5);
    c->keep_start = chance(0.5) ? random_int(0, 20) : 0;
    if (chance(0.2)) c->keep_starts = x->keep_starts;
    if (chance(0.3)) {
        int64_t *windows = own(x, allocate(3 * c->heads * sizeof(int64_t)));
        for (int64_t h = 0; h < 3 * c->heads; h++) windows[h] = random_int(h % 3 == 2 ? 0 : -1, 30);
        c->windows = windows;
    }
    if (chance(0.3)) c->ends = x->ends;
    if (chance(0.3)) c->offsets = x->offsets;
    if (chance(0.3)) c->softcap = 1 + uniform();
    if (chance(0.3)) c->sinks = own(x, random_floats(c->heads, 0, 1));
    if (chance(0.3)) c->slopes = own(x, random_floats(c->heads, 0, 0.5));
    if (chance(0.4)) {
        c->gates_stride = chance(0.5) ? c->heads : 0;
        c->gates = own(x, random_floats(c->gates_stride ? c->batch * c->heads : c->heads, -1, 1));
    }
    if (chance(0.4)) own(x, random_mask(c));
    if (chance(0.4)) c->dropped = chance(0.1) ? DROPOUT_RANGE : random_int(1, DROPOUT_RANGE / 2), c->seed = next_random();
}

/* ---- gradients ---- */

/* A sum of products, and of their magnitudes, with which its error grows. */
typedef struct {
    double value, size;
} Sum;

static void add(Sum *sum, double x, double size) { sum->value += x, sum->size += size; }

/* Add what row i contributes to the gradients; delta is grad_out . out. Returns the relative error of its weights. */
static double add_row_gradients(const Call *c, const Gradients *g, int64_t b, int64_t h, int64_t i, Sum *dq, Sum *dk,
                                Sum *dv, Sum *dmask, double *delta) {
    const int64_t *stride = g->dmask_stride;
    Reference row = {.weights = malloc((c->keys + 1) * sizeof(double))};
    int64_t kv = h / (c->heads / c->kv_heads);
    double size_of_delta = 0;
    reference_row(c, b, h, i, 0, &row);
    for (int64_t x = 0; x < c->value_dim; x++) {
        double product = element(c, g->grad_out, g->grad_out_stride, b, h, i, x) * row.out[x];
        *delta += product, size_of_delta += fabs(product);
    }
    for (int64_t j = 0; j < c->keys && row.visible; j++) {
        double a = row.weights[j], dp = 0, size = size_of_delta, dot = 0, retained = dropout_factor(c, b, h, i, j);
        if (a == 0) continue;
        for (int64_t x = 0; x < c->value_dim; x++) {
            double grad = element(c, g->grad_out, g->grad_out_stride, b, h, i, x) * retained;
            double product = grad * element(c, c->v, c->v_stride, b, kv, j, x);
            dp += product, size += fabs(product);
            add(dv + j * c->value_dim + x, a * grad, fabs(a * grad));
        }
        for (int64_t x = 0; x < c->dim; x++)
            dot += (double)element(c, c->q, c->q_stride, b, h, i, x) * element(c, c->k, c->k_stride, b, kv, j, x);
        if (g->dmask)
            add(dmask + b * stride[0] + h * stride[1] + i * stride[2] + j, a * (dp - *delta), a * size);
        double cap = c->softcap > 0 ? tanh(dot * c->scale / c->softcap) : 0, factor = a * c->scale * (1 - cap * cap);
        for (int64_t x = 0; x < c->dim; x++) {
            double q = element(c, c->q, c->q_stride, b, h, i, x), k = element(c, c->k, c->k_stride, b, kv, j, x);
            add(dq + x, factor * (dp - *delta) * k, fabs(a * c->scale * size * k));
            add(dk + j * c->dim + x, factor * (dp - *delta) * q, fabs(a * c->scale * size * q));
        }
    }
    free(row.weights);
    return row.error;
}

static int64_t count_wrong(const Call *c, const char *got, const Sum *want, int64_t n, double relative) {
    int64_t wrong = 0, size = dtype_size(c->dtype);
    for (int64_t x = 0; x < n; x++)
        wrong += differs(load_element(got + x * size, c->dtype), want[x].value, relative * want[x].size + 1e-6);
    return wrong;
}

/* Returns the relative error of the weights. */
static double check_kv_head(const Call *c, const Gradients *g, int64_t b, int64_t kv, Sum *dmask,
                            int64_t wrong[CHECKS]) {
    int64_t size = dtype_size(c->dtype), group = c->heads / c->kv_heads;
    Sum *dq = calloc(c->queries * group * c->dim + 1, sizeof(Sum)), *dk = calloc(c->keys * c->dim + 1, sizeof(Sum));
    Sum *dv = calloc(c->keys * c->value_dim + 1, sizeof(Sum));
    double error = 0;
    for (int64_t row = 0; row < c->queries * group; row++) {
        int64_t i = row / group, h = kv * group + row % group;
        double delta = 0;
        error = fmax(error, add_row_gradients(c, g, b, h, i, dq + row * c->dim, dk, dv, dmask, &delta));
        if (g->delta)
            wrong[DELTA] += differs(g->delta[(b * c->heads + h) * c->queries + i], delta, c->dtype == F32 ? 1e-3 : 1);
    }
    double relative = 2e-5 + 8 * error + (c->dtype == F32 ? 0 : 2e-2);
    for (int64_t row = 0; row < c->queries * group; row++) {
        int64_t index = (b * c->queries + row / group) * c->heads + kv * group + row % group;
        wrong[DQ] += count_wrong(c, g->dq + index * c->dim * size, dq + row * c->dim, c->dim, relative);
    }
    for (int64_t j = 0; j < c->keys; j++) {
        int64_t index = (b * c->keys + j) * c->kv_heads + kv;
        wrong[DK] += count_wrong(c, g->dk + index * c->dim * size, dk + j * c->dim, c->dim, relative);
        wrong[DV] += count_wrong(c, g->dv + index * c->value_dim * size, dv + j * c->value_dim, c->value_dim, relative);
    }
    free(dq), free(dk), free(dv);
    return error;
}

static int64_t count_mask_elements(const Call *c) {
    const int64_t *stride = c->mask_stride;
    return (stride[0] ? c->batch : 1) * (stride[1] ? c->heads : 1) * (stride[2] ? c->queries : 1) * c->keys;
}

/* The gradients of a random call, without gates and statistics. */
static void test_gradients(Case *x, int path, int64_t wrong[CHECKS]) {
    enum { DECLINED = 3 }; /* in kernel.c */
    Call *c = &x->call;
    int64_t size = dtype_size(c->dtype), rows = c->batch * c->heads * c->queries;
    int64_t keys = c->batch * c->kv_heads * c->keys;
    Gradients g = {.out = c->out};
    c->gates = NULL, c->sums = NULL, c->rows = NULL, c->counted = NULL, c->classes = NULL;
    c->class_count = c->strongest_count = 0;
    if (!c->lse) c->lse = own(x, allocate(rows * sizeof(float)));
    wrong[STATUS] += headwise_run(c, path) != 0;
    memcpy(g.out_stride, c->out_stride, sizeof g.out_stride);
    g.grad_out = own(x, random_tensor(c->dtype, c->batch, c->heads, c->queries, c->value_dim, g.grad_out_stride));
    g.lse = c->lse;
    g.dq = own(x, allocate(rows * c->dim * size));
    g.dk = own(x, allocate(keys * c->dim * size));
    g.dv = own(x, allocate(keys * c->value_dim * size));
    g.delta = chance(0.5) ? own(x, allocate(rows * sizeof(float))) : NULL;
    int64_t masked = c->mask && c->mask_dtype != BOOL8 && c->softcap == 0 && chance(0.7) ? count_mask_elements(c) : 0;
    memcpy(g.dmask_stride, c->mask_stride, sizeof g.dmask_stride);
    if (masked) g.dmask = own(x, allocate(masked * sizeof(float)));
    wrong[STATUS] += headwise_backward(c, &g, path) != (c->scale > 1 ? DECLINED : 0);
    if (c->scale > 1) return;
    Sum *dmask = calloc(masked + 1, sizeof(Sum));
    double error = 0;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t kv = 0; kv < c->kv_heads; kv++) error = fmax(error, check_kv_head(c, &g, b, kv, dmask, wrong));
    double relative = 2e-5 + 8 * error + (c->dtype == F32 ? 0 : 2e-2); /* the output is rounded */
    for (int64_t i = 0; i < masked; i++)
        wrong[DMASK] += differs(g.dmask[i], dmask[i].value, relative * dmask[i].size + 1e-6);
    free(dmask);
}

/* Returns whether anything was wrong with a random call. */
static int test_random_call(int path, int64_t max_keys) {
    int64_t wrong[CHECKS] = {0}, total = 0;
    Case x = {.count = 0};
    choose_sizes(&x.call, max_keys);
    make_tensors(&x);
    request_statistics(&x);
    choose_options(&x);
    poison_hidden(&x.call);
    if (headwise_run(&x.call, path)) printf("%s: headwise_run failed\n", headwise_path(path)), total++;
    else check(&x.call, wrong);
    if (chance(0.5)) test_gradients(&x, path, wrong);
    for (int i = 0; i < CHECKS; i++) total += wrong[i];
    if (total) report(&x.call, path, wrong);
    while (x.count) release(x.buffers[--x.count]);
    return total != 0;
}

/* Which paths machines of different abilities may run: cpuid and xgetbv of real ones, less one feature at a time. */
static int test_cpu_features(void) {
    const uint32_t ecx = CPU_FMA | CPU_OSXSAVE | CPU_AVX | CPU_F16C;
    const uint32_t ebx = CPU_AVX2 | CPU_AVX512F | CPU_AVX512DQ | CPU_AVX512BW | CPU_AVX512VL;
    const struct {
        CpuFeatures cpu;
        int avx2, avx512;
        const char *name;
    } cases[] = {
        {{ecx, ebx, 0xe7}, 1, 1, "all"},
        {{ecx, CPU_AVX2, 0x7}, 1, 0, "AVX2"},
        {{ecx & ~(uint32_t)CPU_F16C, ebx, 0xe7}, 0, 0, "no F16C"},
        {{ecx & ~(uint32_t)CPU_FMA, ebx, 0xe7}, 0, 0, "no FMA"},
        {{ecx & ~(uint32_t)CPU_AVX, ebx, 0xe7}, 0, 0, "no AVX"},
        {{ecx & ~(uint32_t)CPU_OSXSAVE, ebx, 0}, 0, 0, "no XSAVE"},
        {{ecx, ebx & ~(uint32_t)CPU_AVX2, 0xe7}, 0, 0, "no AVX2"},
        {{ecx, ebx & ~(uint32_t)CPU_AVX512F, 0xe7}, 1, 0, "no AVX-512 F"},
        {{ecx, ebx & ~(uint32_t)CPU_AVX512DQ, 0xe7}, 1, 0, "no AVX-512 DQ"},
        {{ecx, ebx & ~(uint32_t)CPU_AVX512BW, 0xe7}, 1, 0, "no AVX-512 BW"},
        {{ecx, ebx & ~(uint32_t)CPU_AVX512VL, 0xe7}, 1, 0, "no AVX-512 VL"},
        {{ecx, ebx, 0x3}, 0, 0, "an operating system without YMM"},
        {{ecx, ebx, 0x7}, 1, 0, "an operating system without ZMM"},
        {{ecx, ebx, 0x67}, 1, 0, "an operating system without ZMM16 to ZMM31"},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (can_run_avx2(&cases[i].cpu) == cases[i].avx2 && can_run_avx512(&cases[i].cpu) == cases[i].avx512) continue;
        printf("wrong paths for a processor with: %s\n", cases[i].name);
        wrong++;
    }
    return wrong;
}

static uint64_t seed = 1;

/* Random calls in one of several threads; returns how many were wrong. */
static int run_calls(int number) {
    state = seed * 1000 + number;
    int wrong = 0;
    for (int i = 0; i < 20; i++) wrong += test_random_call(0, 900);
    return wrong;
}

int main(int argc, char **argv) {
    int calls = argc > 1 ? atoi(argv[1]) : 300, wrong = test_cpu_features();
    if (argc > 2) seed = strtoull(argv[2], NULL, 10);
    for (int path = 0; headwise_path(path); path++) {
        state = seed;
        for (int i = 0; i < calls; i++) wrong += test_random_call(path, i % 5 ? 700 : 3000);
        printf("%s: %d calls\n", headwise_path(path), calls);
    }
    wrong += run_at_once(run_calls, 4);
    printf("%d wrong\n", wrong);
    return wrong != 0;
}
