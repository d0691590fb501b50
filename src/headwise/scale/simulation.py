"""Any number of ranks in one process: one layer, split as on a cluster, on PyTorch's fake process group.

A fake process group sends nothing, and tensors on the meta device have shapes but no values, so a layer of any size
runs through the code that real ranks run. What it holds and would send is counted and compared with the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..attention.checkpoints.architectures import ARCHITECTURES
from ..attention.checkpoints.famous import famous_shape
from ..attention.nn.stack import Decoder
from ..card import read
from ..errors import ShapeError, UnsupportedError
from ..shapes import Shape
from .context_modules import split_sequence, sum_gradients
from .cost_model import costs
from .parallel_linear import local_tensor
from .ranks import simulated_numbers
from .sequence_plan import SequencePlan
from .tensor_parallel import split_heads
from .traffic import count_traffic

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one layer on one rank: sent in a forward pass and in a training step, and held as weights."""

    forward: int
    training: int
    weights: int


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """One layer of a model on one rank, split in one way: counted bytes, and the prediction of the cost model."""

    way: str  # as in `Cost`
    rank: int
    ranks: int
    counted: Bytes
    formula: Bytes

    @property
    def exact(self) -> bool:
        """Whether the cost model predicts every byte."""
        return self.counted == self.formula

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"exact": self.exact}


def simulate(
    model: str | Mapping[str, Any],
    ranks: int,
    tokens: int,
    batch: int = 1,
    dtype: str = "bf16",
    *,
    simulated: Iterable[int] | None = None,
    ways: Iterable[str] = ("heads", "sequence", "weights"),
) -> list[SimulatedRank]:
    """Run one layer of a model, forward and backward, as some of the ranks, and count the bytes that each sends.

    This needs no cluster: one process acts as one rank after another; the other ranks are only simulated.

    Args:
        model: a famous name ("llama2-70b"), or the config of a model that `headwise.Decoder` can build.
        ranks: number of ranks.
        tokens: length of every sequence.
        batch: sequences, over all ranks where these have sequences of their own ("weights").
        dtype: "fp32", "bf16" or "fp16", of weights and activations.
        simulated: the ranks that are run; the first, the middle and the last by default.
        ways: of splitting the layer, by the names of `Cost.way`: "heads", "sequence" and "weights" (FSDP2).

    Returns:
        What each of these ranks sends and holds, counted and by `costs`.

    Example:
        >>> [run] = headwise.scale.simulate("llama2-70b", 64, 4096, simulated=[5], ways=["heads"])
        >>> run.counted.forward, run.exact
        (264241152, True)
    """
    if dist.is_initialized():
        raise UnsupportedError("this process is in a process group; simulate ranks in a process without torchrun")
    card, shape = read(model), _shape(model)
    rank_numbers = sorted({0, ranks // 2, ranks - 1}) if simulated is None else list(simulated)
    results = []
    for rank in rank_numbers:
        formulas = {cost.way: cost for cost in costs(card, ranks, tokens, batch, dtype, rank=rank)}
        for way in ways:
            if way not in WAYS:
                raise UnsupportedError(f"ways that can be simulated are {', '.join(WAYS)}; got {way!r}")
            if way not in formulas:
                raise ShapeError(f"{tokens} tokens are too few for {ranks} ranks; give at least {2 * ranks}")
            cost = formulas[way]
            run = _Run(shape, rank, ranks, tokens, batch, DTYPES[dtype], any(x.causal for x in card.attention.layers))
            with _fake_ranks(rank, ranks) as mesh:
                counted = WAYS[way](run, mesh)
            formula = Bytes(cost.forward, cost.training, cost.weights)
            results.append(SimulatedRank(way, rank, ranks, counted, formula))
    return results


def _shape(model: str | Mapping[str, Any]) -> Shape:
    """The shape of one layer, of a decoder or an encoder."""
    if isinstance(model, str):
        shape = famous_shape(model)
    else:
        model_type = str(model.get("model_type"))
        if model_type not in ARCHITECTURES:
            raise UnsupportedError(f"a model of type {model_type!r} cannot be built; {', '.join(ARCHITECTURES)} can")
        shape = ARCHITECTURES[model_type].shape(dict(model), ())
    if shape.decoder_layers:
        raise UnsupportedError("an encoder-decoder is not simulated; a model of one stack is")
    window = shape.window[0] if isinstance(shape.window, tuple) else shape.window
    return replace(shape, layers=1, vocab=1, window=window, head=None, pooler=False)


@contextmanager
def _fake_ranks(rank: int, count: int) -> Iterator[DeviceMesh]:
    """A fake process group in which this process is one of this many ranks, and its mesh."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # of DTensor, which takes a process to be one rank: shapes of shards are in it
    dist.init_process_group(dist.Backend.FAKE, rank=rank, world_size=count)
    try:
        mesh = init_device_mesh("cpu", (count,))
        group: Any = mesh.get_group()  # it finds the backend of a message by its device
        backend = group._get_backend(torch.device("cpu"))
        group._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        yield mesh
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


@dataclass(frozen=True, slots=True)
class _Run:
    """One layer on one rank."""

    shape: Shape
    rank: int
    ranks: int
    tokens: int
    batch: int
    dtype: torch.dtype
    causal: bool

    def block(self) -> Any:
        return Decoder(self.shape, dtype=self.dtype, device="meta").blocks[0]

    def count(self, block: nn.Module, batch: int, tokens: int, after: Callable[[], None] = lambda: None) -> Bytes:
        """A training step of a split block with this many tokens on this rank; `after` sums gradients."""
        device = next(block.parameters()).device
        x = torch.empty(batch, tokens, self.shape.width, dtype=self.dtype, device=device, requires_grad=True)
        with count_traffic() as forward:
            y: Tensor = block(x, causal=self.causal)
        with count_traffic() as backward:
            y.sum().backward()
        with count_traffic() as gradients:
            after()
        held = sum(x.numel() * x.element_size() for x in map(local_tensor, block.parameters()))
        return Bytes(forward.data, (forward + backward + gradients).total(), held)


def _heads(run: _Run, mesh: DeviceMesh) -> Bytes:
    return _count_fake(run, split_heads(run.block(), mesh), run.batch)


def _sequence(run: _Run, mesh: DeviceMesh) -> Bytes:
    plan = SequencePlan(run.tokens, run.ranks, zigzag=run.causal)
    block = split_sequence(run.block(), mesh, zigzag=run.causal)
    token = simulated_numbers.set([plan.token_count(rank) for rank in range(run.ranks)])
    try:
        return run.count(block, run.batch, plan.token_count(run.rank), lambda: sum_gradients(block, mesh))
    finally:
        simulated_numbers.reset(token)


def _weights(run: _Run, mesh: DeviceMesh) -> Bytes:
    block = fully_shard(run.block(), mesh=mesh, reshard_after_forward=True)
    return _count_fake(run, block, -(-run.batch // run.ranks))


def _count_fake(run: _Run, block: nn.Module, batch: int) -> Bytes:
    """`_Run.count` where parameters on the meta device are refused, or meet indices on another device."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return run.count(block.to_empty(device="cpu"), batch, run.tokens)


WAYS: dict[str, Callable[[_Run, DeviceMesh], Bytes]] = {"heads": _heads, "sequence": _sequence, "weights": _weights}
