"""torch.compile(fullgraph=True) of split modules against the same modules uncompiled."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Decoder, MultiHeadAttention, TransformerBlock
from headwise.attention import dropout
from headwise.errors import RankError
from headwise.scale import split_heads
from headwise.scale.ranks import Ranks

from .composition import EXACT
from .registry import check
from .tensor_parallel import DECODER, LAYERS, whole_tensor

BACKEND = "aot_eager"  # the graphs of forward and backward without kernels, which take minutes to compile


def compare_compiled(name: str, module: Any, x: Tensor, **options: Any) -> None:
    """Outputs and gradients of a split module, compiled and not."""
    torch._dynamo.reset()
    split = split_heads(copy.deepcopy(module))
    compiled = torch.compile(split, fullgraph=True, backend=BACKEND)
    results = []
    for call in (split, compiled):
        split.zero_grad()
        own_x = x.clone().requires_grad_(x.is_floating_point())
        out = call(own_x, **options)
        out.square().sum().backward()
        gradients = {key: whole_tensor(p.grad) for key, p in split.named_parameters()}
        results.append({"output": out.detach(), "input": own_x.grad, **gradients})
    for key, want in results[0].items():
        if want is not None:
            torch.testing.assert_close(results[1][key], want, **EXACT, msg=lambda m, key=key: f"{name} {key}: {m}")


@check
def a_compiled_split_attention_is_the_uncompiled_one(ranks: Ranks, folder: Path) -> None:
    for name in ("divides", "fewer_kv") if ranks.count == 2 else ("idle",):
        torch.manual_seed(41)
        module = MultiHeadAttention(**LAYERS[name]).double()
        x = torch.randn(2, 7, module.heads.width, dtype=torch.float64)
        compare_compiled(name, module, x, causal=True)


@check
def compiled_split_blocks_and_stacks_are_the_uncompiled_ones(ranks: Ranks, folder: Path) -> None:
    if ranks.count > 2:  # compiling takes most of the time
        return
    torch.manual_seed(42)
    block = TransformerBlock(26, 13, ffn=29, activation="swiglu").double()
    x = torch.randn(2, 7, 26, dtype=torch.float64)
    compare_compiled("block", block, x, causal=True)
    decoder = Decoder(replace(DECODER, layers=1, window=None)).double()
    compare_compiled("decoder", decoder, torch.randint(41, (2, 7)))


@check
def different_calls_of_a_compiled_split_module_fail_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch._dynamo.reset()
    split = split_heads(MultiHeadAttention(15, 5))
    compiled = torch.compile(split, fullgraph=True, backend=BACKEND)
    x = torch.ones(2, 7, 15)
    compiled(x)
    with pytest.raises(RankError, match="ranks disagree about the inputs of SplitAttention: the values of tensor 0"):
        compiled(x * (1 + ranks.rank))
    with pytest.raises(RankError, match="ranks disagree about the inputs of SplitAttention: rank 0 has"):
        compiled(x, causal=ranks.first)
    compiled(x)


@check
def a_compiled_split_attention_drops_other_weights_on_each_rank(ranks: Ranks, folder: Path) -> None:
    """The weights that the ranks' seeds drop, applied to the whole in one process."""
    torch._dynamo.reset()
    rate, tokens = 0.3, 7
    whole = MultiHeadAttention(15, 5).double()
    split = split_heads(copy.deepcopy(whole))
    split.dropout = rate
    compiled = torch.compile(split, fullgraph=True, backend=BACKEND)
    x = torch.randn(2, tokens, 15, dtype=torch.float64)
    for seed in (3, 4):  # two runs of one graph draw different numbers
        torch.manual_seed(seed)
        first = int(torch.randint(2**62, ()))
        masks = [
            torch.from_numpy(dropout.retained(first + rank, rate, 2, len(share.query), tokens, tokens))
            for rank, share in enumerate(split.plan.shares)
            if share.query
        ]
        wants, gots = (x.clone().requires_grad_() for _ in range(2))
        projected = whole.project(wants, causal=True)
        weights = projected.weights() * torch.cat(masks, 1) * dropout.factor(rate)
        want = whole.W_O((weights @ projected.v).transpose(1, 2).flatten(2))
        torch.manual_seed(seed)
        got = compiled(gots, causal=True)
        torch.testing.assert_close(got, want, **EXACT)
        for module, out in ((whole, want), (split, got)):
            module.zero_grad()
            out.square().sum().backward()
        torch.testing.assert_close(gots.grad, wants.grad, **EXACT)
        for (name, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
            torch.testing.assert_close(whole_tensor(q.grad), p.grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
    ranks.agree("the next random number", str(int(torch.randint(2**62, ()))))


@check
def a_compiled_split_block_with_dropout_is_the_same_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch._dynamo.reset()
    block = split_heads(TransformerBlock(15, 5, ffn=11, dropout=0.4).double())
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND)
    x = torch.randn(2, 7, 15, dtype=torch.float64)
    outputs = [compiled(x, causal=True).detach() for _ in range(2)]
    assert not torch.equal(*outputs)
    for out in outputs:
        ranks.agree("the output", "", values={"output": out})
