"""watch: exact statistics of every head of a model while it runs as usual."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.stats import HeadStats
from ...errors import HeadwiseError, RankError, UnsupportedError
from ..hooks import Hooks, check_values
from ..passes import PassTracker, in_backward
from ..register import NAME
from ..structure.partition import RankGroup, check_whole, check_whole_tokens, head_partition, splits_tokens
from ..structure.selection import LayerChoice
from ..structure.sites import (
    Key,
    Site,
    attention_sites,
    check_watchable,
    find_site,
    first_per_module,
    runs_undeclared_code,
)
from ..structure.wrappers import inner_model
from .attention_calls import Rejection
from .call_reader import ModelCall, Reading, read
from .eager import EagerReading
from .function_source import FunctionSource
from .layers import Layer
from .lazy_masks import LazyMask
from .packing import is_paged, record_pages, split_packed
from .pass_state import CallContext, PassState
from .recording import Recording
from .request import CallObserver, Request
from .sources import Answer, Function, KnownCall, Sources
from .trust import TrustCheck, by_head, same_outputs


def watch(
    model: nn.Module,
    *,
    weights: LayerChoice = None,
    outputs: LayerChoice = None,
    rows: Iterable[int] | None = None,
    links: int = 0,
    classes: Mapping[str, Any] | None = None,
    exact: bool = False,
    stats: bool = True,
    each: CallObserver | None = None,
) -> Watch:
    """Inside `with`, record what every head of a model does; the model runs as before and its output does not change.

    If the model's own attention function runs, its output is bit-identical. On long inputs one pass over the scores
    computes both output and statistics, equal up to rounding; exact=True prevents this. PyTorch's fused inference path
    for nn.TransformerEncoder, which calls no attention module, is disabled inside the block.

    Args:
        model: any PyTorch model, also compiled or wrapped (DDP, FSDP, PEFT, a pipeline, a SentenceTransformer).
            Attention that no class declares is recognised from the functions that the model calls, and can be selected
            by layer after the model has run once.
        weights: layers whose attention weights to keep: True for all, a layer, several layers, or {layer: heads}. A
            layer is its number, (kind, number) or its module's path.
        outputs: layers whose heads' outputs before W_O to keep, in the same form.
        rows: the queries whose weights to keep; all by default. Negative numbers count from the end of each call.
        links: how many of the strongest keys of every query to keep.
        classes: {name: (B, T) bool}: keys whose share of the weight to measure, as `layer.stats.share(name)`; with
            several kinds of attention {kind: {name: ...}}.
        exact: whether the model's own attention function must compute the output.
        stats: False omits the statistics.
        each: a function (layer, reading, real), called after every attention call with the layer's record so far, the
            call itself (which can compute any row of weights while its tensors are alive), and a mask (B, Tq) of the
            queries that are real tokens, None for all.

    Returns:
        A context manager whose `layers` are the layers that were called.

    Raises:
        UnsupportedError: for a model with attention that cannot be observed exactly.
        HeadwiseError: for layers, heads or rows that the model does not have.

    Example:
        >>> with headwise.watch(model) as seen:
        ...     model(**inputs)
        >>> seen.layers[0].stats.entropy  # (H,)
    """
    model = inner_model(model)
    sites = attention_sites(model)
    check_watchable(model, sites)
    request = Request.of(
        model, sites, weights=weights, outputs=outputs, rows=rows, links=links, classes=classes, exact=exact,
        stats=stats, each=each,
    )  # fmt: skip
    if each is not None:
        check_whole(model, sites, "call each= while watching")
    return Watch(model, sites, request)


def watch_calls(model: nn.Module, each: CallObserver, exact: bool) -> Watch:
    """watch for an observer that gathers the heads of split layers itself: their `partition` is not None."""
    model = inner_model(model)
    sites = attention_sites(model)
    check_watchable(model, sites)
    return Watch(model, sites, Request.of(model, sites, exact=exact, each=each))


class Watch:
    """A watched model, and what was recorded of it."""

    def __init__(self, model: nn.Module, sites: list[Site], request: Request) -> None:
        if request.weights or request.outputs or request.links:
            check_whole_tokens(model, sites, "watch more than statistics of")
        self.model = model
        self.recording = Recording(model, request)
        self.rank_groups = _rank_groups(model, sites)
        self._request = request
        self._modules = [site.module for site in first_per_module(sites) if site.source != "function"]
        self._sources = Sources(sites, self)
        self._functions = FunctionSource(self, sites) if runs_undeclared_code(model, sites) else None
        attention_modules = self._modules if self._functions is None else model.modules()
        self._hooks = Hooks(model, attention_modules, "watch", self._stop)
        self._tracker = PassTracker(
            model, sites, self._hooks, awaits="attention function", consequence="its heads cannot be watched"
        )
        self._pass = PassState(model, list(sites), self._tracker)
        self._trust = TrustCheck()

    @property
    def layers(self) -> list[Layer]:
        """The layers that were called, kind by kind and layer by layer."""
        kinds = list(dict.fromkeys(site.kind for site in self._pass.sites))
        return sorted(self.recording.layers.values(), key=lambda layer: (kinds.index(layer.kind), layer.index))

    @property
    def unseen(self) -> list[str]:
        """Paths of attention modules that were never called."""
        called_modules = {site.module for site in self.recording.layers}
        return list(dict.fromkeys(site.name for site in self._pass.sites if site.module not in called_modules))

    @property
    def rejected(self) -> list[Rejection]:
        """Calls that look like attention but were not recorded: module path, class and reason."""
        return [] if self._functions is None else list(self._functions.rejected)

    def __getitem__(self, key: Key) -> Layer:
        """A layer by its number, (kind, number) or module path."""
        site = find_site(self.model, self._pass.sites, key)
        if site not in self.recording.layers:
            raise HeadwiseError(f"{site} was not called while the model was watched")
        return self.recording.layers[site]

    def __enter__(self) -> Watch:
        if self._hooks.on:
            raise HeadwiseError("this watch is on already; make another with headwise.watch(model)")
        return self._hooks.set(self, self._set_hooks, self._sources.install)

    def _set_hooks(self) -> None:
        self._tracker.follow(self._modules, self._pass.begin, self._pass.end)
        if self._functions is not None:
            self._functions.follow(self._hooks)
        for site in first_per_module(self._pass.sites):
            if site.module in self._request.outputs.by_module and site.source != "function":
                self._tracker.before_w_o(site, functools.partial(self._record_outputs, site.module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.remove()  # at once: an interrupt in what follows leaves none
        if error is not None:
            self.close()
            for group in self.rank_groups:
                if isinstance(error, Exception) and not isinstance(error, RankError):
                    group.report_failure("what was watched", error)
        elif not self.rank_groups:
            self._finish()
        else:
            for group in self.rank_groups:
                group.agree("what was watched", self._finish)
            for site, layer in self.recording.layers.items():
                layer.gather(self._request.weights.heads(site))

    def close(self) -> list[Site]:
        """Take the hooks off, and check and gather nothing; the layers that were called and not seen."""
        self._hooks.remove()
        self._pass.reset()
        return self._tracker.reset()

    def _finish(self) -> str:
        """Take the hooks off and check what was recorded; what all processes that split the heads must have."""
        missed = self.close()
        self.recording.check_rows()
        if missed:
            raise self._tracker.missed_error(missed[0])
        if self._tracker.completed and not self.recording.layers:
            sites = self._pass.sites
            in_registry = bool(sites) and all(site.source == "registry" for site in sites)
            missing = "asked transformers' registry for an attention function" if in_registry else "was called"
            candidates = "".join(f"; {rejection}" for rejection in self.rejected)
            raise UnsupportedError(
                f"{type(self.model).__name__} ran, but none of its attention layers {missing}; its heads cannot be "
                f"watched{candidates}"
            )
        return "; ".join(layer.describe() for layer in self.layers if layer.partition is not None)

    def _stop(self) -> None:
        self._sources.remove()
        if self._functions is not None:
            self._functions.stop()

    def find_layer(self, module: nn.Module, turn: int) -> None:
        """Renumber the layers if a new one was observed. `FunctionSource` calls this."""
        if not self._pass.knows(module, turn):
            sites = attention_sites(self.model)
            self._pass.relabel(sites)
            self.recording.relabel(sites)

    def site(self, module: nn.Module, turn: int) -> Site:
        """The layer of one of a module's attention calls in a pass."""
        return self._pass.site(module, turn)

    def real_tokens(self, module: nn.Module, batch: int, queries: int, keys: int) -> Tensor | None:
        """(B, Tq) bool: which queries are tokens, by the padding that a transformers model was given; None for all."""
        owner = self._tracker.owners.get(module)
        if owner is None or not hasattr(owner, "config"):  # what another model means by a mask is not known
            return None
        return self._tracker.real_tokens(module, batch, queries, keys)

    def records_outputs(self, site: Site) -> bool:
        """Whether the outputs of a layer's heads are requested."""
        return self._request.outputs.heads(site) is not None

    def __repr__(self) -> str:
        count = len(self.recording.layers)
        return f"Watch({type(self.model).__name__}, {count} layer{'s' * (count != 1)} seen)"

    def to_json(self) -> dict[str, Any]:
        """The layers and their statistics as plain JSON values."""
        return {"model": type(self.model).__name__, "layers": [layer.to_json() for layer in self.layers]}

    def _record_outputs(self, module: nn.Module, x: Tensor) -> None:
        if not in_backward():
            self.recording.add_outputs(self._pass.site(module), x)

    def see(self, call: ModelCall, function: Function, eager: Function, innermost: bool) -> tuple[Tensor, Any]:
        """Answer an attention call with the model's output, and record what was requested. The registry calls this.

        Args:
            call: what the model passed to its attention function.
            function: answers the call as the model would.
            eager: the model's own eager function.
            innermost: whether function is the model's attention function, and not another watcher.
        """
        self._tracker.arrive(call.module)
        check_values(call.query, call.module, "watch")
        if is_paged(call):
            with record_pages(call) as calls:
                output, extra = function(call)
            self._record_answered(calls[-1], eager, output)
            return output, extra
        context = self._pass.context(call)
        call = _with_needed_mask(call)
        reading, eager_reading = _readings(call, context, eager)
        new = self._pass.is_new(call)
        if innermost and new and self._in_one_pass(call, reading):
            trusted = self._trust.choose(reading, eager_reading, None, context.real, context.site.name)
            if trusted is reading:
                dropout = call.dropout if call.module.training else 0.0
                classes = self.recording.key_classes(context, reading)
                out, stats = reading.observe(context.real, classes, dropout)
                with torch.no_grad():
                    self.recording.add_call(context, reading, stats)
                return out.transpose(1, 2).contiguous(), None
        output, extra = function(call)
        if new:
            with torch.no_grad():
                self._record(context, reading, eager_reading, output)
        return output, extra

    def see_known(self, call: KnownCall, answer: Answer, innermost: bool) -> Any:
        """Answer a call whose meaning is known, and record what was requested. Sources other than the registry call it.

        Args:
            call: the call in headwise's terms.
            answer: answers the call as the model would.
            innermost: whether answer is the model's own, and not another watcher's.
        """
        reading, request = call.reading, self._request
        self._tracker.arrive(call.module)
        check_values(reading.q, call.module, "watch")
        context = self._pass.known_context(call)
        if innermost and call.one_pass and request.stats and not request.exact:
            output, stats = reading.observe(context.real, self.recording.key_classes(context, reading), call.dropout)
        else:
            output, stats = answer(call), None
        with torch.no_grad():
            self.recording.add_call(context, reading, stats)
        return output

    def _record_answered(self, call: ModelCall, eager: Function, output: Tensor) -> None:
        """Record a call that has been answered."""
        if self._pass.is_new(call):
            context = self._pass.context(call)
            with torch.no_grad():
                reading, eager_reading = _readings(call, context, eager)
                trusted = self._trust.choose(reading, eager_reading, output, context.real, context.site.name)
                self.recording.add_call(context, trusted)

    def _record(self, context: CallContext, reading: Reading, eager: EagerReading, output: Tensor) -> None:
        stats = self._step_stats(context, reading, eager, output)
        if stats is not None:
            self.recording.add_call(context, reading, stats)
        else:
            trusted = self._trust.choose(reading, eager, output, context.real, context.site.name)
            self.recording.add_call(context, trusted)

    def _step_stats(
        self, context: CallContext, reading: Reading, eager: EagerReading, output: Tensor
    ) -> HeadStats | None:
        """Statistics of a decoding step of a trusted form, from the same pass as the output that checks them."""
        one_query = reading.q.shape[2] == 1 and reading.recipe is None
        if not one_query or not self._request.stats or eager.call.dropout or not self._trust.is_trusted(eager.call):
            return None
        ours, stats = reading.observe(context.real, self.recording.key_classes(context, reading))
        return stats if same_outputs(ours, by_head(output, reading), reading.v, context.real) else None

    def _in_one_pass(self, call: ModelCall, reading: Reading) -> bool:
        """Whether our own pass computes the output too: if the mask was never built, or if that is faster."""
        if isinstance(call.mask, LazyMask):
            return True
        plain = call.implementation in ("sdpa", NAME) and not call.options.get("output_attentions")
        permitted = plain and not self._request.exact and self._request.stats and not call.dropout
        return permitted and reading.in_one_pass()


