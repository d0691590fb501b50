/* One row again, key by key in double precision, for rows whose scores overflow single precision. */
#ifndef HEADWISE_EXACT_H
#define HEADWISE_EXACT_H

#include "dropout.h"
#include "item.h"

/* The sums of a row, as in RowResult; the output is summed in place. */
typedef struct {
    double m, l, w, d, landmark[LANDMARKS], c[MAX_CLASSES], top_score[MAX_STRONGEST];
    double max_logit; /* the largest scale * q . k, NaN if there is one */
    int undefined;    /* whether a score is NaN or infinite: only max_logit is complete then */
    int32_t top_key[MAX_STRONGEST];
} ExactSums;

/* q . k; *finite is 0 where NaN or infinities are among the factors. */
static double exact_dot(const Call *call, const char *q, const char *k, int *finite) {
    enum { CHUNK = 64, SUMS = 8 };
    float a[CHUNK], b[CHUNK];
    double sum[SUMS] = {0}, zero = 0, total = 0;
    int64_t size = dtype_size(call->dtype);
    for (int64_t i = 0; i < call->dim; i += CHUNK) {
        int64_t n = min(CHUNK, call->dim - i);
        read_row(a, q + i * call->q_stride[3] * size, call->dtype, call->q_stride[3], n, 1);
        read_row(b, k + i * call->k_stride[3] * size, call->dtype, call->k_stride[3], n, 1);
        for (int64_t x = n; x % SUMS; x++) a[x] = b[x] = 0;
        for (int64_t x = 0; x < n; x++) zero += a[x] * 0.0f + b[x] * 0.0f; /* 0 * x is 0 if x is finite, else NaN */
        for (int64_t x = 0; x < n; x += SUMS)
            for (int y = 0; y < SUMS; y++) sum[y] += (double)a[x + y] * b[x + y];
    }
    for (int y = 0; y < SUMS; y++) total += sum[y];
    *finite = zero == 0;
    return total;
}

/* What ALiBi and the mask add to the row's score on key j, in nats; -inf where it is not visible. */
static double exact_bias(const Call *call, int64_t batch, const Row *row, int64_t j) {
    if (!is_visible(call, batch, row, j)) return -INFINITY;
    double bias = call->slopes ? -(double)call->slopes[row->head] * fabs((double)(j - row->position)) : 0;
    if (!call->mask || call->mask_dtype == BOOL8) return bias;
    return bias + load_scalar(mask_at(call, batch, row, j), call->mask_dtype);
}

/* The largest bias of a row's visible keys, in nats. */
static double largest_bias(const Call *call, const Plan *plan, int64_t batch, int64_t head, int64_t query) {
    Row row = {.head = head, .query = query};
    double largest = -INFINITY;
    locate_row(call, plan, batch, &row);
    for (int i = 0; i < SPANS; i++) {
        row.low = row.span[i].low, row.high = row.span[i].high;
        for (int64_t j = row.low; j < row.high; j++) largest = fmax(largest, exact_bias(call, batch, &row, j));
    }
    return largest;
}

/* Scale all sums down to a higher maximum. */
static void exact_rescale(const Call *call, ExactSums *x, float *o, double m) {
    double f = exp2(x->m - m);
    x->w = x->l > 0 ? f * (x->w + (x->m - m) * x->l) : 0;
    x->l *= f, x->d *= f;
    for (int i = 0; i < LANDMARKS; i++) x->landmark[i] *= f;
    for (int64_t i = 0; i < call->class_count; i++) x->c[i] *= f;
    for (int64_t i = 0; i < call->value_dim; i++) o[i] *= f;
    x->m = m;
}

static void exact_strongest(ExactSums *x, double s, int64_t j, int64_t count) {
    int64_t rank = count;
    while (rank > 0 && s > x->top_score[rank - 1]) rank--;
    if (rank == count) return;
    for (int64_t i = count - 1; i > rank; i--)
        x->top_score[i] = x->top_score[i - 1], x->top_key[i] = x->top_key[i - 1];
    x->top_score[rank] = s, x->top_key[rank] = j;
}

