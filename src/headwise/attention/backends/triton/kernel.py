"""attention.c for CUDA, in Triton: attention and exact statistics of every row of weights, in one pass over the keys.

The scores of a row arrive block by block, and m is their running maximum. Kept for every row, over the keys so far,
with t = s - m and e = exp(t):

    l = sum e        w = sum e t        d = sum e |i - j|        c = sum e over a class of keys        o = sum e v

When a block raises m to m', every sum is rescaled by f = exp(m - m'): l := f l, d, c and o alike, and since
t' = t + (m - m'),  w := f w + (m - m') f l.  At the end, with L = l + the sink's part:

    weight      a = e / L                          output      sum a v = o / L
    entropy     -sum a ln a = (l ln L - w) / L
    confidence  1 / L, the largest e being 1       distance    d / L         share of a class    c / L
    lse         m + ln L

A program computes a block of rows: queries of one KV head, those of the whole group at one position next to each
other, so that each key is read once per group. Scores, sums and statistics are fp32; 16-bit inputs are multiplied as
they are and summed in fp32, and the weights are rounded to the values' dtype before the product, as in every fused
kernel.

This module imports triton, so nothing may import it before a call needs it; launch.py does.
"""

# mypy: disable-error-code="no-untyped-def"
# what Triton compiles is annotated for Triton alone
import triton
import triton.language as tl

from ...stats import COLUMNS
from ..native import library

INF = tl.constexpr(float("inf"))
MAX_CLASSES = tl.constexpr(library.MAX_CLASSES)
# the columns of `sums`, in the order that all kernels share
ENTROPY = tl.constexpr(COLUMNS.index("entropy"))
CONFIDENCE = tl.constexpr(COLUMNS.index("confidence"))
FIRST = tl.constexpr(COLUMNS.index("first"))
DISTANCE = tl.constexpr(COLUMNS.index("distance"))
PREVIOUS = tl.constexpr(COLUMNS.index("previous"))
NEXT = tl.constexpr(COLUMNS.index("next"))
SELF = tl.constexpr(COLUMNS.index("self"))
SINK = tl.constexpr(COLUMNS.index("sink"))
LSE = tl.constexpr(COLUMNS.index("lse"))
MAX_LOGIT = tl.constexpr(COLUMNS.index("max_logit"))
COUNT = tl.constexpr(COLUMNS.index("count"))
CLASS = tl.constexpr(len(COLUMNS))
# decoding changes these with every token, and dropout with every call: kernels are not compiled for their values
CHANGING = ("queries", "keys", "offset", "start", "keep_start", "end", "seed_low", "seed_high", "threshold")


