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
from headwise.errors import RankError, UnsupportedError
from headwise.scale import split_heads
from headwise.scale.ranks import Ranks

from .composition import EXACT
from .registry import check
from .tensor_parallel import DECODER, LAYERS, whole_tensor


def compare_compiled(name: str, module: Any, x: Tensor, backend: str, **options: Any) -> None:
    """Outputs and gradients of a split module, compiled and not."""
    torch._dynamo.reset()
    split = split_heads(copy.deepcopy(module))
    compiled = torch.compile(split, fullgraph=True, backend=backend)
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
    for name in ("divides", "fewer_kv", "idle"):
        torch.manual_seed(41)
        module = MultiHeadAttention(**LAYERS[name]).double()
        x = torch.randn(2, 7, module.heads.width, dtype=torch.float64)
        compare_compiled(name, module, x, "aot_eager", causal=True)


@check
def compiled_split_blocks_and_stacks_are_the_uncompiled_ones(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(42)
    block = TransformerBlock(26, 13, ffn=29, activation="swiglu").double()
    x = torch.randn(2, 7, 26, dtype=torch.float64)
    # kernels of four ranks take minutes to compile on two cores
    compare_compiled("block", block, x, "inductor" if ranks.count == 2 else "aot_eager", causal=True)
    decoder = Decoder(replace(DECODER, layers=1, window=None)).double()
    compare_compiled("decoder", decoder, torch.randint(41, (2, 7)), "aot_eager")


@check
def different_calls_of_a_compiled_split_module_fail_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    torch._dynamo.reset()
    split = split_heads(MultiHeadAttention(15, 5))
    compiled = torch.compile(split, fullgraph=True, backend="aot_eager")
    x = torch.ones(2, 7, 15)
    compiled(x)
    with pytest.raises(RankError, match="ranks disagree about the inputs of SplitAttention: the values of tensor 0"):
        compiled(x * (1 + ranks.rank))
    with pytest.raises(RankError, match="ranks disagree about the inputs of SplitAttention: rank 0 has"):
        compiled(x, causal=ranks.first)
    compiled(x)
    trained = torch.compile(split_heads(MultiHeadAttention(15, 5, dropout=0.1)), fullgraph=True, backend="aot_eager")
    with pytest.raises((UnsupportedError, torch._dynamo.exc.Unsupported), match="dropout inside attention"):
        trained(x)
