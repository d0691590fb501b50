"""Every model type of transformers that can be built small: its statistics equal eager's, or it is refused."""

from __future__ import annotations

import inspect
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import UnsupportedError
from helpers import any_model_type
from helpers.eager_weights import Call, assert_same, record_calls, statistics

torch.set_num_threads(1)
SECONDS = 60  # per model type
# Types whose eager function returns other weights than those of its output: without the sinks.
OTHER_WEIGHTS = {"granite_swa", "granitemoe_swa"}


class Wrong(Exception):
    """Statistics or weights differ from eager's."""


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict(model_type: str) -> tuple[str, str]:
    """The outcome for one type (right, refused, cannot be built, cannot be run) and why; raises Wrong."""
    reason = "too large"
    for kind, config in any_model_type.small_models(model_type):
        if kind is None:
            reason = config
            continue
        try:
            model = any_model_type.build(kind, config, "eager")
        except Exception as error:  # models raise any kind of error
            reason = f"{type(error).__name__}: {error}"
            continue
        refused = _refusal(model)
        if refused:
            return "refused", refused
        batch = _runs(model)
        if batch is not None:
            return "right", _check(model_type, kind, config, batch)
        reason = "inputs"
    return ("cannot be run" if reason == "inputs" else "cannot be built"), reason


def _refusal(model: nn.Module) -> str | None:
    try:
        headwise.watch(model)
    except UnsupportedError as error:
        return str(error)
    return None


def _runs(model: Any) -> dict[str, Tensor] | None:
    for batch in any_model_type.possible_inputs(model):
        try:
            with torch.no_grad():
                model(**batch)
        except TimeoutError:
            raise
        except Exception:  # the next shape may fit
            continue
        return batch
    return None


def _check(model_type: str, kind: Any, config: Any, batch: dict[str, Tensor]) -> str:
    """Compare all statistics under every implementation, with and without padding."""
    models = {
        name: any_model_type.build(kind, config, name) for name in ("eager", *(["sdpa"] if kind._supports_sdpa else []))
    }
    cases = [batch]
    if "input_ids" in batch and "attention_mask" in inspect.signature(models["eager"].forward).parameters:
        mask = torch.ones(any_model_type.BATCH, any_model_type.LENGTH, dtype=torch.long)
        mask[1, 9:] = mask[2, 5:] = 0
        cases.append({**batch, "attention_mask": mask})
    layers = 0
    for case in cases:
        try:
            with torch.no_grad(), record_calls() as calls:
                torch.manual_seed(5)
                models["eager"](**case)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            continue  # it does not take such a mask
        for model in models.values():
            layers += _compare(model_type, model, case, models["eager"], calls)
    return f"{layers} layers"


def _compare(model_type: str, model: Any, case: dict[str, Tensor], eager: nn.Module, calls: list[Call]) -> int:
    outs = []
    with torch.no_grad():
        for watching in (None, headwise.watch(model, weights=True)):
            torch.manual_seed(5)
            if watching is None:
                outs.append(_tensors(model(**case)))
                continue
            with watching as seen:
                outs.append(_tensors(model(**case)))
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*outs, strict=True)):
        raise Wrong("the output changed")
    paths = {id(module): path for path, module in eager.named_modules()}
    true: dict[str, list[Call]] = {}
    for call in calls:
        true.setdefault(paths[id(call.module)], []).append(call)
    if {layer.name for layer in seen.layers} != set(true):
        raise Wrong(f"layers {set(true) ^ {layer.name for layer in seen.layers}}")
    if not _same_function(model, eager, case):
        return 0  # transformers' own sdpa and eager outputs differ
    for name, weights_by_call in true.items():
        layers = [layer for layer in seen.layers if layer.name == name]
        groups = [weights_by_call] if len(layers) == 1 else [[call] for call in weights_by_call]
        for layer, layer_weights in zip(layers, groups, strict=False):
            _compare_layer(model_type, layer, layer_weights[: len(layer.all_weights)], case.get("attention_mask"))
    return len(seen.layers)


def _compare_layer(model_type: str, layer: Any, calls: list[Call], mask: Tensor | None) -> None:
    parts = []
    for ours, call in zip(layer.all_weights, calls, strict=True):
        weights = call.weights
        if not torch.isfinite(weights).all():
            return  # the model's own weights are NaN
        of_batch = mask is not None and weights.shape[0] == any_model_type.BATCH
        real = mask if of_batch and weights.shape[2] == any_model_type.LENGTH else None
        exists = mask if of_batch and weights.shape[3] == any_model_type.LENGTH else None
        if model_type not in OTHER_WEIGHTS:
            rows = torch.ones(1, 1, 1, 1) if real is None else real[:, None, :, None]
            if not torch.allclose(ours * rows, weights * rows, rtol=5e-3, atol=5e-3):
                raise Wrong(f"weights of {layer.name} are off by {float(((ours - weights) * rows).abs().max()):.3g}")
        stats = layer.stats
        parts.append(
            statistics(
                ours if model_type in OTHER_WEIGHTS else weights, real,
                exists=exists, cross="distance" not in stats, sinks="sink" in stats,
            )
        )  # fmt: skip
    expected = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    try:
        assert_same(layer.stats, expected, rtol=1e-2, atol=3e-2)
    except AssertionError as error:
        raise Wrong(f"statistics of {layer.name}: {error}") from None


def _same_function(model: Any, eager: Any, case: dict[str, Tensor]) -> bool:
    """Whether two models give the same output at tokens."""
    if model is eager:
        return True
    outs = []
    for each_model in (model, eager):
        torch.manual_seed(5)
        with torch.no_grad():
            outs.append(_tensors(each_model(**case))[0].float())
    a, b = outs
    mask = case.get("attention_mask")
    if mask is not None and a.shape[:2] == mask.shape:
        a, b = a[mask.bool()], b[mask.bool()]
    return bool((a - b).abs().max() <= 1e-2 * b.abs().max() + 1e-6)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    x = x.to_tuple() if hasattr(x, "to_tuple") else x
    return [y for part in x for y in _tensors(part)] if isinstance(x, (list, tuple)) else []


@pytest.mark.full
def test_every_model_type_equals_eager_or_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: dict[str, list[str]] = {}
    wrong = {}
    warnings.simplefilter("ignore")
    for model_type in any_model_type.TYPES:
        try:
            with time_limit():
                outcome, reason = verdict(model_type)
        except TimeoutError:
            outcome, reason = "cannot be run", "not in time"
        except Exception as error:
            outcome, reason = "wrong", f"{type(error).__name__}: {error}"
            wrong[model_type] = reason
        outcomes.setdefault(outcome, []).append(model_type)
        with capsys.disabled():
            print(f"{outcome:16} {model_type:32} {' '.join(reason.split())[:150]}", flush=True)  # noqa: T201
    with capsys.disabled():
        print(dict(Counter({outcome: len(types) for outcome, types in outcomes.items()})))  # noqa: T201
    assert not wrong
    assert len(outcomes["right"]) >= 250
    assert len(outcomes["refused"]) >= 100
