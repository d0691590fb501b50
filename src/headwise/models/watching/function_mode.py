"""Attention in code that declares nothing: the functions that a model calls while it runs.

A `FunctionMode` sees PyTorch's fused attention function, and a softmax over the product of two tensors that is then
multiplied by a third. It follows each tensor's layout from the projection that made it, which tells sequences from
heads. Calls that look like attention but cannot be interpreted are rejected by name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..structure.heads import input_width
from .attention_calls import FunctionCall, Receiver, Rejection
from .call_outputs import Output, lie_in_order, outputs_at
from .function_names import Function, function_name, qualified_name, without_dispatch
from .head_axes import HeadAxes, assume_axes, read_axes
from .lineage import Lineage, origin_of
from .own_computation import is_own_computation
from .products import PRODUCTS, Factor, Mix, Operands, read_mix, read_operands
from .score_changes import RowScores
from .tensor_traces import FEATURE_AXES, TensorTraces
from .traces import Softmax, Trace, WeightTrace

SOFTMAX = ("softmax", "special_softmax")
FUSED = ("attention", "attn", "fmha", "multi_head", "transformer_encoder_layer")  # in names of fused operators
# nothing that these give has the layout of a tensor
QUERIES = frozenset(
    (
        "shape", "size", "dim", "dtype", "device", "is_nested", "requires_grad", "grad_fn", "numel", "stride", "len",
        "is_contiguous", "data_ptr", "layout", "ndim", "is_cuda", "is_floating_point", "item", "is_complex", "eq", "lt",
    )
)  # fmt: skip
_MHA_FORWARD = without_dispatch(cast("types.FunctionType", functional.multi_head_attention_forward))


class FunctionMode(TorchFunctionMode):
    """Sees the functions that one thread calls while a model runs in it."""

    def __init__(self, receiver: Receiver, paths: dict[nn.Module, str]) -> None:
        super().__init__()
        self.receiver, self.paths = receiver, paths
        self.modules: list[nn.Module] = []  # that are running, outermost first
        self.served = 0  # how many of them are watched by other means
        self.batch: int | None = None  # sequences of the outermost call
        self._readers: set[nn.Module] = set()  # running linear layers that read heads' outputs
        self._traces = TensorTraces()
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
        if is_own_computation() or self.served or not self.modules or name in QUERIES:
            return function(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused(function, args, kwargs)
        if name == "multi_head_attention_forward":
            with self:  # a mode is off inside its own handler
                return _MHA_FORWARD(*args, **kwargs)
        if name in PRODUCTS:
            return self._product(name, function, args, kwargs)
        if name in SOFTMAX:
            return self._softmax(function, args, kwargs)
        if name in FEATURE_AXES:
            return self._traces.projection(name, function, args, kwargs)
        if any(part in name for part in FUSED) and "dropout" not in name:
            self._reject(tuple(self.modules), f"{qualified_name(function)} is a fused operator that shows no weights")
        return self._traces.follow(name, function, args, kwargs)

    def _product(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = read_operands(name, args, kwargs)
        if operands is None:
            return function(*args, **kwargs)
        for x in (operands.left, operands.right):
            trace = self._traces.get(x)
            if trace is not None and trace.weights is not None:
                return self._mix(trace.weights, x, operands, lambda: function(*args, **kwargs))
        output = function(*args, **kwargs)
        self._traces.follow_product(name, operands, args, kwargs, output, tuple(self.modules))
        return output

    def _softmax(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = function(*args, **kwargs)
        x = args[0] if args else kwargs.get("input")
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        trace = self._traces.get(x)
        if not isinstance(x, Tensor) or not isinstance(axis, int):
            return output
        modules, scores = tuple(self.modules), None if trace is None else trace.scores
        if axis % x.dim() != x.dim() - 1:
            if scores is not None:
                self._reject(modules, f"its softmax over a product of two tensors is over axis {axis}, not the last")
            return output
        if scores is None:
            if x.dim() == 4:
                problem = "its softmax is not over a product of two tensors that was seen"
                self._traces.set(output, Trace(weights=WeightTrace(output, Softmax(None, modules), problem)))
            return output
        softmax = Softmax(scores, modules, x.detach().amax(-1) if x.shape[-1] else None)
        self._pending[softmax] = None
        weights = _without_hidden_rows(output, softmax.largest)
        self._traces.set(output, Trace(weights=WeightTrace(weights, softmax, scores.problem)))
        return output

    def _mix(self, trace: WeightTrace, weights: Tensor, operands: Operands, run: Callable[[], Tensor]) -> Tensor:
        """The product of weights with values."""
        self._pending.pop(trace.softmax, None)
        mix = read_mix(operands, weights)
        call: FunctionCall | str = trace.problem or "it multiplies its weights in a form that is not known"
        values = self._traces.get(operands.left if operands.right is weights else operands.right)
        if values is not None and (values.weights is not None or values.of_weights):
            trace = replace(trace, problem="it multiplies its weights by other weights")
            call = str(trace.problem)
        if mix is not None and not trace.problem:
            call = self._read_softmax(trace, weights, mix)
        if mix is None or isinstance(call, str):
            self._reject(_common(trace.softmax.modules, tuple(self.modules)), str(call))
            output = run()
            self._traces.set(output, Trace(of_weights=True))
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
        lineage = (
            self._traces.query_lineage(factor, factor) if tuple(options["query"].shape) == tuple(query.shape) else None
        )
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
        lineage, lead = self._traces.query_lineage(factor, factor), tuple(q.shape[:2])
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
        self._traces.set(output, Trace(origin_of(tuple(output.shape), (), kept)))
        return output

    def _find_output(self, linear: nn.Module, x: Tensor) -> None:
        """Whether the input of a linear layer is the heads' outputs of a call."""
        trace = self._traces.get(x)
        if trace is None or trace.lineage is None or trace.lineage.origin.call is None:
            return
        lineage, kept = trace.lineage, trace.lineage.origin.call
        width = kept.axes.head_count * kept.width
        self._readers.add(linear)  # LoRA has linear layers inside linear layers
        form = (lineage.signature, kept.axes, kept.order, width, x.dim())
        if form not in self._in_order:
            self._in_order[form] = lie_in_order(lineage, width)
        self.receiver.project(kept.token, linear, self._in_order[form], lambda: outputs_at(lineage, x))

    def _reject(self, modules: tuple[nn.Module, ...], reason: str) -> None:
        module = modules[-1]
        self.receiver.reject(Rejection(self.paths.get(module, ""), type(module).__name__, reason))


def _without_hidden_rows(weights: Tensor, largest: Tensor | None) -> Tensor:
    """The weights, with zeros for the NaN of rows whose largest score is -inf: all of their keys are hidden."""
    hidden = None if largest is None else largest == -torch.inf
    if hidden is None or not bool(hidden.any()):
        return weights
    with torch.no_grad():
        return weights.masked_fill(hidden[..., None], 0.0)


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
