"""streaming: inside `with`, some KV heads of a model see only the first and the most recent keys."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ...attention.nn.stack import Decoder
from ...errors import HeadwiseError, UnsupportedError
from ...plans import StreamPlan
from ..hooks import Hooks, check_values
from ..passes import PassTracker
from ..structure.partition import check_whole
from ..structure.sites import Site, attention_sites, check_watchable, first_per_module
from ..structure.wrappers import inner_model
from ..text_inputs import is_encoder_decoder
from ..watching import registry
from ..watching.call_reader import ModelCall, Reading, read
from ..watching.eager import EagerReading
from ..watching.lazy_masks import MaskRecipe
from ..watching.packing import is_paged
from ..watching.registry import Replacement, newest_recipe, pass_masks, recipe_of
from ..watching.sources import Function
from ..watching.trust import agrees
from .cached_attention import attend_cached
from .deferred_keys import DeferredKeys
from .generation import HeadCacheGeneration
from .own_decoder import DecoderStreaming
from .plan_layers import check_plan, streaming_heads
from .saved_plan import attached_plan


def streaming(model: nn.Module, plan: StreamPlan | None = None) -> Streaming | DecoderStreaming:
    """Inside `with`, the KV heads of a plan stream: their query heads see only the first and the most recent keys.

    The first keys are the first real tokens of a sequence, also behind left padding. All other heads, and layers with
    their own sliding window, are not affected. Inside the context the layers of the plan use `headwise.attend`,
    whatever attn_implementation the model has, and compiled models run uncompiled. Everything is restored at the end,
    also after an exception.

    `model.generate` stores keys in a `headwise.HeadCache`, where streaming heads have only the keys that they see. A
    cache that you choose, by past_key_values or cache_implementation, is used unchanged: heads see the same keys, but
    no memory is saved. The same holds for the cache that a direct call of the model creates.

    Args:
        model: a decoder of transformers whose attention goes through its registry, or a `headwise.Decoder`, whose
            `cache` and `generate` then keep what the heads see.
        plan: made for this model, by `headwise.stream_plan` or manually. By default the plan that was saved with the
            model by headwise.save(model, path, plan=plan), if the model was loaded with headwise.load(path).

    Returns:
        A context manager. `watch`, `mask_heads` and `patch` can be used inside and around it.

    Raises:
        HeadwiseError: for a plan of another model.
        UnsupportedError: for a model whose heads cannot stream.

    Example:
        >>> with headwise.streaming(model, plan):
        ...     tokens = model.generate(**inputs, max_new_tokens=100)
    """
    model = inner_model(model)
    plan = attached_plan(model) if plan is None else plan
    if plan is None:
        raise HeadwiseError(
            f"this {type(model).__name__} was not loaded with a plan; give one, headwise.streaming(model, plan)"
        )
    check_whole(model, attention_sites(model), "stream heads of")
    check_plan(model, plan)
    if isinstance(model, Decoder):
        return DecoderStreaming(model, plan)
    sites = attention_sites(model)
    check_watchable(model, sites)
    return Streaming(model, plan, _planned_sites(model, plan, sites), sites)


def _planned_sites(model: nn.Module, plan: StreamPlan, sites: list[Site]) -> dict[tuple[str, int], Site]:
    """The layers of a model that a plan is for."""
    name = type(model).__name__
    if is_encoder_decoder(model):
        raise UnsupportedError(f"{name} is an encoder-decoder; heads of decoders alone can stream")
    kinds = {layer.kind for layer in plan.layers}
    planned = {site.key: site for site in sites if site.kind in kinds}
    for site in planned.values():
        if site.source != "registry":
            raise UnsupportedError(
                f"{type(site.module).__name__} (at {site.place}) does not attend through transformers' registry; its "
                "heads cannot stream"
            )
        if getattr(site.module, "is_kv_shared_layer", False):
            raise UnsupportedError(f"{site} of {name} reads the keys and values of another layer; it cannot stream")
    _check_own_windows(model, plan)
    if len(first_per_module(planned.values())) < len(planned):
        raise UnsupportedError(f"an attention module of {name} serves several layers; their heads cannot stream")
    return planned


def _check_own_windows(model: Any, plan: StreamPlan) -> None:
    """Refuse a plan that gives a layer another sliding window than the model's own: its cache would lack keys."""
    from transformers import DynamicCache

    own_layers = DynamicCache(config=model.config).layers
    for layer in plan.layers:
        own = getattr(own_layers[layer.layer], "sliding_window", None) if layer.layer < len(own_layers) else None
        if layer.window is not None and layer.window != own:
            raise HeadwiseError(
                f"layer {layer.layer} of {type(model).__name__} has a sliding window of {own} keys, and the plan says "
                f"{layer.window}"
            )


