/* Attention, and exact statistics of every row of attention weights, in one pass over the keys.

   The softmax is computed online, block of keys by block of keys. With scores in units of log2,
   s = (q . k) scale log2(e) + bias, m the maximum so far, t = s - m and e = 2^t, a row keeps the sums

       l = sum e        w = sum e t        d = sum e |i - j|        c = sum e over a class of keys        o = sum e v

   When a block raises m to m', every sum is scaled by f = 2^(m - m'): l := f l, and d, c and o alike; since
   t' = t + (m - m'),  w := f (w + (m - m') l).  At the end, with L = l + 2^(sink - m):

       weight      a = e / L                             output      sum a v = o / L
       entropy     -sum a ln a = (l ln L - w ln 2) / L
       confidence  1 / L, the largest e being 2^0        distance    d / L         share of a class    c / L
       lse         m ln 2 + ln L

   The largest scale q . k is m ln 2, unless softcap, ALiBi or a float mask changes the scores: then it is taken before.

   A hidden key has e = 0, whatever is stored there, NaN included. Two parts of the keys are merged as two blocks are.

   Scores of finite queries and keys are clamped to +-SCORE_LIMIT. Single precision may have overflowed there, or in a
   partial sum, and lost even the sign: such a row is detected, and computed again in double precision (exact.h).

   Blocking: a work item (plan.h) is a block of rows. Its queries are scaled and stored row by row. Keys are packed once
   per KV head into panels [dim][PANEL], so that a multiply-add takes whole vectors of keys; values are read in place
   where possible. A strip of up to TILE_ROWS rows is processed with one block of keys at a time, so that scores,
   softmax and o += e v stay within the L1 and L2 caches. When decoding, the few rows are a single strip, and keys and
   values are read in place.

   Limits: any sizes and strides; class_count <= MAX_CLASSES, strongest_count <= MAX_STRONGEST (call.h); BLOCK_ROWS rows
   per item, STRIP_ROWS per strip (item.h), KEY_BLOCK keys per block (plan.h).

   This file and the headers it includes are compiled once per instruction set (hatch_build.py). Nothing here may run
   when the library is loaded (no constructors), since the processor may lack the instructions.

       vectors.h   vectors and dtypes      dot.h       scores of a few rows      exact.h    rows that overflow
       matmul.h    register tiles          item.h      state and scratch         finish.h   results, merging
       pack.h      reading and packing     softmax.h   online softmax            dropout.h  retained weights */
#include "call.h"
#include "dot.h"
#include "finish.h"
#include "item.h"
#include "matmul.h"
#include "pack.h"
#include "plan.h"
#include "softmax.h"
#include "vectors.h"

/* ---- planning ---- */

/* Rows per strip: as many as make all strips of a block alike. */
static int64_t strip_height(const Plan *plan, int64_t rows) {
    int64_t strips = plan->decoding ? 1 : div_up(rows, TILE_ROWS);
    return div_up(rows, strips);
}

/* Whether values are read in place. If they are read only once, value_dim need not be whole vectors: the rest of the
   last vector is the beginning of the next row, and its products are ignored. The last row has no next one, and is
   packed. */
static int can_read_values_in_place(const Call *call, const Plan *plan) {
    const int64_t *stride = call->v_stride;
    int read_once = plan->rows <= strip_height(plan, plan->block_rows); /* a single strip */
    if (stride[3] != 1) return 0;
    if (read_once && call->value_dim >= LANES && stride[2] >= call->value_dim) return 1;
    if (call->dtype != F32) return 0; /* converted once, not for every strip */
    int aligned = (uintptr_t)call->v % (4 * LANES) == 0;
    for (int i = 0; i < 3; i++) aligned &= stride[i] % LANES == 0;
    /* rows that are far apart compete for the same sets of the L1 cache when they are read again and again */
    return call->value_dim % LANES == 0 && aligned && (read_once || stride[2] == call->value_dim);
}

