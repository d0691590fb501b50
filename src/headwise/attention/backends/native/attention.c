/* Attention and exact statistics of every row of weights, in one pass over the keys.

   The scores of a row come block by block. In units of log2, s = (q . k) scale log2(e) + bias, and m is the largest
   so far. Kept for every row, over the keys seen so far, with t = s - m and e = 2^t:

       l = sum e        w = sum e t        d = sum e |i - j|        c = sum e over a class of keys        o = sum e v

   When a block raises m to m', every kept sum is brought down by f = 2^(m - m'): l := f l, d, c and o alike, and since
   t' = t + (m - m'),  w := f (w + (m - m') l).  At the end, with L = l + the sink's part:

       weight      a = e / L                          output      sum a v = o / L
       entropy     -sum a ln a = (l ln L - w ln 2) / L
       confidence  1 / L, the largest e being 2^0     distance    d / L         share of a class    c / L

   A key that a row may not look at has e = 0 whatever lies there. Two parts of the keys are merged as two blocks are.

   A score of a finite query and a finite key counts as 1e38 where it is larger, as -1e38 where it is lower (in nats,
   before softcap and bias). Single precision may have overflowed there, or in a part of the sum, and lost even the sign:
   such a row is noticed, and when its keys are done it is done again in double precision.

   Memory: an item is a block of rows. Its scaled queries lie row by row; keys are packed once a head into panels of
   TILE_ROWS x PANEL tiles ([dim][PANEL], so that a multiply-add takes whole vectors of keys); values are used as they
   lie where that is possible. A strip of TILE_ROWS rows meets a block of keys: scores, softmax and o += e v, all of it
   in the nearest cache. A few rows, as in decoding, are one strip, and meet keys and values as they lie. */
#include <stdlib.h>

#include "call.h"
#include "vectors.h"

enum { WIDEST = 8, PANEL = TILE_VECTORS * W, BLOCK_ROWS = 8 * TILE_ROWS, PART_KEYS = 1024 };
enum { LINE = 16, AHEAD = 8, FEW_ROWS = 12, STRIP_ROWS = TILE_ROWS > FEW_ROWS ? TILE_ROWS : FEW_ROWS };
static const float LOG2E = 1.44269504f, LN2 = 0.693147181f;
static const float LIMIT = 1e38f; /* of a score, in nats */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t up(int64_t a, int64_t to) { return (a + to - 1) / to * to; }

/* ---- multiplying ---- */

/* c (rows x vectors * W) = or += a (rows x n) b (n x vectors * W): the accumulators stay in registers. far:
   what lies `ahead` of each row of b is fetched meanwhile, a little with every step, since only a few lines at once can
   be under way. */
INLINE void tile(const int rows, const int vectors, const float *restrict a, int64_t a_row, const float *restrict b,
                 int64_t b_row, float *restrict c, int64_t c_row, int64_t n, int add, const int far, int64_t ahead) {
    vf sum[TILE_ROWS][WIDEST];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int x = 0; x < vectors; x++)
        sum[r][x] = add ? load(c + r * c_row + x * W) : all(0);
    UNROLL_SOME for (int64_t i = 0; i < n; i++, b += b_row) {
        vf right[WIDEST];
        UNROLL for (int x = 0; x < vectors; x++) right[x] = load(b + x * W);
        if (far) UNROLL for (int x = 0; x < vectors * W; x += LINE) __builtin_prefetch(b + ahead + x);
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = all(a[r * a_row + i]);
            UNROLL for (int x = 0; x < vectors; x++) sum[r][x] += left * right[x];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int x = 0; x < vectors; x++)
        store(c + r * c_row + x * W, sum[r][x]);
}

/* Tiles side by side: of b the next one lies b_step further on, of c PANEL. */
INLINE void tiles(const int rows, int64_t vectors, const float *a, int64_t a_row, const float *b, int64_t b_row,
                  int64_t b_step, float *c, int64_t c_row, int64_t n, int add, const int far, int64_t ahead) {
    for (; vectors >= TILE_VECTORS; vectors -= TILE_VECTORS, b += b_step, c += PANEL)
        tile(rows, TILE_VECTORS, a, a_row, b, b_row, c, c_row, n, add, far, ahead);
    if (vectors == 1) tile(rows, 1, a, a_row, b, b_row, c, c_row, n, add, far, ahead);
    if (TILE_VECTORS > 2 && vectors == 2) tile(rows, 2, a, a_row, b, b_row, c, c_row, n, add, far, ahead);
    if (TILE_VECTORS > 2 && vectors == 3)
        tile(rows, TILE_VECTORS > 2 ? 3 : 1, a, a_row, b, b_row, c, c_row, n, add, far, ahead);
}

#define HEIGHT(r) \
    case r: tiles(r <= TILE_ROWS ? r : 1, vectors, a, a_row, b, b_row, b_step, c, c_row, n, add, far, ahead); break;

/* c (rows x vectors * W) = or += a b for up to TILE_ROWS rows. */
INLINE void multiply_as(int rows, int64_t vectors, const float *a, int64_t a_row, const float *b, int64_t b_row,
                        int64_t b_step, float *c, int64_t c_row, int64_t n, int add, const int far, int64_t ahead) {
    switch (rows) {
        HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6)
#if TALL
        HEIGHT(7) HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12)
#endif
    }
}

static void multiply(int rows, int64_t vectors, const float *a, int64_t a_row, const float *b, int64_t b_row,
                     int64_t b_step, float *c, int64_t c_row, int64_t n, int add) {
    multiply_as(rows, vectors, a, a_row, b, b_row, b_step, c, c_row, n, add, 0, 0);
}

/* c += a b, where b comes from far away. */
static void multiply_far(int rows, int64_t vectors, const float *a, int64_t a_row, const float *b, int64_t b_row,
                         float *c, int64_t c_row, int64_t n, int64_t ahead) {
    multiply_as(rows, vectors, a, a_row, b, b_row, PANEL, c, c_row, n, 1, 1, ahead);
}

/* o (rows x vectors * W) += e (rows x n) v (n x vectors * W) for one or two rows: in wide tiles, so that values which
   come from far away come in the order in which they lie, and many sums are under way at once. */
INLINE void mix_wide(const int rows, const int widest, int64_t vectors, const float *e, int64_t e_row, const float *v,
                     int64_t v_row, float *o, int64_t o_row, int64_t n, int64_t ahead) {
    for (; vectors >= widest; vectors -= widest, v += widest * W, o += widest * W)
        tile(rows, widest, e, e_row, v, v_row, o, o_row, n, 1, 1, ahead);
    if (widest > 4 && vectors & 4) {
        tile(rows, 4, e, e_row, v, v_row, o, o_row, n, 1, 1, ahead);
        v += 4 * W, o += 4 * W;
    }
    if (vectors & 2) {
        tile(rows, 2, e, e_row, v, v_row, o, o_row, n, 1, 1, ahead);
        v += 2 * W, o += 2 * W;
    }
    if (vectors & 1) tile(rows, 1, e, e_row, v, v_row, o, o_row, n, 1, 1, ahead);
}

