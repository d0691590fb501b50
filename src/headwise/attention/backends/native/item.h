/* The state of one work item: its rows, its scratch buffers, and which keys its rows may see. */
#ifndef HEADWISE_ITEM_H
#define HEADWISE_ITEM_H

#include <assert.h>

#include "pack.h"
#include "plan.h"

enum {
    BLOCK_ROWS = 8 * TILE_ROWS, /* rows of a work item at most */
    PART_KEYS = 1024,           /* keys per part, where they are split */
    MAX_DECODING_ROWS = 12,     /* up to so many rows read the keys in place */
    MAX_RUN_HEADS = 16,
};
/* rows of a strip at most */
enum { STRIP_ROWS = (int)TILE_ROWS > (int)MAX_DECODING_ROWS ? (int)TILE_ROWS : (int)MAX_DECODING_ROWS };

static const float LOG2E = 1.44269504f, LN2 = 0.693147181f;
static const float SCORE_LIMIT = 1e38f; /* scores are clamped to this size, in nats, before softcap and bias */

/* Keys whose weight is a statistic of its own. */
enum { AT_FIRST, AT_PREVIOUS, AT_NEXT, AT_SELF, LANDMARKS };

/* Keys low to high - 1; none where low >= high. */
typedef struct {
    int64_t low, high;
} Span;

enum { SPANS = 2 /* a window, and the first keys of the sequence where they lie apart */ };

/* Running sums of one row over the keys so far; attention.c defines m, l, w, d and c. */
typedef struct {
    vfloat l, w, d; /* one partial sum per lane */
    float m;
    float max_product;         /* the largest q . k of a visible key, as load_query scales it, if adjusts_scores */
    float landmark[LANDMARKS]; /* e at these keys */
    int32_t visible;           /* whether the row has a visible key */
    int32_t overflow;          /* whether a product q . k was larger than SCORE_LIMIT */
    vfloat *c;                 /* (class_count) */
    float *top_score;          /* (strongest_count) the largest scores, descending, */
    int32_t *top_key;          /* and their keys */
    int64_t head, query;       /* in the call */
    int64_t position;          /* of the query among the keys */
    Span span[SPANS];          /* the visible keys, of which a mask may hide some, in ascending order */
    int64_t low, high;         /* the span that is being processed */
} Row;

/* The sums of one row when its keys are done. */
typedef struct {
    float m, l, w, d, landmark[LANDMARKS], c[MAX_CLASSES], top_score[MAX_STRONGEST];
    float max_logit; /* the largest scale * q . k of a visible key */
    int32_t visible, overflow, top_key[MAX_STRONGEST];
} RowResult;

enum { RESULT_FLOATS = sizeof(RowResult) / 4 };
_Static_assert(sizeof(RowResult) == 4 * RESULT_FLOATS && _Alignof(RowResult) == 4, "it is counted in floats");

enum { NOT_PACKED, PACKED };
enum { NOT_CHECKED, ALL_FINITE, SOME_NOT_FINITE };

typedef struct {
    const Call *call;
    const Plan *plan;
    int64_t number, batch, kv_head;
    int64_t first_row, rows; /* of the KV head's rows */
    int64_t first_key;       /* of this sequence, for AT_FIRST */
    const char *k, *v;       /* of this sequence and KV head */
    int64_t all_low, all_high; /* without a mask, all rows see the keys all_low to all_high - 1 of the current span */
    float dot_bound;         /* no partial sum of q . k is larger than this times the largest |k|; infinity: unknown */

    /* the current block of keys: */
    const float *keys;  /* in panels */
    const char *values; /* rows of value_dtype, value_stride elements apart */
    int64_t value_dtype, value_stride;
    int64_t values_end; /* the values from this key on are in packed_values */
    int nonfinite;      /* whether a value that some row may not see is NaN or infinite */

    /* scratch, see carve_scratch: */
    Row *row;
    vfloat *class_sums;
    float *top_score;
    int32_t *top_key;
    uint8_t *key_state, *value_state;
    float *max_key;
    float *q, *o, *s, *bias, *packed_keys, *packed_values;
} Item;

