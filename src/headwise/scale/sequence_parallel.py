"""Sequence parallel: between the split layers of a stack, each rank holds the residual stream of some tokens.

The stream is a PyTorch DTensor, sharded over the tokens. PyTorch's SequenceParallel computes the norms on it; split
layers gather all tokens before their column-parallel part and scatter the sum after their row-parallel part, which
together send as many bytes as one all-reduce.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from ..attention.nn.blocks import TransformerBlock
from ..errors import ShapeError, UnsupportedError
from .ranks import Ranks

TOKENS = 1  # the dimension of (B, T, d_model)


def gather_tokens(x: DTensor) -> Tensor:
    """The stream of all tokens, for work that the ranks split: its gradient is summed over them, and scattered."""
    local: Tensor = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return local


def scatter_sum(x: Tensor, ranks: Ranks) -> DTensor:
    """The sum of the ranks' x (B, T, d_model), of which each gets some tokens."""
    summands = DTensor.from_local(x, ranks.mesh, [Partial()], run_check=False)
    return summands.redistribute(placements=[Shard(TOKENS)])


def check_blocks(module: nn.Module) -> None:
    """Refuse a module without blocks, between whose layers there is no stream to split."""
    if not _blocks(module):
        raise UnsupportedError(f"sequence_parallel=True is for blocks and stacks; {type(module).__name__} has no block")


def split_norms(module: nn.Module, ranks: Ranks) -> None:
    """Let the norms of every block take each rank's tokens, and its split layers give them."""
    for block in (block for blocks in _blocks(module) for block in blocks):
        for norm in filter(None, (block.attention_norm, block.cross_norm, block.ffn_norm)):
            parallelize_module(norm, ranks.mesh, SequenceParallel())
        row_parallel: list[Any] = [block.attention.W_O, block.ffn.down]
        for linear in row_parallel if block.cross is None else [*row_parallel, block.cross.W_O]:
            linear.scatters_tokens = True


def split_stream(module: nn.Module, ranks: Ranks) -> None:
    """Split what enters the first of consecutive blocks, and gather what the last one gives."""
    for blocks in _blocks(module):
        stream = _Stream(ranks)
        blocks[0].register_forward_pre_hook(stream.scatter, with_kwargs=True)
        blocks[-1].register_forward_hook(stream.gather)


def _blocks(module: nn.Module) -> list[list[TransformerBlock]]:
    """The blocks of a module, those of one list together: each gets what the one before it gives."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    stacks = [[block for block in blocks if isinstance(block, TransformerBlock)] for blocks in lists]
    members = {block for blocks in stacks for block in blocks}
    alone = [[part] for part in module.modules() if isinstance(part, TransformerBlock) and part not in members]
    return [blocks for blocks in stacks if blocks] + alone


class _Stream:
    """Hooks of the first and the last of consecutive blocks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def scatter(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The block's input (B, T, d_model), the same on all ranks, as a DTensor of each rank's tokens."""
        x, *others = args if args else (kwargs.pop("x"),)
        if block.training and block.dropout.p > 0:
            raise UnsupportedError("ranks with different tokens draw no dropout of their own; set dropout to 0")
        if x.shape[TOKENS] < self.ranks.count:
            raise ShapeError(
                f"{x.shape[TOKENS]} tokens are fewer than {self.ranks.count} ranks; split the heads without "
                "sequence_parallel for decoding"
            )
        whole = DTensor.from_local(x, self.ranks.mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(TOKENS)]), *others), kwargs

    def gather(self, block: nn.Module, args: Any, stream: DTensor) -> Tensor:
        """The last block's output, whole on every rank."""
        x: Tensor = stream.redistribute(placements=[Replicate()]).to_local()
        return x.clone()  # no view: FSDP loses its hooks where one is changed in place
