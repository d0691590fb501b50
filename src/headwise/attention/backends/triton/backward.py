"""backward.c for CUDA, in Triton: the gradients of queries, keys and values from that of the output.

The weights are computed again, block by block, from each row's log-sum-exp. With scores S, O the output, G its
gradient, c the softcap, th = tanh(scale q . k / c), and Z = 1 / (share retained) where dropout retains a weight, else
0:

    P  = exp(S - lse)         D  = rowsum(G * O)         dP = G V^T * Z       dS = P * (dP - D) (1 - th^2)
    dQ = scale dS K           dK = scale dS^T Q          dV = (P * Z)^T G

without Z where there is no dropout, and without 1 - th^2 where there is no softcap. Hidden keys have P = dS = 0.

One program computes the dQ of a block of rows, over all keys that they see; after all of these, one program computes
the dK and dV of a block of keys of one KV head, over the rows of all its query heads that see them. No sum is shared by
two programs, so results are the same from run to run. Sums are fp32; P and dS are rounded to the inputs' dtype before a
product, as the weights are in the forward pass.

Rows that see no key of a block, and keys that no row of a block sees, are excluded from its products: they may contain
NaN, and 0 * NaN is NaN.

This module imports triton, so nothing may import it before a call needs it; launch.py does.
"""

# mypy: disable-error-code="no-untyped-def"
# what Triton compiles is annotated for Triton alone
import triton
import triton.language as tl

from .kernel import (
    CHANGING,
    existing_keys,
    key_blocks,
    mask_block,
    place_block,
    place_rows,
    retained,
    score_block,
    seen_in_turn,
    tanh,
    turn_start,
    visible_spans,
)


@triton.jit(do_not_specialize=CHANGING)
def query_gradients(
    q, k, v, out, grad_out,  # as in the forward pass; grad_out like out
    q_stride, k_stride, v_stride, out_stride, grad_stride,
    lse, delta, grad_q,  # float32 (B, H, Tq) both, of which delta is written; (B, Tq, H, DIM)
    kv_heads, group, queries, keys,
    left, right, keep_first, windows, offset, offsets, start, starts, keep_start, keep_starts, end, ends,
    mask, mask_stride, scale, softcap, slopes, seed_low, seed_high, threshold, factor,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
    CAUSAL: tl.constexpr, KEEPS: tl.constexpr, HEAD_BY_HEAD: tl.constexpr,
):  # fmt: skip
    """One block of rows: dQ, and D (0 for rows that see no key)."""
    existing, band, kept = (start, starts, end, ends), (left, right, keep_first, windows), (keep_start, keep_starts)
    visibility = (existing, band, (offset, offsets), kept)
    block, kv_head, batch = place_block(tl.cdiv(group * queries, ROWS), kv_heads)
    query, head, exists = place_rows(block, kv_head, group, queries, ROWS, HEAD_BY_HEAD)
    at = (batch * kv_heads * group + head) * queries + query
    position, low, high, kept_low, kept_high = visible_spans(
        query, head, exists, batch, keys, visibility, CAUSAL, KEEPS
    )
    sees = (low < high) | (kept_low < kept_high)
    first_block, band_blocks = key_blocks(low, high, KEYS)
    kept_block, kept_blocks = first_block, 0
    if KEEPS:
        kept_block, kept_blocks = key_blocks(kept_low, kept_high, KEYS)

    position_float = position.to(tl.float32)[:, None]
    slope = None if slopes is None else tl.load(slopes + head, mask=exists, other=0)[:, None]
    shown = None
    if mask is not None:
        shown = (mask + batch * mask_stride[0] + head * mask_stride[1] + query * mask_stride[2])[:, None]
        sees = sees & False  # until the mask shows a key

    d, dv = tl.arange(0, D).to(tl.int64), tl.arange(0, DV).to(tl.int64)
    has_d, has_dv = exists[:, None] & (d < DIM)[None, :], exists[:, None] & (dv < VALUE_DIM)[None, :]
    query_block = load_rows(q, q_stride, batch, head[:, None], query[:, None], d[None, :], has_d, UPCAST)
    grad = load_rows(grad_out, grad_stride, batch, head[:, None], query[:, None], dv[None, :], has_dv, UPCAST)
    o = load_rows(out, out_stride, batch, head[:, None], query[:, None], dv[None, :], has_dv, UPCAST)
    row_delta = tl.sum(grad.to(tl.float32) * o.to(tl.float32), 1)
    row_lse = tl.load(lse + at, mask=exists, other=0)
    dq = tl.zeros([ROWS, D], tl.float32)

    for turn in range(kept_blocks + band_blocks):
        from_key = turn_start(turn, first_block, kept_block, kept_blocks, KEYS, KEEPS)
        j = from_key + tl.arange(0, KEYS)
        seen = seen_in_turn(turn, j, low, high, kept_low, kept_high, kept_blocks, KEEPS)
        added, seen = mask_block(j[None, :], seen, shown, mask_stride[3])
        if mask is not None:
            sees = sees | (tl.max(seen.to(tl.int32), 1) > 0)
        key, in_reach = j.to(tl.int64)[None, :], (tl.max(seen.to(tl.int32), 0) > 0)[None, :]
        key_block = load_rows(k, k_stride, batch, kv_head, key, d[:, None], in_reach & (d < DIM)[:, None], UPCAST)
        value = load_rows(v, v_stride, batch, kv_head, key, dv[:, None], in_reach & (dv < VALUE_DIM)[:, None], UPCAST)
        s = tl.dot(query_block, key_block, input_precision="ieee") * scale  # (ROWS, KEYS)
        dp = tl.dot(grad, value, input_precision="ieee")
        if threshold is not None:
            keep = retained(from_key, query, head, batch, seed_low, seed_high, threshold, KEYS, False)
            dp = tl.where(keep, dp * factor, 0.0)
        _, ds = weigh(
            s, dp, j[None, :], seen, position_float, softcap, slope, shown, added, row_lse[:, None], row_delta[:, None]
        )
        dq = tl.dot(ds.to(key_block.dtype), tl.trans(key_block), dq, input_precision="ieee")

    grad_q += ((batch * queries + query) * (kv_heads * group) + head)[:, None] * DIM + d[None, :]
    tl.store(grad_q, (dq * scale).to(grad_q.dtype.element_ty), mask=has_d)
    tl.store(delta + at, tl.where(sees, row_delta, 0.0), mask=exists)


