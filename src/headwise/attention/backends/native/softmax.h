/* From products q . k to e = 2^(s - m), one row and one block of keys at a time, and the running sums of the row. */
#ifndef HEADWISE_SOFTMAX_H
#define HEADWISE_SOFTMAX_H

#include "item.h"

/* The bias of a mask for n keys from key `from` on, in units of log2; -inf where it hides. Written up to whole vectors.
   Returns whether any key is shown. */
static int load_mask(float *bias, const Item *item, const Row *row, int64_t from, int64_t n) {
    const Call *call = item->call;
    const char *x = mask_at(call, item->batch, row, from);
    int64_t dtype = call->mask_dtype, step = call->mask_stride[3], j = 0;
    vint shown = {0};
    if (dtype == BOOL8) {
        if (step == 1)
            for (int64_t i = 0; i < n; i++) bias[i] = x[i] ? 0.0f : -INFINITY;
        else
            for (int64_t i = 0; i < n; i++) bias[i] = x[i * step] ? 0.0f : -INFINITY;
    } else {
        read_row(bias, x, dtype, step, n, 1);
    }
    for (j = n; j % LANES; j++) bias[j] = -INFINITY;
    for (j = 0; j < n; j += LANES) {
        vfloat y = load(bias + j), size = vec_abs(y), limit = splat(FLT_MAX);
        shown |= y != splat(-INFINITY);
        /* -FLT_MAX times LOG2E must not become -inf: it hides nothing */
        vfloat clamped = vec_max(-limit, -vec_max(-limit, -(y * LOG2E)));
        if (dtype != BOOL8) store(bias + j, blend(size <= limit, clamped, y));
    }
    return any_true(shown);
}

/* Apply softcap, ALiBi and the bias of a mask (or NULL) to n scores (whole vectors) from key `from` on. */
static void adjust_scores(const Item *item, const Row *row, float *s, const float *bias, int64_t n, int64_t from) {
    const Call *call = item->call;
    if (call->softcap > 0) {
        float cap = call->softcap * LOG2E;
        for (int64_t j = 0; j < n; j += LANES) store(s + j, vec_tanh(load(s + j)) * cap);
    }
    if (call->slopes) {
        float slope = call->slopes[row->head] * LOG2E;
        vfloat offset = iota() + (float)(from - row->position);
        for (int64_t j = 0; j < n; j += LANES, offset += (float)LANES)
            store(s + j, load(s + j) - slope * vec_abs(offset));
    }
    if (bias)
        for (int64_t j = 0; j < n; j += LANES) {
            vfloat y = load(bias + j), hidden = splat(-INFINITY);
            store(s + j, blend(y == hidden, hidden, load(s + j) + y));
        }
}

/* Whether the product of the row with a visible key, s[a] to s[b - 1] (s[0] belongs to key `from`), is beyond
   SCORE_LIMIT. The rest of the vectors that hold these may contain anything. */
static int exceeds_limit(const Item *item, const Row *row, const float *s, int64_t a, int64_t b, int64_t from) {
    const Call *call = item->call;
    float limit = call->softcap > 0 ? SCORE_LIMIT / call->softcap : SCORE_LIMIT * LOG2E;
    if (item->dot_bound < INFINITY && item->dot_bound * item->max_key[from / item->plan->key_block] < 0.99f * limit)
        return 0;
    int64_t start = a / LANES * LANES;
    if (max_abs(s + start, round_up(b, LANES) - start) <= limit) return 0;
    for (int64_t j = a; j < b; j++)
        if (fabsf(s[j]) > limit && is_visible(call, item->batch, row, from + j)) return 1;
    return 0;
}

/* In the vectors that hold s[a] and s[b], set what lies before a or from b on to -inf. In whole vectors: a vector that
   is loaded soon after several narrow stores into it would wait for all of them. */
INLINE void hide_edges(float *s, int64_t a, int64_t b) {
    vfloat lane = iota(), hidden = splat(-INFINITY);
    float *first = s + a / LANES * LANES, *last = s + b / LANES * LANES;
    if (a % LANES) store(first, blend(lane >= (float)(a % LANES), load(first), hidden));
    if (b % LANES) store(last, blend(lane < (float)(b % LANES), load(last), hidden));
}

