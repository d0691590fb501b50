"""Writes src/headwise/card/defaults.tsv: what transformers assumes where a config.json says nothing.

Run with transformers installed: `python tests/card/write_defaults.py`. One line a model type: its name, then JSON.
"""

from __future__ import annotations

import json
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, logging
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PATH = Path(__file__).parents[2] / "src" / "headwise" / "card" / "defaults.tsv"

# No part of any shape or count. What a reader would need and is hit by one of these is in KEPT.
NOISE = re.compile(
    r"token|dropout|initializer|_eps$|eps_|epsilon|_std|return_|output_(att|hid|score)|_prob|^mask_|loss|theta|rope|cache"
    r"|_act|activation|gradient|label|drop|transformers_version|name_or_path|dtype|chunk_size_feed|problem_type|mean$"
    r"|temperature|tolerance|threshold|_weight$|weighting|freq|sampl|_init|beam|ctc_|task_spec|prefix|finetun|cost|alpha"
    r"|beta|gamma|capping|multiplier|scal(e|ing)|rescale|noise|^codevector|^num_negatives|coef|^summary|generation|suppress"
)
KEPT = re.compile(
    r"token_type|resampler|rope_head_dim|no_rope|dropout_free|use_.*token|token_bias|register_token|per_tok|layer_scale|num_global_tokens|prefix_dense"
    r"|mask_token|mlp_freq|sampl(e|ing)_rate.*dim|activation_function|hidden_act|feed_forward_proj|partial_rot|out_token"
    r"|proj_codevector|ffn_dim_multiplier|with_box|scale_embedding"
)
# The first that knows a type gives its usual class; of those that do not generate, the bare model is the usual one.
GENERATING = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM")


def defaults(model_type: str) -> dict[str, Any] | None:
    """What bears on shapes in the default config; `_generates`, `_base`: its classes; `_map`: other names of keys."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # two types of 5.22.2 cannot make their own default
        return None
    kept = dict(_own(type(config)))
    for name in (
        ()
        if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not kept.get("is_encoder_decoder")
        else GENERATING
    ):
        if found := getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").get(model_type):
            kept["_generates"] = _one(found)
            break
    if base := modeling_auto.MODEL_MAPPING_NAMES.get(model_type):
        kept["_base"] = _one(base)
    if config.attribute_map:
        kept["_map"] = {k: v for k, v in config.attribute_map.items() if k != v and not NOISE.search(v)}
    return kept


@cache
def _own(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    config = kind()
    return {key: value for key, value in _kept(config).items() if key not in _moving(config)}


def _moving(config: PreTrainedConfig) -> set[str]:
    """Keys that are made from others when they are not given, such as Llama's head_dim: no default, but a rule."""
    before, moving = _scalars(config), set()
    for name in ("num_attention_heads", "hidden_size"):
        own = {name, config.attribute_map.get(name, name)}
        try:
            after = _scalars(type(config)(**{name: 2 * getattr(config, name)}))
        except Exception:  # not every type has the key, or lets it change alone
            continue
        moving |= {key for key, value in after.items() if value != before.get(key) and key not in own}
    return moving


def _scalars(config: PreTrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if value is None or isinstance(value, int | float)}


def _one(found: str | tuple[str, ...]) -> str:
    return found if isinstance(found, str) else found[0]


def _kept(config: PreTrainedConfig) -> dict[str, Any]:
    plain = json.loads(config.to_json_string(use_diff=True))
    kept: dict[str, Any] = {}
    for key, value in plain.items():
        child = vars(config).get(key)  # getattr refuses where layers differ
        if isinstance(child, PreTrainedConfig):
            kept[key] = _child(child)
        elif isinstance(value, dict) or (NOISE.search(key) and not KEPT.search(key)):
            continue
        elif isinstance(value, list):
            if len(short := _period(value)) <= 200 and not any(isinstance(x, dict | list) for x in short):
                kept[key] = short
        elif key != "model_type":
            kept[key] = value
    return kept


def _child(config: PreTrainedConfig) -> dict[str, Any]:
    """What a part inside another differs in from its own type's default."""
    own = _own(type(config))
    there = _kept(config)
    return {"model_type": config.model_type} | {k: v for k, v in there.items() if own.get(k, ...) != v}


def _period(values: list[Any]) -> list[Any]:
    """A list of one entry a layer as its shortest period, so that it serves any number of layers."""
    if values and all(isinstance(value, str) for value in values):
        for size in range(1, len(values) // 2 + 1):
            if all(value == values[i % size] for i, value in enumerate(values)):
                return values[:size]
    return values


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    rows = ((name, defaults(name)) for name in sorted(CONFIG_MAPPING.keys()))
    lines = [f"{name}\t{json.dumps(row or {}, separators=(',', ':'), sort_keys=True)}\n" for name, row in rows]
    PATH.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