def _rank_groups(model: nn.Module, sites: list[Site]) -> list[RankGroup]:
    """The processes that heads or tokens of a model are split over: one group as a rule, none where all are here."""
    groups: dict[RankGroup, None] = {}
    for site in first_per_module(sites):
        partition = head_partition(model, site)
        if partition is not None:
            groups[partition.ranks] = None
        elif splits_tokens(site.module):
            attention: Any = site.module  # scale's SplitSequenceAttention
            groups |= dict.fromkeys(attention.rank_groups)
    return list(groups)


def _readings(call: ModelCall, context: CallContext, eager: Function) -> tuple[Reading, EagerReading]:
    """A call in headwise's terms, and by the model's own eager function."""
    reading = read(call, context.recipe, context.similar, context.cross)
    options = reading.options
    eager_reading = EagerReading(call, eager, options["offset"], reading.comparable, context.recipe, options)
    return split_packed(reading, call, context.positions), eager_reading


def _with_needed_mask(call: ModelCall) -> ModelCall:
    """The call, its lazy mask made where the attention function itself needs its values."""
    lazy = isinstance(call.mask, LazyMask)
    if lazy and (call.options.get("output_attentions") or call.implementation not in ("eager", "sdpa")):
        return call._replace(mask=call.mask.recipe.whole())
    return call
