"""context_need: what every KV head of a decoder loses when it sees only the first and the most recent keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..circuits.inputs import encode_texts, model_batches, to_device
from ..errors import HeadwiseError
from ..json_documents import brief
from ..models.batches import batch_size, run
from ..models.evaluation import evaluating
from ..models.structure.config_sizes import max_positions
from ..models.structure.wrappers import inner_model
from ..models.text_inputs import device_of
from ..models.watching.registry import is_replaced
from ..models.watching.watcher import watch
from ..plans import check_keep_first, check_window
from .context_need_result import EXACT, GRADIENT, ContextNeed, join_needs
from .loss_gradients import need_with_gradient
from .need_files import NeedFiles
from .objective import label_queries
from .sequence_losses import check_loss_heads, leave_out, loss_changes, loss_heads
from .stream_corpus import LENGTH, stream_texts
from .window_measurement import WindowMeasurement

Progress = Callable[[int, int | None], None]  # finished batches, and their total number if it is known
UNUSED_OUTPUTS = {"logits_to_keep": 1, "use_cache": False}  # the largest tensors of a long text


def context_need(
    model: nn.Module,
    batches: Any = None,
    windows: Sequence[int] = (64, 256),
    keep_first: int = 4,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    loss: bool | str | Mapping[Any, Sequence[int]] = False,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ContextNeed:
    """Measure, per KV head and window, what is lost if its queries see only the first and the most recent keys.

    Lost weight and change are measured in one pass of the model per batch, for all windows together; the inputs of
    every head are those of the model with full attention.

    - lost weight: the share of a query's attention weight on the keys that the window hides, from two log-sum-exps,
      1 - exp(lse_window - lse_full); the mean over all tokens and the query heads of the KV head.
    - change: let z be the output of a query head before W_O, with all keys and in the window, and W_O^h the columns of
      W_O that read head h. The change is the norm of the sum over the KV head's query heads of W_O^h (z_full -
      z_window), divided by the norm of the sum over all heads of W_O^h z_full (the layer's attention output without
      W_O's bias): a ratio of means over tokens.
    - change of the loss, with `loss`: the model runs once more per window and KV head, with only this head streaming;
      or, with "gradient", a first-order estimate for all heads from one backward pass, dL/dz . (z_window - z_full) over
      all tokens.

    Every sequence counts the same, however long it is. In a batch with labels per token, only the queries that predict
    a label count: those that produce a needle's answer, and not the thousands before them.

    A layer with its own sliding window is measured within that window. Inside `headwise.streaming`, heads that already
    stream lose nothing more, and the other heads are measured on the outputs of the streaming model. 16-bit values are
    measured in float32.

    Args:
        model: a decoder; it is not changed.
        batches: each a dict of model inputs, a tensor or a tuple; or texts, which are run one by one. An iterator is
            consumed lazily. Texts should be longer than the windows: a sequence of at most keep_first + window tokens
            loses nothing. By default long pieces of the bundled novel together with needle prompts: the part "choose"
            of `headwise.prune.stream_texts`. The example there measures the two separately, so that the few retrieval
            heads are not lost in the mean.
        windows: numbers of most recent keys that stay visible, the query's own included.
        keep_first: the number of first keys of each sequence that stay visible; with left padding, of its first real
            keys.
        tokenizer: needed for texts and for the default.
        length: tokens per piece of the default texts; 4,096, or as many as the model has positions for.
        loss: True measures the change of the loss for every KV head, and {layer: [KV heads]} for some; "gradient"
            estimates it for all. It is the loss of a batch's labels, or else of its next tokens.
        resume: a folder in which every measured batch is saved. A run that was killed resumes from it, and so does a
            run with additional batches. Results of another model, other windows or other texts are ignored.
        progress: called with the number of finished batches and their total number, None if it is not known.

    Returns:
        A `ContextNeed`, with 95 % bootstrap intervals over the sequences; results of two corpora can be added.

    Raises:
        UnsupportedError: for a model without causal attention, and for attention that cannot be observed exactly.

    Example:
        >>> need = headwise.context_need(model, windows=(64, 256), tokenizer=tokenizer)
        >>> plan = headwise.stream_plan(need, window=256, share=0.5)
    """
    model = inner_model(model)
    settings = NeedSettings(windows, keep_first, loss)
    inputs = need_inputs(model, batches, tokenizer, length)
    return join_needs(measure_batches(model, inputs, settings, resume, progress))


class NeedSettings:
    """The validated settings of the measurement of every batch."""

    def __init__(self, windows: Any, keep_first: Any, loss: Any = False) -> None:
        self.windows = _check_windows(windows)
        self.keep_first = keep_first
        check_keep_first(keep_first)
        self.loss = check_loss_heads(loss)

    def to_json(self) -> dict[str, Any]:
        loss: Any = self.loss
        if isinstance(loss, Mapping):
            loss = sorted((str(key), x) for key, x in loss.items())
        return {"windows": list(self.windows), "keep_first": self.keep_first, "loss": loss}


def need_inputs(model: nn.Module, batches: Any, tokenizer: Any, length: int | None) -> Iterable[Any]:
    """Batches of model inputs, a list or an iterator; texts one by one, since they are long."""
    if batches is None:
        if tokenizer is None:
            raise HeadwiseError("give batches, or tokenizer=headwise.tokenizer(name) for the bundled texts")
        positions = max_positions(model)
        length = min(LENGTH, positions or LENGTH) if length is None else length
        return stream_texts(tokenizer, length).batches
    if length is not None:
        raise HeadwiseError("length is that of the bundled texts; with batches it has no meaning, leave it out")
    batches = [batches] if isinstance(batches, str) else batches
    if not isinstance(batches, (Sequence, Tensor, Mapping)) and isinstance(batches, Iterable):
        return _read_one_by_one(batches, tokenizer)
    if tokenizer is not None and isinstance(batches, list) and all(isinstance(text, str) for text in batches):
        batches = [encode_texts([text], tokenizer) for text in batches]
    return model_batches(batches, tokenizer)


def _read_one_by_one(batches: Iterable[Any], tokenizer: Any) -> Iterator[Any]:
    for item in batches:
        yield from model_batches([item], tokenizer)


def measure_batches(
    model: nn.Module,
    inputs: Iterable[Any],
    settings: NeedSettings,
    resume: str | os.PathLike[str] | None,
    progress: Progress | None,
    part: tuple[int, int] = (0, 1),
) -> list[ContextNeed]:
    """The need of every batch. part: (i, n) takes every n-th batch from the i-th on."""
    total = len(inputs) if isinstance(inputs, Sequence) else None
    if resume is not None and _is_streaming(model):
        raise HeadwiseError("resume is for a model with full attention, and heads stream; leave one of the two out")
    files = None if resume is None else NeedFiles(resume, model, settings.to_json())
    measurement = WindowMeasurement(model, settings.windows, settings.keep_first)
    needs: list[ContextNeed] = []
    with evaluating(model), torch.no_grad():
        for number, batch in enumerate(inputs):
            if number % part[1] != part[0]:
                continue
            need = None if files is None else files.load(batch)
            if need is None:
                need = _measure(model, batch, measurement, settings.loss)
                if files is not None:
                    files.save(batch, need)
            needs.append(need)
            if progress is not None:
                done = len(needs) * part[1]
                progress(done if total is None else min(done, total), total)
    if not needs and part == (0, 1):
        raise HeadwiseError("there are no inputs; give at least one batch or text")
    return needs


def _is_streaming(model: nn.Module) -> bool:
    """Whether this is inside headwise.streaming, of which the model's fingerprint says nothing."""
    return any(is_replaced(module) or getattr(module, "streams", None) is not None for module in model.modules())


def _measure(model: nn.Module, batch: Any, measurement: WindowMeasurement, loss: Any) -> ContextNeed:
    measurement.counted = label_queries(batch)
    if loss == GRADIENT:
        return need_with_gradient(model, batch, measurement)
    with ExitStack() as stack:
        stack.enter_context(measurement.heads_before_w_o())
        stack.enter_context(watch(model, stats=False, each=measurement.observe))
        run(model, leave_out(model, to_device(batch, device_of(model)), UNUSED_OUTPUTS))
    need = measurement.finish_batch(batch_size(batch))
    if loss is False:
        return need
    heads = loss_heads(loss, need.layers)
    return need.with_losses(*loss_changes(model, batch, need.layers, heads, need.windows, need.keep_first), EXACT)


def _check_windows(windows: Any) -> tuple[int, ...]:
    if isinstance(windows, int) and not isinstance(windows, bool):
        windows = (windows,)
    if isinstance(windows, str) or not isinstance(windows, Iterable):
        raise HeadwiseError(f"windows are numbers of keys, such as (64, 256), got {brief(windows)}")
    sizes = tuple(check_window(window, "a window") for window in windows)
    if not sizes or len(set(sizes)) < len(sizes):
        raise HeadwiseError(f"windows are different numbers of keys, such as (64, 256), got {brief(sizes)}")
    return sizes