/* Insert n scores (whole vectors) from key `from` on into the `count` largest of the row; of equal ones the first. */
static void record_strongest(Row *row, const float *s, int64_t n, int64_t from, int count) {
    for (int64_t j = 0; j < n; j += LANES) {
        if (!any_true(load(s + j) > splat(row->top_score[count - 1]))) continue;
        for (int64_t i = j; i < j + LANES; i++) {
            int rank = count;
            while (rank > 0 && s[i] > row->top_score[rank - 1]) rank--;
            if (rank == count) continue;
            for (int x = count - 1; x > rank; x--)
                row->top_score[x] = row->top_score[x - 1], row->top_key[x] = row->top_key[x - 1];
            row->top_score[rank] = s[i];
            row->top_key[rank] = from + i;
        }
    }
}

/* The maximum of n scores (whole vectors); a NaN may be lost. */
INLINE float max_score(const float *s, int64_t n) {
    vfloat top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES)
        UNROLL for (int i = 0; i < 4; i++) top[i] = vec_max(top[i], load(s + j + i * LANES));
    for (; j < n; j += LANES) top[0] = vec_max(top[0], load(s + j));
    return reduce_max(vec_max(vec_max(top[0], top[1]), vec_max(top[2], top[3])));
}

/* The maximum of n products (whole vectors) at the keys that a bias (or NULL) does not hide; a NaN may be lost. */
static float max_product(const float *s, const float *bias, int64_t n) {
    if (!bias) return max_score(s, n);
    vfloat top = splat(-INFINITY);
    for (int64_t j = 0; j < n; j += LANES)
        top = vec_max(top, blend(load(bias + j) == splat(-INFINITY), splat(-INFINITY), load(s + j)));
    return reduce_max(top);
}

/* Replace n scores (whole vectors) from key `from` on, at most `peak`, by e, and add them to the sums of the row; if m
   rises, scale them and the output o (width) down. classes: (class_count, keys) of the sequence. */
INLINE void update_row(const int with_stats, Row *row, float *s, int64_t n, float peak, int64_t from, float *o,
                       int64_t width, const float *classes, int64_t class_count, int64_t keys) {
    float old = row->m, m = peak > old ? peak : old;
    row->m = m;
    if (m == -INFINITY) m = 0;
    vfloat before = row->l, w = row->w, d = row->d;
    if (old != -INFINITY) { /* f is 1 more often than not, but the branch could not be predicted */
        vfloat fall = vec_max(splat(MIN_EXPONENT), splat(old - m)), f = vec_exp2(fall);
        for (int64_t i = 0; i < width; i += LANES) store(o + i, load(o + i) * f);
        before *= f;
        if (with_stats) {
            w = f * w + fall * before;
            d *= f;
            for (int i = 0; i < LANDMARKS; i++) row->landmark[i] *= f[0];
            for (int64_t i = 0; i < class_count; i++) row->c[i] *= f;
        }
    }
    vfloat l = before;
    /* |step + j| for j in the block: looked up where the query is near; further away it differs by a constant */
    int64_t step = from - row->position, near = step > 0 ? 0 : step < -KEY_BLOCK ? -KEY_BLOCK : step;
    const float *distance = headwise_distances + KEY_BLOCK + near;
    for (int64_t j = 0; j < n; j += LANES) {
        vfloat t = vec_max(splat(MIN_EXPONENT), load(s + j) - m), e = vec_exp2(t);
        store(s + j, e);
        l += e;
        if (with_stats) {
            w += e * t;
            d += e * load(distance + j);
        }
    }
    row->l = l;
    if (!with_stats) return;
    row->w = w;
    row->d = d + (float)(step < near ? near - step : step - near) * (l - before);
    for (int64_t i = 0; i < class_count; i++) {
        const float *member = classes + i * keys + from;
        vfloat c = row->c[i];
        int64_t whole = min(n, (keys - from) / LANES * LANES), j = 0;
        for (; j < whole; j += LANES) c += load(s + j) * load(member + j);
        for (; j < n && from + j < keys; j++) c[0] += s[j] * member[j];
        row->c[i] = c;
    }
}

/* Add e at the landmarks among the keys low to high - 1; s[0] belongs to key `from`. */
INLINE void record_landmarks(Row *row, const float *s, int64_t low, int64_t high, int64_t from, int64_t first_key) {
    const int64_t key[LANDMARKS] = {first_key, row->position - 1, row->position + 1, row->position};
    if (key[AT_FIRST] >= low && key[AT_FIRST] < high) row->landmark[AT_FIRST] += s[key[AT_FIRST] - from];
    if (key[AT_NEXT] < low || key[AT_PREVIOUS] >= high) return;
    for (int i = AT_PREVIOUS; i < LANDMARKS; i++)
        if (key[i] >= low && key[i] < high) row->landmark[i] += s[key[i] - from];
}

#endif