/* The cut depends on the sizes alone, never on the number of threads: that would change the order of the sums. */
static void make_plan(const Call *call, Plan *plan) {
    *plan = (Plan){0};
    plan->head_by_head = windows_differ_in_groups(call);
    plan->rows = call->heads / call->kv_heads * call->queries;
    plan->block_rows = min(BLOCK_ROWS, max(1, plan->rows));
    plan->row_blocks = div_up(plan->rows, plan->block_rows);
    plan->key_block = min(KEY_BLOCK, round_up(max(1, call->keys), PANEL));
    plan->key_blocks = div_up(call->keys, plan->key_block);
    plan->parts = 1;
    plan->part_blocks = max(1, plan->key_blocks);
    /* few KV heads, in an odd number, are cut finer, so that two threads get equal work */
    int64_t kv_heads = call->batch * call->kv_heads, few_and_odd = kv_heads < 8 && kv_heads % 2;
    int64_t part_keys = few_and_odd ? KEY_BLOCK : PART_KEYS;
    if (plan->row_blocks == 1 && call->keys >= 2 * part_keys) {
        plan->part_blocks = part_keys / plan->key_block;
        plan->parts = div_up(plan->key_blocks, plan->part_blocks);
    } else if (plan->row_blocks == 1 && few_and_odd && plan->rows >= 2 * TILE_ROWS) {
        plan->row_blocks = 2;
    }
    if (plan->row_blocks > 1) /* of equal size */
        plan->block_rows = round_up(div_up(plan->rows, plan->row_blocks), TILE_ROWS);
    plan->items = kv_heads * plan->row_blocks * plan->parts;
    plan->value_width = round_up(call->value_dim, LANES);
    plan->partial_floats = plan->block_rows * (RESULT_FLOATS + plan->value_width);
    plan->decoding = plan->rows <= MAX_DECODING_ROWS && call->k_stride[3] == 1;
    plan->values_in_place = can_read_values_in_place(call, plan);
    /* where queries and keys are fewer numbers than their scores, a bound costs less than a look at the scores */
    int64_t numbers = (plan->rows + call->keys) * call->dim;
    plan->has_dot_bound = !plan->decoding && (plan->row_blocks > 1 || numbers < plan->rows * call->keys);
    plan->part_by_part = plan->parts > 1 && call->k_stride[2] > call->k_stride[1];
    plan->run_heads = 1;
    if (plan->part_by_part && plan->decoding && !call->windows) { /* at least two runs per thread */
        int64_t most = max(1, min(MAX_RUN_HEADS, plan->items / (2 * max(1, call->threads))));
        plan->run_heads = div_up(call->kv_heads, div_up(call->kv_heads, most));
    }
    plan->runs = plan->items / call->kv_heads * div_up(call->kv_heads, plan->run_heads);
    Item unused;
    plan->scratch_bytes = plan->run_heads * carve_scratch(call, plan, NULL, &unused);
    assert(plan->block_rows <= BLOCK_ROWS && (plan->parts == 1 || plan->row_blocks == 1));
}

/* ---- keys and values of a block ---- */

/* Whether one of the block's values that some row may not see is NaN or infinite. */
static int has_nonfinite(Item *item, int64_t block, int64_t count) {
    const Call *call = item->call;
    int64_t from = block * item->plan->key_block, stride = item->value_stride, dtype = item->value_dtype;
    int64_t low = call->mask ? count : max(0, min(count, item->all_low - from));
    int64_t high = call->mask ? count : max(low, min(count, item->all_high - from));
    int64_t n = item->plan->values_in_place ? call->value_dim : item->plan->value_width;
    const char *values = item->values;
    if (item->plan->row_blocks == 1) /* read once: check only what is hidden */
        return !all_finite(dtype, values, stride, low, n) ||
               !all_finite(dtype, values + high * stride * dtype_size(dtype), stride, count - high, n);
    if (low <= 0 && high >= count) return 0;
    uint8_t *state = item->value_state + block;
    if (*state == NOT_CHECKED) *state = all_finite(dtype, values, stride, count, n) ? ALL_FINITE : SOME_NOT_FINITE;
    return *state == SOME_NOT_FINITE;
}

/* Make a block of `count` keys the current one: pack its keys and values unless that was done for an earlier row block
   of the same KV head, or they are read in place. */
