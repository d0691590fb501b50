/* The backward pass of attention: gradients of queries, keys and values from that of the output.

   The weights are computed again, block by block, from each row's log-sum-exp. With scores S in units of log2, as in
   attention.c, O the output, G its gradient, c the softcap and th = tanh(scale q . k / c):

       P  = 2^(S - lse)          D  = rowsum(G * O)         dP = G V^T           dS = P * (dP - D) (1 - th^2)
       dQ = scale dS K           dK = scale dS^T Q          dV = P^T G

   without the factor 1 - th^2 where there is no softcap. With dropout, dP and the P of dV are multiplied by 0 at dropped
   weights and by one over the probability of being retained at others. Hidden keys have P = dS = 0, and so have all keys of a row
   without visible ones. Sinks take part in lse alone. The gradient of a float mask is dS, summed over the axes that the
   mask is broadcast over; it is not computed with a softcap.

   Blocking: a work item is one KV head with all of its rows, on all keys or on every parts-th block of them; or, one
   after another, all heads whose gradients of the mask are summed. Queries and G are read once per KV head, into rows
   of whole vectors. For a block of keys, K and V are packed into panels for S and dP, and K is stored row by row for
   dQ. A block of rows is processed strip by strip: the scores of up to TILE_ROWS rows become P and dS within the L1
   cache, and dQ += dS K. Then dV += P^T G and dK += dS^T Q for all rows of the block. dK and dV are complete when a
   block of keys is done. Where the keys of a head are divided among items, each has a dQ of its own, and merge_item
   adds them up.

   All sums are in single precision, in an order that depends on the sizes alone.

   Numbers that are not finite, or so large that a product might overflow, are not computed here: the item sets
   Plan.declined. Keys that no row sees, and rows that see no key, are replaced by zeros, and may hold anything.

   This file is compiled once per instruction set, like attention.c. */
#pragma GCC diagnostic ignored "-Wunused-function" /* in headers that attention.c uses, too */
#include "dropout.h"
#include "item.h"
#include "matmul.h"
#include "pack.h"
#include "plan.h"
#include "softmax.h"
#include "vectors.h"

enum {
    ROW_BLOCK = 96, /* rows whose P and dS are kept */
    MAX_KEYS = 192, /* keys of a block at most: whole panels and whole tiles */
    FEW_ITEMS = 16, /* fewer KV heads than this are divided further */
};
_Static_assert((int)ROW_BLOCK % (int)TILE_ROWS == 0 && (int)MAX_KEYS % (int)PANEL == 0, "whole tiles and panels");

static const float LARGE_LSE = 1e4f;     /* the relative error of a weight is |lse| times that of rounding */
static const float LARGE_NUMBER = 1e15f; /* products of two such numbers, summed, stay far from overflow */
static const float LARGE_SCALE = 1e8f;   /* so do scores, with |scale| * dim up to this */

/* A work item and its buffers, see carve_buffers. */
typedef struct {
    const Call *call;
    const Plan *plan;
    const Gradients *gradients;
    Item place; /* its call and batch, for load_mask */
    int64_t batch, kv_head, group;
    int64_t width, value_width; /* dim and value_dim, rounded up to whole vectors */
    int64_t from, count;        /* the current block of keys */
    int shared_mask;            /* all rows have the same mask: */
    int shown;                  /* whether it shows any of these keys */
    int64_t lds;                /* floats per row of P and dS */

    float *q, *g, *lse, *delta;
    Span *seen;
    Row *row;
    float *dq, *keys, *values, *key_panels, *value_panels, *dk, *dv, *p, *ds, *bias, *retained;
} Backward;

/* ---- planning ---- */