typedef struct {
    char *memory; /* NULL: only count */
    int64_t used;
} Arena;

static void *take(Arena *arena, int64_t bytes) {
    void *start = arena->memory ? arena->memory + arena->used : NULL;
    arena->used += round_up(bytes, SCRATCH_ALIGN);
    return start;
}

/* Scratch memory per item of a run. */
static int64_t item_bytes(const Plan *plan) { return plan->scratch_bytes / plan->run_heads; }

/* Divide the scratch memory of a thread among the buffers of an item; each begins at a multiple of SCRATCH_ALIGN bytes.
   Returns the bytes used. memory NULL: only count.

   The layout is the same for every item of a call: with row_blocks > 1, the packed keys and values of all key blocks,
   and the states that say what is packed, are kept for the next row blocks of the same KV head. */
static int64_t carve_scratch(const Call *call, const Plan *plan, char *memory, Item *item) {
    int64_t rows = round_up(plan->block_rows, TILE_ROWS), blocks = plan->key_blocks, width = plan->value_width;
    int64_t slots = plan->row_blocks > 1 ? blocks : 1; /* key blocks that are kept packed */
    int64_t packed_rows = plan->values_in_place ? 1 : slots * plan->key_block;
    int64_t packed_keys = plan->decoding ? 0 : slots * plan->key_block;
    int64_t strip = plan->decoding ? plan->rows : TILE_ROWS; /* rows of a strip at most */
    Arena arena = {memory, 0};
    item->row = take(&arena, rows * sizeof(Row));                                          /* (rows) */
    item->class_sums = take(&arena, rows * call->class_count * sizeof(vfloat));            /* (rows, class_count) */
    item->top_score = take(&arena, rows * call->strongest_count * sizeof(float));          /* (rows, strongest) */
    item->top_key = take(&arena, rows * call->strongest_count * sizeof(int32_t));          /* (rows, strongest) */
    item->key_state = take(&arena, blocks);                                                /* (blocks), PACKED or not */
    item->value_state = take(&arena, blocks);                                              /* (blocks), finite or not */
    item->max_key = take(&arena, blocks * sizeof(float));                                  /* (blocks), largest |k| */
    item->q = take(&arena, rows * call->dim * sizeof(float));                              /* (rows, dim), scaled */
    item->o = take(&arena, rows * width * sizeof(float));                                  /* (rows, width) */
    item->s = take(&arena, strip * plan->key_block * sizeof(float));                       /* (strip, key_block) */
    item->bias = take(&arena, call->mask ? strip * plan->key_block * sizeof(float) : 0);   /* (strip, key_block) */
    item->packed_keys = take(&arena, packed_keys * call->dim * sizeof(float));             /* (slots, panels) */
    item->packed_values = take(&arena, packed_rows * width * sizeof(float));               /* (packed_rows, width) */
    return arena.used;
}

_Static_assert(SCRATCH_ALIGN % _Alignof(Row) == 0 && SCRATCH_ALIGN % sizeof(vfloat) == 0, "buffers begin aligned");
/* the last row of a buffer is read up to whole vectors, and scores are computed up to whole panels */
_Static_assert(SCRATCH_ALIGN >= 4 * LANES && KEY_BLOCK % PANEL == 0, "reads end within the buffer");
_Static_assert((int)LANES <= (int)MAX_LANES, "headwise_distances is read in whole vectors");

/* The keys of a sequence. Numbers that come out of a compiled graph were not checked by Python. */
static int64_t sequence_start(const Call *call, int64_t batch) {
    return max(0, call->starts ? call->starts[batch] : call->start);
}

static int64_t sequence_end(const Call *call, int64_t batch) {
    return max(0, min(call->ends ? call->ends[batch] : call->end, call->keys));
}

