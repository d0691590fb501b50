"""Writes src/headwise/card/config/defaults.tsv: what transformers assumes where a config.json says nothing.

Run with transformers installed: `python tools/config_defaults.py`. The first line of the table is the version of
transformers; then there is one line per model type: its name, a tab, its defaults as JSON. Every type's model is built
on the meta device, to see which keys about heads it uses.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from functools import cache, reduce
from io import StringIO
from pathlib import Path
from typing import Any

import model_table
import torch
import transformers
from transformers import PreTrainedConfig, logging
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headwise.card.config import keys

PATH = Path(__file__).parents[1] / "src" / "headwise" / "card" / "config" / "defaults.tsv"

# Keys that say nothing about shapes or counts; NEEDED names the exceptions.
NOISE = re.compile(
    r"token|dropout|initializer|_eps$|eps_|epsilon|_std|return_|output_(att|hid|score)|_prob|^mask_|loss|theta|rope|cache"
    r"|_act|activation|gradient|label|drop|transformers_version|name_or_path|dtype|chunk_size_feed|problem_type|mean$"
    r"|temperature|tolerance|threshold|_weight$|weighting|freq|sampl|_init|beam|ctc_|task_spec|prefix|finetun|cost|alpha"
    r"|beta|gamma|capping|multiplier|scal(e|ing)|rescale|noise|^codevector|^num_negatives|coef|^summary|generation|suppress"
)
KEPT_KEYS = re.compile(
    r"token_type|resampler|rope_head_dim|no_rope|dropout_free|use_.*token|token_bias|register_token|per_tok|layer_scale|num_global_tokens|prefix_dense"
    r"|mask_token|mlp_freq|sampl(e|ing)_rate.*dim|activation_function|hidden_act|feed_forward_proj|partial_rot|out_token"
    r"|proj_codevector|ffn_dim_multiplier|with_box|scale_embedding"
)
# The first mapping with a type gives its usual class; for types that do not generate it is the bare model.
GENERATING = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM")

# Keys about heads, which files also have where the type's class does not use them.
HEAD_KEYS = (*keys.HEAD_DIM, "v_head_dim", *keys.KV_HEADS, "multi_query", "kv_lora_rank", "num_kv_shared_layers")
# Of these, the ones that classes take from a config (getattr) whose own class does not name them.
UNNAMED_KEYS = ("head_dim", "attention_head_size", "attention_head_dim", "v_head_dim", "num_key_value_heads")
# Two values of each, for a default that equals one of them.
UNUSUAL = dict.fromkeys(UNNAMED_KEYS, (24, 40)) | {"num_key_value_heads": (1,)}
LAYERS = 2  # of the models that are built
# For types whose default is None, with which nothing can be built.
MISSING = {"head_dim": 64, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "vocab_size": 71}
Shapes = dict[str, tuple[int, ...]]


def defaults(model_type: str) -> dict[str, Any] | None:
    """The keys of a type's default config that bear on shapes.

    Beside them: `_generates` and `_base`, the names of its classes, `_map`, other names of its keys, and `_uses`, the
    keys about heads that its class uses, where it could be built.
    """
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # a few types cannot make their own default
        return None
    row = dict(_type_defaults(type(config)))
    for name in (
        ()
        if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not row.get("is_encoder_decoder")
        else GENERATING
    ):
        if classes := getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").get(model_type):
            row["_generates"] = _first(classes)
            break
    if base := modeling_auto.MODEL_MAPPING_NAMES.get(model_type):
        row["_base"] = _first(base)
    if config.attribute_map:
        row["_map"] = {k: v for k, v in config.attribute_map.items() if k != v and not NOISE.search(v)}
    if (used := used_keys(model_type)) is not None:
        row["_uses"] = used
    return row


@cache
def used_keys(model_type: str) -> list[str] | None:
    """The keys about heads that a type's config class names or its model reads; None where no model can be built."""
    config = CONFIG_MAPPING[model_type]()
    named = {*config.to_dict(), *config.attribute_map}
    for owner, path in _owners(model_type):
        if plain := _shapes(owner, path, {}):
            read = {key for key in UNNAMED_KEYS if key not in named and _is_read(owner, path, key, plain)}
            return [key for key in HEAD_KEYS if key in named | read]
    return None


def _is_read(owner: str, path: tuple[str, ...], key: str, plain: Shapes) -> bool:
    """Whether a key in the config changes the shape of a parameter."""
    return any(_shapes(owner, path, {key: value}) not in (None, plain) for value in UNUSUAL[key])