static int64_t carve_buffers(const Call *call, const Plan *plan, char *memory, Backward *x) {
    int64_t rows = plan->rows, keys = plan->key_block, panels = round_up(keys, PANEL), f = sizeof(float);
    x->width = round_up(call->dim, LANES), x->value_width = round_up(call->value_dim, LANES);
    /* an odd number of cache lines, since rows that are a power of 2 apart compete for the same sets of the L1 cache */
    x->lds = round_up(keys, 2 * CACHE_LINE_FLOATS) + CACHE_LINE_FLOATS;
    Arena arena = {memory, 0};
    x->q = take(&arena, rows * x->width * f);                        /* (rows, width), padded with zeros */
    x->g = take(&arena, rows * x->value_width * f);                  /* (rows, value_width): gradient of the output */
    x->lse = take(&arena, rows * f);                                 /* (rows), in units of log2 */
    x->delta = take(&arena, rows * f);                               /* (rows): D */
    x->seen = take(&arena, plan->row_blocks * SPANS * sizeof(Span)); /* (row_blocks, SPANS): keys some row may see */
    x->row = take(&arena, ROW_BLOCK * sizeof(Row));                  /* (ROW_BLOCK): of the current block */
    x->dq = take(&arena, plan->parts > 1 ? 0 : rows * x->width * f); /* (rows, width) */
    x->keys = take(&arena, keys * x->width * f);                     /* (key_block, width) */
    x->values = take(&arena, keys * x->value_width * f);             /* (key_block, value_width) */
    x->key_panels = take(&arena, panels * call->dim * f);            /* [key_block / PANEL][dim][PANEL] */
    x->value_panels = take(&arena, panels * call->value_dim * f);    /* [key_block / PANEL][value_dim][PANEL] */
    x->dk = take(&arena, keys * x->width * f);                       /* (key_block, width) */
    x->dv = take(&arena, keys * x->value_width * f);                 /* (key_block, value_width) */
    x->p = take(&arena, ROW_BLOCK * x->lds * f);                     /* (ROW_BLOCK, lds): scores, then P */
    x->ds = take(&arena, ROW_BLOCK * x->lds * f);                    /* (ROW_BLOCK, lds): dP, then dS */
    x->bias = take(&arena, TILE_ROWS * x->lds * f);                  /* (TILE_ROWS, lds): masks of a strip */
    x->retained = take(&arena, call->dropped ? x->lds * f : 0);      /* (lds): factors of a row's weights */
    return arena.used;
}

/* Whether the gradient of the mask is summed over sequences, or heads: these are then processed by one item. */
static int sums_sequences(const Gradients *gradients) { return gradients->dmask && !gradients->dmask_stride[0]; }
static int sums_heads(const Gradients *gradients) { return gradients->dmask && !gradients->dmask_stride[1]; }

/* As in attention.c, the cut depends on the sizes alone. */
static void make_plan(const Call *call, const Gradients *gradients, Plan *plan) {
    *plan = (Plan){.gradients = gradients};
    plan->head_by_head = windows_differ_in_groups(call);
    int64_t heads = (sums_sequences(gradients) ? 1 : call->batch) * (sums_heads(gradients) ? 1 : call->kv_heads);
    plan->rows = call->heads / call->kv_heads * call->queries;
    plan->row_blocks = div_up(plan->rows, ROW_BLOCK);
    plan->block_rows = plan->row_blocks ? round_up(div_up(plan->rows, plan->row_blocks), TILE_ROWS) : ROW_BLOCK;
    plan->key_blocks = div_up(call->keys, MAX_KEYS);
    plan->key_block = plan->key_blocks ? round_up(div_up(call->keys, plan->key_blocks), PANEL) : PANEL;
    plan->parts = max(1, min(plan->key_blocks, div_up(FEW_ITEMS, max(1, heads))));
    plan->items = plan->runs = heads * plan->parts;
    plan->partial_floats = plan->rows * round_up(call->dim, LANES);
    Backward unused;
    plan->scratch_bytes = carve_buffers(call, plan, NULL, &unused);
}

/* ---- rows ---- */

static void decline(const Backward *x) { __atomic_store_n(x->plan->declined, 1, __ATOMIC_RELAXED); }
static int has_declined(const Plan *plan) { return __atomic_load_n(plan->declined, __ATOMIC_RELAXED); }

