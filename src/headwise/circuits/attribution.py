"""attribute: what each head adds to a metric directly, by the exact decomposition of the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.batches import batch_size, run
from ..models.evaluation import evaluating
from ..models.structure.heads import query_heads, w_o
from ..models.structure.partition import check_whole_weights
from ..models.structure.sites import Site, require_sites
from ..models.structure.wrappers import inner_model
from ..models.text_inputs import device_of
from .effects import EffectLayer, Effects, EffectsAbout
from .inputs import model_batches, named_tensors, to_device
from .metric import Measure, Metric, metric_key
from .residual_stream import ResidualStream, StreamPass, leaf_of, residual_stream, run_cut

Progress = Callable[[int, int], None]  # finished steps, total number of steps
# the difference between the metric and the sum of its parts, relative to the sum of their absolute values
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
OUTPUT_BIAS, W_O_BIASES, NORM_BIASES = "output bias", "W_O biases", "norm biases"
BEYOND_GRADIENT = "beyond the gradient"


@torch.inference_mode(False)  # whose tensors autograd could not keep
@torch.enable_grad()
def attribute(
    model: nn.Module, inputs: Any, metric: Metric, *, tokenizer: Any = None, progress: Progress | None = None
) -> Effects:
    """The direct effect of every head on a metric: what its output adds, through the final norm and the output layer.

    The last layer's residual stream is the sum of the embeddings, of every head's output through its part of W_O, of
    every feed-forward block and of biases. With the final norm at its actual scale, the metric is the sum of their
    effects. Effects through later heads and feed-forward blocks are not included: `patch` measures them.

    In models with the norm after the residual sum (BERT), the heads of the last layer have a direct effect, and all
    earlier layers together are one term.

    Args:
        model: any transformers model, headwise's own stacks, nn.Transformer and its parts. It is not changed.
        inputs: a batch, a list of batches, a text or a list of texts.
        metric: `LogitDifference`, or a function of the model's output that gives one number per prompt (B,) or one for
            all. A metric that is not linear in the stream after the norm is attributed through its gradient, and the
            result notes this.
        tokenizer: for texts, and for answers that are strings.
        progress: called with the number of finished batches and their total number.

    Returns:
        Effects, {kind: (layers, heads)}. `rest` has the embeddings, feed-forward blocks and biases; heads and rest add
        up to the metric, `about.value`. `about.details["difference"]` is the remaining error, relative to the sum of
        all absolute parts.

    Raises:
        UnsupportedError: for a model whose residual stream is not a sum, or if the parts do not add up.
        HeadwiseError: for a metric that is not finite or of another shape.

    Example:
        >>> metric = headwise.LogitDifference(" Mary", " John")
        >>> text = "When Mary and John went to the store, John gave a drink to"
        >>> effects = headwise.attribute(model, text, metric, tokenizer=tokenizer)
        >>> print(effects)
    """
    model = inner_model(model)
    batches = [to_device(batch, device_of(model)) for batch in model_batches(inputs, tokenizer)]
    measure = Measure(metric, batches, tokenizer)
    sites = require_sites(model)
    check_whole_weights(model, sites, "attribute")
    counts = [query_heads(model, site) for site in sites]
    totals = _Totals(sites, counts)
    with evaluating(model):
        for number, batch in enumerate(batches):

            def metric_of(batch: Any, number: int = number) -> Tensor:
                return measure(run(model, batch), number)[0]

            key = (metric_key(metric), *sorted(named_tensors(batch)))
            stream = residual_stream(model, sites, metric_of, batch, key)
            _add_batch(totals, model, stream, run_cut(model, sites, stream, metric_of, batch), batch_size(batch))
            if progress is not None:
                progress(number + 1, len(batches))
    return totals.effects(model, measure.words, stream)


class _Totals:
    """The parts of the metric, prompt by prompt."""

    def __init__(self, sites: list[Site], counts: list[int]) -> None:
        self.sites, self.counts = sites, counts
        self.heads: list[dict[Site, np.ndarray]] = []  # per batch: (prompts, heads)
        self.rest: list[dict[str, np.ndarray]] = []
        self.values: list[np.ndarray] = []
        self.dtype = torch.float32

    def effects(self, model: nn.Module, words: str, stream: ResidualStream) -> Effects:
        values = np.concatenate(self.values)
        names = list(dict.fromkeys(name for rest in self.rest for name in rest))
        rest = {
            name: np.concatenate(
                [part.get(name, np.zeros(len(v))) for part, v in zip(self.rest, self.values, strict=True)]
            )
            for name in names
        }
        examples = [
            np.concatenate(
                [part.get(site, np.zeros((len(v), n))) for part, v in zip(self.heads, self.values, strict=True)]
            )
            for site, n in zip(self.sites, self.counts, strict=True)
        ]
        parts = [*rest.values(), *(rows[:, i] for rows in examples for i in range(rows.shape[1]))]
        difference = float((np.abs(sum(parts) - values) / np.maximum(sum(map(np.abs, parts)), 1e-30)).max())
        if difference > TOLERANCE.get(self.dtype, 1e-4):
            raise UnsupportedError(
                f"what the heads and the rest of {type(model).__name__} write does not add up to the metric: the parts "
                f"differ from it by {difference:.1g} of their absolute sum"
            )
        layers = [EffectLayer(site.kind, site.index, n) for site, n in zip(self.sites, self.counts, strict=True)]
        method = "each head's output through W_O, the final norm at its actual scale and the output layer"
        notes = _notes(stream, {site.index for heads in self.heads for site in heads}, self.sites)
        about = EffectsAbout(
            "direct effect", method, words, float(values.mean()), notes=notes, details={"difference": difference}
        )
        return Effects(layers, examples, about, rest=rest)


def _notes(stream: ResidualStream, direct: set[int], sites: list[Site]) -> tuple[str, ...]:
    notes = []
    if stream.nonlinear is not None:
        notes.append(
            f"the metric is not linear in the stream ({stream.nonlinear} lies between them): effects are those of its "
            f'gradient, and "{BEYOND_GRADIENT}" is what the gradient leaves out'
        )
    if any(writer.type == "earlier layers" for writer in stream.writers):
        notes.append(
            f"norms follow the residual sums, so only layer {max(direct)} writes to the output directly; the layers "
            "before it are one term"
        )
    return tuple(notes)


def _add_batch(totals: _Totals, model: nn.Module, stream: ResidualStream, cut: StreamPass, rows: int) -> None:
    """Add the parts of one batch; the metric has one value per prompt, or one for all of them."""
    assert cut.values is not None
    values, size = cut.values, len(cut.values)
    leaves = [leaf_of(cut, writer) for writer in stream.writers]
    norms = list(cut.norms.values())
    gradients: list[Tensor | None] = list(
        torch.autograd.grad(
            values.sum(), [*leaves, *(norm.output for norm in norms)], retain_graph=True, allow_unused=True
        )
    )
    heads: dict[Site, np.ndarray] = {}
    rest: dict[str, np.ndarray] = {}

    def add(name: str, part: Tensor) -> None:
        numbers = part.double().cpu().numpy()
        rest[name] = rest[name] + numbers if name in rest else numbers

    with torch.no_grad():
        for writer, leaf, gradient in zip(stream.writers, leaves, gradients, strict=False):
            if gradient is None:
                continue
            if writer.site is not None:
                by_head, bias = _head_parts(model, writer.site, cut.heads[writer.site], gradient, rows)
                heads[writer.site] = _per_value(by_head, size).cpu().numpy()
                if bool(bias.any()):
                    add(W_O_BIASES, _per_value(bias, size))
            elif leaf.dim() >= 3 and leaf.shape[0] == rows:
                add(writer.label, _per_value(_per_prompt(leaf, gradient), size))
            else:
                add(writer.label, _shared_part(values, leaf))
        for norm, gradient in zip(norms, gradients[len(leaves) :], strict=True):
            if norm.beta is not None and gradient is not None:
                add(NORM_BIASES, _per_value(_per_prompt(gradient, norm.beta), size))
        numbers = values.detach().double().cpu().numpy()
        if stream.nonlinear is not None or (stream.has_constant and stream.final_norm is None):
            parts = [*rest.values(), *(rows_of_heads.sum(1) for rows_of_heads in heads.values())]
            rest[OUTPUT_BIAS if stream.nonlinear is None else BEYOND_GRADIENT] = numbers - sum(parts)
        elif stream.has_constant and stream.final_norm is not None:
            final = list(cut.norms).index(stream.final_norm)
            gradient = gradients[len(leaves) + final]
            assert gradient is not None
            read = _per_value(_per_prompt(norms[final].output, gradient), size)  # what is linear in the final norm
            rest[OUTPUT_BIAS] = numbers - read.cpu().numpy()
    totals.dtype = values.dtype
    totals.heads.append(heads)
    totals.rest.append(rest)
    totals.values.append(numbers)


def _per_prompt(a: Tensor, b: Tensor) -> Tensor:
    """(B,): the sums of products of (B, ...), in float64."""
    return (a.double() * b).flatten(1).sum(1)


def _head_parts(model: nn.Module, site: Site, heads: Tensor, gradient: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(B, H) and (B,): what each head and W_O's bias add, where the gradient by W_O's output is not 0.

    heads: (B, T, H * width), before W_O; gradient: (B, T, d).
    """
    linear, count = w_o(model, site)[1], query_heads(model, site)
    if isinstance(site.module, nn.MultiheadAttention) and not site.module.batch_first:
        gradient = gradient.transpose(0, 1)
    gradient = gradient.reshape(rows, -1, gradient.shape[-1])  # (B, T, d)
    heads = heads.reshape(rows, -1, heads.shape[-1])
    prompts, places = gradient.abs().amax(-1).nonzero(as_tuple=True)
    inputs = heads[prompts, places]  # (tokens, H * width)
    with torch.enable_grad():
        inputs.requires_grad_()
        output = linear(inputs)
    chosen = gradient[prompts, places]
    (pulled,) = torch.autograd.grad(output, inputs, chosen)
    by_token = (inputs.detach().double() * pulled).unflatten(-1, (count, -1)).sum(-1)  # (tokens, H)
    by_head = by_token.new_zeros(rows, count).index_add_(0, prompts, by_token)
    bias = ((output.detach() * chosen).double().sum(-1) - by_token.sum(-1)) if _has_bias(linear) else None
    biases = by_token.new_zeros(rows)
    return by_head, biases if bias is None else biases.index_add_(0, prompts, bias)


def _has_bias(linear: nn.Module) -> bool:
    return any("bias" in name for name, _ in linear.named_parameters())


def _per_value(parts: Tensor, size: int) -> Tensor:
    """(size, ...) from (B, ...): one row per value of the metric, which may be one for all prompts."""
    return parts if len(parts) == size else parts.sum(0, keepdim=True)


def _shared_part(values: Tensor, leaf: Tensor) -> Tensor:
    """The contribution of a leaf that all prompts share to each value."""
    parts = []
    for row in torch.eye(len(values), dtype=values.dtype, device=values.device):
        (gradient,) = torch.autograd.grad(values, leaf, row, retain_graph=True)
        parts.append((leaf.detach().double() * gradient).sum())
    return torch.stack(parts)
