"""Attention in code that declares nothing: the functions that a model calls while it runs.

A `FunctionMode` sees PyTorch's fused attention function, and a softmax over the product of two tensors that is then
multiplied by a third. It follows each tensor's layout from the projection that made it, which tells sequences from
heads. What looks like attention and is not understood is rejected by name.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..structure.heads import input_width
from .call_outputs import Output, lie_in_order, outputs_at
from .head_axes import HeadAxes, assume_axes, read_axes
from .lineage import JOINS, LAYOUTS, RESHAPES, Lineage, change_layout, join, origin_of
from .products import PRODUCTS, Factor, Mix, Operands, projected_axes, read_mix, read_operands, read_scores
from .score_changes import NO_ROWS, PLAIN, Logits, RowScores, keep, only_hides
from .traces import (
    DROPOUT,
    NOTHING,
    ScoreTrace,
    Softmax,
    Trace,
    WeightTrace,
    change_operands,
    mix_places,
    trace_elementwise,
)

Function = Callable[..., Any]

SOFTMAX = ("softmax", "special_softmax")
FEATURE_AXES = {"linear": -1, "linear_dynamic": -1, "addmm": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}
FUSED = ("attention", "attn", "fmha", "multi_head", "transformer_encoder_layer")  # in names of fused operators
# nothing that these give has the layout of a tensor
QUERIES = frozenset(
    (
        "shape", "size", "dim", "dtype", "device", "is_nested", "requires_grad", "grad_fn", "numel", "stride", "len",
        "is_contiguous", "data_ptr", "layout", "ndim", "is_cuda", "is_floating_point", "item", "is_complex", "eq", "lt",
    )
)  # fmt: skip


class Rejection(NamedTuple):
    """Something that looks like attention and was not recorded."""

    name: str  # the path of the module that computes it
    module: str  # its class
    reason: str

    def __str__(self) -> str:
        return f"{self.module} (at {self.name or 'the top'}): {self.reason}"


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One attention call that was seen in the functions of a module."""

    modules: tuple[nn.Module, ...]  # that were running during all of it, outermost first
    query: Tensor  # (B, H, Tq, D)
    key: Tensor  # (B, Hkv, Tk, D)
    value: Tensor  # (B, Hkv, Tk, Dv)
    axes: HeadAxes  # of the model's own tensors
    weights: Tensor | None = None  # (B, H, Tq, Tk): the softmax, before dropout; None in PyTorch's fused function
    scores: RowScores = NO_ROWS  # (B, H, Tq): what is known of the scores that the weights are the softmax of
    mask: Tensor | None = None  # of the fused function, with four axes
    causal: bool = False  # query i sees keys 0 ... i
    scale: float | None = None
    dropout: float = 0.0
    options: dict[str, Any] | None = None  # of headwise.attend, where the model calls that


class Receiver(Protocol):
    """What is told of the attention calls that a mode sees."""

    def answer(self, call: FunctionCall, run: Callable[[], Tensor]) -> tuple[Tensor, Any]:
        """The output of a call, in the shape that run gives it, and a token for the call."""

    def keep_outputs(self, token: Any, outputs: Callable[[], Tensor]) -> None:
        """The heads' outputs (B, H, Tq, Dv) of a call, as the call gave them."""

    def project(self, token: Any, linear: nn.Module, in_order: bool, outputs: Callable[[], Tensor | None]) -> None:
        """The heads' outputs of a call reach a linear layer.

        Args:
            token: of the call.
            linear: the layer.
            in_order: whether they lie head by head, each head's width together.
            outputs: gives them as they are there, (B, H, Tq, Dv); None where something was added or left out.
        """

    def reject(self, rejection: Rejection) -> None:
        """Something looked like attention and was not understood."""


class _ThreadState(threading.local):
    computing = False  # whether this thread computes something of our own


_thread = _ThreadState()