/* To single precision. Scores of this size that differ at all differ by far more than an exponent holds. */
static void exact_result(const Call *call, const ExactSums *x, RowResult *result) {
    result->m = x->m == -INFINITY ? x->m : fmax(-(double)FLT_MAX, fmin(x->m, (double)FLT_MAX));
    result->l = x->l, result->w = x->w, result->d = x->d;
    for (int i = 0; i < LANDMARKS; i++) result->landmark[i] = x->landmark[i];
    for (int64_t i = 0; i < call->class_count; i++) result->c[i] = x->c[i];
    for (int64_t i = 0; i < call->strongest_count; i++) {
        double below = x->m - x->top_score[i];
        result->top_score[i] = below < 200 ? result->m + (float)(x->top_score[i] - x->m) : -INFINITY;
        result->top_key[i] = x->top_key[i];
    }
}

/* Add the keys of the row's current span to its sums. */
static void add_span(const Call *call, int64_t batch, const Row *row, const char *q, const char *k, const char *v,
                    const int64_t *key, ExactSums *x, float *o) {
    int64_t size = dtype_size(call->dtype);
    for (int64_t j = row->low; j < row->high; j++) {
        int finite;
        double bias = exact_bias(call, batch, row, j);
        if (bias == -INFINITY) continue;
        double s = exact_dot(call, q, k + j * call->k_stride[2] * size, &finite) * call->scale;
        if (finite) s = fmax(-(double)SCORE_LIMIT, fmin(s, SCORE_LIMIT));
        x->max_logit = max_or_nan(x->max_logit, s);
        if (call->softcap > 0) s = call->softcap * tanh(s / call->softcap);
        s = (s + bias) * M_LOG2E;
        x->undefined |= !(s < INFINITY);
        if (x->undefined) continue;
        if (s > x->m) exact_rescale(call, x, o, s);
        double t = s == -INFINITY ? s : s - x->m, e = exp2(t);
        x->l += e, x->d += e * fabs((double)(j - row->position));
        if (e > 0) x->w += e * t;
        for (int i = 0; i < LANDMARKS; i++) x->landmark[i] += key[i] == j ? e : 0;
        for (int64_t i = 0; i < call->class_count; i++)
            x->c[i] += e * call->classes[(batch * call->class_count + i) * call->keys + j];
        double weight = is_retained(call, batch, row->head, row->query, j) ? e : 0;
        for (int64_t i = 0; i < call->value_dim; i++)
            o[i] += weight * load_scalar(v + (j * call->v_stride[2] + i * call->v_stride[3]) * size, call->dtype);
        exact_strongest(x, s, j, call->strongest_count);
    }
}

/* Compute the sums and the output o (value_dim) of a row anew. If a NaN or an infinite score reaches the row, its sums
   stay as they are, with l = NaN. */
static void recompute_exact(const Call *call, const Plan *plan, int64_t batch, int64_t head, int64_t query,
                            RowResult *result, float *o) {
    int64_t size = dtype_size(call->dtype), kv_head = head / (call->heads / call->kv_heads);
    const char *q = call->q + (batch * call->q_stride[0] + head * call->q_stride[1] + query * call->q_stride[2]) * size;
    const char *k = call->k + (batch * call->k_stride[0] + kv_head * call->k_stride[1]) * size;
    const char *v = call->v + (batch * call->v_stride[0] + kv_head * call->v_stride[1]) * size;
    Row row = {.head = head, .query = query};
    locate_row(call, plan, batch, &row);
    const int64_t key[LANDMARKS] = {plan->first_key ? plan->first_key[batch] : 0, row.position - 1, row.position + 1,
                                    row.position};
    ExactSums x = {.m = -INFINITY, .max_logit = -INFINITY};
    for (int64_t i = 0; i < call->strongest_count; i++) x.top_score[i] = -INFINITY, x.top_key[i] = -1;
    for (int64_t i = 0; i < call->value_dim; i++) o[i] = 0;
    for (int i = 0; i < SPANS; i++) {
        row.low = row.span[i].low, row.high = row.span[i].high;
        add_span(call, batch, &row, q, k, v, key, &x, o);
    }
    result->max_logit = x.max_logit;
    if (x.undefined) result->l = NAN;
    else exact_result(call, &x, result);
}

#endif
