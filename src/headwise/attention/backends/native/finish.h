/* The end of a row: from running sums to the output and the statistics, and merging the parts of split keys. */
#ifndef HEADWISE_FINISH_H
#define HEADWISE_FINISH_H

#include "exact.h"

/* Add up the lanes of a row's sums. */
static void reduce_row(const Call *call, const Row *row, RowResult *result) {
    const vfloat sums[4] = {row->l, row->w, row->d};
    float4 reduced = reduce_add_4(sums);
    result->m = row->m;
    result->l = reduced[0];
    result->visible = row->visible;
    result->overflow = row->overflow;
    if (call->strongest_count) {
        memcpy(result->top_score, row->top_score, 4 * call->strongest_count);
        memcpy(result->top_key, row->top_key, 4 * call->strongest_count);
    }
    if (!call->sums) return;
    result->w = reduced[1];
    result->d = reduced[2];
    result->max_logit = adjusts_scores(call) ? row->max_product * (call->softcap > 0 ? (float)call->softcap : LN2)
                                             : row->m * LN2;
    memcpy(result->landmark, row->landmark, sizeof result->landmark);
    for (int64_t i = 0; i < call->class_count; i++) result->c[i] = reduce_add(row->c[i]);
}

/* Scale sums that are relative to x->m down to a higher maximum (x->m itself is left alone). Returns the factor. */
static float rescale(const Call *call, RowResult *x, float m) {
    if (x->m == m) return 1;
    float f = x->m == -INFINITY ? 0 : exp2f(x->m - m);
    if (call->sums) {
        x->w = f == 0 ? 0 : f * (x->w + (x->m - m) * x->l);
        x->d *= f;
        for (int i = 0; i < LANDMARKS; i++) x->landmark[i] *= f;
        for (int64_t i = 0; i < call->class_count; i++) x->c[i] *= f;
    }
    x->l *= f;
    return f;
}

/* Whether single precision may have failed: a product, or its sum with a bias, overflowed, or there is a NaN. */
static int needs_exact(const RowResult *x) {
    return x->visible && (x->overflow || x->l != x->l || fabsf(x->m) == INFINITY);
}

/* Write the sums of a row, number `row` of all. */
static void write_sums(const Call *call, const RowResult *x, int64_t row) {
    const float fixed[ROW_CLASS] = {
        [ROW_LARGEST] = x->l != x->l ? NAN : x->m * LN2,
        [ROW_LARGEST_LOGIT] = x->max_logit,
        [ROW_HAS_KEYS] = x->visible,
        [ROW_WEIGHTED_SCORES] = x->w * LN2,
        [ROW_DISTANCES] = x->d,
        [ROW_FIRST] = x->landmark[AT_FIRST],
        [ROW_PREVIOUS] = x->landmark[AT_PREVIOUS],
        [ROW_NEXT] = x->landmark[AT_NEXT],
        [ROW_SELF] = x->landmark[AT_SELF],
        [ROW_TOTAL] = x->l,
    };
    int64_t rows = call->batch * call->heads * call->queries;
    for (int64_t i = 0; i < ROW_CLASS; i++) call->rows[i * rows + row] = fixed[i];
    for (int64_t i = 0; i < call->class_count; i++) call->rows[(ROW_CLASS + i) * rows + row] = x->c[i];
}

/* Write the output, log-sum-exp, sums and strongest keys of a row, and add its statistics to sums (MAX_STATS).
   o (value_width) is overwritten. */
