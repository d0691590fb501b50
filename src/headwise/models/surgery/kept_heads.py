"""Which of the original heads each layer of a pruned model still has.

The record of a layer is an attribute of its attention module, and not an entry in a registry of ours: it must stay with
the module when the model is copied, pickled or put into another model. Everything reads and writes it through here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..structure.sites import Key, attention_sites

_RECORD = "headwise_kept"  # on an attention module
_COLUMNS = "headwise_columns"  # on a table of position biases


@dataclass(frozen=True)
class KeptHeads:
    """The heads of one attention layer, by their numbers in the model before any pruning."""

    query: tuple[int | None, ...]  # for each query head its original number; None: a zeroed head that pads a group
    kv: tuple[int | None, ...]
    query_of: int  # original query heads
    kv_of: int  # original KV heads
    zeroed: bool = False  # shapes are as before; the removed heads are zeros in W_O

    @property
    def removed(self) -> list[int]:
        """The original numbers of the query heads that were removed."""
        return [i for i in range(self.query_of) if i not in self.query]

    @property
    def padding(self) -> list[int]:
        """The positions of zeroed query heads."""
        return [i for i, number in enumerate(self.query) if number is None]


def kept_heads(module: nn.Module) -> KeptHeads | None:
    """The record of an attention module; None where no head was removed."""
    record: KeptHeads | None = getattr(module, _RECORD, None)
    return record


def set_kept_heads(module: nn.Module, record: KeptHeads) -> None:
    """Write the record of an attention module."""
    setattr(module, _RECORD, record)


def is_cut(module: nn.Module) -> bool:
    """Whether heads of an attention module were cut out, and not only zeroed."""
    record = kept_heads(module)
    return record is not None and not record.zeroed


def pruned_layers(model: nn.Module) -> dict[tuple[str, int], KeptHeads]:
    """The records of a model's pruned layers, by (kind, layer)."""
    records = {site.key: kept_heads(site.module) for site in attention_sites(model)}
    return {key: record for key, record in records.items() if record is not None}


def set_head_numbers(model: Any) -> None:
    """Set `model.headwise_heads`: for each pruned layer the original number of every head, None for zeroed ones."""
    several_kinds = len({site.kind for site in attention_sites(model)}) > 1
    numbers: dict[Key, list[int | None]] = {
        (key if several_kinds else key[1]): list(record.query) for key, record in pruned_layers(model).items()
    }
    model.headwise_heads = numbers


def table_columns(table: nn.Embedding) -> list[int]:
    """The original heads of the columns of a table of position biases."""
    columns: list[int] = getattr(table, _COLUMNS, None) or list(range(table.weight.shape[1]))
    return columns


def set_table_columns(table: nn.Embedding, columns: list[int]) -> None:
    """Note which original heads the columns of a table are."""
    setattr(table, _COLUMNS, columns)