/* o += e v for a strip; if `ahead` is not 0, the values that far away are wanted next. */
static void mix(int rows, int64_t vectors, const float *e, int64_t e_row, const float *v, int64_t v_row, float *o,
                int64_t o_row, int64_t n, int64_t ahead) {
    const int widest = REGISTERS > 16 ? WIDEST : WIDEST / 2;
    if (rows == 1) mix_wide(1, WIDEST, vectors, e, e_row, v, v_row, o, o_row, n, ahead);
    else if (rows == 2) mix_wide(2, widest, vectors, e, e_row, v, v_row, o, o_row, n, ahead);
    else
        for (int r = 0, height = rows > TILE_ROWS ? (rows + 1) / 2 : rows; r < rows; r += height) {
            int some = least(height, rows - r);
            if (ahead && !r) multiply_far(some, vectors, e, e_row, v, v_row, o, o_row, n, ahead);
            else multiply(some, vectors, e + r * e_row, e_row, v, v_row, PANEL, o + r * o_row, o_row, n, 1);
        }
}

/* ---- reading and writing ---- */

static int64_t width_of(int64_t kind) { return kind == F32 ? 4 : kind == BOOL ? 1 : 2; }

INLINE float number(const char *x, int64_t kind) {
    if (kind == F32) return *(const float *)x;
    return kind == BF16 ? from_bf16(*(const uint16_t *)x) : from_f16(*(const uint16_t *)x);
}

INLINE vf load_kind(const int kind, const char *x, int64_t i) {
    if (kind == F32) return load((const float *)x + i);
    return kind == BF16 ? load_bf16((const uint16_t *)x + i) : load_f16((const uint16_t *)x + i);
}

/* n numbers side by side into y, times a factor: whole vectors, the last of which may overlap the one before. */
INLINE void read_vectors(const int kind, float *y, const char *x, int64_t n, float factor) {
    for (int64_t i = 0; i + W <= n; i += W) store(y + i, load_kind(kind, x, i) * factor);
    if (n % W) store(y + n - W, load_kind(kind, x, n - W) * factor);
}

/* n numbers of any kind and stride into y, times a factor. */
static void read_row(float *y, const char *x, int64_t kind, int64_t stride, int64_t n, float factor) {
    if (stride != 1 || n < W)
        for (int64_t i = 0, size = width_of(kind); i < n; i++) y[i] = number(x + i * stride * size, kind) * factor;
    else if (kind == F32) read_vectors(F32, y, x, n, factor);
    else if (kind == BF16) read_vectors(BF16, y, x, n, factor);
    else read_vectors(F16, y, x, n, factor);
}

/* n numbers times a factor, in any kind; rows of the output lie whole. */
static void write_row(char *y, const float *x, int64_t kind, int64_t n, float factor) {
    if (kind == F32)
        for (int64_t i = 0; i < n; i++) ((float *)y)[i] = x[i] * factor;
    else if (kind == BF16)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = to_bf16(x[i] * factor);
    else
        for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = to_f16(x[i] * factor);
}

/* W keys from x on, row by row, into columns of a panel: W numbers of each at a time, turned. Of fewer keys the last
   stands for the others, and the last numbers of a key may be taken twice. */
INLINE void pack_columns(const int kind, float *y, const char *x, int64_t row, int64_t dim, int64_t count) {
    for (int64_t i = 0; i < dim; i += W) {
        int64_t from = least(i, dim - W);
        vf part[W];
        UNROLL for (int r = 0; r < W; r++) part[r] = load_kind(kind, x + least(r, count - 1) * row, from);
        transpose(part);
        UNROLL for (int r = 0; r < W; r++) store(y + (from + r) * PANEL, part[r]);
    }
}

/* Keys (count x dim) into panels [count / PANEL][dim][PANEL]. What fills up the last panel is never used. */
static void pack_keys(float *y, const char *x, const Call *call, int64_t count) {
    int64_t kind = call->kind, dim = call->dim, size = width_of(kind), row = call->k_stride[2] * size;
    for (int64_t j = 0; j < count; j += W) {
        float *to = y + j / PANEL * PANEL * dim + j % PANEL;
        const char *from = x + j * row;
        int64_t some = least(W, count - j);
        if (call->k_stride[3] != 1 || dim < W) {
            for (int64_t i = 0; i < dim; i++)
                for (int64_t r = 0; r < some; r++)
                    to[i * PANEL + r] = number(from + r * row + i * call->k_stride[3] * size, kind);
        } else if (kind == F32) pack_columns(F32, to, from, row, dim, some);
        else if (kind == BF16) pack_columns(BF16, to, from, row, dim, some);
        else pack_columns(F16, to, from, row, dim, some);
    }
}

/* s (rows x keys) = q . k, the keys as they lie: x row by row. Whole vectors; of the last one, which overlaps the one
   before, only what is new counts. Heads of less than a vector go by number. */
INLINE void dots(const int kind, const int rows, const int keys, const float *q, const char *x, int64_t row, int64_t dim,
                 float *s, int64_t line) {
    const int64_t size = kind == F32 ? 4 : 2;
    vf sums[8] = {{0}};
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
        vf key[4];
        UNROLL for (int j = 0; j < keys; j++) {
            key[j] = load_kind(kind, x + j * row, i);
            __builtin_prefetch(x + (j + AHEAD) * row + i * size); /* past the end it does no harm */
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = load(q + r * dim + i);
            UNROLL for (int j = 0; j < keys; j++) sums[r * keys + j] += left * key[j];
        }
    }
    if (i < dim && dim > W) {
        vi fresh = count_up() >= (float)(i + W - dim);
        vf key[4];
        UNROLL for (int j = 0; j < keys; j++) key[j] = only(fresh, load_kind(kind, x + j * row, dim - W));
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = only(fresh, load(q + r * dim + dim - W)); /* of both, since 0 times infinity is NaN */
            UNROLL for (int j = 0; j < keys; j++) sums[r * keys + j] += left * key[j];
        }
        i = dim;
    }
    UNROLL for (int first = 0; first < rows * keys; first += 4) { /* of one row, or two keys of two rows */
        v4 four = sum_of_four(sums + first);
        float *to = s + first / keys * line;
        memcpy(to, &four, 4 * keys);
        if (keys == 2) memcpy(to + line, (float *)&four + 2, 8);
    }
    for (; i < dim; i++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < keys; j++) s[r * line + j] += q[r * dim + i] * number(x + j * row + i * size, kind);
}

/* s (rows x count) = q . k for a few rows: packing the keys would cost more than it saves. */
INLINE void dot_kind(const int kind, int rows, const float *q, const char *x, const Call *call, float *s, int64_t line,
                     int64_t count) {
    int64_t dim = call->dim, row = call->k_stride[2] * (kind == F32 ? 4 : 2), j = 0;
    float rest[4];
    for (; j + 4 <= count; j += 4, x += 4 * row) {
        int r = 0;
        for (; r + 4 <= rows; r += 4) {
            dots(kind, 4, 2, q + r * dim, x, row, dim, s + r * line + j, line);
            dots(kind, 4, 2, q + r * dim, x + 2 * row, row, dim, s + r * line + j + 2, line);
        }
        for (; r + 2 <= rows; r += 2) dots(kind, 2, 4, q + r * dim, x, row, dim, s + r * line + j, line);
        if (r < rows) dots(kind, 1, 4, q + r * dim, x, row, dim, s + r * line + j, line);
    }
    for (; j < count; j++, x += row) /* the same key four times */
        for (int r = 0; r < rows; r++) {
            dots(kind, 1, 4, q + r * dim, x, 0, dim, rest, 4);
            s[r * line + j] = rest[0];
        }
}