/* Whether query heads of one group have different windows. */
static int windows_differ_in_groups(const Call *call) {
    int64_t group = call->heads / call->kv_heads;
    for (int64_t h = 0; call->windows && h < call->heads; h++)
        if (memcmp(call->windows + 3 * h, call->windows + h / group * group * 3, 3 * sizeof(int64_t))) return 1;
    return 0;
}

/* Set the numbers of the items of a run. Returns how many they are. */
static int find_run(const Call *call, const Plan *plan, int64_t run, Item items[MAX_RUN_HEADS]) {
    int64_t groups = div_up(call->kv_heads, plan->run_heads), part = run / groups; /* sequence * parts + part */
    int64_t first = run % groups * plan->run_heads, count = min(plan->run_heads, call->kv_heads - first);
    for (int64_t i = 0; i < (plan->part_by_part ? count : 1); i++) {
        int64_t head = part / plan->parts * call->kv_heads + first + i; /* sequence * kv_heads + KV head */
        int64_t number = plan->part_by_part ? head * plan->parts + part % plan->parts : run;
        items[i] = (Item){.call = call, .plan = plan, .number = number};
    }
    return plan->part_by_part ? count : 1;
}

/* The head and the query of row `index` of a KV head. */
static void place_row(const Call *call, const Plan *plan, int64_t kv_head, int64_t index, int64_t *head,
                      int64_t *query) {
    int64_t group = call->heads / call->kv_heads;
    *query = plan->head_by_head ? index % call->queries : group == 1 ? index : index / group;
    *head = kv_head * group + (plan->head_by_head ? index / call->queries : index - *query * group);
}

/* Set the position and the visible spans of a row whose head and query are set. */
static void locate_row(const Call *call, const Plan *plan, int64_t batch, Row *row) {
    int64_t start = sequence_start(call, batch), end = sequence_end(call, batch);
    const int64_t *window = call->windows ? call->windows + 3 * row->head : NULL;
    int64_t left = window ? window[0] : call->left, right = window ? window[1] : call->right;
    int64_t keep_first = window ? window[2] : call->keep_first;
    if (plan->low) start = max(start, plan->low[batch]), end = min(end, plan->high[batch]);
    row->position = row->query + (call->offsets ? call->offsets[batch] : call->offset);
    Span near = {left < 0 ? start : max(start, row->position - left),
                 right < 0 ? end : min(end, row->position + right + 1)};
    int64_t first = call->keep_starts ? call->keep_starts[batch] : call->keep_start;
    Span kept = {max(start, first), min(end, first + keep_first)};
    if (call->causal) kept.high = min(kept.high, row->position + 1);
    row->span[1] = (Span){0, 0};
    if (kept.low >= kept.high) {
        row->span[0] = near;
    } else if (near.low >= near.high) {
        row->span[0] = kept;
    } else if (kept.low <= near.high && near.low <= kept.high) { /* they overlap or touch */
        row->span[0] = (Span){min(near.low, kept.low), max(near.high, kept.high)};
    } else {
        row->span[0] = kept.low < near.low ? kept : near;
        row->span[1] = kept.low < near.low ? near : kept;
    }
}

/* The element of the mask for a row and key j. */
static const char *mask_at(const Call *call, int64_t batch, const Row *row, int64_t j) {
    const int64_t *stride = call->mask_stride;
    int64_t index = batch * stride[0] + row->head * stride[1] + row->query * stride[2] + j * stride[3];
    return call->mask + index * dtype_size(call->mask_dtype);
}

static int mask_shows(const char *x, int64_t dtype) {
    return dtype == BOOL8 ? *x != 0 : load_scalar(x, dtype) != -INFINITY;
}

/* Whether scores differ from the products of queries and keys, so that the largest product is not m. */
static int adjusts_scores(const Call *call) {
    return call->softcap > 0 || call->slopes || (call->mask && call->mask_dtype != BOOL8);
}

static int is_visible(const Call *call, int64_t batch, const Row *row, int64_t j) {
    if (j < row->low || j >= row->high) return 0;
    return !call->mask || mask_shows(mask_at(call, batch, row, j), call->mask_dtype);
}

#endif