/* Whether n floats (whole vectors) are numbers of moderate size. */
static int is_moderate(const float *y, int64_t n) {
    vint wrong = {0};
    for (int64_t i = 0; i < n; i += LANES) wrong |= ~(vec_abs(load(y + i)) <= splat(LARGE_NUMBER));
    return !any_true(wrong);
}

/* Set all that a row needs to tell which keys it sees. */
static void find_row(const Backward *x, int64_t index, Row *row) {
    place_row(x->call, x->plan, x->kv_head, index, &row->head, &row->query);
    locate_row(x->call, x->plan, x->batch, row);
}

/* Whether a row sees a key from `from` to `to` - 1. */
static int sees_key_between(const Backward *x, Row *row, int64_t from, int64_t to) {
    for (int i = 0; i < SPANS; i++) {
        row->low = row->span[i].low, row->high = row->span[i].high;
        for (int64_t j = max(from, row->low); j < min(to, row->high); j++)
            if (is_visible(x->call, x->batch, row, j)) return 1;
    }
    return 0;
}

/* The keys of a row's span within the current block, of which a mask may hide some, counted from the block's first. */
static Span span_in_block(const Backward *x, const Row *row, int i) {
    return (Span){max(row->span[i].low - x->from, 0), min(row->span[i].high - x->from, x->count)};
}

/* The smallest span that holds both. */
static Span join_spans(Span a, Span b) {
    if (a.low >= a.high) return b;
    return b.low >= b.high ? a : (Span){min(a.low, b.low), max(a.high, b.high)};
}

/* The visible keys of a row within the current block: *a to *b - 1, of which a mask may hide some, and *gap. Returns
   whether there are any. */
static int visible_range(const Backward *x, const Row *row, int64_t *a, int64_t *b, Span *gap) {
    Span first = span_in_block(x, row, 0), second = span_in_block(x, row, 1), both = join_spans(first, second);
    *gap = first.low < first.high && second.low < second.high ? (Span){first.high, second.low} : (Span){0, 0};
    *a = both.low, *b = both.high;
    return *a < *b;
}

static const char *element(const Backward *x, const char *tensor, const int64_t stride[4], const Row *row) {
    int64_t index = x->batch * stride[0] + row->head * stride[1] + row->query * stride[2];
    return tensor + index * dtype_size(x->call->dtype);
}

/* y (width) = a row of n elements, padded with zeros; stride: of a query or key, and of an element. */
static void read_padded(float *y, int64_t width, const char *from, int64_t dtype, const int64_t stride[2], int64_t n) {
    int64_t size = dtype_size(dtype);
    prefetch_row(from + ROWS_AHEAD * stride[0] * size, n * size, 0);
    read_row(y, from, dtype, stride[1], n, 1);
    for (int64_t i = n; i < width; i++) y[i] = 0;
}

/* Write a row of n elements, whose neighbours are `step` bytes apart. */
static void write_apart(char *y, int64_t step, const float *x, int64_t dtype, int64_t n, float factor) {
    prefetch_row(y + ROWS_AHEAD * step, n * dtype_size(dtype), 1);
    write_row(y, x, dtype, n, factor);
}

/* Read the query, the gradient and the log-sum-exp of a row. The first row of x->dv serves as a buffer. */
static void load_row(Backward *x, int64_t index, Row *row) {
    const Call *call = x->call;
    const Gradients *gradients = x->gradients;
    float *q = x->q + index * x->width, *g = x->g + index * x->value_width, *o = x->dv;
    const int64_t *g_stride = gradients->grad_out_stride, *o_stride = gradients->out_stride;
    read_padded(q, x->width, element(x, call->q, call->q_stride, row), call->dtype, call->q_stride + 2, call->dim);
    read_padded(g, x->value_width, element(x, gradients->grad_out, g_stride, row), call->dtype, g_stride + 2,
                call->value_dim);
    read_padded(o, x->value_width, element(x, gradients->out, o_stride, row), call->dtype, o_stride + 2,
                call->value_dim);
    vfloat sum = {0};
    for (int64_t i = 0; i < x->value_width; i += LANES) sum += load(g + i) * load(o + i);
    int64_t at = (x->batch * call->heads + row->head) * call->queries + row->query;
    float delta = reduce_add(sum), lse = gradients->lse[at];
    int moderate = is_moderate(q, x->width) && is_moderate(g, x->value_width) && fabsf(delta) <= FLT_MAX;
    if (!moderate || !(fabsf(lse) < LARGE_LSE)) { /* -inf: no visible keys, as a rule */
        if (sees_key_between(x, row, 0, call->keys)) decline(x);
        memset(q, 0, x->width * sizeof(float));
        memset(g, 0, x->value_width * sizeof(float));
        delta = lse = 0;
    }
    x->lse[index] = lse * LOG2E;
    x->delta[index] = delta;
}

