"""Which norms are between the residual stream and a layer's heads, and before the unembedding.

Names differ from model to model, so the model runs once on a few random tokens: a norm precedes a projection if the
projection's input is the norm's output and the norm was called inside the same layer. (In a post-norm model the input
of the projections is the output of the previous layer's norm, which is the stream itself.) In PyTorch's layers and
headwise's own blocks the norms are known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.nn.blocks import TransformerBlock
from ..attention.nn.stack import Decoder, Transformer
from ..errors import HeadwiseError, UnsupportedError
from ..models.evaluation import evaluating
from ..models.hooks import has_hooks
from ..models.intervene.head_outputs import run
from ..models.structure.projections import find_projections
from ..models.structure.sites import Site, attention_sites, first_per_module
from ..models.surgery.dummy_inputs import dummy_inputs, first_line
from ..models.text_inputs import has_config, vocabulary_size
from .norms import is_norm

ROLES = "qkv"
TOKENS = 9
LISTS = (nn.ModuleList, nn.Sequential)  # of layers
POST_NORM = 0.01  # how much nearer the stream is to a norm's output than to its input, if it is that output
PROPORTIONAL = 1e-3  # between directions: a scale on the last hidden states, as T5's, does not matter


@dataclass
class StreamNorms:
    """Paths of norms, by the module that reads or gives what they normalise."""

    known_modules: set[str] = field(default_factory=set)  # paths of attention modules about which the rest is complete
    before: dict[tuple[str, str], str] = field(default_factory=dict)  # (attention module, "q", "k" or "v") -> norm
    after: dict[str, str] = field(default_factory=dict)  # attention module -> the norm of W_O's output
    final: str | None = None  # the norm before the unembedding
    final_known: bool = False
    positions: dict[str, Any] = field(default_factory=dict)  # attention module -> the position_embeddings it is given
    reason: str = ""  # why the other attention modules are not known


_observed: weakref.WeakKeyDictionary[nn.Module, tuple[int, StreamNorms]] = weakref.WeakKeyDictionary()


def stream_norms(model: nn.Module) -> StreamNorms:
    """The norms of a model's residual stream; the result of the run is remembered until the model's modules change."""
    structure = hash(tuple((path, type(module)) for path, module in model.named_modules()))
    if model in _observed and _observed[model][0] == structure:
        return _observed[model][1]
    norms = StreamNorms()
    sites = first_per_module(attention_sites(model))
    for site in sites:
        _read_known_block(model, site, norms)
    if isinstance(model, Decoder | Transformer):
        stack = "" if isinstance(model, Decoder) else "decoder."
        norms.final_known, has_norm = True, model.get_submodule(stack.rstrip(".")).norm is not None
        norms.final = f"{stack}norm" if has_norm else None
    if any(site.name not in norms.known_modules for site in sites):
        _observe(model, sites, norms)
    _observed[model] = structure, norms
    return norms


def _read_known_block(model: nn.Module, site: Site, norms: StreamNorms) -> None:
    """The norms of nn.Transformer's layers and of headwise's blocks."""
    block: Any = model.get_submodule(site.parent) if site.name else None
    own_name = site.name.rpartition(".")[2]
    if isinstance(block, TransformerBlock):
        is_pre_norm, norm = block.pre_norm, f"{own_name}_norm"
        reads_memory = own_name == "cross"
    elif isinstance(block, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        reads_memory = own_name == "multihead_attn"
        is_pre_norm, norm = block.norm_first, "norm2" if reads_memory else "norm1"
    elif site.source == "module" and not site.name:  # the model is one attention module
        norms.known_modules.add(site.name)
        return
    else:
        return
    norms.known_modules.add(site.name)
    for role in ROLES[:1] if reads_memory else ROLES:
        if is_pre_norm:
            norms.before[site.name, role] = f"{site.parent}.{norm}"


def _observe(model: Any, sites: list[Site], norms: StreamNorms) -> None:
    """Run the model once, and see which norms feed the projections of the other layers."""
    check_unhooked(model)
    inputs = _inputs(model)
    if inputs is None:
        norms.reason = f"inputs for {type(model).__name__} are not known, so that it cannot be seen running"
        return
    observer = _Observer(model, [site for site in sites if site.name not in norms.known_modules], norms)
    try:
        with evaluating(model), observer.hooks(), torch.no_grad():
            run(model, inputs)
    except Exception as error:  # a model's code fails in any way on inputs that it does not expect
        norms.reason = f"{type(model).__name__} does not run on random tokens ({first_line(error)[:120]})"
        return
    norms.known_modules |= observer.called_modules
    norms.final_known = norms.final_known or observer.unembedding_called
    norms.reason = "the layer's projections were not called while the model ran"


def check_unhooked(model: nn.Module) -> None:
    """Refuse to run a model inside a `with` block that observes or changes its runs."""
    if has_hooks(model):
        raise HeadwiseError("the model is being watched or masked; take its heads' matrices outside of that `with`")


def _inputs(model: Any) -> dict[str, Tensor] | None:
    """Random tokens, pixels or, for Whisper, sound; None where they are not known."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    config, random = getattr(model, "config", None), torch.Generator().manual_seed(0)
    inputs = dummy_inputs(model)
    if inputs is not None or not has_config(model):
        if inputs is not None and "input_ids" in inputs and (size := _embedded_tokens(model)):
            inputs["input_ids"] = inputs["input_ids"].remainder(size)  # a config may count tokens of images too
        return inputs
    size = _embedded_tokens(model)
    bins, length = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    ids = torch.randint(0, size or 1, (1, TOKENS), generator=random).to(model.device)
    if model.main_input_name == "input_ids" and size:
        return {"input_ids": ids}
    if model.main_input_name == "input_features" and isinstance(bins, int) and isinstance(length, int):
        sound = torch.randn(1, bins, 2 * length, generator=random).to(model.device, model.dtype)
        return {"input_features": sound, "decoder_input_ids": ids}
    return None


