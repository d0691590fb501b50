"""Copying and suppression heads: the direct effect of a head on the logit of the token that it attends to most.

The first token is excluded because it is an attention sink. Only differences of logits are meaningful, so the effect is
relative to the mean effect on the other tokens of the text so far; a random token of the text has an expected effect of
0. A head that attends to a sink from most tokens has a small mean effect, however strong it is on a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....models.intervene.head_outputs import head_outputs
from ....models.structure.sites import Site
from ....models.text_inputs import device_of
from ....models.watching.call_reader import Reading
from ....models.watching.eager import EagerReading
from ....models.watching.layers import Layer
from ....role_definitions import CAUSAL
from ..export import WORDS
from ..observer import BatchSums
from ..sums import Key
from .direct_path import DirectPath, direct_path
from .long_text import NAME, token_passages
from .subject import Measurement, Subject

TEXTS, LENGTH = 24, 128  # passages, and tokens of each
FIRST_QUERY = 2  # with two tokens to choose from, beside the first


def measure(subject: Subject) -> Measurement:
    """The mean effect of every head on the token that it attends to, and the same with the sign reversed."""
    length = LENGTH if subject.positions is None else min(LENGTH, subject.positions)
    return measure_copying(subject, token_passages(subject.tokenizer, length, TEXTS, subject.seed))


def measure_copying(subject: Subject, texts: list[list[int]]) -> Measurement:
    """The same on any texts, as token ids."""
    inputs = {"input_ids": torch.tensor([texts[0]], device=device_of(subject.model))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    path = direct_path(subject.model, inputs, subject.is_measured)
    units = []
    for number, ids in enumerate(texts):
        name = f"{subject.seed}/copying/{number}"
        strongest, outputs, stream = _run(subject, path, ids, name)
        readers, scales = path.readers(ids), path.scales(stream)
        layers = {
            key: lift_sums(effects_on_tokens(path, key, outputs[key], readers, scales), strongest[key], ids)
            for key in path.writers
        }
        units.append((layers, name))
    tokens = sum(map(len, texts))
    facts = {
        "texts": len(texts), "tokens": tokens, "corpus": NAME,
        WORDS: f"{len(texts)} passages, {tokens:,} tokens, from {NAME}; effects are in logits, before any softcap or "
        "scale of them; in brackets, a token of the text drawn at random",
    }  # fmt: skip
    return Measurement(subject.tally(units, tokens), facts)


def effects_on_tokens(path: DirectPath, key: Key, outputs: Tensor, readers: Tensor, scales: Tensor) -> Tensor:
    """(H, T, n): the direct effect of each head at each position on the logits of n tokens.

    Args:
        path: of the model.
        key: of the layer.
        outputs: (T, H, width), of its heads.
        readers: (n, d), of the tokens.
        scales: (T, 1), of the final norm.
    """
    return (path.writers[key].write(outputs) / scales) @ readers.T


def _run(
    subject: Subject, path: DirectPath, ids: list[int], name: str
) -> tuple[dict[Key, Tensor], dict[Key, Tensor], Tensor]:
    """Per layer the key that each head attends to most (H, T) and its outputs (T, H, width); the last stream (T, d)."""
    strongest: dict[Key, Tensor] = {}
    outputs: dict[Key, Tensor] = {}
    streams: list[Tensor] = []

    def read(site: Site, heads: Tensor, real: Tensor | None) -> None:
        outputs[site.key] = heads[0].detach()

    with (
        subject.observing(partial(_take, strongest)) as observer,
        head_outputs(observer.model, read),
        _final_stream(subject, path, streams),
    ):
        observer.run(subject.batch([ids], [name]))
    return strongest, outputs, streams[-1][0].double()


def _take(strongest: dict[Key, Tensor], layer: Layer, reading: Reading | EagerReading, real: Tensor | None) -> None:
    weights = reading.weights(None, None)[0]  # (H, T, T)
    strongest[layer.key] = weights[:, :, 1:].argmax(-1) + 1


@contextmanager
def _final_stream(subject: Subject, path: DirectPath, streams: list[Tensor]) -> Iterator[None]:
    """Inside `with`, the stream in front of the final norm, or after the last layer, is appended to a list."""
    if path.final is not None:
        module = subject.model.get_submodule(path.final)
        hook = module.register_forward_pre_hook(lambda module, args: streams.append(args[0].detach()))
    else:
        last = list(path.writers.values())[-1]
        module = subject.model.get_submodule(last.block)
        hook = module.register_forward_hook(
            lambda module, args, output: streams.append((output[0] if isinstance(output, tuple) else output).detach())
        )
    try:
        yield
    finally:
        hook.remove()


def lift_sums(effects: Tensor, strongest: Tensor, ids: list[int]) -> BatchSums:
    """For one text: how far the effects (H, T, T) on the attended tokens, strongest (H, T), exceed those on others."""
    length = len(ids)
    tokens = torch.tensor(ids, device=effects.device)
    on_attended = effects.gather(-1, strongest[..., None])[..., 0]  # (H, T)
    others = tokens[strongest][..., None] != tokens  # (H, T, T)
    others &= torch.ones(length, length, dtype=torch.bool, device=effects.device).tril()
    count = others.sum(-1)
    lift = on_attended - (effects * others).sum(-1) / count.clamp(min=1)
    total = torch.where(count > 0, lift, 0)[:, FIRST_QUERY:].sum(-1).cpu().numpy()  # (H,)
    top = np.stack([np.append(total, 0.0), np.append(-total, 0.0)])
    return BatchSums(("copying", "suppression"), CAUSAL, top[None], np.full((1, 2), float(length - FIRST_QUERY)))
