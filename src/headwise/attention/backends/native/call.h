/* One call of attention, as Python hands it over: every field is 8 bytes wide, in the order of native.py. */
#ifndef HEADWISE_CALL_H
#define HEADWISE_CALL_H

#include <stdint.h>

enum { F32, BF16, F16, BOOL };       /* kinds of numbers */
enum { MOST_CLASSES = 8, MOST_LINKS = 16 };

/* What is kept of a row of weights, and summed over the rows that count. */
enum { ENTROPY, CONFIDENCE, FIRST, DISTANCE, PREVIOUS, NEXT, SELF, SINK, COUNT, CLASS, SUMS = CLASS + MOST_CLASSES };

typedef struct {
    /* FORM in native.py: what calls of the same sizes, strides and options share.
       q (batch, heads, queries, dim), k (batch, kv_heads, keys, dim), v and out likewise with value_dim */
    int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
    int64_t kind; /* of q, k, v and out */
    int64_t q_stride[4], k_stride[4], v_stride[4], out_stride[4]; /* in numbers, not bytes; the output's last is 1 */
    /* who may look where: query i stands at i + offset, and sees keys from left before to right after it (-1: open) */
    int64_t left, right, offset, end;
    int64_t mask_kind, mask_stride[4];
    int64_t gates_stride; /* from one sequence's gates to the next one's */
    int64_t class_count, link_count;
    double scale, softcap; /* softcap 0: none */

    /* POINTERS in native.py: what differs from call to call */
    const char *q, *k, *v;
    char *out;
    const int64_t *offsets, *ends; /* (batch,) where sequences differ, else NULL */
    const char *mask;              /* NULL: none */
    const float *sinks;            /* (heads,) or NULL */
    const float *slopes;           /* (heads,) or NULL: ALiBi */
    const float *gates;            /* a number a head, or NULL */

    /* statistics: wanted where sums is not NULL */
    double *sums;          /* (CLASS + class_count, batch, heads), of the rows that count */
    const uint8_t *asked;  /* (batch, queries): the rows that count; NULL: all */
    const float *classes;  /* (batch, class_count, keys) of zeros and ones, or NULL */
    float *lse;            /* (batch, heads, queries), natural logarithm, or NULL */
    float *link_weight;    /* (batch, heads, queries, link_count), the so many largest of every row, the largest first */
    int32_t *link_key;     /* the same shape; -1 where a row sees fewer keys */
    int64_t threads;
} Call;

/* How a call is cut. An item is a block of rows of one KV head, on all its keys or (split) on a part of them. */
typedef struct {
    int64_t rows;        /* queries of one KV head: the whole group's, those of one position side by side */
    int64_t block_rows;  /* of one item */
    int64_t row_blocks;  /* of one KV head */
    int64_t key_block;   /* keys that are worked on together */
    int64_t key_blocks;
    int64_t split;       /* key blocks of one part */
    int64_t parts;       /* of the keys; more than 1: their results are merged at the end */
    int64_t items;
    int64_t width;       /* value_dim, rounded up to whole vectors */
    int64_t part_floats; /* of what one item keeps for merging */
    int64_t room;        /* bytes of working memory that a thread needs */
    double *item_sums;   /* (items, group, SUMS) */
    float *part;         /* (items, part_floats) where parts > 1 */
    int64_t *first;      /* (batch,): the first key that exists; NULL: key 0 */
    int64_t *low, *high; /* (batch,): outside of these the mask hides all keys from all rows; NULL: unknown */
} Plan;

/* Working memory of one thread. */
typedef struct {
    char *memory;
    int64_t size;
    int64_t head; /* (sequence, KV head) whose packed keys are in there, -1: none */
} Room;

/* One instruction set: the same functions, compiled for it. */
typedef struct {
    const char *name;
    void (*plan)(const Call *, Plan *);
    void (*item)(const Call *, const Plan *, int64_t item, Room *);
    void (*merge)(const Call *, const Plan *, int64_t group); /* of a row block, when all its parts are done */
    int64_t (*first_key)(const Call *, int64_t batch);
    int (*span)(const Call *, int64_t batch, int64_t *low, int64_t *high);
} Path;

enum { KEY_BLOCK = 512, WIDEST_VECTOR = 16 };

/* |x| for x from -KEY_BLOCK on: distances within a block of keys; beyond its reach they differ by a constant. */
extern float headwise_distances[2 * KEY_BLOCK + WIDEST_VECTOR];

extern const Path headwise_avx512, headwise_avx2, headwise_neon, headwise_plain;

#endif