def _embedded_tokens(model: Any) -> int | None:
    try:
        return vocabulary_size(model)
    except (NotImplementedError, AttributeError):  # a model of images or sound
        return None


class _Observer:
    """Hooks that compare what norms give with what projections are given."""

    def __init__(self, model: nn.Module, sites: list[Site], norms: StreamNorms) -> None:
        self.model, self.sites, self.norms = model, sites, norms
        self.called_modules: set[str] = set()
        self.unembedding_called = False
        self._outputs: dict[str, Tensor] = {}  # norm -> its newest output
        self._inputs: dict[str, Tensor] = {}  # norm -> its newest input
        self._head_outputs: dict[str, Tensor] = {}  # attention module -> its output of W_O, until a norm was called

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            handles.extend(self._register())
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _register(self) -> Iterator[Any]:
        for path, module in self.model.named_modules():
            if is_norm(module):
                yield module.register_forward_hook(self._after_norm(path))
        blocks = {_block(self.model, site) for site in self.sites} - {""}
        for block in blocks:
            yield self.model.get_submodule(block).register_forward_pre_hook(self._before_block(block))
        for site in self.sites:
            yield site.module.register_forward_pre_hook(self._before_attention(site), with_kwargs=True)
            try:
                layer = find_projections(self.model, site)
            except UnsupportedError:
                continue
            for part in layer.parts:
                roles = {role for role, _ in part.layout(layer.query, layer.kv)}
                yield part.linear.register_forward_pre_hook(self._before_projection(site, roles))
            yield layer.out.register_forward_hook(self._after_w_o(site))
        unembedding = unembedding_module(self.model)
        if unembedding is not None:
            yield unembedding.register_forward_pre_hook(self._before_unembedding)

    def _after_norm(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not args or not isinstance(output, Tensor):
                return
            for site, head_output in self._head_outputs.items():
                if site not in self.norms.after and _equal(args[0], head_output):
                    self.norms.after[site] = path
                self._check_stream(site, args[0], head_output)
            self._head_outputs = {}
            self._outputs.pop(path, None)  # the newest is the last
            self._outputs[path], self._inputs[path] = output, args[0]

        return hook

    def _check_stream(self, site: str, x: Tensor, head_output: Tensor) -> None:
        """Forget a norm before a layer whose output is the stream: what the layer wrote was added to it (post-norm)."""
        norm = self.norms.before.get((site, "q"))
        if norm not in self._outputs or x.shape != head_output.shape or x.shape != self._outputs[norm].shape:
            return
        stream = x - head_output
        to_input, to_output = (float((stream - y).norm()) for y in (self._inputs[norm], self._outputs[norm]))
        if to_output < POST_NORM * to_input:
            for role in ROLES:
                if self.norms.before.get((site, role)) == norm:
                    del self.norms.before[site, role]

    def _before_block(self, block: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            for path in [path for path in self._outputs if path.startswith(f"{block}.")]:
                del self._outputs[path]

        return hook

    def _before_attention(self, site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if "position_embeddings" in kwargs:
                self.norms.positions.setdefault(site.name, kwargs["position_embeddings"])

        return hook

    def _before_projection(self, site: Site, roles: set[str]) -> Callable[..., None]:
        block = _block(self.model, site)

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.called_modules.add(site.name)
            inside = {path: y for path, y in self._outputs.items() if not block or path.startswith(f"{block}.")}
            norm = _source(args[0], inside) if args else None
            for role in roles:
                if norm is not None:
                    self.norms.before.setdefault((site.name, role), norm)

        return hook

    def _after_w_o(self, site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._head_outputs = {site.name: output} if isinstance(output, Tensor) else {}

        return hook

    def _before_unembedding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.unembedding_called = True
        self.norms.final = next(
            (path for path in reversed(self._outputs) if args and _proportional(args[0], self._outputs[path])), None
        )


def unembedding_module(model: Any) -> nn.Module | None:
    """The output layer of a transformers model; None if there is none."""
    if not has_config(model) or not hasattr(model, "get_output_embeddings"):
        return None
    module = model.get_output_embeddings()
    return module if isinstance(module, nn.Module) else None


def _block(model: nn.Module, site: Site) -> str:
    """The path of the layer around an attention module: the innermost item of a list of modules."""
    parts = site.name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if parts[length - 1].isdigit() and isinstance(model.get_submodule(".".join(parts[: length - 1])), LISTS):
            return ".".join(parts[:length])
    return ""


def _source(x: Any, outputs: dict[str, Tensor]) -> str | None:
    """The norm that gave x: its very tensor, or else, the newest first, the same numbers."""
    tests = (_identical, _equal)  # new norms all give the same numbers
    return next((path for test in tests for path, y in reversed(outputs.items()) if test(x, y)), None)


def _identical(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.numel() == y.numel() and x.data_ptr() == y.data_ptr()


def _equal(x: Any, y: Tensor) -> bool:
    """Whether two tensors have the same numbers, in any order of the tokens: windows and transposes change it."""
    if not isinstance(x, Tensor) or x.numel() != y.numel() or x.shape[-1] != y.shape[-1]:
        return False
    x, y = x.detach().flatten(), y.detach().flatten()
    return torch.equal(x, y) or torch.equal(x.sort().values, y.sort().values)


def _proportional(x: Any, y: Tensor) -> bool:
    if not isinstance(x, Tensor) or x.numel() != y.numel() or x.shape[-1] != y.shape[-1]:
        return False
    x, y = (t.detach().flatten().double() for t in (x, y))
    return bool((x / x.norm() - y / y.norm()).norm() < PROPORTIONAL)
