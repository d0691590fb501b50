"""The roles of every head over a corpus, against the same batches through the model alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cases import Case, PreparedCase
from .limits import matmul_limit

VOCABULARY = 997


def sentences(count: int) -> Iterator[Any]:
    """Batches of random sentences, 5 to 75 tokens long, as the atlas reads them from a corpus."""
    from ..role_definitions import Tokens
    from ..roles.atlas.corpus import Batch, chunks

    random = np.random.default_rng(0)
    lengths = np.sort(np.clip(random.lognormal(3.2, 0.5, count), 5, 75).astype(int))
    for rows in chunks(list(range(count)), lengths.tolist()):
        shape = len(rows), int(lengths[rows].max())
        real = torch.from_numpy(np.arange(shape[1]) < lengths[rows][:, None])
        ids = torch.from_numpy(random.integers(5, VOCABULARY, shape))
        punctuation = torch.from_numpy(random.random(shape) < 0.12) & real
        special = torch.zeros_like(real)
        special[:, 0] = True
        word = ids.masked_fill(punctuation | special, -1)
        position = torch.arange(shape[1]).expand(shape)
        yield Batch(
            Tokens(ids, real, special, punctuation, word, position, ids), None, random.integers(0, 1 << 62, shape[0]), 0
        )


def _corpus(make: Callable[[int], Any], flops: int, quick: bool, *, texts: int, layers: int) -> PreparedCase:
    from ..roles.atlas.accumulator import Accumulator
    from ..roles.atlas.observer import Observer, forward
    from ..roles.atlas.sums import Tally

    model, batches = make(layers), list(sentences(texts))
    sums = Accumulator(Tally())

    def measure_roles() -> Tensor:
        observer = Observer(model)
        with observer.watching():
            for batch in batches:
                sums.add(observer.run(batch), batch)
            sums.flush()
        last: Tensor = observer.output[0]
        return last

    def run_alone() -> Tensor:
        with torch.inference_mode():
            for batch in batches:
                last: Tensor = forward(model, batch)[0]
        return last

    tokens = sum(batch.source.ids.numel() for batch in batches)
    return PreparedCase(
        measure_roles,
        {"the same batches unwatched, sdpa": run_alone},
        "roles: weights of every call times the columns of all roles",
        (matmul_limit(2 * flops * layers * tokens),),
    )


def _encoder(layers: int) -> Any:
    """MiniLM's shape."""
    from .models import bert

    return bert(128, hidden_size=384, intermediate_size=1536, num_attention_heads=12, num_hidden_layers=layers)


def _decoder(layers: int) -> Any:
    """SmolLM2-135M's shape, without its vocabulary."""
    from transformers import LlamaConfig, LlamaModel

    from .models import build_model

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    return build_model(LlamaModel, LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=VOCABULARY), "sdpa")


def _build(make: Callable[[int], Any], flops: int) -> Callable[..., PreparedCase]:
    return lambda quick, **sizes: _corpus(make, flops, quick, **sizes)


GOAL = {"the same batches unwatched, sdpa": 0.6}
CASES = {
    "atlas": Case(
        "atlas",
        "roles of all heads over 400 sentences, MiniLM's shape",
        _build(_encoder, 12 * 384**2),
        {"texts": 400, "layers": 6},
        {"texts": 7, "layers": 2},
        GOAL,
    ),
    "atlas-decoder": Case(
        "atlas-decoder",
        "the same, SmolLM2's shape, 200 sentences, 10 of its 30 layers",
        _build(_decoder, 576 * (576 * 2 + 2 * 192 + 3 * 1536)),
        {"texts": 200, "layers": 10},
        {"texts": 7, "layers": 2},
        GOAL,
    ),
}
