"""The registry of importance scores: what a score says about itself, and how one is added.

A bundled score is one module of `headwise.prune.scores`, found automatically. A score from outside is registered by the
same decorator; an installed package is found through the entry point group `headwise.scores`:

    [project.entry-points."headwise.scores"]
    mine = "my_package.my_scores"      # a module whose functions carry the decorator
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from ..errors import HeadwiseError

if TYPE_CHECKING:
    import numpy as np

    from .scoring import ScoringRun

ENTRY_POINTS = "headwise.scores"
ScoreFunction: TypeAlias = "Callable[[ScoringRun], list[np.ndarray]]"
LossUse = Literal["gradient", "damage", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One importance score: its function, and every fact about its numbers that other code relies on.

    No fact has a default: the author of a score decides each of them, also those that matter only with several ranks.
    """

    name: str
    function: ScoreFunction  # gives an array (examples, units) for each attention layer, or one row for all examples
    signed: bool  # examples have a sign, and the mean is taken over their magnitudes
    normalised: bool  # the scores of a layer are divided by their Euclidean norm
    additive: bool  # an example's row depends on no other batch: ranks may score the batches separately
    trained: bool  # it trains parameters of its own, which takes far longer than a pass over the batches
    runs_model: bool  # False: it reads the weights alone, and needs no batches
    loss: LossUse  # what of the objective it measures: its gradient, the damage of a change, or nothing
    options: tuple[str, ...]  # keyword arguments of `importance` that it reads

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossUse):
            raise HeadwiseError(f"loss of a score must be one of {', '.join(get_args(LossUse))}, got {self.loss!r}")


_SCORES: dict[str, Score] = {}


def score(
    name: str,
    *,
    signed: bool,
    normalised: bool,
    additive: bool,
    trained: bool,
    runs_model: bool,
    loss: LossUse,
    options: tuple[str, ...] = (),
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as the importance score `name`.

    The function receives one `ScoringRun` and returns, for each of its `layers`, an array (examples, units), or
    (1, units) where the score has no examples. High means important.

    Args:
        name: what `importance(score=...)` and `headwise prune --score` call it.
        signed: whether values per example have a sign; the score is the mean of their magnitudes.
        normalised: whether the scores of each layer are divided by their Euclidean norm.
        additive: whether the row of an example is independent of other batches, so that ranks may score batches
            separately. Such a score returns one row per example.
        trained: whether the score trains its own parameters; comparisons of all scores omit it.
        runs_model: False for a score that reads only the weights and needs no batches.
        loss: the function of `run.objective` that the score calls, "gradient" or "damage", or "none".
        options: names of the keyword arguments of `importance` that it reads from `run.options`.

    Returns:
        The decorator; the function itself is not changed.

    Example:
        >>> import numpy as np
        >>> from headwise.prune import score
        >>> @score("layer-index", signed=False, normalised=False, additive=False, trained=False, runs_model=False,
        ...        loss="none")
        ... def layer_index(run):
        ...     return [np.full((1, len(run.units(layer))), float(layer.index)) for layer in run.layers]
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        importlib.import_module(".scores", __package__)  # so that the name of a bundled score is never taken over
        earlier = _SCORES.get(name)
        if earlier is not None and _origin(earlier.function) != _origin(function):  # a notebook's cell may run again
            raise HeadwiseError(
                f"there is a score {name!r} already, {'.'.join(_origin(earlier.function))}; give another name"
            )
        _SCORES[name] = Score(
            name=name,
            function=function,
            signed=signed,
            normalised=normalised,
            additive=additive,
            trained=trained,
            runs_model=runs_model,
            loss=loss,
            options=options,
        )
        return function

    return register


def scores() -> Mapping[str, Score]:
    """Every registered score by its name: the bundled ones, those of installed packages, those of this process."""
    importlib.import_module(".scores", __package__)
    _load_plugins()
    return MappingProxyType(_SCORES)


def find_score(name: str) -> Score:
    """The score of that name; a HeadwiseError that lists all names if there is none."""
    registered = scores()
    if name not in registered:
        raise HeadwiseError(f"there is no score {str(name)[:60]!r}; there are {', '.join(registered)}")
    return registered[name]


@functools.cache
def _load_plugins() -> None:
    """Import the scores of installed packages, once; one that fails must not take the bundled scores with it."""
    for plugin in entry_points(group=ENTRY_POINTS):
        try:
            plugin.load()
        except Exception as error:
            warnings.warn(
                f"the scores of {plugin.value!r} (entry point {plugin.name!r}) are left out: {error}", stacklevel=2
            )


def _origin(function: ScoreFunction) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
