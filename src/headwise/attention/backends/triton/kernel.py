"""attention.c for CUDA, in Triton: attention and exact statistics of every row of weights, in one pass over the keys.

The scores of a row come block by block, and m is the largest so far. Kept for every row, over the keys seen so far,
with t = s - m and e = exp(t):

    l = sum e        w = sum e t        d = sum e |i - j|        c = sum e over a class of keys        o = sum e v

When a block raises m to m', every kept sum is brought down by f = exp(m - m'): l := f l, d, c and o alike, and since
t' = t + (m - m'),  w := f w + (m - m') f l.  At the end, with L = l + the sink's part:

    weight      a = e / L                          output      sum a v = o / L
    entropy     -sum a ln a = (l ln L - w) / L
    confidence  1 / L, the largest e being 1       distance    d / L         share of a class    c / L

A program takes a block of rows: queries of one KV head, the whole group's, those of one position side by side, so that
each key is read once a group. Scores, sums and statistics are fp32; 16-bit inputs are multiplied as they are and
summed in fp32, and the weights are rounded to the values' dtype before they meet, as in every fused kernel.

This module imports triton, so nothing may import it before a call needs it; cuda.py does.
"""

# mypy: disable-error-code="no-untyped-def"
# what Triton compiles is annotated for Triton alone
import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
MOST_CLASSES = tl.constexpr(8)