class Streaming:
    """A model whose heads stream, for as long as the `with` lasts."""

    def __init__(
        self, model: nn.Module, plan: StreamPlan, planned: dict[tuple[str, int], Site], sites: list[Site]
    ) -> None:
        self.model, self.plan = model, plan
        self._planned = planned
        modules = [site.module for site in planned.values()]
        self._hooks = Hooks(model, modules, "stream", self._restore)
        self._tracker = PassTracker(
            model, sites, self._hooks, awaits="attention function", consequence="its heads cannot stream"
        )
        self._generation = HeadCacheGeneration(model, plan)
        self._checked: set[nn.Module] = set()  # modules whose calls mean what they are read as

    def __enter__(self) -> Streaming:
        if self._hooks.on:
            raise HeadwiseError("this streaming is on already; make another with headwise.streaming")
        if any(registry.is_replaced(site.module) for site in self._planned.values()):
            raise HeadwiseError(
                f"heads of {type(self.model).__name__} stream already; leave that headwise.streaming first"
            )
        return self._hooks.set(self, self._set_hooks, self._replace, self._generation.install)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.remove()
        missed = self._tracker.reset()
        if error is None and missed:
            raise self._tracker.missed_error(missed[0])

    def __repr__(self) -> str:
        return f"Streaming({type(self.model).__name__}, {self.plan.streaming} of {self.plan.total} KV heads)"

    def _set_hooks(self) -> None:
        modules = [site.module for site in self._planned.values()]
        self._tracker.follow(modules, lambda owner: pass_masks.begin(), lambda owner, completed: pass_masks.end())

    def _replace(self) -> None:
        streams = streaming_heads(self.plan)
        registry.replace_functions(
            {
                site.module: Replacement(self._answer, streams.get(key), self._tracker.arrive)
                for key, site in self._planned.items()
            }
        )

    def _restore(self) -> None:
        self._generation.remove()
        registry.restore_functions(site.module for site in self._planned.values())

    def _answer(self, call: ModelCall, eager: Function) -> tuple[Tensor, Any]:
        """Answer an attention call of the model by our own attention."""
        check_values(call.query, call.module, "stream")
        recipe = recipe_of(call.mask)
        if isinstance(call.key, DeferredKeys):
            self._check_cached_call(call, call.key, eager, recipe)
            return attend_cached(call, recipe)
        similar = newest_recipe(call.query.shape[2], call.key.shape[2], has_mask=call.mask is not None)
        self._check_call(call, recipe or similar)
        self._check_reading(call, eager, recipe, similar)
        reading = read(call, recipe, similar, cross=False)
        output = reading.attend(call.dropout).transpose(1, 2).contiguous()
        return output, reading.weights(None, None) if call.options.get("output_attentions") else None

    def _check_call(self, call: ModelCall, recipe: MaskRecipe | None) -> None:
        """Refuse what is not one causal sequence per row."""
        name = type(call.module).__name__
        packed = recipe is not None and recipe.sequence_numbers is not None
        if is_paged(call) or packed or call.options.get("cu_seq_lens_q") is not None:
            raise UnsupportedError(f"{name} attends to packed sequences; heads stream with one sequence per row")
        if call.streams is None:
            return
        if call.key.shape[1] != call.streams.kv_heads:
            raise UnsupportedError(
                f"{name} attends with {call.key.shape[1]} KV heads, and the plan has {call.streams.kv_heads}"
            )
        hides_nothing = recipe.band() == (None, None) if recipe is not None else call.mask is None and not call.causal
        if hides_nothing and call.query.shape[2] > 1:
            raise UnsupportedError(f"{name} attends to later tokens; heads of causal attention alone can stream")

    def _check_cached_call(
        self, call: ModelCall, key: DeferredKeys, eager: Function, recipe: MaskRecipe | None
    ) -> None:
        """Refuse a HeadCache of another plan, and attention that is not plain."""
        cached = key.cached
        if call.streams != cached.heads:
            raise HeadwiseError("this HeadCache was made for another plan than that by which the model streams")
        if not cached.length and isinstance(call.value, DeferredKeys):
            self._check_reading(call._replace(key=key.added, value=call.value.added), eager, recipe, None)

    def _check_reading(
        self, call: ModelCall, eager: Function, recipe: MaskRecipe | None, similar: MaskRecipe | None
    ) -> None:
        """Refuse a module whose attention, without windows, is not what the model's own code computes."""
        if call.module in self._checked:
            return
        plain = call._replace(streams=None)
        reading = read(plain, recipe, similar, cross=False)
        own = EagerReading(plain, eager, reading.options["offset"], reading.comparable, recipe)
        real = self._tracker.real_tokens(call.module, call.query.shape[0], call.query.shape[2], call.key.shape[2])
        if not _agrees(reading, own, real):
            raise UnsupportedError(
                f"{type(call.module).__name__} does not compute plain softmax attention from what it hands to its "
                "attention function; its heads cannot stream"
            )
        self._checked.add(call.module)


def _agrees(reading: Reading, own: EagerReading, real: Tensor | None) -> bool:
    fits = real is not None and tuple(real.shape) == (reading.q.shape[0], reading.q.shape[2])
    return agrees(reading, own.exact(), real.to(reading.q.device) if fits and real is not None else None)