static void dot(int rows, const float *q, const char *x, const Call *call, float *s, int64_t line, int64_t count) {
    if (call->kind == F32) dot_kind(F32, rows, q, x, call, s, line, count);
    else if (call->kind == BF16) dot_kind(BF16, rows, q, x, call, s, line, count);
    else dot_kind(F16, rows, q, x, call, s, line, count);
}

static void pack_values(float *y, int64_t width, const char *x, const Call *call, int64_t count) {
    int64_t row = call->v_stride[2] * width_of(call->kind);
    for (int64_t j = 0; j < count; j++, y += width) {
        read_row(y, x + j * row, call->kind, call->v_stride[3], call->value_dim, 1);
        for (int64_t i = call->value_dim; i < width; i++) y[i] = 0;
    }
}

/* ---- an item ---- */

/* What is kept of a row while its keys go by: see above. The sums are vectors, added up at the end. */
typedef struct {
    vf l, w, d;
    float m;
    float at[4];  /* e at the first, previous, next and own key */
    int32_t sees; /* whether it may look anywhere */
    int32_t beyond; /* whether a product q . k passed LIMIT */
    vf *c;        /* (class_count) */
    float *links; /* (link_count) largest scores, the largest first, */
    int32_t *best; /* and their keys */
    int64_t head, query, place; /* of the call; where it stands among the keys */
    int64_t low, high;          /* the keys that band and length let it see */
} Row;

/* The same for one row when its keys are done. */
typedef struct {
    float m, l, w, d, at[4], c[MOST_CLASSES], links[MOST_LINKS];
    int32_t sees, beyond, best[MOST_LINKS];
} Kept;

enum { KEPT_FLOATS = sizeof(Kept) / 4 };

typedef struct {
    const Call *call;
    const Plan *plan;
    int64_t batch, kv_head, rows, first_key;
    const char *k, *v;       /* of this sequence and KV head */
    const float *values;     /* of the block at hand, */
    int64_t value_row;       /* one to the next */
    int64_t spare;           /* from this key on they lie in `packed` */
    int odd;                 /* whether there are NaN or infinities among them */
    Row *row;
    float *q, *o, *s, *bias; /* (rows, dim), (rows, width), (STRIP_ROWS, key_block) twice */
    float *keys, *packed;    /* key blocks in panels; value blocks */
    vf *classes;             /* (rows, class_count) */
    float *links;            /* (rows, link_count) */
    int32_t *best;
    uint8_t *key_state, *value_state; /* a block: 1 packed or looked at, 2 also odd */
    float *key_size;                  /* a block: its largest number, where `bounds` */
    float reach; /* no part of a product is larger than this times the keys' largest number; inf: unknown */
} Item;

static int few(const Call *call, const Plan *p) { return p->rows <= FEW_ROWS && call->k_stride[3] == 1; }

/* Whether what keeps scores from overflowing is known from the packed keys and the queries: so many rows share the keys
   that it costs less than a look at the scores. */
static int bounds(const Call *call, const Plan *p) { return p->row_blocks > 1 && !few(call, p); }

/* Rows of a strip: as many as make all strips alike. */
static int64_t strip_rows(const Call *call, const Plan *p, int64_t rows) {
    int64_t strips = few(call, p) ? 1 : (rows + TILE_ROWS - 1) / TILE_ROWS;
    return (rows + strips - 1) / strips;
}

/* Whether values are used as they lie. Those that are read once may end in a part of a vector: the rest of it is the
   beginning of the next row, whose products nobody looks at. The last row has no next one, and is copied. */
static int in_place(const Call *call, const Plan *p) {
    const int64_t *stride = call->v_stride;
    int once = p->rows <= strip_rows(call, p, p->block_rows); /* a single strip */
    if (call->kind != F32 || stride[3] != 1) return 0;
    if (once && call->value_dim >= W && stride[2] >= call->value_dim) return 1;
    int aligned = (uintptr_t)call->v % (4 * W) == 0 && !(stride[0] % W || stride[1] % W || stride[2] % W);
    /* rows far apart compete for the same lines of the nearest cache when they are used again and again */
    return call->value_dim % W == 0 && aligned && (once || stride[2] == call->value_dim);
}

static void plan(const Call *call, Plan *p) {
    int64_t group = call->heads / call->kv_heads;
    p->rows = group * call->queries;
    p->block_rows = least(BLOCK_ROWS, most(1, p->rows));
    p->row_blocks = (p->rows + p->block_rows - 1) / p->block_rows;
    p->key_block = least(KEY_BLOCK, up(most(1, call->keys), PANEL));
    p->key_blocks = (call->keys + p->key_block - 1) / p->key_block;
    p->parts = 1;
    p->split = most(1, p->key_blocks);
    /* Heads are cut where there are few of them; never by the number of threads, with which the sums would change. */
    int64_t heads = call->batch * call->kv_heads, odd = heads < 8 && heads % 2, part = odd ? KEY_BLOCK : PART_KEYS;
    if (p->row_blocks == 1 && call->keys >= 2 * part) {
        p->split = part / p->key_block;
        p->parts = (p->key_blocks + p->split - 1) / p->split;
    } else if (p->row_blocks == 1 && odd && p->rows >= 2 * TILE_ROWS) {
        p->row_blocks = 2;
    }
    if (p->row_blocks > 1) /* alike, so that two threads have as much to do */
        p->block_rows = up((p->rows + p->row_blocks - 1) / p->row_blocks, TILE_ROWS);
    p->items = call->batch * call->kv_heads * p->row_blocks * p->parts;
    p->width = up(call->value_dim, W);
    p->part_floats = p->block_rows * (KEPT_FLOATS + p->width);
    int64_t kept = p->row_blocks > 1 ? p->key_blocks : 1, rows = up(p->block_rows, TILE_ROWS);
    int64_t packed = (in_place(call, p) ? 1 : kept * p->key_block) * p->width;
    int64_t each = sizeof(Row) + call->class_count * sizeof(vf) + call->link_count * 8; /* bytes of a row */
    p->room = 64 * 13 + rows * each + 2 * up(p->key_blocks, 64) + 4 * up(p->key_blocks, 16) +
              4 * (rows * (call->dim + p->width) + 2 * STRIP_ROWS * p->key_block + kept * p->key_block * call->dim + packed);
}

static void *take(char **from, int64_t bytes) {
    void *x = *from;
    *from += up(bytes, 64);
    return x;
}

/* Lengths out of a graph were never looked at. */
static int64_t end_of(const Call *call, int64_t batch) {
    return most(0, least(call->ends ? call->ends[batch] : call->end, call->keys));
}

/* Where a row stands, and the keys that band, length and padding let it see; its query is set. */
static void place_row(const Call *call, const Plan *p, int64_t batch, Row *row) {
    int64_t end = end_of(call, batch);
    row->place = row->query + (call->offsets ? call->offsets[batch] : call->offset);
    row->low = call->left < 0 ? 0 : most(0, row->place - call->left);
    row->high = call->right < 0 ? end : least(end, row->place + call->right + 1);
    if (p->low) {
        row->low = most(row->low, p->low[batch]);
        row->high = least(row->high, p->high[batch]);
    }
}