@triton.jit(do_not_specialize=["queries", "keys", "offset", "end"])  # decoding changes them with every token
def attend(
    q, k, v, out,  # (B, H, Tq, DIM), (B, Hkv, Tk, DIM), (B, Hkv, Tk, VALUE_DIM), (B, H, Tq, VALUE_DIM)
    q_stride, k_stride, v_stride, out_stride,
    kv_heads, group, queries, keys,
    left, right,  # how far a query sees, None for open
    offset, offsets, end, ends,  # for all sequences, or (B,) where they differ; else None
    mask, mask_stride,  # uint8 (0: hidden) or float, or None; strides are 0 where it is broadcast
    scale, softcap, sinks, slopes,  # the last three may be None; (H,)
    gates, gates_stride,  # None, or a number a head, the next sequence's so much further on
    sums, column,  # None, or float32 (9 + CLASSES, B, H, Tq), from one to the next so far: SUMS in cuda.py, classes
    asked, first,  # uint8 (B, Tq), int64 (B,), or None
    classes,  # None, or uint8 (B, Tk): a bit for every class that a key is in
    lse,  # None, or float32 (B, H, Tq)
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CLASSES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,  # the widths rounded up to powers of two
    ROWS: tl.constexpr, KEYS: tl.constexpr,  # of a block
    UPCAST: tl.constexpr,  # the interpreter would multiply the bits of bf16
):  # fmt: skip
    """One block of rows: output, statistics and log-sum-exp."""
    number = tl.program_id(0)
    blocks = tl.cdiv(group * queries, ROWS)
    block = blocks - 1 - number % blocks  # late rows first: causal ones see the most
    kv_head = (number // blocks % kv_heads).to(tl.int64)
    batch = (number // blocks // kv_heads).to(tl.int64)

    row = block * ROWS + tl.arange(0, ROWS)  # indices are 64 bits wide from here on: strides may be anything
    query, head = (row // group).to(tl.int64), kv_head * group + row % group
    there = query < queries
    at = (batch * kv_heads * group + head) * queries + query  # among all rows of the call

    # where each row stands among the keys, and which of them band and length let it see
    place = query + (offset if offsets is None else tl.load(offsets + batch))
    last = tl.minimum(keys, end if ends is None else tl.load(ends + batch))
    low = tl.zeros_like(place) if left is None else tl.maximum(0, place - left)
    high = tl.zeros_like(place) + last if right is None else tl.minimum(last, place + right + 1)
    sees = there & (low < high)
    low, high = tl.where(sees, low, keys).to(tl.int32), tl.where(sees, high, 0).to(tl.int32)
    start, stop = tl.min(low, 0) // KEYS * KEYS, tl.max(high, 0)

    far = place.to(tl.float32)
    spot = tl.minimum(tl.maximum(place, -2), keys + 1).to(tl.int32)  # the same, where it is near any key
    slope = None if slopes is None else tl.load(slopes + head, mask=there, other=0)
    shown = None if mask is None else mask + batch * mask_stride[0] + head * mask_stride[1] + query * mask_stride[2]
    if mask is not None:
        sees = sees & False  # until a key shows

    d, dv = tl.arange(0, D).to(tl.int64), tl.arange(0, DV).to(tl.int64)
    q += batch * q_stride[0] + head[:, None] * q_stride[1] + query[:, None] * q_stride[2] + d[None, :] * q_stride[3]
    k += batch * k_stride[0] + kv_head * k_stride[1]
    v += batch * v_stride[0] + kv_head * v_stride[1]
    asking = tl.load(q, mask=there[:, None] & (d < DIM)[None, :], other=0)  # (ROWS, D)
    if UPCAST:
        asking = asking.to(tl.float32)

    m = tl.full([ROWS], -INF, tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, DV], tl.float32)
    if sums is not None:
        w, away = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        on_first, on_previous = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        on_next, on_self = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        near, nearest = tl.max(tl.where(there, spot, -2), 0) + 1, tl.min(tl.where(there, spot, keys + 1), 0) - 1
        first_key = 0 if first is None else tl.load(first + batch)
    if CLASSES > 0:
        name = tl.arange(0, MOST_CLASSES)
        classes += batch * keys
        on_class = tl.zeros([ROWS, MOST_CLASSES], tl.float32)

    for from_key in range(start, stop, KEYS):
        j = from_key + tl.arange(0, KEYS)
        key = j.to(tl.int64)
        k_at = k + key[None, :] * k_stride[2] + d[:, None] * k_stride[3]
        asked_of = tl.load(k_at, mask=(j < stop)[None, :] & (d < DIM)[:, None], other=0)  # (D, KEYS)
        if UPCAST:
            asked_of = asked_of.to(tl.float32)
        s = tl.dot(asking, asked_of, input_precision="ieee") * scale
        s, seen = judge(s, j, low, high, far, softcap, slope, shown, mask_stride[3])
        if mask is not None:
            sees = sees | (tl.max(seen.to(tl.int32), 1) > 0)

        higher = tl.maximum(m, tl.max(s, 1))
        down = tl.where(m == -INF, 0.0, m - higher)  # of nothing there is nothing to bring down
        f = tl.exp(down)
        t = s - tl.where(higher == -INF, 0.0, higher)[:, None]
        e = tl.exp(t)
        if sums is not None:
            w = f * w + down * (f * l) + tl.sum(tl.where(t > -INF, e * t, 0.0), 1)
            away = f * away + tl.sum(e * tl.abs(j.to(tl.float32)[None, :] - far[:, None]), 1)
            on_first, on_previous, on_next, on_self = f * on_first, f * on_previous, f * on_next, f * on_self
            if (from_key <= first_key) & (first_key < from_key + KEYS):
                on_first += tl.sum(tl.where((j == first_key)[None, :], e, 0.0), 1)
            if (from_key <= near) & (nearest < from_key + KEYS):
                step = j[None, :] - spot[:, None]
                on_previous += tl.sum(tl.where(step == -1, e, 0.0), 1)
                on_next += tl.sum(tl.where(step == 1, e, 0.0), 1)
                on_self += tl.sum(tl.where(step == 0, e, 0.0), 1)
        if CLASSES > 0:
            bits = tl.load(classes + key, mask=j < stop, other=0)
            on_class *= f[:, None]
            for i in tl.static_range(CLASSES):
                share = tl.sum(tl.where((bits & (1 << i) != 0)[None, :], e, 0.0), 1)
                on_class += tl.where((name == i)[None, :], share[:, None], 0.0)
        l = f * l + tl.sum(e, 1)  # noqa: E741
        m = higher

        v_at = v + key[:, None] * v_stride[2] + dv[None, :] * v_stride[3]
        value = tl.load(v_at, mask=(j < stop)[:, None] & (dv < VALUE_DIM)[None, :], other=0)  # (KEYS, DV)
        if UPCAST:
            value = value.to(tl.float32)
        o = tl.dot(e.to(value.dtype), value, o * f[:, None], input_precision="ieee")

    sink = tl.full([ROWS], -INF, tl.float32) if sinks is None else tl.load(sinks + head, mask=there, other=0)
    top = tl.maximum(m, sink)
    top = tl.where(top == -INF, 0.0, top)
    down = tl.where(m == -INF, 0.0, m - top)
    f = tl.exp(down)
    sunk = tl.exp(sink - top)
    total = f * l + sunk
    whole = tl.where(total == 0, 1.0, total)

    o *= f[:, None]
    # 0 * NaN is NaN, so what is odd in a value may have reached those who may not look at it
    if tl.sum(tl.sum((tl.abs(o) < INF).to(tl.int32), 1), 0) < ROWS * DV:
        o = key_by_key(
            asking, k, v, k_stride, v_stride, start, stop, low, high, far, scale, softcap, slope, shown,
            mask_stride[3], top, DIM, VALUE_DIM, D, DV,
        )  # fmt: skip
    o = tl.where(sees[:, None], o / whole[:, None], 0.0)
    if gates is not None:
        o *= tl.load(gates + batch * gates_stride + head, mask=there, other=0)[:, None]
    out += batch * out_stride[0] + head[:, None] * out_stride[1] + query[:, None] * out_stride[2]
    o_there = there[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(out + dv[None, :] * out_stride[3], o.to(out.dtype.element_ty), mask=o_there)

    if lse is not None:
        tl.store(lse + at, top + tl.log(total), mask=there)
    if sums is not None:
        real = sees
        if asked is not None:
            real = sees & (tl.load(asked + batch * queries + query, mask=there, other=0) != 0)
        sums += at
        w = f * w + down * (f * l)
        write(sums, there, real, (f * l * tl.log(whole) - w) / whole)
        write(sums + column, there, real, tl.where(m == -INF, 0.0, f) / whole)
        write(sums + 2 * column, there, real, f * on_first / whole)
        write(sums + 3 * column, there, real, f * away / whole)
        write(sums + 4 * column, there, real, f * on_previous / whole)
        write(sums + 5 * column, there, real, f * on_next / whole)
        write(sums + 6 * column, there, real, f * on_self / whole)
        write(sums + 7 * column, there, real, sunk / whole)
        write(sums + 8 * column, there, real, tl.full([ROWS], 1.0, tl.float32))
        if CLASSES > 0:
            share = tl.where(real[:, None], on_class * (f / whole)[:, None], 0.0)
            share_at = sums[:, None] + (9 + name)[None, :] * column
            tl.store(share_at, share, mask=there[:, None] & (name < CLASSES)[None, :])


@triton.jit
def judge(s, j, low, high, far, softcap, slope, shown, mask_step):
    """Scaled products (rows, keys) of the keys j -> scores, -inf where hidden, and which of them a row may see."""
    seen = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    if slope is not None:
        s -= slope[:, None] * tl.abs(j.to(tl.float32)[None, :] - far[:, None])
    if shown is not None:
        more = tl.load(shown[:, None] + j.to(tl.int64)[None, :] * mask_step, mask=seen, other=0)
        if more.dtype == tl.uint8:
            seen = seen & (more != 0)
        else:
            s += more.to(tl.float32)
            seen = seen & (more.to(tl.float32) != -INF)
    return tl.where(seen, s, -INF), seen


@triton.jit
def tanh(x):
    """By its series near 0, where the quotient would cancel."""
    e, y = tl.exp(-2 * tl.abs(x)), x * x
    series = x * (1 - y * (1 / 3 - y * (2 / 15 - y * (17 / 315 - y * (62 / 2835)))))
    quotient = (1 - e) / (1 + e)
    return tl.where(y < 0.0625, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def key_by_key(
    asking, k, v, k_stride, v_stride, start, stop, low, high, far, scale, softcap, slope, shown, mask_step, top,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """sum e v again, with a value's NaN or infinities added to the rows that may look there, and to no others.

    Slow, and hardly ever needed.
    """
    d, dv = tl.arange(0, D).to(tl.int64), tl.arange(0, DV).to(tl.int64)
    o = tl.zeros([asking.shape[0], DV], tl.float32)
    asking = asking.to(tl.float32)
    for at in range(start, stop):
        j = at + tl.arange(0, 1)
        key = tl.load(k + j.to(tl.int64) * k_stride[2] + d * k_stride[3], mask=d < DIM, other=0).to(tl.float32)
        value = tl.load(v + j.to(tl.int64) * v_stride[2] + dv * v_stride[3], mask=dv < VALUE_DIM, other=0)
        s = tl.sum(asking * key[None, :], 1)[:, None] * scale
        s, seen = judge(s, j, low, high, far, softcap, slope, shown, mask_step)
        o = tl.where(seen, o + tl.exp(s - top[:, None]) * value.to(tl.float32)[None, :], o)
    return o


@triton.jit
def write(at, there, real, x):
    """A statistic of every row; 0 for those that do not count."""
    tl.store(at, tl.where(real, x, 0.0), mask=there)
