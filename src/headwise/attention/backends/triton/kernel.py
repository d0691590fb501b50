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


@triton.jit(
    do_not_specialize=["queries", "keys", "offset", "start", "keep_start", "end"]
)  # decoding changes them with every token
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
    number = tl.program_id(0)
    blocks = tl.cdiv(group * queries, ROWS)
    block = blocks - 1 - number % blocks  # late rows first: causal ones have the most keys
    kv_head = (number // blocks % kv_heads).to(tl.int64)
    batch = (number // blocks // kv_heads).to(tl.int64)

    row = block * ROWS + tl.arange(0, ROWS)  # indices are 64 bits wide from here on: strides may be anything
    if HEAD_BY_HEAD:
        query, head = (row % queries).to(tl.int64), kv_head * group + row // queries
    else:
        query, head = (row // group).to(tl.int64), kv_head * group + row % group
    exists = row < group * queries
    at = (batch * kv_heads * group + head) * queries + query  # among all rows of the call

    # the key position of each row, and the keys that band and length let it see
    position = query + (offset if offsets is None else tl.load(offsets + batch))
    begin = tl.maximum(0, start if starts is None else tl.load(starts + batch))
    last = tl.minimum(keys, end if ends is None else tl.load(ends + batch))
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
    first_block, stop = tl.min(low, 0) // KEYS * KEYS, tl.max(high, 0)
    # the first keys that stay visible, unless they are in the band anyway
    kept_low, kept_high, kept_block, kept_blocks = low, high * 0, first_block, 0
    if KEEPS:
        kept = begin * 0 + (keep_start if keep_starts is None else tl.load(keep_starts + batch))
        count = keep_first if windows is None else tl.load(windows + 3 * head + 2, mask=exists, other=0)
        kept_end = tl.minimum(last, kept + count + tl.zeros_like(position))
        if CAUSAL:
            kept_end = tl.minimum(kept_end, position + 1)
        kept_low = tl.zeros_like(position) + tl.maximum(begin, kept)
        keeps = exists & (kept_low < kept_end)
        kept_low = tl.where(keeps, kept_low, keys).to(tl.int32)
        kept_high = tl.where(keeps, kept_end, 0).to(tl.int32)
        sees = sees | keeps
        kept_block = tl.min(kept_low, 0) // KEYS * KEYS
        kept_blocks = tl.cdiv(tl.maximum(0, tl.max(kept_high, 0) - kept_block), KEYS)
    limit = tl.maximum(stop, tl.max(kept_high, 0))  # no row sees a key from here on
    band_blocks = tl.cdiv(tl.maximum(0, stop - first_block), KEYS)

    position_float = position.to(tl.float32)
    clamped = tl.minimum(tl.maximum(position, -2), keys + 1).to(tl.int32)  # clamped to just outside the keys
    slope = None if slopes is None else tl.load(slopes + head, mask=exists, other=0)
    shown = None if mask is None else mask + batch * mask_stride[0] + head * mask_stride[1] + query * mask_stride[2]
    if mask is not None:
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
        from_key = first_block + (turn - kept_blocks) * KEYS
        if KEEPS:
            from_key = tl.where(turn < kept_blocks, kept_block + turn * KEYS, from_key)
        j = from_key + tl.arange(0, KEYS)
        seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
        if KEEPS:
            among_kept = (j[None, :] >= kept_low[:, None]) & (j[None, :] < kept_high[:, None])
            seen = tl.where(turn < kept_blocks, among_kept & (seen == 0), seen)
        key = j.to(tl.int64)
        k_at = k + key[None, :] * k_stride[2] + d[:, None] * k_stride[3]
        key_block = tl.load(k_at, mask=(j < limit)[None, :] & (d < DIM)[:, None], other=0)  # (D, KEYS)
        if UPCAST:
            key_block = key_block.to(tl.float32)
        s = tl.dot(query_block, key_block, input_precision="ieee") * scale
        products = s
        s, seen = score_block(s, j, seen, position_float, softcap, slope, shown, mask_stride[3])
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
            DIM, VALUE_DIM, D, DV,
        )  # fmt: skip
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


@triton.jit
def score_block(s, j, seen, position_float, softcap, slope, shown, mask_step):
    """Scaled products (rows, keys) of the keys j -> scores, -inf where hidden, and which of them are visible.

    seen: what is visible but for the mask.
    """
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    if slope is not None:
        s -= slope[:, None] * tl.abs(j.to(tl.float32)[None, :] - position_float[:, None])
    if shown is not None:
        added = tl.load(shown[:, None] + j.to(tl.int64)[None, :] * mask_step, mask=seen, other=0)
        if added.dtype == tl.uint8:
            seen = seen & (added != 0)
        else:
            s += added.to(tl.float32)
            seen = seen & (added.to(tl.float32) != -INF)
    return tl.where(seen, s, -INF), seen


@triton.jit
def tanh(x):
    """tanh, by its series near 0, where the quotient would cancel."""
    e, y = tl.exp(-2 * tl.abs(x)), x * x
    series = x * (1 - y * (1 / 3 - y * (2 / 15 - y * (17 / 315 - y * (62 / 2835)))))
    quotient = (1 - e) / (1 + e)
    return tl.where(y < 0.0625, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def key_by_key(
    query_block, k, v, k_stride, v_stride, start, stop,
    low, high, kept_low, kept_high, position_float, scale, softcap, slope, shown, mask_step, top,
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
        s, seen = score_block(s, j, seen, position_float, softcap, slope, shown, mask_step)
        o = tl.where(seen, o + tl.exp(s - top[:, None]) * value.to(tl.float32)[None, :], o)
        has_nan = has_nan | (tl.max((seen & (products != products)).to(tl.int32), 1) > 0)
    return o, has_nan


@triton.jit
def write(at, exists, real, x):
    """Write a statistic of every row; 0 for those that do not count."""
    tl.store(at, tl.where(real, x, 0.0), mask=exists)