@triton.jit(do_not_specialize=CHANGING)
def key_gradients(
    q, k, v, grad_out, q_stride, k_stride, v_stride, grad_stride,
    lse, delta, grad_k, grad_v,  # float32 (B, H, Tq) both; (B, Tk, Hkv, DIM), (B, Tk, Hkv, VALUE_DIM)
    kv_heads, group, queries, keys,
    left, right, keep_first, windows, offset, offsets, start, starts, keep_start, keep_starts, end, ends,
    mask, mask_stride, scale, softcap, slopes, seed_low, seed_high, threshold, factor,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
    CAUSAL: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """One block of keys: dK and dV. Blocks of scores are (KEYS, ROWS) here, as the products need them."""
    existing, band, kept = (start, starts, end, ends), (left, right, keep_first, windows), (keep_start, keep_starts)
    visibility = (existing, band, (offset, offsets), kept)
    number = tl.program_id(0)
    blocks = tl.cdiv(keys, KEYS)
    from_key = number % blocks * KEYS  # early keys first: causal ones have the most rows
    kv_head, batch = (number // blocks % kv_heads).to(tl.int64), (number // blocks // kv_heads).to(tl.int64)
    j = from_key + tl.arange(0, KEYS)
    d, dv = tl.arange(0, D).to(tl.int64), tl.arange(0, DV).to(tl.int64)
    key, exists = j.to(tl.int64)[:, None], (j < keys)[:, None]
    key_block = load_rows(k, k_stride, batch, kv_head, key, d[None, :], exists & (d < DIM)[None, :], UPCAST)
    value = load_rows(v, v_stride, batch, kv_head, key, dv[None, :], exists & (dv < VALUE_DIM)[None, :], UPCAST)
    grad_key, grad_value = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, DV], tl.float32)

    for member in range(group):
        head = kv_head * group + member
        first, stop = rows_in_reach(from_key, head, batch, queries, keys, visibility, KEYS, CAUSAL, KEEPS)
        for from_query in range(first, stop, ROWS):
            query = from_query + tl.arange(0, ROWS).to(tl.int64)
            heads, row_exists = head + tl.zeros_like(query), query < queries
            position, low, high, kept_low, kept_high = visible_spans(
                query, heads, row_exists, batch, keys, visibility, CAUSAL, KEEPS
            )
            seen = (j[:, None] >= low[None, :]) & (j[:, None] < high[None, :])
            if KEEPS:
                seen = seen | ((j[:, None] >= kept_low[None, :]) & (j[:, None] < kept_high[None, :]))
            slope = None if slopes is None else tl.load(slopes + head)
            shown = None
            if mask is not None:
                shown = (mask + batch * mask_stride[0] + head * mask_stride[1] + query * mask_stride[2])[None, :]
            added, seen = mask_block(j[:, None], seen, shown, mask_stride[3])
            sees = tl.max(seen.to(tl.int32), 0) > 0  # the rows that see a key of the block
            has_d, has_dv = sees[None, :] & (d < DIM)[:, None], sees[:, None] & (dv < VALUE_DIM)[None, :]
            query_block = load_rows(q, q_stride, batch, head, query[None, :], d[:, None], has_d, UPCAST)  # (D, ROWS)
            grad = load_rows(grad_out, grad_stride, batch, head, query[:, None], dv[None, :], has_dv, UPCAST)
            at = (batch * kv_heads * group + head) * queries + query
            row_lse, row_delta = tl.load(lse + at, mask=sees, other=0), tl.load(delta + at, mask=sees, other=0)
            s = tl.dot(key_block, query_block, input_precision="ieee") * scale  # (KEYS, ROWS)
            dp = tl.dot(value, tl.trans(grad), input_precision="ieee")
            if threshold is not None:
                keep = retained(from_key, query, heads, batch, seed_low, seed_high, threshold, KEYS, True)
                dp = tl.where(keep, dp * factor, 0.0)
            p, ds = weigh(
                s, dp, j[:, None], seen, position.to(tl.float32)[None, :], softcap, slope, shown, added,
                row_lse[None, :], row_delta[None, :],
            )  # fmt: skip
            if threshold is not None:
                p = tl.where(keep, p, 0.0)
            grad_value = tl.dot(p.to(grad.dtype), grad, grad_value, input_precision="ieee")
            grad_key = tl.dot(ds.to(query_block.dtype), tl.trans(query_block), grad_key, input_precision="ieee")

    if threshold is not None:
        grad_value *= factor
    row = ((batch * keys + j) * kv_heads + kv_head)[:, None]
    has_d, has_dv = exists & (d < DIM)[None, :], exists & (dv < VALUE_DIM)[None, :]
    tl.store(grad_k + row * DIM + d[None, :], (grad_key * scale).to(grad_k.dtype.element_ty), mask=has_d)
    tl.store(grad_v + row * VALUE_DIM + dv[None, :], grad_value.to(grad_v.dtype.element_ty), mask=has_dv)


