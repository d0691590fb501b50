"""The traces of all tensors of a running model, followed through the functions that are no attention."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .function_names import Function, overwrites
from .lineage import JOINS, LAYOUTS, RESHAPES, Lineage, change_layout, join, origin_of
from .products import Factor, Operands, projected_axes, read_scores
from .score_changes import PLAIN, Logits, keep, only_hides
from .traces import NOTHING, ScoreTrace, Trace, WeightTrace, change_operands, mix_places, trace_elementwise

FEATURE_AXES = {"linear": -1, "linear_dynamic": -1, "addmm": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}


class TensorTraces:
    """What is known of the tensors of one pass, as long as they live."""

    def __init__(self) -> None:
        self._traces: dict[int, tuple[weakref.ref[Tensor], Trace]] = {}

    def clear(self) -> None:
        """Forget all of them."""
        self._traces.clear()

    def get(self, x: Any) -> Trace | None:
        """What is known of a tensor; None for nothing."""
        entry = self._traces.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def set(self, x: Tensor, trace: Trace) -> None:
        """Keep what is known of a tensor."""
        number = id(x)
        if trace == NOTHING:
            self._traces.pop(number, None)
            return
        self._traces[number] = weakref.ref(x, lambda _: self._traces.pop(number, None)), trace

    def _mixed(self, name: str, x: Any) -> tuple[ScoreTrace | None, WeightTrace | None]:
        return mix_places(name, x, self.get(x) or NOTHING)

    def follow(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is no product or softmax: it may change the layout of a tensor, or its values."""
        if name in JOINS:
            return self._join(name, function, args, kwargs)
        if name == "iter":  # q, k, v = qkv
            return iter(self.follow("unbind", torch.Tensor.unbind, args, kwargs))
        operands = [(x, trace) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and (trace := self.get(x))]
        if not operands:
            return function(*args, **kwargs)
        in_place = overwrites(function, name, args, kwargs)
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
            self.set(result, trace_elementwise(name, result, operands))
        return output

    def _keep_weights(self, operands: list[tuple[Tensor, Trace]]) -> None:
        """Keep a copy of weights that are about to be overwritten."""
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
            self.set(x, Trace(own_lineage, scores, weights, trace.of_weights))

    def projection(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer or a convolution."""
        output = function(*args, **kwargs)
        axis = FEATURE_AXES[name]
        if isinstance(output, Tensor) and output.dim() >= -axis:
            scores, weights = self._mixed(name, args[0] if args else kwargs.get("input"))
            self.set(output, Trace(origin_of(tuple(output.shape), (axis,)), scores, weights))
        return output

    def _join(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = function(*args, **kwargs)
        tensors = args[0] if args else kwargs.get("tensors", ())
        traces = [self.get(x) for x in tensors]
        if any(trace is not None and trace.lineage is not None for trace in traces):
            options = dict(kwargs) if len(args) < 2 else {**kwargs, "dim": args[1]}
            options.pop("tensors", None)
            parents = [
                tuple(x.shape) if trace is None or trace.lineage is None else trace.lineage
                for x, trace in zip(tensors, traces, strict=True)
            ]
            self.set(output, Trace(join(parents, name, function, options)))
        scores = next((trace.scores for trace in traces if trace is not None and trace.scores is not None), None)
        if scores is not None:
            problem = f"it joins its scores with others before the softmax ({name})"
            self.set(output, Trace(scores=replace(scores, problem=scores.problem or problem)))
        return output

    def follow_product(
        self,
        name: str,
        operands: Operands,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
        modules: tuple[nn.Module, ...],
    ) -> None:
        """A product of two tensors, neither of them weights: it may be scores, or a projection."""
        if any(trace is not None and trace.of_weights for trace in map(self.get, (operands.left, operands.right))):
            self.set(output, Trace(of_weights=True))
            return
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
                scores.query, scores.key, tuple(output.shape[:-2]), self.query_lineage(scores.query, scores.key),
                modules, logits=_product_logits(name, operands, args, kwargs),
            )  # fmt: skip
        self.set(output, Trace(lineage, trace_of_scores))

    def query_lineage(self, query: Factor, key: Factor) -> Lineage | None:
        """The lineage of the queries as they are arranged; that of the keys where they have the same axes."""
        for factor in (query, key):
            trace = self.get(factor.tensor)
            if trace is None or trace.lineage is None or (factor is key and len(key.axes) != len(key.order)):
                continue
            parent = trace.lineage
            signature = hash((parent.signature, factor.axes, factor.order, factor is key))
            return Lineage(parent.origin, (parent,), factor.arranged, signature, parent.depth + 1)
        return None


def _product_logits(name: str, operands: Operands, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
    """Where scale * q.k of a product is: baddbmm adds a bias to it."""
    beta = kwargs.get("beta", 1)
    if name != "baddbmm" or not beta or only_hides(args[0] if args else kwargs["input"], beta):
        return PLAIN
    with torch.no_grad():
        product = torch.bmm(operands.left, operands.right)
    scale = float(kwargs.get("alpha", 1))
    problem = None if scale > 0 else "it multiplies its scores by a number below 0"
    return replace(keep(product, PLAIN), scale=scale, problem=problem)


def _is_weight(x: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
