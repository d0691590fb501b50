/* How a call is divided into work items, and the interface between the threads and the code of one instruction set. */
#ifndef HEADWISE_PLAN_H
#define HEADWISE_PLAN_H

#include "call.h"
#include "gradients.h"

/* A work item is a block of query rows of one KV head, on all keys or on one part of them. The rows of a KV head are
   those of all query heads of its group, query by query, so that neighbours see the same keys; head by head where the
   windows of a group differ (place_row in item.h). Items are numbered
   ((sequence * kv_heads + KV head) * row_blocks + row block) * parts + part.

   A thread takes up a run of items. It is one item, or, when decoding from caches where the keys of all heads lie side
   by side, token by token, the items of several heads: they take turns on every few keys, so that memory is read in its
   own order (find_run in item.h). An item computes the same either way. */
typedef struct {
    int64_t rows;           /* per KV head */
    int64_t block_rows;     /* per item */
    int64_t row_blocks;     /* per KV head */
    int64_t key_block;      /* keys that are processed together */
    int64_t key_blocks;     /* per sequence */
    int64_t part_blocks;    /* key blocks per part */
    int64_t parts;          /* of the keys; if more than 1, row_blocks is 1, and partial results are merged */
    int64_t items;
    int64_t runs;
    int64_t run_heads;      /* items per run, of as many KV heads, at most MAX_RUN_HEADS */
    int64_t value_width;    /* value_dim, rounded up to whole vectors */
    int64_t partial_floats; /* of a partial result: (block_rows) RowResult, (block_rows, value_width) output */
    int64_t scratch_bytes;  /* per thread */
    int head_by_head;       /* the order of a KV head's rows */
    int part_by_part;       /* runs are in the order of parts, then KV heads: each page of memory is visited once */
    int decoding;           /* so few rows that keys are read in place (dot.h); they are one strip */
    int values_in_place;    /* values are not packed */
    int has_dot_bound;      /* overflow of the scores is excluded by the largest |q| and |k| */
    double *item_sums;      /* (items, group, MAX_STATS), where Call.sums is wanted */
    float *partial;         /* (items, partial_floats), where parts > 1 */
    int64_t *first_key;     /* (batch,): see Path.first_visible_key; NULL: key 0 */
    int64_t *low, *high;    /* (batch,): the mask hides all other keys from all rows; NULL: unknown */

    /* of the backward pass (backward.c): */
    const Gradients *gradients;
    int *declined; /* set to 1 by an item that finds numbers which need another method */
} Plan;

/* Scratch memory of one thread, aligned to SCRATCH_ALIGN bytes. */
typedef struct {
    char *memory;
    int64_t size;
    int64_t packed_head; /* sequence * kv_heads + KV head whose keys and values are packed there; -1: none */
} Scratch;

typedef void RunItem(const Call *, const Plan *, int64_t number, Scratch *); /* number: of the run */

/* The functions of backward.c, compiled for one instruction set. */
typedef struct {
    void (*make_plan)(const Call *, const Gradients *, Plan *);
    RunItem *run_item;
    RunItem *merge_item; /* a row block of a KV head, numbered KV head * row_blocks + block, where parts > 1 */
} BackwardPath;

/* The functions of attention.c, compiled for one instruction set. */
typedef struct {
    const char *name;
    void (*make_plan)(const Call *, Plan *);
    RunItem *run_item;
    void (*merge_parts)(const Call *, const Plan *, int64_t kv_head); /* sequence * kv_heads + KV head */
    int64_t (*first_visible_key)(const Call *, int64_t batch);
    int (*visible_span)(const Call *, int64_t batch, int64_t *low, int64_t *high);
    const BackwardPath *backward;
} Path;

extern const Path headwise_avx512, headwise_avx2, headwise_neon, headwise_plain;
extern const BackwardPath headwise_backward_avx512, headwise_backward_avx2, headwise_backward_neon,
    headwise_backward_plain;

/* The name of a table above for the instruction set of a source file. */
#define JOIN(a, b) a##b
#define NAME_FOR(isa, prefix) JOIN(prefix, isa)

enum { KEY_BLOCK = 512 /* key_block at most */, MAX_LANES = 16, SCRATCH_ALIGN = 64 };

/* The larger of two numbers; NaN if one of them is. */
static inline double max_or_nan(double a, double b) { return b > a || b != b ? b : a; }

/* |x| for x from -KEY_BLOCK on, at index KEY_BLOCK + x: distances between a query and a block of keys. */
extern float headwise_distances[2 * KEY_BLOCK + MAX_LANES];

#endif