class FunctionMode(TorchFunctionMode):
    """Sees the functions that one thread calls while a model runs in it."""

    def __init__(self, receiver: Receiver, paths: dict[nn.Module, str]) -> None:
        super().__init__()
        self.receiver, self.paths = receiver, paths
        self.modules: list[nn.Module] = []  # that are running, outermost first
        self.served = 0  # how many of them are watched by other means
        self.batch: int | None = None  # sequences of the outermost call
        self._readers: set[nn.Module] = set()  # running linear layers that read heads' outputs
        self._traces: dict[int, tuple[weakref.ref[Tensor], Trace]] = {}
        self._pending: dict[Softmax, None] = {}  # those that have met no values yet
        self._axes: dict[Any, HeadAxes | str] = {}  # by form of the lineage
        self._in_order: dict[Any, bool] = {}  # by form of the lineage

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], served: bool) -> None:
        """A module begins to run."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not self.modules:
            self.batch = next((x.shape[0] for x in tensors if x.dim()), None)
        self.modules.append(module)
        self.served += served
        if tensors and not self.served and not self._readers and input_width(module):
            self._find_output(module, tensors[0])

    def end(self, module: nn.Module, served: bool) -> None:
        """A module has run, or has raised."""
        self._readers.discard(module)
        while self.modules:
            last = self.modules.pop()
            if last is module:
                self.served -= served
                break
        if not self.modules:
            self.served = 0
            self._readers.clear()
            for softmax in self._pending:
                self._reject(softmax.modules, "its softmax over a product of two tensors is not multiplied by values")
            self._pending.clear()
            self._traces.clear()

    def __torch_function__(
        self, function: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(function)
        if _thread.computing or self.served or not self.modules or name in QUERIES:
            return function(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused(function, args, kwargs)
        if name == "multi_head_attention_forward":
            with self:  # a mode is off inside of its own handler
                return _MHA_FORWARD(*args, **kwargs)
        if name in PRODUCTS:
            return self._product(name, function, args, kwargs)
        if name in SOFTMAX:
            return self._softmax(function, args, kwargs)
        if name in FEATURE_AXES:
            return self._projection(name, function, args, kwargs)
        if any(part in name for part in FUSED) and "dropout" not in name:
            self._reject(tuple(self.modules), f"{_qualified_name(function)} is a fused operator that shows no weights")
        return self._other(name, function, args, kwargs)

    # what is known of tensors

    def _get(self, x: Any) -> Trace | None:
        entry = self._traces.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def _set(self, x: Tensor, trace: Trace) -> None:
        number = id(x)
        if trace == NOTHING:
            self._traces.pop(number, None)
            return
        self._traces[number] = weakref.ref(x, lambda _: self._traces.pop(number, None)), trace

    def _mixed(self, name: str, x: Any) -> tuple[ScoreTrace | None, WeightTrace | None]:
        return mix_places(name, x, self._get(x) or NOTHING)

    # functions

    def _other(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other function: it may change the layout of a tensor, or its values."""
        if name in JOINS:
            return self._join(name, function, args, kwargs)
        if name == "iter":  # q, k, v = qkv
            return iter(self._other("unbind", torch.Tensor.unbind, args, kwargs))
        operands = [(x, trace) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and (trace := self._get(x))]
        if not operands:
            return function(*args, **kwargs)
        in_place = _in_place(function, name, args, kwargs)
        if in_place:
            self._keep_weights(operands)
        if name in LAYOUTS and args and args[0] is operands[0][0]:
            output = function(*args, **kwargs)
            self._change_layout(name, function, args, kwargs, operands[0][1], output)
            return output
        operands = change_operands(name, args, kwargs, operands, in_place)
        output = function(*args, **kwargs)
        result = args[0] if name == "setitem" else output
        if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
            self._set(result, trace_elementwise(name, result, operands))
        return output

    def _keep_weights(self, operands: list[tuple[Tensor, Trace]]) -> None:
        """Weights that are about to be overwritten are kept as they are."""
        for x, trace in operands:
            if trace.weights is not None and trace.weights.weights is x:
                trace.weights.weights = x.clone()

    def _change_layout(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace, output: Any
    ) -> None:
        lineage = None if trace.lineage is None else change_layout(trace.lineage, name, function, args, kwargs)
        many = isinstance(output, (tuple, list))
        for number, x in enumerate(output if many else (output,)):
            if not isinstance(x, Tensor):
                continue
            same_rows = name in RESHAPES and x.shape[-2:] == args[0].shape[-2:]
            scores, weights = trace.scores, trace.weights
            if not same_rows and scores is not None:
                scores = replace(
                    scores, problem=scores.problem or f"it rearranges its scores before the softmax ({name})"
                )
            if not same_rows and weights is not None:
                weights = replace(weights, problem=weights.problem or f"it rearranges its weights ({name})")
            own_lineage = None if lineage is None else lineage(number if many else None)
            self._set(x, Trace(own_lineage, scores, weights, trace.of_weights))

    def _projection(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer or a convolution."""
        output = function(*args, **kwargs)
        axis = FEATURE_AXES[name]
        if isinstance(output, Tensor) and output.dim() >= -axis:
            scores, weights = self._mixed(name, args[0] if args else kwargs.get("input"))
            self._set(output, Trace(origin_of(tuple(output.shape), (axis,)), scores, weights))
        return output

    def _join(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = function(*args, **kwargs)
        tensors = args[0] if args else kwargs.get("tensors", ())
        traces = [self._get(x) for x in tensors]
        if any(trace is not None and trace.lineage is not None for trace in traces):
            options = dict(kwargs) if len(args) < 2 else {**kwargs, "dim": args[1]}
            options.pop("tensors", None)
            parents = [
                tuple(x.shape) if trace is None or trace.lineage is None else trace.lineage
                for x, trace in zip(tensors, traces, strict=True)
            ]
            self._set(output, Trace(join(parents, name, function, options)))
        scores = next((trace.scores for trace in traces if trace is not None and trace.scores is not None), None)
        if scores is not None:
            problem = f"it joins its scores with others before the softmax ({name})"
            self._set(output, Trace(scores=replace(scores, problem=scores.problem or problem)))
        return output

    def _product(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = read_operands(name, args, kwargs)
        if operands is None:
            return function(*args, **kwargs)
        for x in (operands.left, operands.right):
            trace = self._get(x)
            if trace is not None and trace.weights is not None:
                return self._mix(trace.weights, x, operands, lambda: function(*args, **kwargs))
        output = function(*args, **kwargs)
        if any(trace is not None and trace.of_weights for trace in map(self._get, (operands.left, operands.right))):
            self._set(output, Trace(of_weights=True))
            return output
        weight = next((x for x in (operands.right, operands.left) if _is_weight(x)), None)
        scores = None if weight is not None else read_scores(operands)
        lineage = None
        if weight is None and min(operands.left.dim(), operands.right.dim()) == 2:
            weight = min(operands.right, operands.left, key=Tensor.dim)
            scores = scores if operands.left.dim() == operands.right.dim() else None
        if weight is not None:
            lineage = origin_of(tuple(output.shape), projected_axes(operands, weight))
        trace_of_scores = self._mixed(name, operands.left)[0] or self._mixed(name, operands.right)[0]
        if scores is not None:
            trace_of_scores = ScoreTrace(
                scores.query, scores.key, tuple(output.shape[:-2]), self._query_lineage(scores.query, scores.key),
                tuple(self.modules), logits=_product_logits(name, operands, args, kwargs),
            )  # fmt: skip
        self._set(output, Trace(lineage, trace_of_scores))
        return output

    def _query_lineage(self, query: Factor, key: Factor) -> Lineage | None:
        """The lineage of the queries as they are arranged; that of the keys where they have the same axes."""
        for factor in (query, key):
            trace = self._get(factor.tensor)
            if trace is None or trace.lineage is None or (factor is key and len(key.axes) != len(key.order)):
                continue
            parent = trace.lineage
            signature = hash((parent.signature, factor.axes, factor.order, factor is key))
            return Lineage(parent.origin, (parent,), factor.arranged, signature, parent.depth + 1)
        return None

    def _softmax(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = function(*args, **kwargs)
        x = args[0] if args else kwargs.get("input")
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        trace = self._get(x)
        if not isinstance(x, Tensor) or not isinstance(axis, int):
            return output
        modules, scores = tuple(self.modules), None if trace is None else trace.scores
        if axis % x.dim() != x.dim() - 1:
            if scores is not None:
                self._reject(modules, f"its softmax over a product of two tensors is over axis {axis}, not the last")
            return output
        problem = "its softmax is not over a product of two tensors that was seen"
        if scores is None and x.dim() != 4:
            return output
        softmax = Softmax(scores, modules)
        weights, problem_of_scores = output, problem
        if scores is not None:
            softmax.largest = x.detach().amax(-1) if x.shape[-1] else None
            weights, problem_of_scores = _without_hidden_rows(output, softmax.largest), scores.problem
            self._pending[softmax] = None
        self._set(output, Trace(weights=WeightTrace(weights, softmax, problem_of_scores)))
        return output

    # attention calls

    def _mix(self, trace: WeightTrace, weights: Tensor, operands: Operands, run: Callable[[], Tensor]) -> Tensor:
        """The product of weights with values."""
        self._pending.pop(trace.softmax, None)
        mix = read_mix(operands, weights)
        call: FunctionCall | str = trace.problem or "it multiplies its weights in a form that is not known"
        values = self._get(operands.left if operands.right is weights else operands.right)
        if values is not None and (values.weights is not None or values.of_weights):
            trace = replace(trace, problem="it multiplies its weights by other weights")
            call = str(trace.problem)
        if mix is not None and not trace.problem:
            call = self._read_softmax(trace, weights, mix)
        if mix is None or isinstance(call, str):
            self._reject(_common(trace.softmax.modules, tuple(self.modules)), str(call))
            output = run()
            self._set(output, Trace(of_weights=True))
            return output
        return self._answer(call, run, mix.result_order)

    def _read_softmax(self, trace: WeightTrace, weights: Tensor, mix: Mix) -> FunctionCall | str:
        """A softmax between two products, or why it is not understood."""
        scores = trace.softmax.scores
        assert scores is not None  # else there is a problem
        query, key, value = scores.query.arranged(), scores.key.arranged(), mix.value.arranged()
        rows, columns = trace.weights.shape[-2:]
        lead = max(scores.lead, tuple(trace.weights.shape[:-2]), key=len)
        axes = self._read_axes(scores.lineage, lead, rows, query.shape[-1])
        if isinstance(axes, str):
            return axes
        modules = _common(scores.modules, trace.softmax.modules, tuple(self.modules))

        def by_head(x: Tensor, full: tuple[int, ...]) -> Tensor:
            if full != lead:  # sequences and heads are one axis there
                x = x.expand(*full, *x.shape[-2:]).reshape(*lead, *x.shape[-2:])
            return axes.by_head(x)

        def rows_by_head(x: Tensor | None) -> Tensor | None:
            return None if x is None else by_head(x.reshape(*lead, rows, 1), lead)[..., 0]

        known = trace.read_rows()
        return FunctionCall(
            modules,
            by_head(query, scores.lead),
            by_head(key, scores.lead),
            by_head(value, tuple(weights.shape[:-2])),
            axes,
            weights=by_head(trace.weights.reshape(*lead, rows, columns), lead),
            scores=RowScores(rows_by_head(known.logits), rows_by_head(known.lse), known.absent),
        )

    def _fused(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A call of PyTorch's scaled_dot_product_attention."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        query: Tensor = options["query"]
        key: Tensor = options["key"]
        mask: Tensor | None = options.get("attn_mask")

        def run() -> Tensor:
            output: Tensor = function(*args, **kwargs)
            return output

        if query.is_nested:
            self._reject(tuple(self.modules), "nested tensors have no axis of tokens")
            return run()
        lead = tuple(query.shape[:-2])
        if key.shape[:-2] != lead:
            lead = tuple(torch.broadcast_shapes(lead, _kv_lead(query, key)))
            query = query.expand(*lead, *query.shape[-2:])
        axes_name = "".join(chr(ord("a") + i) for i in range(query.dim()))
        factor = Factor(options["query"], axes_name, axes_name)
        lineage = self._query_lineage(factor, factor) if tuple(options["query"].shape) == tuple(query.shape) else None
        axes = self._read_axes(lineage, lead, query.shape[-2], query.shape[-1], documented=True)
        if isinstance(axes, str):
            self._reject(tuple(self.modules), axes)
            return run()
        if key.shape[:-2] != query.shape[:-2] and not axes.plain:  # KV heads that serve several query heads
            self._reject(tuple(self.modules), "its grouped key and value heads are not on the second of four axes")
            return run()
        call = FunctionCall(
            tuple(self.modules),
            axes.by_head(query),
            axes.by_head(key),
            axes.by_head(options["value"]),
            axes,
            mask=None if mask is None else axes.by_head(mask),
            causal=bool(options.get("is_causal")),
            scale=options.get("scale"),
            dropout=float(options.get("dropout_p") or 0.0),
        )
        return self._answer(call, run, tuple(range(query.dim())))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], run: Callable[[], Tensor]) -> Tensor:
        """A call of headwise.attend."""
        if self.served or not self.modules:
            return run()
        factor = Factor(q, "abcd", "abcd")
        lineage, lead = self._query_lineage(factor, factor), tuple(q.shape[:2])
        axes = self._read_axes(lineage, lead, q.shape[2], q.shape[3], documented=True)
        if isinstance(axes, str) or not axes.plain:  # attend takes (B, H, T, D) and nothing else
            problem = axes if isinstance(axes, str) else "it gives headwise.attend heads for sequences"
            self._reject(tuple(self.modules), problem)
            return run()
        call = FunctionCall(tuple(self.modules), q, k, v, axes, dropout=options["dropout"], options=options)
        return self._answer(call, run, (0, 1, 2, 3))

    def _read_axes(
        self, lineage: Lineage | None, lead: tuple[int, ...], rows: int, columns: int, documented: bool = False
    ) -> HeadAxes | str:
        """Which of the leading axes are sequences and heads, or why that cannot be told."""
        if lineage is not None:
            origin = lineage.origin
            key = (lineage.signature, lead, columns, tuple(origin.shape[axis] for axis in origin.features))
            if key not in self._axes:
                with torch._C.DisableTorchFunction():
                    self._axes[key] = read_axes(lineage, lead, rows, columns)
            return self._axes[key]
        axes = assume_axes(lead)
        if axes is None or not (documented or lead[0] == self.batch != lead[1]):
            return f"which of its axes {(*lead, rows, columns)} are sequences and which are heads cannot be told"
        return axes

    def _answer(self, call: FunctionCall, run: Callable[[], Tensor], order: tuple[int, ...]) -> Tensor:
        """The output of a call; order: its axes as (*lead, Tq, Dv)."""
        output, token = self.receiver.answer(call, run)
        kept = Output(token, call.axes, call.value.shape[-1], order)
        self.receiver.keep_outputs(token, lambda: kept.by_head(output))
        self._set(output, Trace(origin_of(tuple(output.shape), (), kept)))
        return output

    def _find_output(self, linear: nn.Module, x: Tensor) -> None:
        """Whether the input of a linear layer is the heads' outputs of a call."""
        trace = self._get(x)
        if trace is None or trace.lineage is None or trace.lineage.origin.call is None:
            return
        lineage, kept = trace.lineage, trace.lineage.origin.call
        width = kept.axes.head_count * kept.width
        self._readers.add(linear)  # LoRA has linear layers inside of linear layers
        form = (lineage.signature, kept.axes, kept.order, width, x.dim())
        if form not in self._in_order:
            self._in_order[form] = lie_in_order(lineage, width)
        self.receiver.project(kept.token, linear, self._in_order[form], lambda: outputs_at(lineage, x))

    def _reject(self, modules: tuple[nn.Module, ...], reason: str) -> None:
        module = modules[-1]
        self.receiver.reject(Rejection(self.paths.get(module, ""), type(module).__name__, reason))


@contextmanager
def own_computation(on: bool = True) -> Iterator[None]:
    """Inside, what this thread computes is ours and not the model's, and no mode looks at it."""
    before, _thread.computing = _thread.computing, on
    try:
        yield
    finally:
        _thread.computing = before


def is_own_computation() -> bool:
    """Whether this thread computes something of our own."""
    return _thread.computing


def function_name(function: Function) -> str:
    """The bare name of a function: "masked_fill" of Tensor.masked_fill_, "shape" of the property."""
    name: str = getattr(function, "__name__", "") or type(function).__name__
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return _bare_name(name)


@functools.cache
def _bare_name(name: str) -> str:
    return name.partition(".")[0].strip("_")


def _qualified_name(function: Function) -> str:
    module = (getattr(function, "__module__", None) or "").removeprefix("torch._ops.")
    name: str = getattr(function, "__name__", str(function))
    return f"{module}.{name}" if module else name


def _without_hidden_rows(weights: Tensor, largest: Tensor | None) -> Tensor:
    """The weights, with zeros for the NaN of rows whose largest score is -inf: all of their keys are hidden."""
    hidden = None if largest is None else largest == -torch.inf
    if hidden is None or not bool(hidden.any()):
        return weights
    with torch.no_grad():
        return weights.masked_fill(hidden[..., None], 0.0)


def _product_logits(name: str, operands: Operands, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
    """Where scale * q.k of a product is: baddbmm adds a bias to it."""
    beta, bias = kwargs.get("beta", 1), kwargs.get("input", args[0] if args else None)
    if name != "baddbmm" or not beta or only_hides(bias, beta):
        return PLAIN
    with torch.no_grad():
        product = torch.bmm(operands.left, operands.right)
    scale = float(kwargs.get("alpha", 1))
    problem = None if scale > 0 else "it multiplies its scores by a number below 0"
    return replace(keep(product, PLAIN), scale=scale, problem=problem)


def _in_place(function: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function overwrites its first argument."""
    if name == "setitem" or kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    if name in DROPOUT and len(args) > 3:
        return bool(args[3])
    own_name: str = getattr(function, "__name__", "")
    return own_name.endswith("_") and not own_name.endswith("__")


def _is_weight(x: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def _kv_lead(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """The leading axes of keys, without KV heads that serve several query heads."""
    lead = tuple(key.shape[:-2])
    return (*lead[:-1], 1) if lead and query.dim() == key.dim() and query.shape[-3] != lead[-1] else lead


def _common(*stacks: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """The modules that were running in all of several calls."""
    count = 0
    for modules in zip(*stacks, strict=False):
        if any(module is not modules[0] for module in modules):
            break
        count += 1
    return stacks[0][: max(count, 1)]


def _without_dispatch(function: types.FunctionType) -> Function:
    """A copy of a Python function of PyTorch that a mode does not see as a whole, but call by call."""
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_MHA_FORWARD = _without_dispatch(cast("types.FunctionType", functional.multi_head_attention_forward))