static void load_block(Item *item, int64_t block, int64_t count) {
    const Call *call = item->call;
    const Plan *plan = item->plan;
    int64_t size = dtype_size(call->dtype), from = block * plan->key_block, slot = plan->row_blocks > 1 ? block : 0;
    float *keys = item->packed_keys + slot * plan->key_block * call->dim;
    const char *v = item->v + from * call->v_stride[2] * size;
    int in_place = plan->values_in_place;
    float *values = item->packed_values + (in_place ? 0 : slot * plan->key_block * plan->value_width);
    item->value_dtype = in_place ? call->dtype : F32;
    item->value_stride = in_place ? call->v_stride[2] : plan->value_width;
    item->values_end = in_place && call->value_dim % LANES ? call->keys - 1 : call->keys;
    if (item->key_state[block] == NOT_PACKED) {
        if (!plan->decoding) pack_keys(keys, item->k + from * call->k_stride[2] * size, call, count);
        if (plan->has_dot_bound) /* whatever fills up the last panel only loosens the bound */
            item->max_key[block] = max_abs(keys, round_up(count, PANEL) * call->dim);
        if (!in_place) {
            pack_values(values, plan->value_width, v, call, count);
        } else if (item->values_end < call->keys && from + count == call->keys) {
            pack_values(values, plan->value_width, v + (count - 1) * item->value_stride * size, call, 1);
            if (call->dtype == BF16) reorder_pairs(values, plan->value_width, 1);
        }
        item->key_state[block] = PACKED;
    }
    item->keys = keys;
    item->values = in_place ? v : (const char *)values;
    item->nonfinite = has_nonfinite(item, block, count);
}

/* ---- a strip of rows on a block of keys ---- */

/* The part of a block, from key `from` on, that a strip works on. Indices into s count from there. */
typedef struct {
    int64_t from, to;    /* keys of the block */
    int64_t low, high;   /* keys that some row of the strip may see */
    int64_t start, stop; /* indices of the scores that are computed: from a whole panel on */
    int64_t first;       /* row of the item */
    int rows;
    int visible;               /* whether some row may see a key */
    int shared_mask;           /* all rows have the same mask, stored for the first */
    int shown[STRIP_ROWS];     /* where there is a mask: whether it shows any of these keys to the row */
    int64_t begin[STRIP_ROWS]; /* indices of the vectors that hold the row's visible keys; */
    int64_t end[STRIP_ROWS];   /* end = begin where it has none */
    float peak[STRIP_ROWS];    /* maximum of these scores */
} Strip;

/* Find the keys that some row may see. Returns whether there are any. */
static int find_range(const Item *item, Strip *strip) {
    const Row *row = item->row + strip->first;
    strip->low = strip->to, strip->high = strip->from;
    for (int r = 0; r < strip->rows; r++) {
        if (row[r].low >= row[r].high) continue;
        strip->low = min(strip->low, max(row[r].low, strip->from));
        strip->high = max(strip->high, min(row[r].high, strip->to));
    }
    strip->start = (strip->low - strip->from) / PANEL * PANEL, strip->stop = strip->high - strip->from;
    return strip->low < strip->high;
}

/* Load the mask of every row. Returns whether it shows any key. */
static int load_masks(const Item *item, Strip *strip) {
    const Call *call = item->call;
    int any_shown = 0;
    strip->shared_mask = !call->mask_stride[1] && !call->mask_stride[2];
    for (int r = 0; r < strip->rows; r++) {
        if (r && strip->shared_mask) {
            strip->shown[r] = strip->shown[0];
            continue;
        }
        float *bias = item->bias + r * item->plan->key_block + strip->start;
        const Row *row = item->row + strip->first + r;
        strip->shown[r] = load_mask(bias, item, row, strip->from + strip->start, strip->stop - strip->start);
        any_shown |= strip->shown[r];
    }
    return any_shown;
}

/* s = q . k, for whole vectors of keys from `start` on, in all items of a run. */
static void compute_products(const Item *items, int heads, const Strip *strip) {
    const Call *call = items->call;
    const Plan *plan = items->plan;
    int64_t dim = call->dim, lds = plan->key_block, n = strip->stop - strip->start;
    const float *q = items->q + strip->first * dim;
    float *s = items->s + strip->start;
    if (plan->decoding) {
        const char *k = items->k + (strip->from + strip->start) * call->k_stride[2] * dtype_size(call->dtype);
        dot_rows(strip->rows, q, k, call, s, lds, n, heads, item_bytes(plan) / sizeof(float));
    } else {
        const float *panels = items->keys + strip->start * dim;
        multiply_panels(strip->rows, div_up(n, LANES), q, dim, panels, s, lds, dim);
    }
}