@triton.jit(do_not_specialize=CHANGING)
def attend(
    q, k, v, out,  # (B, H, Tq, DIM), (B, Hkv, Tk, DIM), (B, Hkv, Tk, VALUE_DIM), (B, H, Tq, VALUE_DIM)
    q_stride, k_stride, v_stride, out_stride,
    kv_heads, group, queries, keys,
    left, right, keep_first,  # visible keys before and after a query's position, None for open; and first keys
    windows,  # None, or int64 (H, 3): the same for each head, -1 for open
    offset, offsets, start, starts, keep_start, keep_starts, end, ends,  # or (B,) where sequences differ; else None
    mask, mask_stride,  # uint8 (0: hidden) or float, or None; strides are 0 where it is broadcast
    scale, softcap, sinks, slopes,  # the last three may be None; (H,)
    gates, gates_stride,  # None, or one number per head, and the stride between sequences
    seed_low, seed_high, threshold, factor,  # of dropout; threshold is None without it
    sums, column,  # None, or float32 (COLUMNS and CLASSES, B, H, Tq), and the stride between columns
    counted, first,  # uint8 (B, Tq), int64 (B,), or None
    classes,  # None, or uint8 (B, Tk): one bit per class that a key is in
    lse,  # None, or float32 (B, H, Tq)
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CLASSES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,  # the widths rounded up to powers of two
    ROWS: tl.constexpr, KEYS: tl.constexpr,  # of a block
    UPCAST: tl.constexpr,  # the interpreter would multiply the bits of bf16
    CAUSAL: tl.constexpr, KEEPS: tl.constexpr,  # whether any head keeps first keys, and only up to the query
    HEAD_BY_HEAD: tl.constexpr,  # the order of a KV head's rows, else query by query
    ADJUSTED: tl.constexpr,  # softcap, slopes or a float mask change the scores
):  # fmt: skip
    """One block of rows: output, statistics and log-sum-exp."""
    existing, band, kept = (start, starts, end, ends), (left, right, keep_first, windows), (keep_start, keep_starts)
    visibility = (existing, band, (offset, offsets), kept)
    block, kv_head, batch = place_block(tl.cdiv(group * queries, ROWS), kv_heads)
    query, head, exists = place_rows(block, kv_head, group, queries, ROWS, HEAD_BY_HEAD)
    at = (batch * kv_heads * group + head) * queries + query  # among all rows of the call
    position, low, high, kept_low, kept_high = visible_spans(
        query, head, exists, batch, keys, visibility, CAUSAL, KEEPS
    )
    sees = (low < high) | (kept_low < kept_high)
    first_block, band_blocks = key_blocks(low, high, KEYS)
    kept_block, kept_blocks = first_block, 0
    if KEEPS:
        kept_block, kept_blocks = key_blocks(kept_low, kept_high, KEYS)
    limit = tl.maximum(tl.max(high, 0), tl.max(kept_high, 0))  # no row sees a key from here on

    position_float = position.to(tl.float32)
    clamped = tl.minimum(tl.maximum(position, -2), keys + 1).to(tl.int32)  # clamped to just outside the keys
    slope = None if slopes is None else tl.load(slopes + head, mask=exists, other=0)[:, None]
    shown = None
    if mask is not None:
        shown = (mask + batch * mask_stride[0] + head * mask_stride[1] + query * mask_stride[2])[:, None]
        sees = sees & False  # until the mask shows a key

    d, dv = tl.arange(0, D).to(tl.int64), tl.arange(0, DV).to(tl.int64)
    q += batch * q_stride[0] + head[:, None] * q_stride[1] + query[:, None] * q_stride[2] + d[None, :] * q_stride[3]
    k += batch * k_stride[0] + kv_head * k_stride[1]
    v += batch * v_stride[0] + kv_head * v_stride[1]
    query_block = tl.load(q, mask=exists[:, None] & (d < DIM)[None, :], other=0)  # (ROWS, D)
    if UPCAST:
        query_block = query_block.to(tl.float32)

    m = tl.full([ROWS], -INF, tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, DV], tl.float32)
    if sums is not None:
        w, distance = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        on_first, on_previous = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        on_next, on_self = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        near, nearest = tl.max(tl.where(exists, clamped, -2), 0) + 1, tl.min(tl.where(exists, clamped, keys + 1), 0) - 1
        first_key = 0 if first is None else tl.load(first + batch)
        logit = tl.full([ROWS], -INF, tl.float32)  # the largest scale * q.k of a visible key, where it is not m
    if CLASSES > 0:
        name = tl.arange(0, MAX_CLASSES)
        classes += batch * keys
        on_class = tl.zeros([ROWS, MAX_CLASSES], tl.float32)

    for turn in range(kept_blocks + band_blocks):
        from_key = turn_start(turn, first_block, kept_block, kept_blocks, KEYS, KEEPS)
        j = from_key + tl.arange(0, KEYS)
        seen = seen_in_turn(turn, j, low, high, kept_low, kept_high, kept_blocks, KEEPS)
        key = j.to(tl.int64)
        k_at = k + key[None, :] * k_stride[2] + d[:, None] * k_stride[3]
        key_block = tl.load(k_at, mask=(j < limit)[None, :] & (d < DIM)[:, None], other=0)  # (D, KEYS)
        if UPCAST:
            key_block = key_block.to(tl.float32)
        s = tl.dot(query_block, key_block, input_precision="ieee") * scale
        products = s
        added, seen = mask_block(j[None, :], seen, shown, mask_stride[3])
        s = score_block(s, j[None, :], seen, position_float[:, None], softcap, slope, shown, added)
        if (sums is not None) and ADJUSTED:
            logit = tl.maximum(logit, tl.max(tl.where(seen, products, -INF), 1))
        if mask is not None:
            sees = sees | (tl.max(seen.to(tl.int32), 1) > 0)

        higher = tl.maximum(m, tl.max(s, 1))
        down = tl.where(m == -INF, 0.0, m - higher)  # no keys so far, nothing to rescale
        f = tl.exp(down)
        t = s - tl.where(higher == -INF, 0.0, higher)[:, None]
        e = tl.exp(t)
        if sums is not None:
            w = f * w + down * (f * l) + tl.sum(tl.where(t > -INF, e * t, 0.0), 1)
            distance = f * distance + tl.sum(e * tl.abs(j.to(tl.float32)[None, :] - position_float[:, None]), 1)
            on_first, on_previous, on_next, on_self = f * on_first, f * on_previous, f * on_next, f * on_self
            if (from_key <= first_key) & (first_key < from_key + KEYS):
                on_first += tl.sum(tl.where((j == first_key)[None, :], e, 0.0), 1)
            if (from_key <= near) & (nearest < from_key + KEYS):
                step = j[None, :] - clamped[:, None]
                on_previous += tl.sum(tl.where(step == -1, e, 0.0), 1)
                on_next += tl.sum(tl.where(step == 1, e, 0.0), 1)
                on_self += tl.sum(tl.where(step == 0, e, 0.0), 1)
        if CLASSES > 0:
            bits = tl.load(classes + key, mask=j < limit, other=0)
            on_class *= f[:, None]
            for i in tl.static_range(CLASSES):
                share = tl.sum(tl.where((bits & (1 << i) != 0)[None, :], e, 0.0), 1)
                on_class += tl.where((name == i)[None, :], share[:, None], 0.0)
        l = f * l + tl.sum(e, 1)  # noqa: E741
        m = higher

        v_at = v + key[:, None] * v_stride[2] + dv[None, :] * v_stride[3]
        value = tl.load(v_at, mask=(j < limit)[:, None] & (dv < VALUE_DIM)[None, :], other=0)  # (KEYS, DV)
        if UPCAST:
            value = value.to(tl.float32)
        if threshold is not None:
            keep = retained(from_key, query, head, batch, seed_low, seed_high, threshold, KEYS, False)
            e = tl.where(keep, e, 0.0)
        o = tl.dot(e.to(value.dtype), value, o * f[:, None], input_precision="ieee")

    sink = tl.full([ROWS], -INF, tl.float32) if sinks is None else tl.load(sinks + head, mask=exists, other=0)
    top = tl.maximum(m, sink)
    top = tl.where(top == -INF, 0.0, top)
    down = tl.where(m == -INF, 0.0, m - top)
    f = tl.exp(down)
    sink_part = tl.exp(sink - top)
    total = f * l + sink_part
    denominator = tl.where(total == 0, 1.0, total)

    o *= f[:, None]
    has_nan = sees & False
    # 0 * NaN is NaN, so NaN or infinity in a value may have reached rows that do not see it
    if tl.sum(tl.sum((tl.abs(o) < INF).to(tl.int32), 1), 0) < ROWS * DV:
        o, has_nan = key_by_key(
            query_block, k, v, k_stride, v_stride, tl.minimum(first_block, kept_block), limit,
            low, high, kept_low, kept_high, position_float, scale, softcap, slope, shown, mask_stride[3], top,
            query, head, batch, seed_low, seed_high, threshold, DIM, VALUE_DIM, D, DV,
        )  # fmt: skip
    if threshold is not None:
        o *= factor
    o = tl.where(sees[:, None], o / denominator[:, None], 0.0)
    if gates is not None:
        o *= tl.load(gates + batch * gates_stride + head, mask=exists, other=0)[:, None]
    out += batch * out_stride[0] + head[:, None] * out_stride[1] + query[:, None] * out_stride[2]
    o_exists = exists[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(out + dv[None, :] * out_stride[3], o.to(out.dtype.element_ty), mask=o_exists)

    if lse is not None:
        tl.store(lse + at, top + tl.log(total), mask=exists)
    if sums is not None:
        real = sees
        if counted is not None:
            real = sees & (tl.load(counted + batch * queries + query, mask=exists, other=0) != 0)
        sums += at
        w = f * w + down * (f * l)
        write(sums + column * ENTROPY, exists, real, (f * l * tl.log(denominator) - w) / denominator)
        write(sums + column * CONFIDENCE, exists, real, tl.where(m == -INF, 0.0, f) / denominator)
        write(sums + column * FIRST, exists, real, f * on_first / denominator)
        write(sums + column * DISTANCE, exists, real, f * distance / denominator)
        write(sums + column * PREVIOUS, exists, real, f * on_previous / denominator)
        write(sums + column * NEXT, exists, real, f * on_next / denominator)
        write(sums + column * SELF, exists, real, f * on_self / denominator)
        write(sums + column * SINK, exists, real, sink_part / denominator)
        write(sums + column * LSE, exists, real, top + tl.log(total))
        logit = tl.where(has_nan, float("nan"), logit if ADJUSTED else m)
        tl.store(sums + column * MAX_LOGIT, tl.where(real, logit, -INF), mask=exists)
        write(sums + column * COUNT, exists, real, tl.full([ROWS], 1.0, tl.float32))
        if CLASSES > 0:
            share = tl.where(real[:, None], on_class * (f / denominator)[:, None], 0.0)
            share_at = sums[:, None] + (name + CLASS)[None, :] * column
            tl.store(share_at, share, mask=exists[:, None] & (name < CLASSES)[None, :])


# ---- which rows and keys


@triton.jit
def place_block(blocks, kv_heads):
    """The block of rows, the KV head and the sequence of this program."""
    number = tl.program_id(0)
    block = blocks - 1 - number % blocks  # late rows first: causal ones have the most keys
    return block, (number // blocks % kv_heads).to(tl.int64), (number // blocks // kv_heads).to(tl.int64)


@triton.jit
def place_rows(block, kv_head, group, queries, ROWS: tl.constexpr, HEAD_BY_HEAD: tl.constexpr):
    """The query and the head of each row of a block, and whether there is one."""
    row = block * ROWS + tl.arange(0, ROWS)  # indices are 64 bits wide from here on: strides may be anything
    if HEAD_BY_HEAD:
        query, head = (row % queries).to(tl.int64), kv_head * group + row // queries
    else:
        query, head = (row // group).to(tl.int64), kv_head * group + row % group
    return query, head, row < group * queries


@triton.jit
def visible_spans(query, head, exists, batch, keys, visibility, CAUSAL: tl.constexpr, KEEPS: tl.constexpr):
    """The key position of each row, and the keys that it sees but for the mask: low to high - 1, its band, and kept_low
    to kept_high - 1, the first keys. A span without keys is `keys` to 0.
    """
    existing, band, place, kept = visibility
    left, right, keep_first, windows = band
    offset, offsets = place
    keep_start, keep_starts = kept
    position = query + (offset if offsets is None else tl.load(offsets + batch))
    begin, last = existing_keys(batch, keys, existing)
    low, high = tl.zeros_like(position) + begin, tl.zeros_like(position) + last
    if windows is not None:
        before = tl.load(windows + 3 * head, mask=exists, other=0)
        after = tl.load(windows + 3 * head + 1, mask=exists, other=0)
        low = tl.where(before < 0, low, tl.maximum(low, position - before))
        high = tl.where(after < 0, high, tl.minimum(high, position + after + 1))
    else:
        if left is not None:
            low = tl.maximum(low, position - left)
        if right is not None:
            high = tl.minimum(high, position + right + 1)
    sees = exists & (low < high)
    low, high = tl.where(sees, low, keys).to(tl.int32), tl.where(sees, high, 0).to(tl.int32)
    kept_low, kept_high = low, high * 0
    if KEEPS:
        kept_start = tl.zeros_like(position)
        kept_start += keep_start if keep_starts is None else tl.load(keep_starts + batch)
        count = keep_first if windows is None else tl.load(windows + 3 * head + 2, mask=exists, other=0)
        kept_end = tl.minimum(last, kept_start + count)
        if CAUSAL:
            kept_end = tl.minimum(kept_end, position + 1)
        kept_start = tl.maximum(begin, kept_start)
        keeps = exists & (kept_start < kept_end)
        kept_low, kept_high = tl.where(keeps, kept_start, keys).to(tl.int32), tl.where(keeps, kept_end, 0).to(tl.int32)
    return position, low, high, kept_low, kept_high


@triton.jit
def existing_keys(batch, keys, existing):
    """The keys begin to last - 1 of a sequence exist."""
    start, starts, end, ends = existing
    begin = tl.maximum(0, start if starts is None else tl.load(starts + batch))
    return begin, tl.minimum(keys, end if ends is None else tl.load(ends + batch))


@triton.jit
def key_blocks(low, high, KEYS: tl.constexpr):
    """The first key and the number of the blocks that hold the spans of all rows."""
    first = tl.min(low, 0) // KEYS * KEYS
    return first, tl.cdiv(tl.maximum(0, tl.max(high, 0) - first), KEYS)


@triton.jit
def turn_start(turn, first_block, kept_block, kept_blocks, KEYS: tl.constexpr, KEEPS: tl.constexpr):
    """The first key of a turn: those of the first keys' blocks come before those of the band."""
    from_key = first_block + (turn - kept_blocks) * KEYS
    if KEEPS:
        from_key = tl.where(turn < kept_blocks, kept_block + turn * KEYS, from_key)
    return from_key


@triton.jit
def seen_in_turn(turn, j, low, high, kept_low, kept_high, kept_blocks, KEEPS: tl.constexpr):
    """Which of the keys j each row sees in this turn: first keys unless they are in the band anyway, or the band."""
    seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
    if KEEPS:
        among_kept = (j[None, :] >= kept_low[:, None]) & (j[None, :] < kept_high[:, None])
        seen = tl.where(turn < kept_blocks, among_kept & (seen == 0), seen)
    return seen


# ---- scores


@triton.jit
def mask_block(j, seen, shown, mask_step):
    """What a mask adds to the scores of the keys j, and which of them are visible: those `seen` that it shows.

    All are (rows, keys) or (keys, rows): j runs along the keys, shown along the rows.
    """
    added = 0.0
    if shown is not None:
        added = tl.load(shown + j.to(tl.int64) * mask_step, mask=seen, other=0)
        seen = seen & (added != 0 if added.dtype == tl.uint8 else added.to(tl.float32) != -INF)
    return added, seen


@triton.jit
def score_block(s, j, seen, position_float, softcap, slope, shown, added):
    """Scaled products -> scores, -inf where hidden. position_float, slope and shown run along the rows."""
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    if slope is not None:
        s -= slope * tl.abs(j.to(tl.float32) - position_float)
    if shown is not None:  # noqa: SIM102  # Triton evaluates both sides of an `and`
        if added.dtype != tl.uint8:
            s += added.to(tl.float32)
    return tl.where(seen, s, -INF)


@triton.jit
def tanh(x):
    """tanh, by its series near 0, where the quotient would cancel."""
    e, y = tl.exp(-2 * tl.abs(x)), x * x
    series = x * (1 - y * (1 / 3 - y * (2 / 15 - y * (17 / 315 - y * (62 / 2835)))))
    quotient = (1 - e) / (1 + e)
    return tl.where(y < 0.0625, series, tl.where(x < 0, -quotient, quotient))


# ---- dropout


@triton.jit
def retained(
    from_key, query, head, batch, seed_low, seed_high, threshold, KEYS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Which weights of a block of keys dropout retains: (rows, KEYS), or (KEYS, rows).

    from_key is a multiple of KEYS, and KEYS divides 128.
    """
    if TRANSPOSED:
        lane, query, head = tl.arange(0, 16)[:, None], query[None, :], head[None, :]
    else:
        lane, query, head = tl.arange(0, 16)[None, :], query[:, None], head[:, None]
    if KEYS == 16:
        keep = retained_keys(from_key + lane, query, head, batch, seed_low, seed_high, threshold)
    else:
        # (rows, 16, ..., 2), or (16, rows, ..., 2)
        keep = retained_groups(from_key, lane, query, head, batch, seed_low, seed_high, threshold, KEYS)
        rows: tl.constexpr = keep.numel // KEYS
        if TRANSPOSED:
            if KEYS == 128:
                keep = tl.permute(keep, 2, 3, 4, 0, 1)
            elif KEYS == 64:
                keep = tl.permute(keep, 2, 3, 0, 1)
            else:
                keep = tl.permute(keep, 2, 0, 1)
            keep = tl.reshape(keep, [KEYS, rows]) != 0
        else:
            if KEYS == 128:
                keep = tl.permute(keep, 0, 2, 3, 4, 1)
            elif KEYS == 64:
                keep = tl.permute(keep, 0, 2, 3, 1)
            else:
                keep = tl.permute(keep, 0, 2, 1)
            keep = tl.reshape(keep, [rows, KEYS]) != 0
    return keep


@triton.jit
def retained_groups(from_key, lane, query, head, batch, seed_low, seed_high, threshold, KEYS: tl.constexpr):
    """The same with axes of 2 at the end, which number the groups of 16 keys: a call of the generator serves eight."""
    w0, w1, w2, w3 = random_words(from_key // 128 * 16 + lane, query, head, batch, seed_low, seed_high)
    first = from_key % 128  # of the 128 keys that the words serve
    if KEYS == 128:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    elif KEYS == 64:
        words = tl.join(tl.where(first < 64, w0, w2), tl.where(first < 64, w1, w3))
    else:
        words = tl.where(first < 64, tl.where(first < 32, w0, w1), tl.where(first < 96, w2, w3))
    low, high = (words & 0xFFFF).to(tl.int32) < threshold, (words >> 16).to(tl.int32) < threshold
    return tl.join(low.to(tl.int8), high.to(tl.int8))


@triton.jit
def retained_keys(j, query, head, batch, seed_low, seed_high, threshold):
    """The same for any keys j, with a call of the generator for each."""
    w0, w1, w2, w3 = random_words(j // 128 * 16 + j % 16, query, head, batch, seed_low, seed_high)
    first = j % 128
    word = tl.where(first < 64, tl.where(first < 32, w0, w1), tl.where(first < 96, w2, w3))
    return tl.where(first % 32 < 16, word & 0xFFFF, word >> 16).to(tl.int32) < threshold


@triton.jit
def random_words(lane, query, head, batch, seed_low, seed_high):
    """Four words of Philox4x32-7 for each lane and row, as headwise.attention.dropout defines them."""
    zero = (lane * 0 + query * 0).to(tl.uint32)
    return tl.philox_impl(
        zero + lane.to(tl.uint32),
        zero + query.to(tl.uint32),
        zero + head.to(tl.uint32),
        zero + batch.to(tl.uint32),
        seed_low.to(tl.uint32, bitcast=True),
        seed_high.to(tl.uint32, bitcast=True),
        7,
    )


# ---- values that are not finite


@triton.jit
def key_by_key(
    query_block, k, v, k_stride, v_stride, start, stop,
    low, high, kept_low, kept_high, position_float, scale, softcap, slope, shown, mask_step, top,
    query, head, batch, seed_low, seed_high, threshold,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """sum e v again, with NaN and infinities in values added to the rows that see them, and to no others.

    Also which rows see a key whose product with the query is NaN. Slow, and rarely needed.
    """
    d, dv = tl.arange(0, D).to(tl.int64), tl.arange(0, DV).to(tl.int64)
    o = tl.zeros([query_block.shape[0], DV], tl.float32)
    has_nan = low < -1  # none
    query_block = query_block.to(tl.float32)
    for at in range(start, stop):
        j = at + tl.arange(0, 1)
        key = tl.load(k + j.to(tl.int64) * k_stride[2] + d * k_stride[3], mask=d < DIM, other=0).to(tl.float32)
        value = tl.load(v + j.to(tl.int64) * v_stride[2] + dv * v_stride[3], mask=dv < VALUE_DIM, other=0)
        s = tl.sum(query_block * key[None, :], 1)[:, None] * scale
        seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        seen = seen | ((j[None, :] >= kept_low[:, None]) & (j[None, :] < kept_high[:, None]))
        products = s
        added, seen = mask_block(j[None, :], seen, shown, mask_step)
        s = score_block(s, j[None, :], seen, position_float[:, None], softcap, slope, shown, added)
        e = tl.exp(s - top[:, None])
        if threshold is not None:
            keep = retained_keys(j[None, :], query[:, None], head[:, None], batch, seed_low, seed_high, threshold)
            e = tl.where(keep, e, 0.0)
        o = tl.where(seen, o + e * value.to(tl.float32)[None, :], o)
        has_nan = has_nan | (tl.max((seen & (products != products)).to(tl.int32), 1) > 0)
    return o, has_nan


@triton.jit
def write(at, exists, real, x):
    """Write a statistic of every row; 0 for those that do not count."""
    tl.store(at, tl.where(real, x, 0.0), mask=exists)
