"""The parameters of a whole model: its class, towers and output head; `Unknown` where a count would be a guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..config.node import Node
from ..types import Counts, Part, Source, Unknown
from .count import count_head, count_stack
from .facts import Facts, Sizes
from .output_heads import ENCODER_ALONE, SUFFIXES
from .table import facts_of

Towers = Sequence[tuple[Part, Node]]


def class_name(root: Node) -> tuple[str, Source]:
    """The class that is counted: the one in `architectures`, else the usual class of the model type."""
    classes = root.raw.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        return classes[0], Source("read", root.place("architectures"))
    usual = root.assumed.get("_generates") or root.assumed.get("_base") or ""
    return usual, Source("defaulted", f"no architectures in the file; the usual class of {root.model_type}")


def ending(name: str) -> str:
    """The end of a class's name, which says what its output head does: "ForCausalLM"."""
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")


def count(root: Node, towers: Towers) -> tuple[Counts | Unknown, list[Part]]:
    """The parameters of the class, and the towers with their own parameters."""
    name, _ = class_name(root)
    facts = facts_of(root.model_type)
    plain = [part for part, _ in towers]
    if facts is None:
        return Unknown(f"not known for this model type ({root.model_type or 'none is named'})"), plain
    if not name or not _fits(root, name):
        return Unknown(f"not known for {name or 'a class without a name'} of model type {root.model_type}"), plain
    if facts.towers:
        return _composite(root, facts, towers, ending(name))
    return _single(facts, towers, ending(name))


def _fits(root: Node, name: str) -> bool:
    """Whether a class belongs to the model type: its name starts like those of the type's own classes, in any case.

    The hub's MPTForCausalLM is the library's MptForCausalLM.
    """
    class_names = [root.assumed.get(key) for key in ("_base", "_generates")]
    starts = {known.removesuffix(ending(known)).lower() for known in class_names if known}
    starts |= {start.removesuffix("text") for start in starts} | {start + "text" for start in starts}
    return ending(name) != "" and name.removesuffix(ending(name)).lower() in starts


def _single(facts: Facts, towers: Towers, suffix: str) -> tuple[Counts | Unknown, list[Part]]:
    counted_parts, total = [], Counts()
    encoder_head = ENCODER_ALONE.get(suffix) if facts.decoder else None
    if encoder_head:
        part, node = towers[0]
        counts = count_stack(facts, part, node)
        return counts + Counts(other=encoder_head(Sizes(node, part.numbers, None, {}), facts)), [
            replace(part, parameters=counts)
        ]
    sides = [facts, facts.decoder] if facts.decoder else [facts]
    for (part, node), side_facts in zip(towers, sides, strict=False):
        counts = count_stack(side_facts, part, node)
        counted_parts.append(replace(part, parameters=counts))
        total += counts
    part, node = towers[-1] if facts.decoder else towers[0]
    head = count_head(facts, part, node, suffix)
    if head is None:
        return Unknown(f"not known for classes that end in {suffix} of model type {part.model_type}"), counted_parts
    return total + head, counted_parts


def _composite(root: Node, facts: Facts, towers: Towers, suffix: str) -> tuple[Counts | Unknown, list[Part]]:
    """Each tower by its own type's facts, then what joins them and the head over the text."""
    by_key = {node.path.split(".")[-1] or "text_config": (part, node) for part, node in towers}
    total, counted_parts, sizes = Counts(), {part.name: part for part, _ in towers}, dict[str, Sizes]()
    for key, role in facts.towers.items():
        if key not in by_key:
            if role.endswith("?"):
                continue
            return Unknown(f"not known without the {key} that model type {root.model_type} has"), [
                *counted_parts.values()
            ]
        part, node = by_key[key]
        tower_facts = facts_of(node.model_type)
        if tower_facts is None:
            return Unknown(f"not known for model type {node.model_type} ({node.path})"), [*counted_parts.values()]
        counts = count_stack(tower_facts, part, node)
        head = count_head(tower_facts, part, node, role.rstrip("?"))
        if head is None:
            return Unknown(f"not known for {node.model_type} as a tower"), [*counted_parts.values()]
        counted_parts[part.name] = replace(part, parameters=counts + head)
        total += counts + head
        sizes[key.removesuffix("_config")] = Sizes(node, part.numbers, None, {})
    joint = _joint_parameters(root, facts, sizes)
    head = count_head(facts, Part("", "", ""), root, suffix, sizes)
    if head is None:
        return Unknown(f"not known for classes that end in {suffix} of model type {root.model_type}"), [
            *counted_parts.values()
        ]
    return total + joint + head, [*counted_parts.values()]


def _joint_parameters(root: Node, facts: Facts, below: Mapping[str, Sizes]) -> Counts:
    s = Sizes(root, {}, None, below)
    return Counts(**{group: term(s) for group, term in facts.once.items()})