static int shows(const char *x, int64_t kind) { return kind == BOOL ? *x != 0 : number(x, kind) != -INFINITY; }

static int may_see(const Item *it, const Row *row, int64_t j) {
    const Call *call = it->call;
    if (j < row->low || j >= row->high) return 0;
    if (!call->mask) return 1;
    const int64_t *stride = call->mask_stride;
    int64_t at = it->batch * stride[0] + row->head * stride[1] + row->query * stride[2] + j * stride[3];
    const char *x = call->mask + at * width_of(call->mask_kind);
    return shows(x, call->mask_kind);
}

/* Of rows of n numbers, at least a vector of them. */
static int all_finite(const float *x, int64_t row, int64_t rows, int64_t n) {
    vf zero[4] = {{0}}; /* 0 * x is 0, or NaN */
    for (int64_t j = 0; j < rows; j++, x += row) {
        int64_t i = 0;
        for (; i + 4 * W <= n; i += 4 * W) UNROLL for (int u = 0; u < 4; u++) zero[u] += load(x + i + u * W) * 0.0f;
        for (; i + W <= n; i += W) zero[0] += load(x + i) * 0.0f;
        if (n % W) zero[1] += load(x + n - W) * 0.0f;
    }
    return sum(zero[0] + zero[1] + zero[2] + zero[3]) == 0;
}

/* The largest |x| of n numbers, whole vectors; NaN among them is passed over or stays. */
static float largest_size(const float *x, int64_t n) {
    vf size[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) UNROLL for (int u = 0; u < 4; u++)
        size[u] = larger(magnitude(load(x + i + u * W)), size[u]); /* in this order, so that NaN hides no infinity */
    for (; i < n; i += W) size[0] = larger(magnitude(load(x + i)), size[0]);
    vf top = larger(larger(size[0], size[1]), larger(size[2], size[3]));
    return any(~(top <= all(0x1.fffffep127f))) ? INFINITY : largest(top);
}

/* The keys of a block in panels, and its values; packed once for all row blocks of a head. Some row may not look at the
   keys before all_low, or from all_high on. */
static const float *fetch(Item *it, int64_t block, int64_t count, int64_t all_low, int64_t all_high) {
    const Call *call = it->call;
    const Plan *p = it->plan;
    int64_t size = width_of(call->kind), from = block * p->key_block, slot = p->row_blocks > 1 ? block : 0;
    float *keys = it->keys + slot * p->key_block * call->dim;
    const char *v = it->v + from * call->v_stride[2] * size;
    int here = in_place(call, p);
    float *values = here ? (float *)v : it->packed + slot * p->key_block * p->width;
    it->value_row = here ? call->v_stride[2] : p->width;
    it->spare = here && call->value_dim % W ? call->keys - 1 : call->keys;
    if (!it->key_state[block]) {
        if (!few(call, p)) pack_keys(keys, it->k + from * call->k_stride[2] * size, call, count);
        if (bounds(call, p)) it->key_size[block] = largest_size(keys, up(count, PANEL) * call->dim);
        if (!here) pack_values(values, p->width, v, call, count);
        else if (it->spare < call->keys && from + count == call->keys)
            pack_values(it->packed, p->width, v + (count - 1) * 4 * it->value_row, call, 1);
        it->key_state[block] = 1;
    }
    it->values = values;
    int64_t seen_from = call->mask ? count : most(0, least(count, all_low - from));
    int64_t seen_to = call->mask ? count : most(seen_from, least(count, all_high - from));
    int64_t n = here ? call->value_dim : p->width, row = it->value_row;
    it->odd = 0;
    if (p->row_blocks == 1) { /* nobody else asks, so only what is hidden is looked at */
        it->odd = !all_finite(values, row, seen_from, n) || !all_finite(values + seen_to * row, row, count - seen_to, n);
    } else if (seen_from > 0 || seen_to < count) {
        if (!it->value_state[block]) it->value_state[block] = all_finite(values, row, count, n) ? 1 : 2;
        it->odd = it->value_state[block] == 2;
    }
    return keys;
}

/* What the mask adds to a row's scores on keys from to from + n - 1, in units of log2; -inf where it hides. Gives
   whether it shows any of them. */
static int mask_row(float *y, const Item *it, const Row *row, int64_t from, int64_t n) {
    const Call *call = it->call;
    const int64_t *stride = call->mask_stride, kind = call->mask_kind, step = stride[3];
    int64_t at = it->batch * stride[0] + row->head * stride[1] + row->query * stride[2] + from * step, j = 0;
    vi shows = {0};
    if (kind == BOOL) {
        const char *x = call->mask + at;
        if (step == 1)
            for (int64_t i = 0; i < n; i++) y[i] = x[i] ? 0.0f : -INFINITY;
        else
            for (int64_t i = 0; i < n; i++) y[i] = x[i * step] ? 0.0f : -INFINITY;
    } else {
        read_row(y, call->mask + at * width_of(kind), kind, step, n, 1);
    }
    for (j = n; j % W; j++) y[j] = -INFINITY; /* up to whole vectors; nobody sees these */
    for (j = 0; j < n; j += W) {
        vf x = load(y + j), size = magnitude(x), most = all(0x1.fffffep127f);
        shows |= x != all(-INFINITY);
        /* the lowest number that is not -inf still hides nothing */
        vf held = larger(-most, -larger(-most, -(x * LOG2E)));
        if (kind != BOOL) store(y + j, either(size <= most, held, x));
    }
    return any(shows);
}

/* Keep the link_count largest scores of a row, the largest first; of equals, the first. */
static void keep_links(Row *row, const float *s, int64_t n, int64_t from, int count) {
    for (int64_t j = 0; j < n; j += W) {
        if (!any(load(s + j) > all(row->links[count - 1]))) continue;
        for (int64_t i = j; i < j + W; i++) {
            int at = count;
            while (at > 0 && s[i] > row->links[at - 1]) at--;
            if (at == count) continue;
            for (int x = count - 1; x > at; x--) row->links[x] = row->links[x - 1], row->best[x] = row->best[x - 1];
            row->links[at] = s[i];
            row->best[at] = from + i;
        }
    }
}

/* Nothing in this file may run when the library is loaded (no constructors): it is compiled for instruction sets that
   the processor may not have. */
_Static_assert((int)W <= (int)WIDEST_VECTOR, "headwise_distances is read in whole vectors");

