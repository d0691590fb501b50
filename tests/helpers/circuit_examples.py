"""A small circuit and effects of heads, written by hand, for pages that show them."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.circuits.effects import EffectLayer, Effects, EffectsAbout

NASTY = '</script><img src=x onerror="alert(1)">'


def head_node(layer: int, head: int) -> dict[str, Any]:
    return {
        "id": f"self.{layer}.{head}", "type": "head", "kind": "self", "layer": layer, "head": head, "order": 2 * layer,
    }  # fmt: skip


def edge(source: str, target: str, score: float, input: str = "input", **ends: float) -> dict[str, Any]:
    return {"from": source, "to": target, "input": input, "score": score, "low": None, "high": None, **ends}


CIRCUIT: dict[str, Any] = {
    "headwise": "circuit", "format": 1, "model": "minilm", "metric": f"logit of {NASTY}", "clean": 3.125,
    "corrupted": -0.25, "prompts": 7, "method": "by hand", "size": 5, "notes": ["a note"],
    "nodes": [
        {"id": "embedding", "type": "embedding", "layer": -1},
        *(head_node(layer, head) for layer, head in ((0, 2), (3, 1), (3, 11), (5, 4))),
        {"id": "feed-forward.3", "type": "feed-forward", "layer": 3, "order": 7},
        {"id": "output", "type": "output", "layer": 6, "order": 12},
    ],
    "edges": [
        edge("self.5.4", "output", 0.75, low=0.5, high=1.0),
        edge("self.3.1", "self.5.4", -0.375, "key"),
        edge("self.0.2", "self.3.1", 0.25, "query"),
        edge("embedding", "self.0.2", 0.125, "value"),
        edge("feed-forward.3", "output", 0.0625),
    ],
    "curve": [
        {"edges": 1, "faithfulness": [0.25, 0.125, 0.375], "completeness": [0.5, None, None], "random": [0, 0, 0]},
        {"edges": 5, "faithfulness": [0.875, 0.75, 1.25], "completeness": [0.75, None, None], "random": [-0.1, -1, 0]},
    ],
}  # fmt: skip


def head_effects(name: str, sign: float = 1.0) -> Effects:
    layers = [EffectLayer("self", layer, 12) for layer in range(6)]
    examples = [sign * (12.0 * layer + np.arange(12.0) - 60) + np.array([[-1.0], [1.0]]) for layer in range(6)]
    about = EffectsAbout(name, f"how {name} is measured", "logit of ' a'", 2.5, notes=(NASTY,))
    return Effects(layers, examples, about, rest={NASTY: np.array([1.0, 3.0])})