@cache
def _owners(model_type: str) -> list[tuple[str, tuple[str, ...]]]:
    """Types with a model that has a config of this type, each with the path to it: the type itself comes first."""
    own = [(model_type, ())] if model_type in modeling_auto.MODEL_MAPPING_NAMES else []
    return own + [(owner, path) for owner in modeling_auto.MODEL_MAPPING_NAMES for path in _paths(owner, model_type)]


@cache
def _nested(owner: str) -> list[tuple[tuple[str, ...], str]]:
    """Path and type of every config inside the default config of a type."""
    try:
        return list(_walk(CONFIG_MAPPING[owner]()))
    except Exception:  # a few types cannot make their own default
        return []


def _walk(config: PreTrainedConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, child in vars(config).items():
        if isinstance(child, PreTrainedConfig):
            yield (*path, key), child.model_type
            yield from _walk(child, (*path, key))


def _paths(owner: str, model_type: str) -> list[tuple[str, ...]]:
    return [path for path, nested_type in _nested(owner) if nested_type == model_type]


def _shapes(owner: str, path: tuple[str, ...], changes: dict[str, Any]) -> Shapes | None:
    """The shapes of a small model's parameters, with changes to its config at `path`; None where none can be built."""
    for layers in (LAYERS, None):
        with suppress(Exception):  # sizes that do not fit, a library that is missing, a key that the config refuses
            config = _config(owner, path, changes)
            if layers is not None:
                model_table.set_layers(config, layers)
            with torch.device("meta"), redirect_stderr(StringIO()):
                model = transformers.AutoModel.from_config(config)
            return {name: tuple(x.shape) for name, x in model.named_parameters()}
    return None


def _config(owner: str, path: tuple[str, ...], changes: dict[str, Any]) -> PreTrainedConfig:
    """The default config of a type, with changes to the config at `path` in it."""
    plain = CONFIG_MAPPING[owner]()
    filled = {key: value for key, value in MISSING.items() if getattr(plain, key, ...) is None}
    if not path:
        return CONFIG_MAPPING[owner](**(filled | changes))
    config = CONFIG_MAPPING[owner](**filled)
    parent = reduce(getattr, path[:-1], config)
    child = getattr(parent, path[-1])
    setattr(parent, path[-1], type(child).from_dict({**child.to_dict(), **changes}) if changes else child)
    return config


@cache
def _type_defaults(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    config = kind()
    return {key: value for key, value in _relevant(config).items() if key not in _derived(config)}


def _derived(config: PreTrainedConfig) -> set[str]:
    """Keys that transformers computes from other keys, such as Llama's head_dim: a rule, not a default."""
    before, derived = _scalars(config), set()
    for name in ("num_attention_heads", "hidden_size"):
        names = {name, config.attribute_map.get(name, name)}
        try:
            after = _scalars(type(config)(**{name: 2 * getattr(config, name)}))
        except Exception:  # not every type has the key, or lets it change alone
            continue
        derived |= {key for key, value in after.items() if value != before.get(key) and key not in names}
    return derived


def _scalars(config: PreTrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if value is None or isinstance(value, int | float)}


def _first(classes: str | tuple[str, ...]) -> str:
    return classes if isinstance(classes, str) else classes[0]


def _relevant(config: PreTrainedConfig) -> dict[str, Any]:
    plain = json.loads(config.to_json_string(use_diff=True))
    relevant: dict[str, Any] = {}
    for key, value in plain.items():
        child = vars(config).get(key)  # getattr refuses where layers differ
        if isinstance(child, PreTrainedConfig):
            relevant[key] = _child(child)
        elif isinstance(value, dict) or (NOISE.search(key) and not KEPT_KEYS.search(key)):
            continue
        elif isinstance(value, list):
            if len(short := _period(value)) <= 200 and not any(isinstance(x, dict | list) for x in short):
                relevant[key] = short
        elif key != "model_type":
            relevant[key] = value
    return relevant


def _child(config: PreTrainedConfig) -> dict[str, Any]:
    """A nested config: where it differs from the default of its own type."""
    type_values = _type_defaults(type(config))
    values = _relevant(config)
    return {"model_type": config.model_type} | {k: v for k, v in values.items() if type_values.get(k, ...) != v}


def _period(values: list[Any]) -> list[Any]:
    """A list with one entry per layer as its shortest period, so that it serves any number of layers."""
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
    PATH.write_text("".join([f"# transformers {transformers.__version__}\n", *lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