/* Turn the products of row r into scores: -inf at hidden keys within begin and end, 0 outside, where e must be 0. */
static void compute_scores(Item *item, Strip *strip, int r) {
    const Call *call = item->call;
    Row *row = item->row + strip->first + r;
    float *s = item->s + r * item->plan->key_block;
    int64_t from = strip->from, start = strip->start, stop = strip->stop;
    int64_t a = max(row->low, from) - from, b = min(row->high, strip->to) - from; /* visible without a mask */
    int64_t begin = a / LANES * LANES, end = round_up(b, LANES);
    strip->begin[r] = begin, strip->end[r] = end;
    if (a >= b || (call->mask && !strip->shown[r])) {
        memset(s + start, 0, 4 * (stop - start));
        strip->end[r] = begin;
        return;
    }
    row->overflow |= exceeds_limit(item, row, s, a, b, from);
    for (int64_t j = start; j < begin; j += LANES) store(s + j, splat(0));
    for (int64_t j = end; j < stop; j += LANES) store(s + j, splat(0));
    hide_edges(s, a, b);
    if (call->mask || call->softcap > 0 || call->slopes) {
        const float *bias = item->bias + (strip->shared_mask ? 0 : r) * item->plan->key_block + begin;
        if (!call->mask) bias = NULL;
        if (call->sums && adjusts_scores(call)) {
            float product = max_product(s + begin, bias, end - begin);
            if (product > row->max_product) row->max_product = product;
        }
        adjust_scores(item, row, s + begin, bias, end - begin, from + begin);
        hide_edges(s, a, b); /* again: softcap made -inf finite */
    }
    if (!row->visible) {
        row->visible = !call->mask;
        for (int64_t j = from + a; j < from + b && !row->visible; j++)
            row->visible = is_visible(call, item->batch, row, j);
    }
    if (call->strongest_count) record_strongest(row, s + begin, end - begin, from + begin, call->strongest_count);
    strip->peak[r] = max_score(s + begin, end - begin);
}

/* Replace the scores of row r by e, update the sums of the row, and drop what dropout drops. */
static void apply_softmax(Item *item, const Strip *strip, int r) {
    const Call *call = item->call;
    Row *row = item->row + strip->first + r;
    int64_t from = strip->from, begin = strip->begin[r], n = strip->end[r] - begin, width = item->plan->value_width;
    float *s = item->s + r * item->plan->key_block, *o = item->o + (strip->first + r) * width, peak = strip->peak[r];
    const float *classes = call->classes ? call->classes + item->batch * call->class_count * call->keys : NULL;
    if (!n) return;
    if (call->sums) {
        update_row(1, row, s + begin, n, peak, from + begin, o, width, classes, call->class_count, call->keys);
        record_landmarks(row, s, max(row->low, from), min(row->high, strip->to), from, item->first_key);
    } else {
        update_row(0, row, s + begin, n, peak, from + begin, o, width, NULL, 0, 0);
    }
    if (call->dropped) drop_weights(s + begin, call, item->batch, row->head, row->query, from + begin, n);
}

/* o += e v key by key, where some values are NaN or infinite: these reach only the rows that see them. */
static void accumulate_nonfinite(const Item *item, const Strip *strip, int r) {
    const Call *call = item->call;
    const Row *row = item->row + strip->first + r;
    const float *s = item->s + r * item->plan->key_block;
    float *o = item->o + (strip->first + r) * item->plan->value_width;
    int64_t size = dtype_size(item->value_dtype);
    for (int64_t j = strip->low; j < strip->high; j++) {
        int64_t index = j - strip->from;
        if (!is_visible(call, item->batch, row, j)) continue;
        const char *value = item->values + index * item->value_stride * size;
        for (int64_t i = 0; i < call->value_dim; i++) {
            int64_t at = item->value_dtype == BF16 ? index_in_pairs(i, item->plan->value_width) : i;
            o[at] += s[index] * load_scalar(value + i * size, item->value_dtype);
        }
    }
}

