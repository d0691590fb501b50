"""importance: how much every head of a model matters, by one of several scores, each under its own name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import HeadwiseError, UnsupportedError
from ..models.intervene.head_outputs import head_outputs, mean_head_outputs, run
from ..models.intervene.masking import mask_heads
from ..models.structure.heads import query_heads, w_o
from ..models.structure.linear_layers import output_width
from ..models.structure.projections import projections
from ..models.structure.sites import Key, Site, attention_sites
from ..models.watching.watcher import watch
from .l0 import OPTIONS as GATE_OPTIONS
from .l0 import opened
from .objective import Loss, Objective, batch_size, choose
from .scores import Place, Scores

UNITS = ("head", "kv", "layer")
LARGEST_SEED = 2**32 - 1  # of NumPy's older generators; PyTorch's take more
Advance = Callable[[int, int], None]  # steps done, steps in all


@dataclass
class Setting:
    """What a score works on."""

    model: Any
    sites: list[Site]
    places: list[Place]
    batches: list[Any]
    objective: Objective
    unit: str
    random: torch.Generator
    advance: Advance
    options: dict[str, Any]
    numbers: list[int]  # of the batches in a whole of which they may be a part

    def random_of(self, step: int) -> torch.Generator:
        """Random numbers of one batch's own, the same whatever other batches there are."""
        return torch.Generator().manual_seed(self.random.initial_seed() + 1_000_003 * (1 + self.numbers[step]))

    def row(self, site: Site) -> int:
        return next(i for i, place in enumerate(self.places) if place.key == site.key)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One way to score heads, with all that others must know about its numbers; nothing has a default."""

    function: Callable[[Setting], list[np.ndarray]]  # for each place (examples, units), or one row
    signed: bool  # examples have signs, and their sizes count
    normed: bool  # each layer is divided by its norm
    additive: bool  # an example's row does not depend on other batches: ranks may score batches apart
    loss: str  # what of the objective it looks at: "slope", "damage" or "no loss"
    options: tuple[str, ...]  # names of the options of `importance` that it reads


SCORES: dict[str, Score] = {}


def score(
    name: str, *, signed: bool, normed: bool, additive: bool, loss: str, options: tuple[str, ...] = ()
) -> Callable[[Callable[[Setting], list[np.ndarray]]], Callable[[Setting], list[np.ndarray]]]:
    """Register a score under a name."""

    def register(function: Callable[[Setting], list[np.ndarray]]) -> Callable[[Setting], list[np.ndarray]]:
        SCORES[name] = Score(
            function=function, signed=signed, normed=normed, additive=additive, loss=loss, options=options
        )
        return function

    return register


def importance(
    model: nn.Module,
    batches: Iterable[Any],
    score: str = "michel",
    loss: Loss | None = None,
    *,
    unit: str = "head",
    masked: Mapping[Any, Any] | None = None,
    seed: int = 0,
    progress: Advance | None = None,
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> Scores:
    """{kind: (layers, heads)}: how much each head matters, with bootstrap intervals over the examples.

    batches: dicts of model inputs, with labels or not. loss(output, batch) gives a loss an example, or their mean;
    without it the labels serve, else a causal model's own text, else the model's own softmax or embedding.
    score: michel, michel-token, ablation, output, variance, confidence, sink, magnitude, random or l0.
    unit: "head", "kv" (all query heads of a KV head) or "layer". masked: heads that are already off.
    numbers: which batches of a larger whole these are, where others score the rest; 0, 1, ... by default.
    """
    if score not in SCORES:
        raise HeadwiseError(f"there is no score {score!r}; there are {', '.join(SCORES)}")
    if unit not in UNITS:
        raise HeadwiseError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
    _check_options(score, options)
    kept = list(batches)
    if not kept and score not in ("magnitude", "random"):
        raise HeadwiseError(f"{score} needs batches of model inputs, and there are none")
    sites = attention_sites(model)
    if not sites:
        raise HeadwiseError(f"no attention layer was found in {type(model).__name__}")
    objective = choose(model, kept[0] if kept else {}, loss)
    random = torch.Generator().manual_seed(_seed(seed))
    setting = Setting(
        model, sites, places(model), kept, objective, unit, random, progress or (lambda *_: None), options,
        list(range(len(kept)) if numbers is None else numbers),
    )  # fmt: skip
    chosen = SCORES[score]
    with ExitStack() as stack:
        if masked and score not in ("magnitude", "random"):  # those do not run the model
            stack.enter_context(mask_heads(model, masked))
        stack.enter_context(_still(model))
        each = chosen.function(setting)
    _check_rows(score, chosen, setting, each)
    return _scores(setting.places, score, unit, objective, each)


def _seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise HeadwiseError(f"seed must be a whole number from 0 to {LARGEST_SEED}, got {str(seed)[:40]}")
    return seed


def merged(
    model: nn.Module, batches: Sequence[Any], score: str, loss: Loss | None, unit: str, each: list[np.ndarray]
) -> Scores:
    """The scores that `importance` gives for all batches, from rows of an additive score that were computed apart."""
    if not SCORES[score].additive:
        raise HeadwiseError(f"score {score!r} does not come apart by batches; compute it from all of them at once")
    return _scores(places(model), score, unit, choose(model, batches[0], loss), each)


def _scores(where: list[Place], score: str, unit: str, objective: Objective, each: list[np.ndarray]) -> Scores:
    chosen = SCORES[score]
    words = {"slope": objective.slope, "damage": objective.words, "no loss": "no loss"}[chosen.loss]
    return Scores(where, score, unit, words, each, chosen.signed, chosen.normed, objective.relative)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    known = SCORES[name].options
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise HeadwiseError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")


def _check_rows(name: str, chosen: Score, setting: Setting, each: list[np.ndarray]) -> None:
    """Numbers, and for an additive score one row per example: what ranks score apart is put together by rows."""
    wanted = sum(batch_size(batch) for batch in setting.batches)
    wrong = next((len(rows) for rows in each if chosen.additive and len(rows) != wanted), None)
    if wrong is not None:
        raise HeadwiseError(
            f"score {name!r} gave {wrong} rows for {wanted} examples; a score with additive=True gives one per "
            "example, say additive=False"
        )
    for place, rows in zip(setting.places, each, strict=True):
        if not np.isfinite(rows).all():  # sorted among numbers, a NaN would make its head the first to go
            raise HeadwiseError(
                f"{name} of {place.kind} layer {place.index} is not a finite number; check the model's outputs for "
                "NaN and inf on these batches, or score it in float32"
            )


def places(model: nn.Module) -> list[Place]:
    """Every attention layer of a model, with its counts and what a head of it costs."""
    sites = attention_sites(model)
    modules = [id(site.module) for site in sites]
    cached = _cached(model)
    return [_place(model, site, modules, id(site.module) in cached) for site in sites]


def _cached(model: Any) -> set[int]:
    """The modules whose attention keeps keys and values while a model generates: those of its decoder, by their id.

    An encoder and a vision tower read everything at once. A model that does not generate is taken for a decoder whole.
    """
    part = model
    generates = getattr(model, "can_generate", lambda: False)()
    while generates or getattr(getattr(part, "config", None), "is_encoder_decoder", False):
        inner = part.get_decoder() if hasattr(part, "get_decoder") else None
        if inner is None or inner is part:
            break
        part, generates = inner, True
    # some layers of Gemma 3n read the keys and values of an earlier layer
    return {id(module) for module in part.modules() if not getattr(module, "is_kv_shared_layer", False)}


def _place(model: nn.Module, site: Site, modules: list[int], cached: bool) -> Place:
    own = id(site.module)
    shared = 1 + modules.index(own) if modules.count(own) > 1 else 0
    try:
        found = projections(model, site)
    except UnsupportedError:  # it can be scored and zeroed all the same
        count = query_heads(model, site)
        return Place(site.kind, site.index, count, count, site.name, shared)
    per_query = per_kv = cache = 0
    for part in found.parts:
        blocks = part.layout(found.query, found.kv)
        of_block = sum(p.numel() for p in part.linear.parameters()) // len(blocks)
        per_query += of_block * sum(role == "q" for role, _ in blocks) // found.query
        per_kv += of_block * sum(role != "q" for role, _ in blocks) // found.kv
        cache += output_width(part.linear) // len(blocks) * sum(role != "q" for role, _ in blocks) // found.kv
    per_query += found.out.get_parameter("weight").numel() // found.query
    return Place(
        site.kind, site.index, found.query, found.kv, site.name, shared, per_query, per_kv, cached * cache,
        found.multiple,
    )  # fmt: skip


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients of weights, both put back."""
    training = {module: module.training for module in model.modules()}
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for parameter, want in wanted.items():
            parameter.requires_grad_(want)


