"""Parts of the keys in one process: outputs that are merged, and gradients that add up to those of the whole."""

from __future__ import annotations

import pytest
import torch

import headwise
from headwise.attention import dispatch
from headwise.attention.backends.native import library
from headwise.scale import partial_attention
from headwise.scale.partial_attention import PartOptions

QUERIES, DIM = 37, 11
CHUNKS = range(13), range(13, 20), range(20, QUERIES)
OPTIONS = {
    "causal": PartOptions(None, 0, 0.3, None, None, None),
    "not causal": PartOptions(None, None, 0.3, None, None, None),
    "a window": PartOptions(9, 2, 0.3, None, None, None),
    "softcap": PartOptions(None, 0, 0.3, 2.0, None, None),
}


def merged_parts(q, k, v, options):
    """The output and the log-sum-exp of all queries over all chunks of keys."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for keys in CHUNKS:
        part = slice(keys.start, keys.stop)
        call = options.call(q, k[:, :, part], v[:, :, part], range(QUERIES), keys)
        partial_attention.merge_part(out, lse, *dispatch.attend_with_lse(q, k[:, :, part], v[:, :, part], call))
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_gradients_of_parts_add_up_to_those_of_the_whole(name, kv_heads, dtype):
    random, options = torch.Generator().manual_seed(3), OPTIONS[name]
    sizes = (6, kv_heads, kv_heads, 6)
    q, k, v, grad = (torch.randn(2, n, QUERIES, DIM, generator=random, dtype=torch.float64).to(dtype) for n in sizes)
    whole = [x.double().clone().requires_grad_() for x in (q, k, v)]
    window = (options.left, options.right)
    want = headwise.attend(*whole, window=window, scale=options.scale, softcap=options.softcap)
    want.backward(grad.double())
    with torch.no_grad():
        out, lse = merged_parts(q, k, v, options)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for keys in CHUNKS:
            part = slice(keys.start, keys.stop)
            call = options.call(q, k[:, :, part], v[:, :, part], range(QUERIES), keys)
            gradients = partial_attention.backward_part(grad, q, k[:, :, part], v[:, :, part], out, lse, call)
            dq += gradients.q
            dk[:, :, part] += gradients.k
            dv[:, :, part] += gradients.v
    # an element is a sum over QUERIES, heads of a group and DIM of products of at most the largest numbers, three deep
    largest = max(float(x.abs().max()) for x in (q, k, v, grad))
    bound = 4 * torch.finfo(dtype).eps * QUERIES * DIM * 6 / kv_heads * largest**3
    for got, expected in ((out, want.detach()), (dq, whole[0].grad), (dk, whole[1].grad), (dv, whole[2].grad)):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=bound)


@pytest.mark.skipif(library.choice().why_not is not None, reason="the native kernel is off or was not built")
def test_float32_gradients_come_from_the_native_kernel():
    q = torch.randn(1, 2, QUERIES, DIM)
    call = OPTIONS["causal"].call(q, q, q, range(QUERIES), range(QUERIES))
    with torch.no_grad():
        out, lse = dispatch.attend_with_lse(q, q, q, call)
        assert dispatch.gradients_from_lse(q, q, q, q, out, lse, call) is not None
        assert dispatch.gradients_from_lse(q, q * 1e30, q * 1e30, q, out, lse, call) is None  # it declines overflow
