/* One attention call as Python passes it to headwise_run, and the statistics that come back.

   library.py packs a Call with `struct`, field by field, without padding. Every field is therefore 8 bytes wide; the
   assertions below fix the position of each. */
#ifndef HEADWISE_CALL_H
#define HEADWISE_CALL_H

#include <stddef.h>
#include <stdint.h>

enum { F32, BF16, F16, BOOL8 }; /* dtypes of tensors; BOOL8 is for masks only */
enum { MAX_CLASSES = 8, MAX_STRONGEST = 16, DROPOUT_RANGE = 1 << 16 };

/* The statistics of a row of attention, in the order of the columns of Call.sums. The shares of the key classes follow.
   All are summed over rows but MAX_LOGIT, of which the largest is taken. Python compares these names with its own when
   it loads the library. */
#define STATISTICS(X)                                                   \
    X(ENTROPY, "entropy")       /* in nats */                           \
    X(CONFIDENCE, "confidence") /* the largest weight */                \
    X(FIRST, "first")           /* the weight of the first key */       \
    X(DISTANCE, "distance")     /* the mean of |query - key| */         \
    X(PREVIOUS, "previous")     /* the weight of the key before, */     \
    X(NEXT, "next")             /* after, */                            \
    X(SELF, "self")             /* and at the query's own position */   \
    X(SINK, "sink")             /* the weight that goes to the sink */  \
    X(LSE, "lse")               /* log-sum-exp, sink included */        \
    X(MAX_LOGIT, "max_logit")   /* the largest scale * q . k */         \
    X(COUNT, "count")           /* 1 per row, so that sums have means */

/* The sums of a row that those of other keys can be merged with, in the order of Call.rows. The sums over the key classes
   follow. With s the scores in nats, m the largest of them and e = exp(s - m): */
#define ROW_SUMS(X)                                                              \
    X(LARGEST, "largest")                 /* m; NaN where a score is undefined */ \
    X(LARGEST_LOGIT, "largest_logit")     /* the largest scale * q . k */         \
    X(HAS_KEYS, "has_keys")               /* 1 where a key is visible, else 0 */  \
    X(WEIGHTED_SCORES, "weighted_scores") /* sum e (s - m) */                     \
    X(DISTANCES, "distances")             /* sum e |query - key| */               \
    X(FIRST, "first")                     /* e at the first key, */               \
    X(PREVIOUS, "previous")               /* the key before, */                   \
    X(NEXT, "next")                       /* the key after, */                    \
    X(SELF, "self")                       /* and the query's own position */      \
    X(TOTAL, "total")                     /* sum e */

#define STATISTIC_COLUMN(id, name) STAT_##id,
#define ROW_SUM_COLUMN(id, name) ROW_##id,
enum { ROW_SUMS(ROW_SUM_COLUMN) ROW_CLASS };
enum { STATISTICS(STATISTIC_COLUMN) STAT_CLASS, MAX_STATS = STAT_CLASS + MAX_CLASSES };

typedef struct {
    /* Part 1: shared by all calls with the same sizes, strides and options.
       q (batch, heads, queries, dim), k (batch, kv_heads, keys, dim), v (batch, kv_heads, keys, value_dim),
       out (batch, heads, queries, value_dim) */
    int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
    int64_t dtype; /* of q, k, v and out */
    int64_t q_stride[4], k_stride[4], v_stride[4], out_stride[4]; /* in elements */
    /* visibility: query i has position i + offset. Of the keys from start to end - 1 it sees those from position - left
       to position + right (-1: no limit), and the keep_first keys from keep_start on (causal: up to its position) */
    int64_t left, right, keep_first, causal, offset, start, keep_start, end;
    int64_t mask_dtype, mask_stride[4]; /* stride 0: broadcast */
    int64_t gates_stride;               /* between sequences; 0: all sequences share their gates */
    int64_t class_count, strongest_count;
    int64_t dropped; /* by dropout, of DROPOUT_RANGE weights; 0: no dropout */
    double scale, softcap; /* softcap 0: none */

    /* Part 2: different in every call. */
    const char *q, *k, *v;
    char *out;
    const int64_t *offsets, *starts, *keep_starts, *ends; /* (batch,): replace the numbers above; or NULL */
    const int64_t *windows;        /* (heads, 3): replace left, right and keep_first; or NULL */
    const char *mask;              /* bool (0: hidden) or floats added to the scores, or NULL */
    const float *sinks;            /* (heads,) extra logits in the softmax denominator, or NULL */
    const float *slopes;           /* (heads,) ALiBi slopes, or NULL */
    const float *gates;            /* (heads,) or (batch, heads) factors of the outputs, or NULL */

    double *sums;            /* (STAT_CLASS + class_count, batch, heads), written: statistics; NULL: not wanted */
    const uint8_t *counted;  /* (batch, queries): the rows that are summed; NULL: all */
    const float *classes;    /* (batch, class_count, keys) zeros and ones, or NULL */
    float *lse;              /* (batch, heads, queries), written: log-sum-exp in nats; NULL: not wanted */
    float *strongest_weight; /* (batch, heads, queries, strongest_count), written: the largest weights, descending, */
    int32_t *strongest_key;  /* and their keys; -1 where a row has fewer visible keys */
    float *rows;             /* (ROW_CLASS + class_count, batch, heads, queries), written, without sinks; NULL: not wanted;
                                sums must be wanted too */
    uint64_t seed;           /* of dropout */
    int64_t threads;
} Call;

enum { CALL_FIELDS = 65, CALL_POINTERS = 43 /* the first field of part 2 */ };

#define FIELD(name, index) _Static_assert(offsetof(Call, name) == 8 * (index), "Call." #name " has moved")
FIELD(batch, 0);
FIELD(heads, 1);
FIELD(kv_heads, 2);
FIELD(queries, 3);
FIELD(keys, 4);
FIELD(dim, 5);
FIELD(value_dim, 6);
FIELD(dtype, 7);
FIELD(q_stride, 8);
FIELD(k_stride, 12);
FIELD(v_stride, 16);
FIELD(out_stride, 20);
FIELD(left, 24);
FIELD(right, 25);
FIELD(keep_first, 26);
FIELD(causal, 27);
FIELD(offset, 28);
FIELD(start, 29);
FIELD(keep_start, 30);
FIELD(end, 31);
FIELD(mask_dtype, 32);
FIELD(mask_stride, 33);
FIELD(gates_stride, 37);
FIELD(class_count, 38);
FIELD(strongest_count, 39);
FIELD(dropped, 40);
FIELD(scale, 41);
FIELD(softcap, 42);
FIELD(q, CALL_POINTERS);
FIELD(k, 44);
FIELD(v, 45);
FIELD(out, 46);
FIELD(offsets, 47);
FIELD(starts, 48);
FIELD(keep_starts, 49);
FIELD(ends, 50);
FIELD(windows, 51);
FIELD(mask, 52);
FIELD(sinks, 53);
FIELD(slopes, 54);
FIELD(gates, 55);
FIELD(sums, 56);
FIELD(counted, 57);
FIELD(classes, 58);
FIELD(lse, 59);
FIELD(strongest_weight, 60);
FIELD(strongest_key, 61);
FIELD(rows, 62);
FIELD(seed, 63);
FIELD(threads, 64);
#undef FIELD
_Static_assert(sizeof(Call) == 8 * CALL_FIELDS, "a field of Call is missing above, or pointers are not 8 bytes wide");

#endif