static void load_rows(Backward *x) {
    for (int64_t block = 0; block < x->plan->row_blocks; block++) {
        int64_t first = block * x->plan->block_rows;
        Span *seen = x->seen + block * SPANS;
        for (int i = 0; i < SPANS; i++) seen[i] = (Span){0, 0};
        for (int64_t r = first; r < min(first + x->plan->block_rows, x->plan->rows); r++) {
            Row row;
            find_row(x, r, &row);
            load_row(x, r, &row);
            for (int i = 0; i < SPANS; i++) seen[i] = join_spans(seen[i], row.span[i]);
        }
    }
}

/* ---- a block of keys ---- */

/* Whether no row sees key j. */
static int is_hidden_key(const Backward *x, int64_t j) {
    for (int64_t r = 0; r < x->plan->rows; r++) {
        Row row;
        find_row(x, r, &row);
        if (sees_key_between(x, &row, j, j + 1)) return 0;
    }
    return 1;
}

/* Replace hidden keys and values that might do harm by zeros: 0 * NaN is NaN. */
static void clean_keys(Backward *x) {
    int64_t width = x->width, value_width = x->value_width;
    if (is_moderate(x->keys, x->count * width) && is_moderate(x->values, x->count * value_width)) return;
    for (int64_t j = 0; j < x->count; j++) {
        float *k = x->keys + j * width, *v = x->values + j * value_width;
        if (is_moderate(k, width) && is_moderate(v, value_width)) continue;
        if (!is_hidden_key(x, x->from + j)) decline(x);
        memset(k, 0, width * sizeof(float));
        memset(v, 0, value_width * sizeof(float));
    }
}

/* Rows of `width` floats, of which `dim` count, into panels. */
static void pack_rows(float *panels, const float *rows, int64_t width, int64_t dim, int64_t count) {
    const Call layout = {.dtype = F32, .dim = dim, .k_stride = {0, 0, width, 1}};
    pack_keys(panels, (const char *)rows, &layout, count);
}

/* Make a block of keys the current one. */
static void load_keys(Backward *x, int64_t block) {
    const Call *call = x->call;
    const int64_t *ks = call->k_stride, *vs = call->v_stride;
    int64_t size = dtype_size(call->dtype), width = x->width, value_width = x->value_width;
    x->from = block * x->plan->key_block, x->count = min(x->plan->key_block, call->keys - x->from);
    const char *k = call->k + (x->batch * ks[0] + x->kv_head * ks[1] + x->from * ks[2]) * size;
    const char *v = call->v + (x->batch * vs[0] + x->kv_head * vs[1] + x->from * vs[2]) * size;
    for (int64_t j = 0; j < x->count; j++) {
        read_padded(x->keys + j * width, width, k + j * ks[2] * size, call->dtype, ks + 2, call->dim);
        read_padded(x->values + j * value_width, value_width, v + j * vs[2] * size, call->dtype, vs + 2,
                    call->value_dim);
    }
    clean_keys(x);
    pack_rows(x->key_panels, x->keys, width, call->dim, x->count);
    pack_rows(x->value_panels, x->values, value_width, call->value_dim, x->count);
    memset(x->dk, 0, x->count * width * sizeof(float));
    memset(x->dv, 0, x->count * value_width * sizeof(float));
    x->shared_mask = call->mask && !call->mask_stride[1] && !call->mask_stride[2];
    if (x->shared_mask) {
        Row first = {0};
        x->shown = load_mask(x->bias, &x->place, &first, x->from, x->count);
    }
}

