"""Successor heads (Gould et al. 2023): whether a head's OV circuit turns a token of an ordered set into its successor.

A token goes through its embedding and the first feed-forward block, without any attention; the result is the input of
every later layer's heads, which attend to this token only. Among the tokens of the set, the head must raise the
successor most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....errors import UnsupportedError
from ....models.intervene.head_outputs import head_outputs
from ....models.intervene.masking import mask_heads
from ....models.structure.sites import Site
from ....models.text_inputs import device_of, run_on_tokens
from ....role_definitions import CAUSAL
from ..export import WORDS
from ..observer import BatchSums
from ..sums import Key
from .direct_path import DirectPath, direct_path
from .subject import Measurement, Subject

LEAST = 4  # tokens of a set
CYCLIC = ("days", "months")
SETS = {
    "days": " Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "months": " January February March April May June July August September October November December",
    "digits": "0123456789",
    "numbers": " one two three four five six seven eight nine ten eleven twelve",
    "ordinals": " first second third fourth fifth sixth seventh eighth ninth tenth",
    "letters": " A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
}


@dataclass(frozen=True)
class OrderedSet:
    """Tokens in their order; a successor is the index of the next one, None where that is no token."""

    name: str
    ids: list[int]
    successors: list[int | None]


def ordered_sets(tokenizer: Any) -> list[OrderedSet]:
    """The sets of which enough members are one token each.

    Raises:
        UnsupportedError: for a tokenizer that has none.
    """
    sets = []
    for name, text in SETS.items():
        words = [" " + word for word in text.split()] if text.startswith(" ") else list(text)
        tokens = [tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"] for word in words]
        single = [
            ids[0] if len(ids) == 1 and ids[0] != getattr(tokenizer, "unk_token_id", None) else None for ids in tokens
        ]
        ids = [token for token in single if token is not None]
        following = [*single[1:], single[0] if name in CYCLIC else None]
        after = [
            None if later is None else ids.index(later)
            for token, later in zip(single, following, strict=True)
            if token is not None
        ]
        if len(set(ids)) == len(ids) and sum(index is not None for index in after) >= LEAST:
            sets.append(OrderedSet(name, ids, after))
    if not sets:
        raise UnsupportedError("the tokenizer has too few days, months, numbers and letters as one token each")
    return sets


def measure(subject: Subject) -> Measurement:
    """The share of tokens whose successor a head raises most among its set; a guess has 1 / size of the set."""
    sets = ordered_sets(subject.tokenizer)
    ids = torch.tensor([[token] for group in sets for token in group.ids], device=device_of(subject.model))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if hasattr(getattr(subject.model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    training = subject.model.training
    subject.model.eval()
    try:
        path = direct_path(subject.model, inputs, subject.is_measured)
        outputs = ov_outputs(subject.model, inputs, path)
    finally:
        subject.model.train(training)
    readers = path.readers(ids[:, 0])
    logits = {key: writer.write(outputs[key]) @ readers.T for key, writer in path.writers.items()}  # (H, n, n)
    units = []
    first = 0
    for group in sets:
        members = slice(first, first + len(group.ids))
        first += len(group.ids)
        raised = {key: table[:, members, members].argmax(-1).cpu().numpy() for key, table in logits.items()}
        for i, successor in enumerate(group.successors):
            if successor is not None:
                units.append((_unit(raised, i, successor, len(group.ids)), f"successor/{group.name}/{i}"))
    facts = {
        "tokens": len(units), "sets": [group.name for group in sets],
        WORDS: f"{len(units)} tokens of {', '.join(group.name for group in sets)}, by the weights alone; in brackets, "
        "a guess among the set",
    }  # fmt: skip
    return Measurement(subject.tally(units, len(units)), facts)


def _unit(raised: dict[Key, np.ndarray], token: int, successor: int, size: int) -> dict[Key, BatchSums]:
    return {
        key: BatchSums(
            ("successor",), CAUSAL, np.append(best[:, token] == successor, 1 / size)[None, None], np.ones((1, 1))
        )
        for key, best in raised.items()
    }


def ov_outputs(model: Any, inputs: dict[str, Any], path: DirectPath) -> dict[Key, Tensor]:
    """{layer: (n, H, width)}: each head's output where it attends to one token alone, (n, 1) of them in the inputs.

    Layers from the second on are given the token's embedding after the first feed-forward block.
    """
    writers = list(path.writers.values())
    blocks = list(dict.fromkeys(writer.block for writer in writers))
    if len(blocks) < 2:
        raise UnsupportedError("this model has one layer, whose heads do not read a feed-forward block's output")
    outputs: dict[Key, Tensor] = {}
    first = [writer for writer in writers if writer.block == blocks[0]]

    def read(site: Site, heads: Tensor, real: Tensor | None) -> None:
        outputs[site.key] = heads[:, 0].detach()

    with torch.no_grad():
        streams: list[Tensor] = []
        silent = {writer.site.name: list(range(writer.heads)) for writer in first}
        with mask_heads(model, silent), _given(model, blocks[1:2], lambda x: streams.append(x.detach())):
            run_on_tokens(model, inputs)
        with head_outputs(model, read), _given(model, blocks[1:], lambda x: streams[0]):
            run_on_tokens(model, inputs)
    return outputs


@contextmanager
def _given(model: Any, blocks: list[str], function: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Inside `with`, what some blocks are given goes through a function; it returns something else, or None."""

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            new = function(args[0])
            return None if new is None else ((new, *args[1:]), kwargs)
        new = function(kwargs["hidden_states"])
        return None if new is None else (args, {**kwargs, "hidden_states": new})

    with ExitStack() as stack:
        for block in blocks:
            hook = model.get_submodule(block).register_forward_pre_hook(replace, with_kwargs=True)
            stack.callback(hook.remove)
        yield
