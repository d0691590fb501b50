"""The environment of a claim: its compute budget, its random starts, and a store of finished pieces of work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import HeadwiseError
from ..files import write_atomically
from ..json_documents import parse_json
from ..timing.machine import processor

if TYPE_CHECKING:
    from ..scale.ranks import Ranks
    from .model import Recipe
    from .train import TrainedModel

VERSION = 1  # increased when training changes, so that old pieces are not reused
Progress = Callable[[str, int, int], None]  # description, steps done, total steps
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a claim may compute."""

    name: str
    starts: int  # random starts per trained model
    steps: float = 1.0  # share of a recipe's training steps
    text: float = 1.0  # a further factor for text models, which are far from converged after 1,000 steps

    def pick(self, tiny: T, default: T, full: T) -> T:
        """The value for this budget."""
        return {"tiny": tiny, "default": default, "full": full}[self.name]


TINY, DEFAULT, FULL = Budget("tiny", 2, 0.003), Budget("default", 2), Budget("full", 20, text=4.0)
BUDGETS = {budget.name: budget for budget in (TINY, DEFAULT, FULL)}


@dataclass
class Lab:
    """What a claim runs with.

    Finished pieces of work are stored in the folder `work` under a hash of their inputs, so that claims share models
    and nothing is trained twice. Several ranks train every model together and need a folder that all of them see;
    everything else is computed by rank 0 and read by the others.
    """

    budget: Budget = DEFAULT
    seed: int = 0
    device: str = "cpu"
    work: Path | None = None
    progress: Progress = lambda description, step, total: None
    new_pieces: list[str] = field(default_factory=list)  # the pieces that were not in the store
    processors: set[str] = field(default_factory=set)  # the CPUs that computed the pieces, as far as the store knows
    ranks: Ranks | None = None  # the ranks that torchrun started
    over: str = "ddp"  # how the ranks train: ddp or fsdp

    @property
    def starts(self) -> list[int]:
        """The seeds of the random starts."""
        return list(range(self.seed, self.seed + self.budget.starts))

    def recipe(self, **options: Any) -> Recipe:
        """A recipe with its training steps scaled to the budget."""
        from .model import Recipe

        recipe = Recipe(**options)
        share = self.budget.steps * (self.budget.text if recipe.task == "text" else 1)
        return replace(recipe, steps=max(2, round(recipe.steps * share)))

    def model(self, **options: Any) -> TrainedModel:
        """The trained model of this recipe, from the store or trained now."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file

        from ..scale.train import training_group
        from .model import build, task_of
        from .train import TrainedModel, train

        recipe = self.recipe(**options)
        weights = self._place("model", self.model_key(recipe), ".safetensors")
        words = f"{recipe.task}, {recipe.heads} heads, start {recipe.seed}"
        new_models: list[TrainedModel] = []

        def run() -> list[tuple[int, float, float]]:
            group = training_group(self.over, self.ranks) if self.ranks else None
            model = train(recipe, self.device, partial(self.progress, words), group)
            new_models.append(model)
            if weights and self._first:
                with write_atomically(weights) as path:
                    save_file({name: x.contiguous() for name, x in model.decoder.state_dict().items()}, path)
            return model.curve

        place = self._place("model", self.model_key(recipe), ".json")
        if self.ranks:
            self.ranks.agree("what to train", f"{words}, {'' if place and place.exists() else 'not '}in the store")
        curve = self._piece("model", self.model_key(recipe), run)
        if self.ranks:
            self.ranks.barrier("the end of a training")
        if new_models:
            return new_models[0]
        assert weights is not None
        decoder = build(recipe)
        try:
            decoder.load_state_dict(load_file(weights))
        except (OSError, SafetensorError, RuntimeError) as error:
            words = " ".join(str(error).split())
            raise HeadwiseError(
                f"{str(weights)!r} cannot be read ({words}); remove it and {str(place)!r}, they are made again"
            ) from error
        rows = [(step, loss, right) for step, loss, right in curve]
        return TrainedModel(recipe, decoder.to(self.device).eval(), rows, task_of(recipe).chance())

    def piece(self, name: str, key: dict[str, Any], compute: Callable[[], T]) -> T:
        """The result of compute() as JSON values, computed once per name and inputs."""

        def first() -> str:
            if self._first:
                self._piece(name, key, compute)
            return "there"

        if self.ranks:
            self.ranks.agree(f"a piece of the lab ({name})", first)
        return self._piece(name, key, compute)

    def outcome(self, **options: Any) -> dict[str, Any]:
        """How the training of a recipe ended, without its weights; "curve" has steps and held-out losses."""
        return self.figure("outcome", _outcome, **options)

    def figure(self, name: str, measure: Callable[[TrainedModel], T], **options: Any) -> T:
        """A figure of a trained model as JSON values, computed once per recipe; only then is the model loaded."""
        key = {"model": self.model_key(self.recipe(**options))}
        place = self._place(name, key, ".json")
        models = [] if place and place.exists() else [self.model(**options)]
        return self.piece(name, key, lambda: measure(*models))

    @property
    def _first(self) -> bool:
        return self.ranks is None or self.ranks.first

    def _piece(self, name: str, key: dict[str, Any], compute: Callable[[], T]) -> T:
        place = self._place(name, key, ".json")
        if place and place.exists():
            try:
                document = parse_json(place.read_text(encoding="utf-8"))
                self.processors |= {document["cpu"]} if "cpu" in document else set()
                return document["value"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise HeadwiseError(f"{str(place)!r} cannot be read ({error}); remove it, it is made again") from error
        value = compute()
        self.new_pieces.append(f"{name} {json.dumps(key, sort_keys=True)}")
        self.processors.add(processor())
        if place and self._first:
            document = {"made_of": key, "cpu": processor(), "value": value}
            with write_atomically(place) as path:
                path.write_text(json.dumps(document) + "\n", encoding="utf-8")
        return value

    def model_key(self, recipe: Recipe) -> dict[str, Any]:
        """Everything that determines a trained model: the key of the pieces computed from it."""
        from .tasks import fingerprint

        return asdict(recipe) | {"text": fingerprint() if recipe.task == "text" else ""}

    def _place(self, name: str, key: dict[str, Any], suffix: str) -> Path | None:
        if self.work is None:
            return None
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HeadwiseError(f"{str(self.work)!r} cannot be made: {error.strerror or error}") from error
        text = json.dumps([VERSION, self.device, name, key], sort_keys=True)
        return self.work / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}{suffix}"


def _outcome(model: TrainedModel) -> dict[str, Any]:
    curve = [(step, loss) for step, loss, _ in model.curve]
    return {"loss": model.loss, "accuracy": model.accuracy, "learned": model.learned, "curve": curve}
