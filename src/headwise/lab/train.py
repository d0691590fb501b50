"""The whole training loop: draw a batch, predict, compute the loss, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.nn.stack import Decoder
from ..prune.training_group import TrainingGroup
from .model import Recipe, build, task_of
from .tasks import IGNORED, Batch, Relations, Text

EVALUATIONS = 20  # per run: on one held-out batch along the way, on all held-out data at the end
TEST_SEED, TEST_BATCHES, TEST_SIZE = 1 << 20, 8, 64  # the same held-out data for every model
WARM_UP = 0.1  # share of the steps; after it the learning rate falls linearly
CLIP = 1.0  # maximum gradient norm
LEARNED = 0.9  # a model has learned if its loss is below this share of chance


@dataclass(frozen=True)
class TrainedModel:
    """A trained decoder with its training curve."""

    recipe: Recipe
    decoder: Decoder
    curve: list[tuple[int, float, float]]  # step, held-out loss, held-out accuracy
    chance: float  # the loss of a model that learned nothing

    @property
    def loss(self) -> float:
        return self.curve[-1][1]

    @property
    def accuracy(self) -> float:
        return self.curve[-1][2]

    @property
    def learned(self) -> bool:
        return self.loss < LEARNED * self.chance  # also False where the loss is not a number


def train(
    recipe: Recipe,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    group: TrainingGroup | None = None,
) -> TrainedModel:
    """A model trained by its recipe. The order of the data depends on the seed too.

    group: the ranks that share every batch, headwise.scale.train.training_group("ddp") or ("fsdp") under torchrun.
    """
    task, model = task_of(recipe), build(recipe).to(device)
    random = torch.Generator().manual_seed(recipe.seed)
    steps, batch, rate = recipe.steps, recipe.batch, recipe.rate
    curve = fit(model, task, model.parameters(), random, steps, batch, rate, progress, recipe.seed, group)
    return TrainedModel(recipe, model.eval(), curve, task.chance())


def fit(
    model: Decoder,
    task: Relations | Text,
    parameters: Iterable[nn.Parameter],
    random: torch.Generator,
    steps: int,
    batch: int,
    rate: float,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
    group: TrainingGroup | None = None,
) -> list[tuple[int, float, float]]:
    """Train these parameters of the model on the task; returns the held-out curve."""
    device = next(model.parameters()).device
    group = group or TrainingGroup()
    trainable_ids, originals = {id(x) for x in parameters}, list(model.parameters())
    learner = group.wrap(model)
    whole = getattr(learner, "module", learner)
    trainable = [x for x, original in zip(whole.parameters(), originals, strict=True) if id(original) in trainable_ids]
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    curve = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + group.rank)  # for dropout
        for step in range(steps):
            examples = task.batch(batch, random)
            (inputs, weight), (targets, _) = group.local_batch(examples.inputs), group.local_batch(examples.targets)
            loss = loss_of(learner(inputs.to(device)), targets.to(device), weight, group.all_sum)
            learner.zero_grad()
            (loss * group.count).backward()  # ranks average their gradients
            nn.utils.clip_grad_norm_(trainable, CLIP)
            optimizer.step()
            schedule.step()
            if (step + 1) % max(1, steps // EVALUATIONS) == 0 or step + 1 == steps:
                curve.append((step + 1, *quality(whole, task, TEST_BATCHES if step + 1 == steps else 1)))
                if progress:
                    progress(step + 1, steps)
    group.finish(model)
    return curve


def _rate(step: int, steps: int) -> float:
    warm = max(1, int(WARM_UP * steps))
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def loss_of(
    logits: Tensor, targets: Tensor, weight: float = 1.0, total: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """logits (B, T, answers * symbols), targets (B, T, answers) -> the mean loss over all targets except IGNORED.

    total: the sum over the ranks that share a batch; the result is then this rank's part of that mean.
    """
    answers = logits.unflatten(-1, (targets.shape[-1], -1))  # (B, T, answers, symbols)
    mean = F.cross_entropy(answers.flatten(0, 2), targets.flatten(), ignore_index=IGNORED)
    if total is None:
        return mean
    count = weight * (targets != IGNORED).sum()
    return mean * count / total(count)


@torch.no_grad()
def quality(model: Decoder, task: Relations | Text, batches: int = TEST_BATCHES) -> tuple[float, float]:
    """Loss and accuracy on the held-out data, or on its first batches."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    loss = right = count = 0.0
    for batch in held_out(task, batches):
        logits, targets = model(batch.inputs.to(device)), batch.targets.to(device)
        best = logits.unflatten(-1, (targets.shape[-1], -1)).argmax(-1)  # (B, T, answers)
        real = targets != IGNORED
        loss += float(loss_of(logits, targets)) * int(real.sum())
        right += int((best == targets)[real].sum())
        count += int(real.sum())
    model.train(training)
    return loss / count, right / count


def held_out(task: Relations | Text, batches: int = TEST_BATCHES, size: int = TEST_SIZE) -> list[Batch]:
    """Data that no model was trained on, the same in every call."""
    random = torch.Generator().manual_seed(TEST_SEED)
    return [task.batch(size, random, held_out=True) for _ in range(batches)]
