"""The card: what was read of a model, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .nodes import Node
from .totals import class_name, count
from .towers import parts
from .values import Attention, Counts, Part, Unknown


@dataclass(frozen=True)
class Card:
    name: str
    model_type: str
    class_name: str
    parts: tuple[Part, ...]
    parameters: Counts | Unknown


def from_config(raw: dict[str, Any], name: str = "") -> Card:
    root = Node(raw)
    towers = list(parts(root))
    parameters, counted = count(root, towers)
    return Card(name, root.model_type, class_name(root)[0], tuple(counted), parameters)