/* Write the gradients of the current block of keys. */
static void store_keys(const Backward *x) {
    const Call *call = x->call;
    int64_t row = call->dim * dtype_size(call->dtype), value_row = call->value_dim * dtype_size(call->dtype);
    for (int64_t j = 0; j < x->count; j++) {
        int64_t index = (x->batch * call->keys + x->from + j) * call->kv_heads + x->kv_head;
        write_apart(x->gradients->dk + index * row, call->kv_heads * row, x->dk + j * x->width, call->dtype, call->dim,
                    call->scale);
        write_apart(x->gradients->dv + index * value_row, call->kv_heads * value_row, x->dv + j * x->value_width,
                    call->dtype, call->value_dim, 1);
    }
}

/* ---- a strip of rows on a block of keys ---- */

/* Up to TILE_ROWS rows from `first` on, within a block of rows, and the keys that some of them see, counted from the
   block's first key; none if low >= high. */
typedef struct {
    int64_t first, low, high;
    int rows;
    int shown[TILE_ROWS]; /* where rows differ in their masks: whether it shows any of the keys to the row */
} Strip;

static void find_strip_range(const Backward *x, Strip *strip) {
    int64_t a, b;
    Span gap;
    strip->low = x->count, strip->high = 0;
    for (int r = 0; r < strip->rows; r++)
        if (visible_range(x, x->row + strip->first + r, &a, &b, &gap))
            strip->low = min(strip->low, a), strip->high = max(strip->high, b);
}

/* Load the mask of every row, from index `start` on. Returns whether it shows any key. */
static int load_strip_masks(Backward *x, Strip *strip, int64_t start) {
    int any = 0;
    for (int r = 0; r < strip->rows; r++) {
        const Row *row = x->row + strip->first + r;
        float *bias = x->bias + r * x->lds + start;
        strip->shown[r] = load_mask(bias, &x->place, row, x->from + start, strip->high - start);
        any |= strip->shown[r];
    }
    return any;
}

/* Zeros in p[0] to p[a - 1] and from p[b] on, in a row of n floats. The vectors on the edges are written whole. */
static void clear_outside(float *p, int64_t a, int64_t b, int64_t n) {
    float *first = p + a / LANES * LANES, *last = p + b / LANES * LANES;
    if (a % LANES) store(first, zero_unless(iota() >= (float)(a % LANES), load(first)));
    if (b % LANES) store(last, zero_unless(iota() < (float)(b % LANES), load(last)));
    int64_t end = round_up(b, LANES);
    memset(p, 0, (a / LANES * LANES) * sizeof(float));
    if (end < n) memset(p + end, 0, (n - end) * sizeof(float));
}

/* Turn n products q . k (whole vectors) into P and n products G . v into dS. */
INLINE void weigh(const int capped, const int sloped, const int biased, float *p, float *ds, int64_t n, float factor,
                  float cap, float slope, vfloat distance, const float *bias, float lse, float delta) {
    for (int64_t j = 0; j < n; j += LANES) {
        vfloat s = load(p + j) * factor, change = splat(1);
        if (capped) {
            s = vec_tanh(s);
            change -= s * s;
            s *= cap;
        }
        if (sloped) s -= slope * vec_abs(distance);
        if (biased) s += load(bias + j);
        vfloat e = vec_exp2(vec_max(splat(MIN_EXPONENT), s - lse)), slant = e * (load(ds + j) - delta);
        store(p + j, e);
        store(ds + j, capped ? slant * change : slant);
        distance += (float)LANES;
    }
}

/* y *= x for n numbers (whole vectors). */
INLINE void multiply_vectors(float *y, const float *x, int64_t n) {
    for (int64_t j = 0; j < n; j += LANES) store(y + j, load(y + j) * load(x + j));
}