def _united(setting: Setting, each: list[list[np.ndarray]]) -> list[np.ndarray]:
    """For each place its examples (N, heads), summed up to the units."""
    united = []
    for place, parts in zip(setting.places, each, strict=True):
        rows = np.concatenate(parts) if parts else np.zeros((1, place.query))
        united.append(np.stack([rows[:, unit].sum(1) for unit in place.units(setting.unit)], 1))
    return united


@score("michel", signed=True, normed=True, additive=True, loss="slope")
def _michel(setting: Setting) -> list[np.ndarray]:
    return _gates(setting, of_token=False)


@score("michel-token", signed=False, normed=False, additive=True, loss="slope")
def _michel_token(setting: Setting) -> list[np.ndarray]:
    return _gates(setting, of_token=True)


def _gates(setting: Setting, of_token: bool) -> list[np.ndarray]:
    """dL/d gate of every head and example, in one backward pass a batch."""
    check_slopes(setting.model)
    each: list[list[np.ndarray]] = [[] for _ in setting.places]
    for step, batch in enumerate(setting.batches):
        size = batch_size(batch)
        gates: dict[int, Tensor] = {}
        tokens: dict[int, Tensor] = {}

        def tap(
            site: Site, heads: Tensor, real: Any, size: int = size, gates: Any = gates, tokens: Any = tokens
        ) -> Tensor:
            row = setting.row(site)
            gate = gates[row] = torch.ones(size, heads.shape[-2], device=heads.device, requires_grad=True)
            spread = gate.repeat_interleave(heads.shape[0] // size, 0).to(heads.dtype)
            out = heads * spread.view(-1, *[1] * (heads.dim() - 3), heads.shape[-2], 1)
            if of_token:
                out.register_hook(lambda grad: tokens.__setitem__(row, _of_tokens(out.detach() * grad, size)))
            return out

        with torch.enable_grad(), head_outputs(setting.model, tap):
            out = run(setting.model, batch)
            loss = setting.objective.gradient(out, batch, setting.random_of(step))
        if not loss.requires_grad:
            raise HeadwiseError("the loss has no gradient; it must be made of the model's output by torch operations")
        loss.sum().backward()
        for row in range(len(setting.places)):
            found = tokens.get(row) if of_token else getattr(gates.get(row), "grad", None)
            zeros = torch.zeros(size, setting.places[row].query)
            each[row].append((zeros if found is None else found).double().cpu().numpy())
        setting.advance(step + 1, len(setting.batches))
    if not any(np.abs(part).max() > 0 for parts in each for part in parts):
        raise HeadwiseError(
            "the loss has no slope here (a distance to the full model has none at the full model); "
            "use ablation, or a loss of labels or text"
        )
    return _united(setting, each)


def check_slopes(model: nn.Module) -> None:
    """Refuse layers without gradients: what lies before them would seem not to matter."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise UnsupportedError(
                f"{type(module).__name__} (at {path}) is quantized and has no gradient; use the score ablation, "
                "confidence or sink"
            )


def _of_tokens(product: Tensor, size: int) -> Tensor:
    """sum over tokens of abs(ctx . dL/d ctx): (B, H)."""
    return product.sum(-1).abs().reshape(size, -1, product.shape[-2]).sum(1)


@score("ablation", signed=False, normed=False, additive=True, loss="damage")
def _ablation(setting: Setting) -> list[np.ndarray]:
    """The damage without a unit, minus that of the whole: one pass a unit."""
    each: list[list[np.ndarray]] = [[] for _ in setting.places]
    total = sum(len(place.units(setting.unit)) for place in setting.places) * len(setting.batches)
    done = 0
    with torch.no_grad():
        for batch in setting.batches:
            full = run(setting.model, batch)
            base = setting.objective.damage(full, batch, full)
            for row, place in enumerate(setting.places):
                columns = []
                for unit in place.units(setting.unit):
                    without: dict[Key, Any] = {place.key: unit}
                    with mask_heads(setting.model, without):
                        out = run(setting.model, batch)
                    columns.append((setting.objective.damage(out, batch, full) - base).double().cpu().numpy())
                    done += 1
                    setting.advance(done, total)
                each[row].append(np.stack(columns, 1))
    return [np.concatenate(parts) for parts in each]


def _columns(setting: Setting, site: Site) -> Tensor:
    """W_O of each head: (H, width, width of a head)."""
    path, out = w_o(setting.model, site)
    weight = getattr(out, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta or weight.dim() != 2:
        raise UnsupportedError(
            f"the weights of {type(out).__name__} (at {path}) are not plain numbers in memory (quantized, packed or "
            "offloaded); use the score ablation, confidence or sink, which does without them"
        )
    weight = weight.detach().float()
    weight = weight.T if type(out).__name__ == "Conv1D" else weight
    return weight.unflatten(1, (setting.places[setting.row(site)].query, -1)).permute(1, 0, 2)


def _forward(setting: Setting, measure: Callable[[Site, Tensor], Tensor]) -> list[np.ndarray]:
    """The mean over each example's tokens of something of every head: measure gives (..., H)."""
    each: list[list[np.ndarray]] = [[] for _ in setting.places]
    for step, batch in enumerate(setting.batches):
        size = batch_size(batch)

        def tap(site: Site, heads: Tensor, real: Tensor | None, size: int = size) -> None:
            found = measure(site, heads.float())
            if real is not None:
                mean = (found * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
            else:
                mean = found.reshape(size, -1, found.shape[-1]).mean(1)
            each[setting.row(site)].append(mean.double().cpu().numpy())

        with torch.no_grad(), head_outputs(setting.model, tap):
            run(setting.model, batch)
        setting.advance(step + 1, len(setting.batches))
    return _united(setting, each)


@score("output", signed=False, normed=False, additive=True, loss="no loss")
def _output(setting: Setting) -> list[np.ndarray]:
    grams = {site.key: (w := _columns(setting, site)).transpose(1, 2) @ w for site in setting.sites}
    return _forward(
        setting,
        lambda site, heads: torch.einsum("...hd,hde,...he->...h", heads, grams[site.key], heads).clamp(min=0).sqrt(),
    )


# not additive: it measures from the mean over all batches
@score("variance", signed=False, normed=False, additive=False, loss="no loss")
def _variance(setting: Setting) -> list[np.ndarray]:
    mean = {name: x.float() for name, x in mean_head_outputs(setting.model, setting.batches).items()}
    columns = {site.key: _columns(setting, site).square().sum(1) for site in setting.sites}  # (H, d)
    return _forward(
        setting, lambda site, heads: ((heads - mean[site.name].to(heads.device)).square() * columns[site.key]).sum(-1)
    )


@score("confidence", signed=False, normed=False, additive=True, loss="no loss")
def _confidence(setting: Setting) -> list[np.ndarray]:
    return _watched(setting, "confidence", 1)


@score("sink", signed=False, normed=False, additive=True, loss="no loss")
def _sink(setting: Setting) -> list[np.ndarray]:
    """High where little goes to the first token."""
    return _watched(setting, "first", -1)


def _watched(setting: Setting, statistic: str, sign: int) -> list[np.ndarray]:
    each: list[list[np.ndarray]] = [[] for _ in setting.places]
    for step, batch in enumerate(setting.batches):
        with torch.no_grad(), watch(setting.model) as seen:
            run(setting.model, batch)
        for site in setting.sites:
            found = seen[site.key].stats.per_sequence(statistic)
            found = np.nan_to_num(np.asarray(torch.as_tensor(found).double().cpu()))
            each[setting.row(site)].append(1 - found if sign < 0 else found)
        setting.advance(step + 1, len(setting.batches))
    return _united(setting, each)


# those that follow are not additive: one row for the whole model, whatever the batches
@score("magnitude", signed=False, normed=False, additive=False, loss="no loss")
def _magnitude(setting: Setting) -> list[np.ndarray]:
    """The norm of all weights of a head; what a group shares counts for each of its heads."""
    each = []
    for site in setting.sites:
        found = projections(setting.model, site)
        total = found.out.get_parameter("weight").detach().float()
        total = total.T if type(found.out).__name__ == "Conv1D" else total
        squares = total.square().sum(0).view(found.query, -1).sum(1)
        for part in found.parts:
            weight = part.linear.get_parameter("weight").detach().float()
            rows = (weight.T if type(part.linear).__name__ == "Conv1D" else weight).square().sum(1)
            blocks = part.layout(found.query, found.kv)
            for (role, number), size in zip(blocks, rows.view(len(blocks), -1).sum(1), strict=True):
                group = found.query // found.kv
                mine = [number] if role == "q" else list(range(number * group, (number + 1) * group))
                squares[mine] += size
        each.append([squares.sqrt().double().cpu().numpy()[None]])
    return _united(setting, each)


@score("random", signed=False, normed=False, additive=False, loss="no loss")
def _random(setting: Setting) -> list[np.ndarray]:
    return [torch.rand(1, len(place.units(setting.unit)), generator=setting.random).numpy() for place in setting.places]


@score("l0", signed=False, normed=False, additive=False, loss="damage", options=tuple(GATE_OPTIONS))
def _l0(setting: Setting) -> list[np.ndarray]:
    check_slopes(setting.model)
    return _united(setting, [[row[None]] for row in opened(setting)])