/* o += e v for all rows of the strip and the keys from `low` to `high` - 1. ahead: see accumulate_values. */
static void accumulate_strip(const Item *item, const Strip *strip, int64_t low, int64_t high, int64_t ahead) {
    int64_t width = item->plan->value_width, vectors = width / LANES, lds = item->plan->key_block;
    int64_t stride = item->value_stride, dtype = item->value_dtype, end = min(high, item->values_end);
    float *o = item->o + strip->first * width;
    if (low < end) {
        const float *e = item->s + (low - strip->from);
        const char *values = item->values + (low - strip->from) * stride * dtype_size(dtype);
        accumulate_values(dtype, strip->rows, vectors, e, lds, values, stride, o, width, end - low, ahead);
    }
    if (low >= high || end == high) return;
    const float *e = item->s + (end - strip->from); /* of the last key, whose values were packed */
    accumulate_values(F32, strip->rows, vectors, e, lds, (const char *)item->packed_values, width, o, width, 1, 0);
}

/* o += e v in all items of a run. Values that are read only once are not cached: in small steps, on which the heads
   take turns, while the values of the next turn are prefetched. */
static void accumulate_run(const Item *items, int heads, const Strip *strips) {
    int64_t from = strips->from, to = strips->to, read_once = items->plan->row_blocks == 1;
    int64_t step = read_once ? 32 : to - from, stride = items->value_stride, size = dtype_size(items->value_dtype);
    for (int64_t j = from; j < to; j += step)
        for (int h = 0; h < heads; h++) {
            const Strip *strip = strips + h;
            const char *next = h + 1 < heads ? items[h + 1].values : items->values + step * stride * size;
            int64_t ahead = read_once ? (next - items[h].values) / size : 0;
            if (strip->visible && !items[h].nonfinite)
                accumulate_strip(items + h, strip, max(strip->low, j), min(strip->high, j + step), ahead);
        }
}

/* Process the rows first to first + rows - 1 of the items of a run on the keys from `from` to `to` - 1 of the current
   block. A run of several items has no windows: all rows may see the same keys, of which a mask may hide some. */
static void run_strips(Item *items, int heads, int64_t first, int rows, int64_t from, int64_t to) {
    Strip strips[MAX_RUN_HEADS];
    int visible = 0;
    for (int h = 0; h < heads; h++) {
        Strip *strip = strips + h;
        strip->first = first, strip->rows = rows, strip->from = from, strip->to = to, strip->shared_mask = 0;
        strip->visible = find_range(items + h, strip) && (!items->call->mask || load_masks(items + h, strip));
        visible |= strip->visible;
    }
    if (!visible) return;
    compute_products(items, heads, strips);
    for (int h = 0; h < heads; h++) {
        if (!strips[h].visible) continue;
        for (int r = 0; r < rows; r++) compute_scores(items + h, strips + h, r);
        /* a loop of its own, so that the first steps of a row need not wait for the row before */
        for (int r = 0; r < rows; r++) apply_softmax(items + h, strips + h, r);
        for (int r = 0; items[h].nonfinite && r < rows; r++) accumulate_nonfinite(items + h, strips + h, r);
    }
    accumulate_run(items, heads, strips);
}

/* ---- a work item ---- */

/* Find the place of item h of a run in the call, and of its buffers in the scratch memory. */
static void begin_item(Item *item, int h, Scratch *scratch) {
    const Call *call = item->call;
    const Plan *plan = item->plan;
    int64_t row_block = item->number / plan->parts, size = dtype_size(call->dtype);
    int64_t head = row_block / plan->row_blocks; /* sequence * kv_heads + KV head */
    item->batch = head / call->kv_heads, item->kv_head = head % call->kv_heads;
    item->first_row = row_block % plan->row_blocks * plan->block_rows;
    item->rows = min(plan->block_rows, plan->rows - item->first_row);
    item->first_key = plan->first_key ? plan->first_key[item->batch] : 0;
    item->k = call->k + (item->batch * call->k_stride[0] + item->kv_head * call->k_stride[1]) * size;
    item->v = call->v + (item->batch * call->v_stride[0] + item->kv_head * call->v_stride[1]) * size;
    int64_t used = carve_scratch(call, plan, scratch->memory + h * item_bytes(plan), item);
    assert(used <= item_bytes(plan) && plan->scratch_bytes <= scratch->size);
    assert((uintptr_t)scratch->memory % SCRATCH_ALIGN == 0);
    (void)used; /* with NDEBUG */
    if (scratch->packed_head != head || plan->row_blocks == 1) {
        memset(item->key_state, NOT_PACKED, plan->key_blocks);
        memset(item->value_state, NOT_CHECKED, plan->key_blocks);
        scratch->packed_head = head;
    }
}