/* The same for row r of a strip: P and dS of all keys of the block, 0 at hidden ones. */
static void weigh_row(const Backward *x, const Strip *strip, int64_t first_row, int r) {
    const Call *call = x->call;
    int64_t index = strip->first + r, a, b, n = round_up(x->count, LANES);
    Span gap;
    const Row *row = x->row + index;
    float *p = x->p + index * x->lds, *ds = x->ds + index * x->lds;
    if (!visible_range(x, row, &a, &b, &gap) || (call->mask && !x->shared_mask && !strip->shown[r])) {
        memset(p, 0, n * sizeof(float));
        memset(ds, 0, n * sizeof(float));
        return;
    }
    int64_t begin = a / LANES * LANES, count = round_up(b, LANES) - begin;
    float lse = x->lse[first_row + index], delta = x->delta[first_row + index];
    if (call->dropped) {
        for (int64_t j = 0; j < count; j += LANES) store(x->retained + j, splat(dropout_factor(call)));
        drop_weights(x->retained, call, x->batch, row->head, row->query, x->from + begin, count);
        multiply_vectors(ds + begin, x->retained, count);
    }
    float factor = call->softcap > 0 ? call->scale / call->softcap : call->scale * M_LOG2E;
    if (!call->mask && !call->slopes && !(call->softcap > 0)) {
        weigh(0, 0, 0, p + begin, ds + begin, count, factor, 0, 0, splat(0), NULL, lse, delta);
    } else {
        float cap = call->softcap * M_LOG2E, slope = call->slopes ? call->slopes[row->head] * LOG2E : 0;
        vfloat distance = iota() + (float)(x->from + begin - row->position);
        const float *bias = x->bias + (x->shared_mask ? 0 : r * x->lds) + begin;
        if (call->softcap > 0 && call->mask)
            weigh(1, 1, 1, p + begin, ds + begin, count, factor, cap, slope, distance, bias, lse, delta);
        else if (call->softcap > 0)
            weigh(1, 1, 0, p + begin, ds + begin, count, factor, cap, slope, distance, bias, lse, delta);
        else if (call->mask)
            weigh(0, 1, 1, p + begin, ds + begin, count, factor, cap, slope, distance, bias, lse, delta);
        else weigh(0, 1, 0, p + begin, ds + begin, count, factor, cap, slope, distance, bias, lse, delta);
    }
    if (call->dropped) multiply_vectors(p + begin, x->retained, count);
    clear_outside(p, a, b, n);
    clear_outside(ds, a, b, n);
    for (int64_t j = gap.low; j < gap.high; j++) p[j] = ds[j] = 0;
}

/* Add dS of row r of a strip to the gradient of the mask. */
static void add_mask_gradient(const Backward *x, const Strip *strip, int r) {
    const Row *row = x->row + strip->first + r;
    const int64_t *stride = x->gradients->dmask_stride;
    const float *ds = x->ds + (strip->first + r) * x->lds;
    float *sum = x->gradients->dmask + x->batch * stride[0] + row->head * stride[1] + row->query * stride[2] + x->from;
    int64_t j, b;
    Span gap; /* where dS is 0 */
    if (!visible_range(x, row, &j, &b, &gap)) return;
    for (; j + LANES <= b; j += LANES) store(sum + j, load(sum + j) + load(ds + j));
    for (; j < b; j++) sum[j] += ds[j];
}

