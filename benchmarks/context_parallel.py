"""Attention over a split sequence by direct sends, by a true ring and by PyTorch's context parallel, on 2 and 4 ranks.

    python benchmarks/context_parallel.py benchmarks/results/context-parallel-NAME.json

Ranks of one thread each are started by torchrun. Errors are against one process in float64. Every round times every
contestant once, in a shuffled order; the best of each counts, as seconds of the slowest rank and as CPU seconds of all
ranks. Memory is the peak of a rank above its own queries, keys and values.

PyTorch's `context_parallel` has no rule for the operator that attention on a CPU calls, so its ring is called below it:
`_templated_ring_attention` with that operator, by either of its ways to pass blocks on.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

import headwise
from headwise import scale
from headwise.bench.memory import peak_above
from headwise.files import write_atomically
from headwise.scale import context_parallel
from headwise.scale.exchange import ALL_LOCAL, Block, Channel, Step
from headwise.scale.ranks import Ranks
from headwise.timing import describe_machine

RANKS = 2, 4
ROUNDS = 9
TOKENS, HEADS, KV_HEADS, DIM, WINDOW = 4096, 12, 4, 64, 512
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Attend = Callable[..., Tensor]


class RingExchange:
    """The steps of a true ring: every rank passes the block that it holds to its neighbour, R - 1 times."""

    def __init__(self, channel: Channel, q: Tensor, k: Tensor, v: Tensor, classes: Tensor | None = None) -> None:
        assert classes is None  # the benchmark takes no statistics by a ring
        self.channel, self.k, self.v = channel, k, v
        self.group = q.shape[1] // k.shape[1]
        steps = channel.steps(q, k)
        self.head_slices = list(dict.fromkeys((x.kv_heads.start, x.kv_heads.stop) for x in steps))

    def __iter__(self) -> Iterator[tuple[Step, Block]]:
        ranks, plan = self.channel.ranks, self.channel.plan
        for start, stop in self.head_slices:
            kv_heads, query_heads = slice(start, stop), slice(start * self.group, stop * self.group)
            message = torch.cat([self.k[:, kv_heads].flatten(), self.v[:, kv_heads].flatten()])
            for distance in range(ranks.count):
                source = (ranks.rank - distance) % ranks.count
                buffer, works = None, []
                if distance + 1 < ranks.count:
                    before, after = (ranks.rank - 1) % ranks.count, (ranks.rank + 1) % ranks.count
                    width = message.numel() // max(1, plan.token_count(source))
                    buffer = message.new_empty(width * plan.token_count((source - 1) % ranks.count))
                    works = self.channel.post(distance, message, after, buffer, before)
                shape = (len(self.k), stop - start, plan.token_count(source))
                split = shape[0] * shape[1] * shape[2] * self.k.shape[3]
                k, v = message[:split].view(*shape, -1), message[split:].view(*shape, -1)
                local = distance == 0
                for chunk in (ALL_LOCAL,) if local and self.channel.joint else plan.chunks_of(source):
                    tokens = slice(None) if chunk == ALL_LOCAL else plan.chunk_slice(source, chunk)
                    step = Step(kv_heads, query_heads, chunk, source, None, source, local=local)
                    yield step, Block(k[:, :, tokens], v[:, :, tokens], None)
                ranks.wait(works, "the block of a neighbour")
                message = message if buffer is None else buffer


@contextmanager
def ring_schedule() -> Iterator[None]:
    direct = context_parallel.KeyValueExchange
    context_parallel.KeyValueExchange = RingExchange  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        context_parallel.KeyValueExchange = direct  # type: ignore[misc]


def attend_by_ring(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with ring_schedule():
        return scale.context_parallel_attend(q, k, v, **options)


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor, *, method: str, causal: bool) -> Tensor:
    """Forward, and backward where q requires a gradient, by PyTorch's ring."""
    torch_ring.set_rotate_method(method)
    torch_ring._cp_options.enable_load_balance = causal
    tensors = [x.detach() for x in (q, k, v)]
    out, lse, *_ = torch_ring._templated_ring_attention(dist.group.WORLD, 2, FORWARD, *tensors, is_causal=causal)
    if q.requires_grad:
        gradients = torch_ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, functools.partial(BACKWARD, dropout_p=0.0), torch.ones_like(out), "grad_out",
            *tensors, out, lse, is_causal=causal,
        )  # fmt: skip
        for x, grad in zip((q, k, v), gradients, strict=False):
            x.grad = grad
    return out