/* The largest of n scores, whole vectors; a NaN among them may be passed over. */
INLINE float peak_of(const float *s, int64_t n) {
    vf top[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
    int64_t j = 0;
    for (; j + 4 * W <= n; j += 4 * W) UNROLL for (int i = 0; i < 4; i++) top[i] = larger(top[i], load(s + j + i * W));
    for (; j < n; j += W) top[0] = larger(top[0], load(s + j));
    return largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
}

/* Scores become e, and what is kept of the row moves on. s: n scores (whole vectors) from key `from` on, at most peak. */
INLINE void soften(const int wanted, Row *row, float *s, int64_t n, float peak, int64_t from, float *o, int64_t width,
                   const float *classes, int64_t class_count, int64_t keys) {
    float old = row->m, m = peak > old ? peak : old;
    row->m = m;
    if (m == -INFINITY) m = 0;
    vf before = row->l, w = row->w, d = row->d;
    if (old != -INFINITY) { /* f is 1 more often than not, but nobody could foretell when */
        vf fall = larger(all(LOWEST), all(old - m)), f = power_of_two(fall);
        for (int64_t i = 0; i < width; i += W) store(o + i, load(o + i) * f);
        before *= f;
        if (wanted) {
            w = f * w + fall * before;
            d *= f;
            for (int i = 0; i < 4; i++) row->at[i] *= f[0];
            for (int64_t i = 0; i < class_count; i++) row->c[i] *= f;
        }
    }
    vf l = before;
    int64_t step = from - row->place, near = step > 0 ? 0 : step < -KEY_BLOCK ? -KEY_BLOCK : step;
    const float *away = headwise_distances + KEY_BLOCK + near;
    for (int64_t j = 0; j < n; j += W) {
        vf t = larger(all(LOWEST), load(s + j) - m), e = power_of_two(t);
        store(s + j, e);
        l += e;
        if (wanted) {
            w += e * t;
            d += e * load(away + j);
        }
    }
    row->l = l;
    if (!wanted) return;
    row->w = w;
    row->d = d + (float)(step < near ? near - step : step - near) * (l - before);
    for (int64_t i = 0; i < class_count; i++) {
        const float *member = classes + i * keys + from;
        vf c = row->c[i];
        int64_t whole = least(n, (keys - from) / W * W), j = 0;
        for (; j < whole; j += W) c += load(s + j) * load(member + j);
        for (; j < n && from + j < keys; j++) c[0] += s[j] * member[j];
        row->c[i] = c;
    }
}

/* e at the first key, and at the ones around where the row stands; s begins at key `from`. */
INLINE void pick(Row *row, const float *s, int64_t low, int64_t high, int64_t from, int64_t first) {
    const int64_t spots[4] = {first, row->place - 1, row->place + 1, row->place};
    if (spots[0] >= low && spots[0] < high) row->at[0] += s[spots[0] - from];
    if (spots[2] < low || spots[1] >= high) return;
    for (int i = 1; i < 4; i++)
        if (spots[i] >= low && spots[i] < high) row->at[i] += s[spots[i] - from];
}

/* Softcap, what a mask adds, ALiBi: all that comes between the product and the softmax. s: n scores from key `from`. */
static void adjust(const Item *it, const Row *row, float *s, const float *bias, int64_t n, int64_t from) {
    const Call *call = it->call;
    if (call->softcap > 0) {
        float cap = call->softcap * LOG2E;
        for (int64_t j = 0; j < n; j += W) store(s + j, hyperbolic_tangent(load(s + j)) * cap);
    }
    if (call->slopes) {
        float slope = call->slopes[row->head] * LOG2E;
        vf away = count_up() + (float)(from - row->place);
        for (int64_t j = 0; j < n; j += W, away += (float)W) store(s + j, load(s + j) - slope * magnitude(away));
    }
    if (bias)
        for (int64_t j = 0; j < n; j += W) {
            vf more = load(bias + j), hidden = all(-INFINITY);
            store(s + j, either(more == hidden, hidden, load(s + j) + more));
        }
}

/* Whether the product of a row and a key that it sees, s[a] to s[b - 1], is past what scores may be. Any other number may
   lie in the rest of the vectors that hold them. */
static int passes(const Item *it, const Row *row, const float *s, int64_t a, int64_t b, int64_t from) {
    const Call *call = it->call;
    float limit = call->softcap > 0 ? LIMIT / call->softcap : LIMIT * LOG2E;
    if (it->reach < INFINITY && it->reach * it->key_size[from / it->plan->key_block] < 0.99f * limit) return 0;
    int64_t start = a / W * W;
    if (largest_size(s + start, up(b, W) - start) <= limit) return 0;
    for (int64_t j = a; j < b; j++)
        if (fabsf(s[j]) > limit && may_see(it, row, from + j)) return 1;
    return 0;
}

/* Values with NaN or infinities among them, key by key: they reach the rows that may look there, and no others. */
static void mix_odd(Item *it, Row *row, const float *s, float *o, int64_t low, int64_t high, int64_t from) {
    for (int64_t j = low; j < high; j++)
        if (may_see(it, row, j))
            for (int64_t i = 0; i < it->call->value_dim; i++) o[i] += s[j - from] * it->values[(j - from) * it->value_row + i];
}

/* In the vectors that hold a and b, what is before a or from b on becomes -inf. By whole vectors, since one that is
   loaded soon after several stores into it would wait for all of them. */
INLINE void hide_edges(float *s, int64_t a, int64_t b) {
    vf place = count_up(), hidden = all(-INFINITY);
    float *first = s + a / W * W, *last = s + b / W * W;
    if (a % W) store(first, either(place >= (float)(a % W), load(first), hidden));
    if (b % W) store(last, either(place < (float)(b % W), load(last), hidden));
}

/* A strip of rows meets the keys from `from` to `to` - 1 of a block. */
static void strip(Item *it, int64_t first, int rows, const float *keys, int64_t from, int64_t to) {
    const Call *call = it->call;
    const Plan *p = it->plan;
    int64_t dim = call->dim, width = p->width, line = p->key_block, low = to, high = from;
    Row *row = it->row + first;
    for (int r = 0; r < rows; r++) {
        if (row[r].low >= row[r].high) continue;
        low = least(low, most(row[r].low, from));
        high = most(high, least(row[r].high, to));
    }
    if (low >= high) return;

    int64_t start = (low - from) / PANEL * PANEL, stop = high - from; /* of s; whole panels are multiplied */
    int shared = call->mask && !call->mask_stride[1] && !call->mask_stride[2], shows = !call->mask;
    int shown[STRIP_ROWS];
    if (call->mask) {
        for (int r = 0; r < rows; r++) {
            if (r && shared) {
                shown[r] = shown[0];
                continue;
            }
            shown[r] = mask_row(it->bias + r * line + start, it, row + r, from + start, stop - start);
            shows |= shown[r];
        }
        if (!shows) return;
    }
    const float *q = it->q + first * dim;
    if (few(call, p)) {
        const char *k = it->k + (from + start) * call->k_stride[2] * width_of(call->kind);
        dot(rows, q, k, call, it->s + start, line, stop - start);
    } else {
        int64_t vectors = (stop - start + W - 1) / W;
        multiply(rows, vectors, q, dim, keys + start * dim, PANEL, PANEL * dim, it->s + start, line, dim, 0);
    }

    int adjusts = call->mask || call->softcap > 0 || call->slopes;
    int64_t head[STRIP_ROWS], tail[STRIP_ROWS]; /* the vectors that hold what a row sees; none where it sees nothing */
    float peak[STRIP_ROWS];
    for (int r = 0; r < rows; r++) {
        float *s = it->s + r * line;
        int64_t a = most(row[r].low, from) - from, b = least(row[r].high, to) - from; /* what this row sees */
        head[r] = a / W * W, tail[r] = up(b, W);
        if (a >= b || (call->mask && !shown[r])) {
            memset(s + start, 0, 4 * (stop - start));
            tail[r] = head[r];
            continue;
        }
        row[r].beyond |= passes(it, row + r, s, a, b, from);
        for (int64_t j = start; j < head[r]; j += W) store(s + j, all(0));
        for (int64_t j = tail[r]; j < stop; j += W) store(s + j, all(0));
        hide_edges(s, a, b);
        int64_t n = tail[r] - head[r], at = from + head[r];
        if (adjusts) {
            const float *bias = call->mask ? it->bias + (shared ? 0 : r) * line + head[r] : NULL;
            adjust(it, row + r, s + head[r], bias, n, at);
            hide_edges(s, a, b); /* softcap made a number of it */
        }
        if (!row[r].sees) {
            row[r].sees = !call->mask;
            for (int64_t j = from + a; j < from + b && !row[r].sees; j++) row[r].sees = may_see(it, row + r, j);
        }
        if (call->link_count) keep_links(row + r, s + head[r], n, at, call->link_count);
        peak[r] = peak_of(s + head[r], n);
    }
    /* in a loop of its own: here a row's first steps need not wait for the one before */
    const float *classes = call->classes ? call->classes + it->batch * call->class_count * call->keys : NULL;
    for (int r = 0; r < rows; r++) {
        float *s = it->s + r * line, *o = it->o + (first + r) * width;
        int64_t n = tail[r] - head[r], at = from + head[r];
        if (!n) continue;
        if (call->sums) {
            soften(1, row + r, s + head[r], n, peak[r], at, o, width, classes, call->class_count, call->keys);
            pick(row + r, s, most(row[r].low, from), least(row[r].high, to), from, it->first_key);
        } else {
            soften(0, row + r, s + head[r], n, peak[r], at, o, width, NULL, 0, 0);
        }
    }
    if (it->odd) {
        for (int r = 0; r < rows; r++)
            mix_odd(it, row + r, it->s + r * line, it->o + (first + r) * width, low, high, from);
        return;
    }
    /* values that are read only once come from far away: a few at a time, the next ones on their way meanwhile */
    int64_t once = p->row_blocks == 1, step = once ? 32 : high - low, end = least(high, it->spare);
    float *o = it->o + first * width;
    for (int64_t j = low; j < end; j += step) {
        const float *values = it->values + (j - from) * it->value_row;
        int64_t ahead = once && j + step < end ? step * it->value_row : 0;
        mix(rows, width / W, it->s + j - from, line, values, it->value_row, o, width, least(step, end - j), ahead);
    }
    if (end < high) mix(rows, width / W, it->s + end - from, line, it->packed, width, o, width, 1, 0);
}

/* ---- the end of a row ---- */

static void keep(const Call *call, const Row *row, Kept *kept) {
    const vf four[4] = {row->l, row->w, row->d};
    v4 sums = sum_of_four(four);
    kept->m = row->m;
    kept->l = sums[0];
    kept->sees = row->sees;
    kept->beyond = row->beyond;
    if (call->link_count) {
        memcpy(kept->links, row->links, 4 * call->link_count);
        memcpy(kept->best, row->best, 4 * call->link_count);
    }
    if (!call->sums) return;
    kept->w = sums[1];
    kept->d = sums[2];
    memcpy(kept->at, row->at, sizeof kept->at);
    for (int64_t i = 0; i < call->class_count; i++) kept->c[i] = sum(row->c[i]);
}

/* Bring what was kept relative to m down to a higher top. Gives the factor. */
static float lower_to(const Call *call, Kept *x, float top) {
    if (x->m == top) return 1;
    float f = x->m == -INFINITY ? 0 : exp2f(x->m - top);
    if (call->sums) {
        x->w = f == 0 ? 0 : f * (x->w + (x->m - top) * x->l);
        x->d *= f;
        for (int i = 0; i < 4; i++) x->at[i] *= f;
        for (int64_t i = 0; i < call->class_count; i++) x->c[i] *= f;
    }
    x->l *= f;
    return f;
}

/* Whether single precision may have failed a row: a product or a sum with its bias overflowed, or there is NaN. */
static int overflowed(const Kept *x) { return x->sees && (x->beyond || x->l != x->l || fabsf(x->m) == INFINITY); }

/* q . k in double precision; NaN and infinities are among the numbers where `finite` is 0. */
static double exact_dot(const Call *call, const char *q, const char *k, int *finite) {
    enum { SOME = 64, LANES = 8 };
    float a[SOME], b[SOME];
    double lane[LANES] = {0}, odd = 0, total = 0;
    int64_t size = width_of(call->kind);
    for (int64_t i = 0; i < call->dim; i += SOME) {
        int64_t n = least(SOME, call->dim - i);
        read_row(a, q + i * call->q_stride[3] * size, call->kind, call->q_stride[3], n, 1);
        read_row(b, k + i * call->k_stride[3] * size, call->kind, call->k_stride[3], n, 1);
        for (int64_t x = n; x % LANES; x++) a[x] = b[x] = 0;
        for (int64_t x = 0; x < n; x++) odd += a[x] * 0.0f + b[x] * 0.0f; /* 0 * x is 0, or NaN */
        for (int64_t x = 0; x < n; x += LANES)
            for (int y = 0; y < LANES; y++) lane[y] += (double)a[x + y] * b[x + y];
    }
    for (int y = 0; y < LANES; y++) total += lane[y];
    *finite = odd == 0;
    return total;
}

/* What the row adds to its score on key j, in nats; -inf where it may not look. */
static double exact_bias(const Item *it, const Row *row, int64_t j) {
    const Call *call = it->call;
    if (!may_see(it, row, j)) return -INFINITY;
    double bias = call->slopes ? -(double)call->slopes[row->head] * fabs((double)(j - row->place)) : 0;
    if (!call->mask || call->mask_kind == BOOL) return bias;
    const int64_t *stride = call->mask_stride;
    int64_t at = it->batch * stride[0] + row->head * stride[1] + row->query * stride[2] + j * stride[3];
    return bias + number(call->mask + at * width_of(call->mask_kind), call->mask_kind);
}

/* A row all over again, key by key in double precision. What is kept is as after `keep`; where NaN or infinities reach
   the row it stays as it is, NaN. Scores that differ at all at 1e38 differ by far more than an exponent holds. */
static void redo(const Call *call, const Plan *p, int64_t batch, int64_t head, int64_t query, Kept *kept, float *o) {
    int64_t size = width_of(call->kind), kv_head = head / (call->heads / call->kv_heads);
    const char *q = call->q + (batch * call->q_stride[0] + head * call->q_stride[1] + query * call->q_stride[2]) * size;
    const char *k = call->k + (batch * call->k_stride[0] + kv_head * call->k_stride[1]) * size;
    const char *v = call->v + (batch * call->v_stride[0] + kv_head * call->v_stride[1]) * size;
    Item it = {.call = call, .plan = p, .batch = batch};
    Row row = {.head = head, .query = query};
    place_row(call, p, batch, &row);
    const int64_t spots[4] = {p->first ? p->first[batch] : 0, row.place - 1, row.place + 1, row.place};
    double peak = -INFINITY, l = 0, w = 0, d = 0, at[4] = {0}, c[MOST_CLASSES] = {0}, links[MOST_LINKS];
    int32_t best[MOST_LINKS];
    for (int64_t i = 0; i < call->link_count; i++) links[i] = -INFINITY, best[i] = -1;
    for (int64_t i = 0; i < call->value_dim; i++) o[i] = 0;
    for (int64_t j = row.low; j < row.high; j++) {
        int finite;
        double bias = exact_bias(&it, &row, j);
        if (bias == -INFINITY) continue;
        double s = exact_dot(call, q, k + j * call->k_stride[2] * size, &finite) * call->scale;
        if (finite) s = fmax(-(double)LIMIT, fmin(s, LIMIT));
        if (call->softcap > 0) s = call->softcap * tanh(s / call->softcap);
        s = (s + bias) * 1.4426950408889634;
        if (!(s < INFINITY)) {
            kept->l = NAN;
            return;
        }
        if (s > peak) {
            double f = exp2(peak - s);
            w = l > 0 ? f * (w + (peak - s) * l) : 0;
            l *= f, d *= f;
            for (int i = 0; i < 4; i++) at[i] *= f;
            for (int64_t i = 0; i < call->class_count; i++) c[i] *= f;
            for (int64_t i = 0; i < call->value_dim; i++) o[i] *= f;
            peak = s;
        }
        double t = s == -INFINITY ? s : s - peak, e = exp2(t);
        l += e, d += e * fabs((double)(j - row.place));
        if (e > 0) w += e * t;
        for (int i = 0; i < 4; i++) at[i] += spots[i] == j ? e : 0;
        for (int64_t i = 0; i < call->class_count; i++)
            c[i] += e * call->classes[(batch * call->class_count + i) * call->keys + j];
        for (int64_t i = 0; i < call->value_dim; i++)
            o[i] += e * number(v + (j * call->v_stride[2] + i * call->v_stride[3]) * size, call->kind);
        int64_t place = call->link_count;
        while (place > 0 && s > links[place - 1]) place--;
        if (place == call->link_count) continue;
        for (int64_t x = call->link_count - 1; x > place; x--) links[x] = links[x - 1], best[x] = best[x - 1];
        links[place] = s, best[place] = j;
    }
    kept->m = peak == -INFINITY ? peak : fmax(-0x1.fffffep127, fmin(peak, 0x1.fffffep127));
    kept->l = l, kept->w = w, kept->d = d;
    for (int i = 0; i < 4; i++) kept->at[i] = at[i];
    for (int64_t i = 0; i < call->class_count; i++) kept->c[i] = c[i];
    for (int64_t i = 0; i < call->link_count; i++) {
        kept->links[i] = peak - links[i] < 200 ? kept->m + (float)(links[i] - peak) : -INFINITY;
        kept->best[i] = best[i];
    }
}

/* The output and the statistics of a row out of what was kept; o (width) is used up. */
static void finish(const Call *call, const Plan *p, Kept *x, float *o, int64_t batch, int64_t head, int64_t query,
                   double *sums) {
    if (overflowed(x)) redo(call, p, batch, head, query, x, o);
    float peak = x->m, sink = call->sinks ? call->sinks[head] * LOG2E : -INFINITY;
    float top = sink > peak ? sink : peak, f = 1;
    if (top == -INFINITY) top = 0;
    if (peak != -INFINITY) f = lower_to(call, x, top);
    float sunk = call->sinks ? exp2f(sink - top) : 0, total = x->l + sunk;
    if (total == 0) total = 1;
    float gate = call->gates ? call->gates[batch * call->gates_stride + head] : 1, share = 1 / total;
    const int64_t *stride = call->out_stride;
    int64_t at = batch * stride[0] + head * stride[1] + query * stride[2];
    if (!x->sees) memset(o, 0, 4 * call->value_dim);
    write_row(call->out + at * width_of(call->kind), o, call->kind, call->value_dim, f * share * gate);

    int64_t row = (batch * call->heads + head) * call->queries + query;
    if (call->lse) call->lse[row] = (top + log2f(x->l + sunk)) * LN2;
    for (int64_t i = 0; i < call->link_count; i++) {
        call->link_weight[row * call->link_count + i] = x->best[i] < 0 ? 0 : exp2f(x->links[i] - top) / total;
        call->link_key[row * call->link_count + i] = x->best[i];
    }
    if (!call->sums || !x->sees || (call->asked && !call->asked[batch * call->queries + query])) return;
    sums[COUNT] += 1;
    sums[ENTROPY] += (x->l * log2f(total) - x->w) * LN2 * share;
    sums[CONFIDENCE] += (peak == -INFINITY ? 0 : f) * share;
    sums[DISTANCE] += x->d * share;
    sums[FIRST] += x->at[0] * share;
    sums[PREVIOUS] += x->at[1] * share;
    sums[NEXT] += x->at[2] * share;
    sums[SELF] += x->at[3] * share;
    sums[SINK] += sunk * share;
    for (int64_t i = 0; i < call->class_count; i++) sums[CLASS + i] += x->c[i] * share;
}

static void merge_links(Kept *x, const Kept *y, int64_t count) {
    float links[MOST_LINKS];
    int32_t best[MOST_LINKS];
    for (int64_t i = 0, a = 0, b = 0; i < count; i++) {
        int mine = x->links[a] >= y->links[b] || y->best[b] < 0;
        links[i] = mine ? x->links[a] : y->links[b];
        best[i] = mine ? x->best[a++] : y->best[b++];
    }
    memcpy(x->links, links, 4 * count);
    memcpy(x->best, best, 4 * count);
}

/* All parts of the keys of KV head `group` (of all sequences'): the first part takes the others in, one by one. */
static void merge(const Call *call, const Plan *p, int64_t group) {
    int64_t heads = call->heads / call->kv_heads, batch = group / call->kv_heads;
    for (int64_t r = 0; r < p->rows; r++) {
        float *part = p->part + group * p->parts * p->part_floats;
        Kept *x = (Kept *)part + r;
        float *o = part + p->block_rows * KEPT_FLOATS + r * p->width;
        for (int64_t i = 1; i < p->parts; i++) {
            part += p->part_floats;
            Kept *y = (Kept *)part + r;
            const float *more = part + p->block_rows * KEPT_FLOATS + r * p->width;
            float top = y->m > x->m ? y->m : x->m;
            if (call->link_count) merge_links(x, y, call->link_count);
            x->sees |= y->sees;
            x->beyond |= y->beyond;
            float f = lower_to(call, x, top), g = lower_to(call, y, top);
            for (int64_t d = 0; d < call->value_dim; d++) o[d] = o[d] * f + more[d] * g;
            x->m = top;
            x->l += y->l;
            if (!call->sums) continue;
            x->w += y->w, x->d += y->d;
            for (int d = 0; d < 4; d++) x->at[d] += y->at[d];
            for (int64_t d = 0; d < call->class_count; d++) x->c[d] += y->c[d];
        }
        finish(call, p, x, o, batch, group % call->kv_heads * heads + r % heads, r / heads,
               p->item_sums + (group * p->parts * heads + r % heads) * SUMS);
    }
}

/* ---- all of it ---- */

static void begin_row(const Call *call, Item *it, int64_t at, int64_t r) {
    Row *row = it->row + at;
    int64_t group = call->heads / call->kv_heads;
    memset(row, 0, sizeof *row);
    row->m = -INFINITY;
    row->c = it->classes + at * call->class_count;
    row->links = it->links + at * call->link_count;
    row->best = it->best + at * call->link_count;
    memset(row->c, 0, call->class_count * sizeof(vf));
    for (int i = 0; i < call->link_count; i++) row->links[i] = -INFINITY, row->best[i] = -1;
    row->query = group == 1 ? r : r / group;
    row->head = it->kv_head * group + r - row->query * group;
    place_row(call, it->plan, it->batch, row);
}

/* The first key that exists for a sequence: that the mask shows to some row that counts. Past all where there is none. */
static int64_t first_key(const Call *call, int64_t batch) {
    int64_t first = end_of(call, batch), size = width_of(call->mask_kind);
    const int64_t *stride = call->mask_stride;
    for (int64_t h = 0; h < (stride[1] ? call->heads : 1); h++)
        for (int64_t i = 0; i < call->queries; i++) {
            if (call->asked && !call->asked[batch * call->queries + i]) continue;
            const char *x = call->mask + (batch * stride[0] + h * stride[1] + i * stride[2]) * size;
            for (int64_t j = 0; j < first; j++)
                if (shows(x + j * stride[3] * size, call->mask_kind)) first = j;
            if (!stride[2] || !first) break;
        }
    return first;
}

/* Where a mask that is the same for all rows, such as padding, shows its first key and its last. Gives whether that is
   all it says: keys in between are shown, and nothing is added to their scores. */
static int span(const Call *call, int64_t batch, int64_t *low, int64_t *high) {
    int64_t size = width_of(call->mask_kind), step = call->mask_stride[3] * size, end = end_of(call, batch);
    const char *x = call->mask + batch * call->mask_stride[0] * size;
    for (*low = 0; *low < end && !shows(x + *low * step, call->mask_kind);) ++*low;
    for (*high = end; *high > *low && !shows(x + (*high - 1) * step, call->mask_kind);) --*high;
    int64_t j = *low;
    while (call->mask_kind == BOOL && j < *high && x[j * step]) j++;
    return j == *high;
}

/* Rows of the output lie far apart, and a cache that waits for each of them would cost more than the sums. */
static void prefetch_output(const Call *call, int64_t batch, const Row *row) {
    const int64_t *stride = call->out_stride, size = width_of(call->kind);
    const char *x = call->out + (batch * stride[0] + row->head * stride[1] + row->query * stride[2]) * size;
    for (int64_t i = 0; i < call->value_dim * size; i += 64) __builtin_prefetch(x + i, 1);
}

static void item(const Call *call, const Plan *p, int64_t number, Room *room) {
    int64_t part = number % p->parts, block = number / p->parts % p->row_blocks;
    int64_t head = number / p->parts / p->row_blocks, group = call->heads / call->kv_heads;
    int64_t from_row = block * p->block_rows, size = width_of(call->kind);
    Item it = {.call = call, .plan = p, .batch = head / call->kv_heads, .kv_head = head % call->kv_heads};
    it.rows = least(p->block_rows, p->rows - from_row);
    it.first_key = p->first ? p->first[it.batch] : 0;
    it.k = call->k + (it.batch * call->k_stride[0] + it.kv_head * call->k_stride[1]) * size;
    it.v = call->v + (it.batch * call->v_stride[0] + it.kv_head * call->v_stride[1]) * size;

    int64_t kept = p->row_blocks > 1 ? p->key_blocks : 1, rows = up(p->block_rows, TILE_ROWS);
    char *memory = room->memory + (64 - (uintptr_t)room->memory % 64) % 64;
    it.row = take(&memory, rows * sizeof(Row));
    it.classes = take(&memory, rows * call->class_count * sizeof(vf));
    it.links = take(&memory, rows * call->link_count * 4);
    it.best = take(&memory, rows * call->link_count * 4);
    it.key_state = take(&memory, p->key_blocks);
    it.value_state = take(&memory, p->key_blocks);
    it.key_size = take(&memory, 4 * p->key_blocks);
    it.q = take(&memory, 4 * rows * call->dim);
    it.o = take(&memory, 4 * rows * p->width);
    it.s = take(&memory, 4 * STRIP_ROWS * p->key_block);
    it.bias = take(&memory, 4 * STRIP_ROWS * p->key_block);
    it.keys = take(&memory, 4 * kept * p->key_block * call->dim);
    it.packed = (float *)memory;
    if (room->head != head || p->row_blocks == 1) {
        memset(it.key_state, 0, p->key_blocks);
        memset(it.value_state, 0, p->key_blocks);
        room->head = head;
    }

    float scale = call->softcap > 0 ? call->scale / call->softcap : call->scale * 1.4426950408889634;
    int64_t low = call->keys, high = 0, all_low = 0, all_high = call->keys; /* seen by some row, and by all of them */
    for (int64_t r = 0; r < it.rows; r++) {
        Row *row = it.row + r;
        begin_row(call, &it, r, from_row + r);
        int64_t at = it.batch * call->q_stride[0] + row->head * call->q_stride[1] + row->query * call->q_stride[2];
        read_row(it.q + r * call->dim, call->q + at * size, call->kind, call->q_stride[3], call->dim, scale);
        all_low = most(all_low, row->low), all_high = least(all_high, row->high);
        if (row->low < row->high) low = least(low, row->low), high = most(high, row->high);
    }
    it.reach = bounds(call, p) ? call->dim * largest_size(it.q, up(it.rows * call->dim, W)) : INFINITY;
    memset(it.o, 0, 4 * it.rows * p->width);
    int64_t height = strip_rows(call, p, it.rows);
    low = most(low, part * p->split * p->key_block);
    high = least(high, (part + 1) * p->split * p->key_block);
    for (int64_t b = low / p->key_block; b * p->key_block < high; b++) {
        int64_t from = b * p->key_block, to = least(from + p->key_block, call->keys);
        const float *keys = fetch(&it, b, to - from, all_low, all_high);
        to = least(to, high);
        for (int64_t r = 0; r < it.rows; r += height) {
            int count = least(height, it.rows - r);
            for (int i = 0; to == high && i < count; i++) prefetch_output(call, it.batch, it.row + r + i);
            strip(&it, r, count, keys, from, to);
        }
    }

    float *out = p->parts > 1 ? p->part + number * p->part_floats : NULL;
    for (int64_t r = 0; r < it.rows; r++) {
        Kept one, *kept_row = out ? (Kept *)out + r : &one;
        keep(call, it.row + r, kept_row);
        if (!out)
            finish(call, p, kept_row, it.o + r * p->width, it.batch, it.row[r].head, it.row[r].query,
                   p->item_sums + (number * group + it.row[r].head - it.kv_head * group) * SUMS);
    }
    if (out) memcpy(out + p->block_rows * KEPT_FLOATS, it.o, 4 * it.rows * p->width);
}

#define JOIN(a, b) a##b
#define NAMED(isa) JOIN(headwise_, isa)
#define TEXT(x) #x
#define QUOTED(x) TEXT(x)
const Path NAMED(ISA) = {QUOTED(ISA), plan, item, merge, first_key, span};