@triton.jit
def load_rows(x, stride, batch, head, token, d, exists, UPCAST: tl.constexpr):
    """Rows of a tensor (B, H, T, D), or columns of its transpose, with zeros where none exist."""
    at = x + batch * stride[0] + head * stride[1] + token * stride[2] + d * stride[3]
    block = tl.load(at, mask=exists, other=0)
    return block.to(tl.float32) if UPCAST else block


@triton.jit
def weigh(s, dp, j, seen, position_float, softcap, slope, shown, added, lse, delta):
    """Scaled products q . k and products G . v -> P, and dS before it is multiplied by scale."""
    if softcap is not None:
        th = tanh(s / softcap)
        s = softcap * th
        dp_change = 1 - th * th
    p = tl.exp(score_block(s, j, seen, position_float, None, slope, shown, added) - lse)
    p = tl.where(seen, p, 0.0)
    ds = p * (dp - delta)
    if softcap is not None:
        ds *= dp_change
    return p, tl.where(seen, ds, 0.0)


@triton.jit
def rows_in_reach(
    from_key, head, batch, queries, keys, visibility, KEYS: tl.constexpr, CAUSAL: tl.constexpr, KEEPS: tl.constexpr
):
    """The queries first to stop - 1 of a head, outside of which none sees a key of the block."""
    existing, band, place, kept = visibility
    left, right, keep_first, windows = band
    offset, offsets = place
    keep_start, keep_starts = kept
    zero = batch * 0  # 64 bits wide: windows and offsets may be anything
    shift = zero + (offset if offsets is None else tl.load(offsets + batch))
    begin, last = existing_keys(batch, keys, existing)
    low, high = zero + tl.maximum(begin, from_key), zero + tl.minimum(last, from_key + KEYS)  # the block's that exist
    first, stop = zero, zero + queries
    if windows is not None:
        before, after = tl.load(windows + 3 * head), tl.load(windows + 3 * head + 1)
        first = tl.where(after < 0, first, low - after - shift)
        stop = tl.where(before < 0, stop, high + before - shift)
    else:
        if right is not None:
            first = low - right - shift
        if left is not None:
            stop = high + left - shift
    if KEEPS:
        kept_start = zero + (keep_start if keep_starts is None else tl.load(keep_starts + batch))
        count = keep_first if windows is None else tl.load(windows + 3 * head + 2)
        kept_low, kept_high = tl.maximum(low, kept_start), tl.minimum(high, kept_start + count)
        kept_first = zero
        if CAUSAL:
            kept_first = kept_low - shift
        first = tl.where(kept_low < kept_high, tl.minimum(first, kept_first), first)
        stop = tl.where(kept_low < kept_high, queries, stop)
    stop = tl.where(low < high, tl.minimum(stop, queries), 0)
    return tl.minimum(tl.maximum(first, 0), queries).to(tl.int32), tl.maximum(stop, 0).to(tl.int32)