static void finish_row(const Call *call, const Plan *plan, RowResult *x, float *o, int64_t batch, int64_t head,
                       int64_t query, double *sums) {
    if (needs_exact(x)) recompute_exact(call, plan, batch, head, query, x, o);
    int64_t row = (batch * call->heads + head) * call->queries + query;
    if (call->rows) write_sums(call, x, row);
    float peak = x->m, sink = call->sinks ? call->sinks[head] * LOG2E : -INFINITY;
    float m = sink > peak ? sink : peak, f = 1;
    if (m == -INFINITY) m = 0;
    if (peak != -INFINITY) f = rescale(call, x, m);
    float sink_e = call->sinks ? exp2f(sink - m) : 0, total = x->l + sink_e;
    if (total == 0) total = 1;
    float gate = call->gates ? call->gates[batch * call->gates_stride + head] : 1, share = 1 / total;
    const int64_t *stride = call->out_stride;
    int64_t index = batch * stride[0] + head * stride[1] + query * stride[2];
    if (!x->visible) memset(o, 0, 4 * call->value_dim);
    float factor = f * share * gate * dropout_factor(call);
    write_row(call->out + index * dtype_size(call->dtype), o, call->dtype, call->value_dim, factor);

    float lse = 0;
    if (call->lse || call->sums) {
        float log_all = log2f(x->l + sink_e);
        /* m is clamped where a bias is too large for units of log2 (load_mask); no score counts beside such a bias */
        lse = fabsf(m) == FLT_MAX ? largest_bias(call, plan, batch, head, query) + log_all * LN2 : (m + log_all) * LN2;
    }
    if (call->lse) call->lse[row] = lse;
    for (int64_t i = 0; i < call->strongest_count; i++) {
        int64_t at = row * call->strongest_count + i;
        call->strongest_weight[at] = x->top_key[i] < 0 ? 0 : exp2f(x->top_score[i] - m) / total;
        call->strongest_key[at] = x->top_key[i];
    }
    if (!call->sums || !x->visible || (call->counted && !call->counted[batch * call->queries + query])) return;
    float log_total = log2f(total);
    sums[STAT_COUNT] += 1;
    sums[STAT_ENTROPY] += (x->l * log_total - x->w) * LN2 * share;
    sums[STAT_LSE] += lse;
    sums[STAT_MAX_LOGIT] = max_or_nan(sums[STAT_MAX_LOGIT], x->max_logit);
    sums[STAT_CONFIDENCE] += (peak == -INFINITY ? 0 : f) * share;
    sums[STAT_DISTANCE] += x->d * share;
    sums[STAT_FIRST] += x->landmark[AT_FIRST] * share;
    sums[STAT_PREVIOUS] += x->landmark[AT_PREVIOUS] * share;
    sums[STAT_NEXT] += x->landmark[AT_NEXT] * share;
    sums[STAT_SELF] += x->landmark[AT_SELF] * share;
    sums[STAT_SINK] += sink_e * share;
    for (int64_t i = 0; i < call->class_count; i++) sums[STAT_CLASS + i] += x->c[i] * share;
}

static void merge_strongest(RowResult *x, const RowResult *y, int64_t count) {
    float score[MAX_STRONGEST];
    int32_t key[MAX_STRONGEST];
    for (int64_t i = 0, a = 0, b = 0; i < count; i++) {
        int from_x = x->top_score[a] >= y->top_score[b] || y->top_key[b] < 0;
        score[i] = from_x ? x->top_score[a] : y->top_score[b];
        key[i] = from_x ? x->top_key[a++] : y->top_key[b++];
    }
    memcpy(x->top_score, score, 4 * count);
    memcpy(x->top_key, key, 4 * count);
}

/* x, with output o, takes in y, with output p, which is of other keys of the same row. */
static void merge_row(const Call *call, RowResult *x, float *o, RowResult *y, const float *p) {
    float m = y->m > x->m ? y->m : x->m;
    if (call->strongest_count) merge_strongest(x, y, call->strongest_count);
    x->visible |= y->visible;
    x->overflow |= y->overflow;
    float f = rescale(call, x, m), g = rescale(call, y, m);
    for (int64_t i = 0; i < call->value_dim; i++) o[i] = o[i] * f + p[i] * g;
    x->m = m;
    x->l += y->l;
    if (!call->sums) return;
    x->w += y->w, x->d += y->d;
    x->max_logit = fmaxf(x->max_logit, y->max_logit); /* a NaN is found by recompute_exact */
    for (int i = 0; i < LANDMARKS; i++) x->landmark[i] += y->landmark[i];
    for (int64_t i = 0; i < call->class_count; i++) x->c[i] += y->c[i];
}

/* Merge the partial results of all parts of the keys into the first, and finish the rows. kv_head: among all
   sequences'. */
static void merge_parts(const Call *call, const Plan *plan, int64_t kv_head) {
    int64_t group = call->heads / call->kv_heads, batch = kv_head / call->kv_heads, item = kv_head * plan->parts;
    int64_t outputs = plan->block_rows * RESULT_FLOATS; /* they follow the rows' results */
    for (int64_t r = 0; r < plan->rows; r++) {
        float *partial = plan->partial + item * plan->partial_floats;
        RowResult *x = (RowResult *)partial + r;
        float *o = partial + outputs + r * plan->value_width;
        for (int64_t i = 1; i < plan->parts; i++) {
            partial += plan->partial_floats;
            merge_row(call, x, o, (RowResult *)partial + r, partial + outputs + r * plan->value_width);
        }
        int64_t head, query;
        place_row(call, plan, kv_head % call->kv_heads, r, &head, &query);
        finish_row(call, plan, x, o, batch, head, query, plan->item_sums + (item * group + head % group) * MAX_STATS);
    }
}

#endif