/* P and dS of a strip, and dQ += dS K. first_row: of the block of rows. */
static void run_strip(Backward *x, Strip *strip, int64_t first_row) {
    const Call *call = x->call;
    int64_t lds = x->lds, width = x->width, row = first_row + strip->first;
    float *p = x->p + strip->first * lds, *ds = x->ds + strip->first * lds;
    find_strip_range(x, strip);
    int64_t start = strip->low / PANEL * PANEL, n = strip->high - start;
    if (strip->low < strip->high && call->mask && !x->shared_mask && !load_strip_masks(x, strip, start))
        strip->high = strip->low;
    if (strip->low >= strip->high) {
        memset(p, 0, strip->rows * lds * sizeof(float));
        memset(ds, 0, strip->rows * lds * sizeof(float));
        return;
    }
    multiply_panels(strip->rows, div_up(n, LANES), x->q + row * width, width, x->key_panels + start * call->dim,
                    p + start, lds, call->dim);
    multiply_panels(strip->rows, div_up(n, LANES), x->g + row * x->value_width, x->value_width,
                    x->value_panels + start * call->value_dim, ds + start, lds, call->value_dim);
    for (int r = 0; r < strip->rows; r++) weigh_row(x, strip, first_row, r);
    for (int r = 0; x->gradients->dmask && r < strip->rows; r++) add_mask_gradient(x, strip, r);
    multiply_add(strip->rows, width / LANES, ds + strip->low, lds, x->keys + strip->low * width, width,
                 x->dq + row * width, width, strip->high - strip->low);
}

/* ---- a block of rows on a block of keys ---- */

/* c (rows x vectors * LANES) += a^T b for 1 to TILE_ROWS rows, the columns of a (n x rows). */
static void multiply_add_transposed(int rows, int64_t vectors, const float *a, int64_t lda, const float *b, int64_t ldb,
                                    float *c, int64_t ldc, int64_t n) {
    multiply_with(rows, vectors, a, 1, lda, b, ldb, PANEL, c, ldc, n, 1, 0, 0);
}

/* dV += P^T G and dK += dS^T Q, each tile of keys with the rows from the first strip to the last one that sees any. */
static void accumulate_keys(Backward *x, const Strip *strip, int strips, int64_t first_row) {
    int64_t low = x->count, high = 0, lds = x->lds, width = x->width, value_width = x->value_width;
    for (int i = 0; i < strips; i++)
        if (strip[i].low < strip[i].high) low = min(low, strip[i].low), high = max(high, strip[i].high);
    for (int64_t j = low; j < high; j += TILE_ROWS) {
        int64_t keys = min(TILE_ROWS, high - j), from = ROW_BLOCK, to = 0;
        for (int i = 0; i < strips; i++) {
            if (strip[i].high <= j || strip[i].low >= j + keys || strip[i].low >= strip[i].high) continue;
            from = min(from, strip[i].first), to = max(to, strip[i].first + strip[i].rows);
        }
        if (from >= to) continue;
        multiply_add_transposed(keys, value_width / LANES, x->p + from * lds + j, lds,
                                x->g + (first_row + from) * value_width, value_width, x->dv + j * value_width,
                                value_width, to - from);
        multiply_add_transposed(keys, width / LANES, x->ds + from * lds + j, lds, x->q + (first_row + from) * width,
                                width, x->dk + j * width, width, to - from);
    }
}

static void run_block(Backward *x, int64_t block) {
    Strip strip[ROW_BLOCK / TILE_ROWS];
    int64_t first_row = block * x->plan->block_rows, rows = min(x->plan->block_rows, x->plan->rows - first_row);
    int strips = 0;
    for (int64_t r = 0; r < rows; r++) find_row(x, first_row + r, x->row + r);
    for (int64_t r = 0; r < rows; r += TILE_ROWS, strips++) {
        strip[strips].first = r, strip[strips].rows = min(TILE_ROWS, rows - r);
        run_strip(x, strip + strips, first_row);
    }
    accumulate_keys(x, strip, strips, first_row);
}

/* ---- a work item ---- */

/* Write the gradients of the queries of some rows, from dq (rows, width). */
static void store_queries(const Backward *x, const float *dq, int64_t first, int64_t rows) {
    const Call *call = x->call;
    int64_t row = call->dim * dtype_size(call->dtype);
    for (int64_t r = first; r < first + rows; r++) {
        int64_t query, head;
        place_row(call, x->plan, x->kv_head, r, &head, &query);
        int64_t index = (x->batch * call->queries + query) * call->heads + head;
        write_apart(x->gradients->dq + index * row, call->heads * row, dq + r * x->width, call->dtype, call->dim,
                    call->scale);
    }
}