CONTESTANTS: dict[str, Attend] = {
    "direct sends": scale.context_parallel_attend,
    "true ring": attend_by_ring,
    "PyTorch, ring": functools.partial(attend_by_torch, method="alltoall"),
    "PyTorch, all-gather": functools.partial(attend_by_torch, method="allgather"),
}


def random_parts(
    tokens: int, kv_heads: int, dtype: torch.dtype, zigzag: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """All of q, k and v, and this rank's tokens of them."""
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, kv_heads, kv_heads)
    whole = [torch.randn(1, heads, tokens, DIM, generator=generator, dtype=torch.float64) for heads in sizes]
    whole = [x.to(dtype) for x in whole]
    return whole, [scale.shard_sequence(x, 2, zigzag=zigzag).contiguous() for x in whole]


def largest_over_ranks(ranks: Ranks, value: float) -> float:
    return max(float(x) for x in ranks.all_gather(torch.tensor([value], dtype=torch.float64)))


def errors(ranks: Ranks) -> dict[str, Any]:
    """The largest error of outputs and of gradients against one process in float64, by contestant and case."""
    cases: dict[str, tuple[int, int, dict[str, Any], list[str]]] = {
        "causal": (512, HEADS, {"causal": True}, list(CONTESTANTS)),
        "fewer KV heads": (512, KV_HEADS, {"causal": True}, list(CONTESTANTS)),
        "not causal": (512, HEADS, {"causal": False}, list(CONTESTANTS)),
        "a length that nothing divides": (509, HEADS, {"causal": True}, ["direct sends", "true ring"]),
        "a window": (512, HEADS, {"causal": True, "window": (63, 0)}, ["direct sends", "true ring"]),
    }
    results: dict[str, Any] = {}
    for case, (tokens, kv_heads, options, names) in cases.items():
        for name in names:
            for dtype in (torch.float32, torch.float64):
                zigzag = options["causal"]
                whole, parts = random_parts(tokens, kv_heads, dtype, zigzag)
                exact = [x.double().requires_grad_() for x in whole]
                want = headwise.attend(*exact, **options)
                want.sum().backward()
                gradients = name != "true ring"
                parts = [x.requires_grad_(gradients) for x in parts]
                out = CONTESTANTS[name](*parts, **options)
                if out.requires_grad:
                    out.sum().backward()
                pairs = [(out.detach(), want.detach())]
                pairs += [(x.grad, y.grad) for x, y in zip(parts, exact, strict=True) if gradients]
                error = max(
                    float((a.double() - scale.shard_sequence(b, 2, zigzag=zigzag)).abs().max()) for a, b in pairs
                )
                results.setdefault(case, {}).setdefault(name, {})[str(dtype).removeprefix("torch.")] = (
                    largest_over_ranks(ranks, error)
                )
    return results


def race(ranks: Ranks, contestants: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Any]:
    """The best seconds of the slowest rank, and the least CPU seconds of all ranks together, of each contestant."""
    best: dict[str, list[float]] = {}
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for name in order.sample(list(contestants), len(contestants)):
            ranks.barrier(name)
            start, cpu_start = time.perf_counter(), time.process_time()
            contestants[name]()
            spent = torch.tensor([time.perf_counter() - start, time.process_time() - cpu_start], dtype=torch.float64)
            table = torch.stack(ranks.all_gather(spent))
            times = [float(table[:, 0].max()), float(table[:, 1].sum())]
            best[name] = [min(a, b) for a, b in zip(best.get(name, times), times, strict=True)]
    return {name: {"seconds": seconds, "cpu_seconds": cpu} for name, (seconds, cpu) in best.items()}