/* Set up row r of the item, without any keys so far. */
static void begin_row(Item *item, int64_t r) {
    const Call *call = item->call;
    Row *row = item->row + r;
    memset(row, 0, sizeof *row);
    row->m = row->max_product = -INFINITY;
    row->c = item->class_sums + r * call->class_count;
    row->top_score = item->top_score + r * call->strongest_count;
    row->top_key = item->top_key + r * call->strongest_count;
    memset(row->c, 0, call->class_count * sizeof(vfloat));
    for (int i = 0; i < call->strongest_count; i++) row->top_score[i] = -INFINITY, row->top_key[i] = -1;
    place_row(call, item->plan, item->kv_head, item->first_row + r, &row->head, &row->query);
    locate_row(call, item->plan, item->batch, row);
}

/* Load row r's query, scaled so that its products are scores in units of log2, or what softcap takes the tanh of. */
static void load_query(Item *item, int64_t r) {
    const Call *call = item->call;
    const Row *row = item->row + r;
    const int64_t *stride = call->q_stride;
    float scale = call->softcap > 0 ? call->scale / call->softcap : call->scale * M_LOG2E;
    int64_t index = item->batch * stride[0] + row->head * stride[1] + row->query * stride[2];
    int64_t size = dtype_size(call->dtype);
    const char *q = call->q + index * size;
    prefetch_distant_row(q, ROWS_AHEAD, stride[2] * size, call->dim * size);
    read_row(item->q + r * call->dim, q, call->dtype, stride[3], call->dim, scale);
    if (item->plan->decoding && call->dtype == BF16) reorder_pairs(item->q + r * call->dim, call->dim, 1);
}

static void prefetch_output(const Call *call, int64_t batch, const Row *row) {
    const int64_t *stride = call->out_stride, size = dtype_size(call->dtype);
    int64_t index = batch * stride[0] + row->head * stride[1] + row->query * stride[2];
    prefetch_row(call->out + index * size, call->value_dim * size, 1);
}

/* Make one of their spans the current one of all rows of an item. *low to *high - 1 grow by the keys that some see. */
static void begin_span(Item *item, int number, int64_t *low, int64_t *high) {
    const Plan *plan = item->plan;
    if (number && plan->row_blocks == 1) memset(item->key_state, NOT_PACKED, plan->key_blocks); /* one slot for all */
    item->all_low = 0, item->all_high = item->call->keys;
    for (int64_t r = 0; r < item->rows; r++) {
        Row *row = item->row + r;
        row->low = row->span[number].low, row->high = row->span[number].high;
        item->all_low = max(item->all_low, row->low), item->all_high = min(item->all_high, row->high);
        if (row->low < row->high) *low = min(*low, row->low), *high = max(*high, row->high);
    }
}

/* All rows of a run on one of their spans, in the run's part of the keys. */
static void run_span(Item *items, int heads, int number) {
    const Call *call = items->call;
    const Plan *plan = items->plan;
    int64_t low = call->keys, high = 0;
    for (int h = 0; h < heads; h++) begin_span(items + h, number, &low, &high);
    int64_t height = strip_height(plan, items->rows), part = items->number % plan->parts;
    low = max(low, part * plan->part_blocks * plan->key_block);
    high = min(high, (part + 1) * plan->part_blocks * plan->key_block);
    for (int64_t block = low / plan->key_block; block * plan->key_block < high; block++) {
        int64_t from = block * plan->key_block, to = min(from + plan->key_block, call->keys);
        for (int h = 0; h < heads; h++) load_block(items + h, block, to - from);
        to = min(to, high);
        for (int64_t r = 0; r < items->rows; r += height) {
            int rows = min(height, items->rows - r);
            for (int i = 0; to == high && i < heads * rows; i++)
                prefetch_output(call, items->batch, items[i / rows].row + r + i % rows);
            run_strips(items, heads, r, rows, from, to);
        }
    }
}