static void store_delta(const Backward *x) {
    const Call *call = x->call;
    for (int64_t r = 0; r < x->plan->rows; r++) {
        int64_t query, head;
        place_row(call, x->plan, x->kv_head, r, &head, &query);
        x->gradients->delta[(x->batch * call->heads + head) * call->queries + query] = x->delta[r];
    }
}

static Backward begin_item(const Call *call, const Plan *plan, int64_t kv_head) {
    Backward x = {.call = call, .plan = plan, .gradients = plan->gradients};
    x.batch = kv_head / call->kv_heads, x.kv_head = kv_head % call->kv_heads;
    x.group = call->heads / call->kv_heads;
    x.place = (Item){.call = call, .plan = plan, .batch = x.batch};
    return x;
}

/* One part of the keys of a KV head, numbered sequence * kv_heads + KV head. */
static void run_head(const Call *call, const Plan *plan, int64_t head, int64_t part, Scratch *scratch) {
    Backward x = begin_item(call, plan, head);
    if (fabs(call->scale) * call->dim > LARGE_SCALE) decline(&x);
    int64_t used = carve_buffers(call, plan, scratch->memory, &x);
    assert(used <= scratch->size);
    (void)used; /* with NDEBUG */
    if (scratch->packed_head != head) load_rows(&x);
    scratch->packed_head = head;
    if (plan->parts > 1) x.dq = plan->partial + (head * plan->parts + part) * plan->partial_floats;
    memset(x.dq, 0, plan->rows * x.width * sizeof(float));
    if (!part && x.gradients->delta) store_delta(&x);
    for (int64_t block = part; block < plan->key_blocks && !has_declined(plan); block += plan->parts) {
        load_keys(&x, block);
        for (int64_t i = 0; i < plan->row_blocks; i++) {
            int seen = 0;
            for (int s = 0; s < SPANS; s++) {
                Span span = x.seen[i * SPANS + s];
                seen |= span.low < span.high && span.low < x.from + x.count && span.high > x.from;
            }
            if (seen && !(x.shared_mask && !x.shown)) run_block(&x, i);
        }
        store_keys(&x);
    }
    if (plan->parts == 1) store_queries(&x, x.dq, 0, plan->rows);
}

static void run_item(const Call *call, const Plan *plan, int64_t number, Scratch *scratch) {
    int64_t sequences = sums_sequences(plan->gradients) ? call->batch : 1; /* of the item */
    int64_t heads = sums_heads(plan->gradients) ? call->kv_heads : 1;
    int64_t part = number % plan->parts, first = number / plan->parts, groups = call->kv_heads / heads;
    for (int64_t b = 0; b < sequences; b++)
        for (int64_t h = 0; h < heads && !has_declined(plan); h++) {
            int64_t sequence = first / groups + b, kv_head = first % groups + h;
            run_head(call, plan, sequence * call->kv_heads + kv_head, part, scratch);
        }
}

/* Add up the gradients of a block of rows over the parts of the keys. */
static void merge_item(const Call *call, const Plan *plan, int64_t number, Scratch *scratch) {
    (void)scratch;
    int64_t head = number / plan->row_blocks, first = number % plan->row_blocks * plan->block_rows;
    int64_t rows = min(plan->block_rows, plan->rows - first);
    Backward x = begin_item(call, plan, head);
    x.width = round_up(call->dim, LANES);
    float *sum = plan->partial + head * plan->parts * plan->partial_floats;
    for (int64_t part = 1; part < plan->parts; part++) {
        const float *other = sum + part * plan->partial_floats;
        for (int64_t i = first * x.width; i < (first + rows) * x.width; i += LANES)
            store(sum + i, load(sum + i) + load(other + i));
    }
    store_queries(&x, sum, first, rows);
}

const BackwardPath NAME_FOR(ISA, headwise_backward_) = {make_plan, run_item, merge_item};