def peaks(ranks: Ranks, contestants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The largest peak of a rank's memory above its tokens, in bytes."""
    trim = ctypes.CDLL(None).malloc_trim
    results = {}
    for name, call in contestants.items():
        call()
        trim(0)  # free memory goes back to the system, or its reuse would not be counted
        ranks.barrier(name)
        results[name] = largest_over_ranks(ranks, peak_above(call))
    return results


def speed(ranks: Ranks) -> dict[str, Any]:
    """Times and memory of causal attention by every contestant, and of what only ours computes."""
    results: dict[str, Any] = {}
    for case, kv_heads in (("causal", HEADS), ("causal, fewer KV heads", KV_HEADS)):
        _, parts = random_parts(TOKENS, kv_heads, torch.float32)
        calls = {n: functools.partial(attend, *parts, causal=True) for n, attend in CONTESTANTS.items()}
        with torch.no_grad():
            results[case] = {"forward": race(ranks, calls), "peak": peaks(ranks, calls)}
        trained = [x.clone().requires_grad_() for x in parts]

        def step(attend: Attend, inputs: list[Tensor] = trained) -> None:
            out = attend(*inputs, causal=True)
            if out.requires_grad:
                out.sum().backward()
            for x in inputs:
                x.grad = None

        steps = {n: functools.partial(step, attend) for n, attend in CONTESTANTS.items() if n != "true ring"}
        results[case]["forward and backward"] = race(ranks, steps, ROUNDS // 2)
    _, parts = random_parts(TOKENS, HEADS, torch.float32)
    ours = {
        "attend": lambda: scale.context_parallel_attend(*parts, causal=True),
        "statistics": lambda: scale.context_parallel_head_stats(*parts, causal=True),
        "a window, direct sends": lambda: scale.context_parallel_attend(*parts, causal=True, window=(WINDOW - 1, 0)),
        "a window, true ring": lambda: attend_by_ring(*parts, causal=True, window=(WINDOW - 1, 0)),
    }
    with torch.no_grad():
        results["ours"] = race(ranks, ours)
    return results


TORCH_CALLS = {
    "causal": (32, 4, True),
    "causal, fewer KV heads": (32, 2, True),
    "not causal": (32, 4, False),
    "not causal, 31 tokens": (31, 4, False),
}


def torch_outcome(ranks: Ranks, name: str) -> str:
    """What PyTorch's context_parallel gives for F.scaled_dot_product_attention on CPUs: its error, or a refusal."""
    tokens, kv_heads, causal = TORCH_CALLS[name]
    mesh = init_device_mesh("cpu", (ranks.count,))
    torch_ring._cp_options.enable_load_balance = causal
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, kv_heads, kv_heads)]
    want = F.scaled_dot_product_attention(*buffers, is_causal=causal, enable_gqa=kv_heads < 4)
    try:
        with torch_context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            out = F.scaled_dot_product_attention(*buffers, is_causal=causal, enable_gqa=kv_heads < 4)
            (whole,) = torch_ring.context_parallel_unshard(mesh, [out], [2])
        return f"error {float((whole - want).abs().max()):.1e}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def run_rank(file: Path, call: str | None) -> None:
    """On a rank: measure, or make one of PyTorch's calls; rank 0 writes the results."""
    torch.set_num_threads(1)
    with scale.init_ranks(timeout=60) as ranks:
        results = {"errors": errors(ranks), "speed": speed(ranks)} if call is None else torch_outcome(ranks, call)
        if ranks.first:
            file.write_text(json.dumps(results))


def launch(ranks: int, file: Path, *arguments: str) -> str:
    """Run this program on so many ranks. Returns what it wrote to stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(file), *arguments], env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    return run.stderr


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python benchmarks/context_parallel.py FILE.json")
    file = Path(sys.argv[1])
    if "RANK" in os.environ:
        run_rank(file, sys.argv[2] if len(sys.argv) > 2 else None)
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            part = Path(folder) / f"{ranks}.json"
            message = launch(ranks, part)
            if not part.exists():
                raise SystemExit(message)
            results[f"{ranks} ranks"] = json.loads(part.read_text())
        outcomes = {}
        for name in TORCH_CALLS:  # one may end the process
            part = Path(folder) / "outcome.json"
            part.unlink(missing_ok=True)
            lines = launch(2, part, name).splitlines()
            crash = next((line.strip() for line in lines if "what():" in line), "")
            outcomes[name] = (
                json.loads(part.read_text()) if part.exists() and not crash else f"a rank ends: {crash[:300]}"
            )
        results["PyTorch's context_parallel"] = outcomes
    what = f"{TOKENS} tokens, {HEADS} heads of {DIM}, float32, one thread per rank; fewer KV heads: {KV_HEADS}"
    settings = {"headwise": headwise.__version__, "torch": torch.__version__, "what": what, "rounds": ROUNDS}
    with write_atomically(file) as new:
        new.write_text(json.dumps({**results, "machine": describe_machine(), "settings": settings}, indent=2) + "\n")


if __name__ == "__main__":
    main()