/* Finish the rows of an item, or store their partial results for merge_parts. */
static void end_item(Item *item) {
    const Call *call = item->call;
    const Plan *plan = item->plan;
    int64_t group = call->heads / call->kv_heads, width = plan->value_width;
    double *sums = plan->item_sums + item->number * group * MAX_STATS;
    float *partial = plan->parts > 1 ? plan->partial + item->number * plan->partial_floats : NULL;
    for (int64_t r = 0; r < item->rows; r++) {
        const Row *row = item->row + r;
        RowResult local, *result = partial ? (RowResult *)partial + r : &local;
        if (plan->values_in_place && call->dtype == BF16) reorder_pairs(item->o + r * width, width, 0);
        reduce_row(call, row, result);
        if (partial) continue;
        finish_row(call, plan, result, item->o + r * width, item->batch, row->head, row->query,
                   sums + (row->head - item->kv_head * group) * MAX_STATS);
    }
    if (partial) memcpy(partial + plan->block_rows * RESULT_FLOATS, item->o, 4 * item->rows * width);
}

static void run_item(const Call *call, const Plan *plan, int64_t number, Scratch *scratch) {
    Item items[MAX_RUN_HEADS];
    int heads = find_run(call, plan, number, items);
    for (int h = 0; h < heads; h++) {
        Item *item = items + h;
        begin_item(item, h, scratch);
        for (int64_t r = 0; r < item->rows; r++) {
            begin_row(item, r);
            load_query(item, r);
        }
        item->dot_bound = INFINITY;
        if (plan->has_dot_bound)
            item->dot_bound = call->dim * max_abs(item->q, round_up(item->rows * call->dim, LANES));
        memset(item->o, 0, 4 * item->rows * plan->value_width);
    }
    for (int i = 0; i < (call->windows || call->keep_first ? SPANS : 1); i++) run_span(items, heads, i);
    for (int h = 0; h < heads; h++) end_item(items + h);
}

/* ---- masks of whole sequences ---- */

/* The first key of a sequence that the mask shows to some counted row; the sequence's end where there is none. */
static int64_t first_visible_key(const Call *call, int64_t batch) {
    int64_t start = sequence_start(call, batch), first = sequence_end(call, batch);
    int64_t size = dtype_size(call->mask_dtype);
    const int64_t *stride = call->mask_stride;
    if (!call->mask) return start;
    for (int64_t h = 0; h < (stride[1] ? call->heads : 1); h++)
        for (int64_t i = 0; i < call->queries; i++) {
            if (call->counted && !call->counted[batch * call->queries + i]) continue;
            const char *x = call->mask + (batch * stride[0] + h * stride[1] + i * stride[2]) * size;
            for (int64_t j = start; j < first; j++)
                if (mask_shows(x + j * stride[3] * size, call->mask_dtype)) first = j;
            if (!stride[2] || first <= start) break;
        }
    return first;
}

/* For a mask that all rows of a sequence share, such as padding: the keys *low to *high - 1 hold all that it shows.
   Returns whether it shows all of them and adds nothing to their scores, so that this range replaces it. */
static int visible_span(const Call *call, int64_t batch, int64_t *low, int64_t *high) {
    int64_t size = dtype_size(call->mask_dtype), step = call->mask_stride[3] * size, end = sequence_end(call, batch);
    const char *x = call->mask + batch * call->mask_stride[0] * size;
    for (*low = min(sequence_start(call, batch), end); *low < end && !mask_shows(x + *low * step, call->mask_dtype);) ++*low;
    for (*high = end; *high > *low && !mask_shows(x + (*high - 1) * step, call->mask_dtype);) --*high;
    int64_t j = *low;
    while (call->mask_dtype == BOOL8 && j < *high && x[j * step]) j++;
    return j == *high;
}

#define TEXT(x) #x
#define QUOTE(x) TEXT(x)
const Path NAME_FOR(ISA, headwise_) = {QUOTE(ISA),        make_plan,    run_item,
                                       merge_parts,       first_visible_key, visible_span,
                                       &NAME_FOR(ISA, headwise_backward_)};
