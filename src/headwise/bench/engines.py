"""ONNX Runtime and OpenVINO as peers: the same attention as a graph of fixed sizes, on the same memory.

Each engine gets every graph that it can run and keeps the fastest. Inputs and outputs are tensors of ours that the
engine reads and writes in place. Engines use as many threads as PyTorch. Their threads do not spin between calls,
because that would slow down the next contestant.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..timing.interleaved_race import Contestant
from ..timing.machine import restricted_to
from .peers import Unavailable

INSTALL = "pip install 'headwise[bench-peers]'"
OPSET = 23  # the first of ONNX with attention as one operator


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call in single precision: q (B, H, Tq, D), k and v (B, Hkv, T, D), all contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    out_shape: torch.Size | None = None  # where it is not that of q

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v}

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    def bias(self) -> Tensor:
        """The causal bias (Tq, T), 0 or -inf."""
        hidden = torch.ones(self.q.shape[2], self.k.shape[2], dtype=torch.bool).triu(1)
        return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)

    def grouped(self) -> Problem:
        """The same with the queries of a KV head as its rows, so that no keys are repeated: for a single query."""
        batch, heads, queries, dim = self.q.shape
        kv_heads = self.k.shape[1]
        if heads == kv_heads:
            return self
        if queries > 1:
            raise Unavailable("no graph for several queries per KV head")
        rows = self.q.view(batch, kv_heads, heads // kv_heads, dim)
        return Problem(rows, self.k, self.v, self.causal, self.q.shape)

    def new_output(self) -> tuple[Tensor, Tensor]:
        """A tensor for the graph's output, and the same memory in the shape of the call's output."""
        out = torch.empty(self.q.shape)
        return out, out.view(self.out_shape or out.shape)


def engines(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> dict[str, Callable[[], Contestant]]:
    """Name -> what starts the engine with this call; Unavailable where it cannot."""
    makers = {"ONNX Runtime": _onnx_runtime, "OpenVINO": _openvino}
    return {name: partial(_start, make, Problem(q, k, v, causal)) for name, make in makers.items()}


def _start(make: Callable[[Problem], list[Callable[[], Contestant]]], problem: Problem) -> Contestant:
    """The fastest of an engine's graphs."""
    if problem.q.device.type != "cpu":
        raise Unavailable("measured on the CPU alone")
    if restricted_to():
        raise Unavailable(f"cannot be restricted to {restricted_to()}")
    try:
        candidates = make(problem)
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed: {INSTALL}") from None
    contestants, reason = [], ""
    for candidate in candidates:
        try:
            contestant = candidate()
            contestant()
            contestants.append(contestant)
        except Exception as error:  # an operator or a layout that this version of the engine does not have
            reason = reason or (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    if not contestants:
        raise Unavailable(f"has no graph for this: {reason}")
    return min(contestants, key=_seconds)


# ---- ONNX Runtime ----


def _onnx_runtime(problem: Problem) -> list[Callable[[], Contestant]]:
    import onnx  # noqa: F401  (a missing package is reported by name)
    import onnxruntime  # noqa: F401

    return [
        lambda: _session(problem, _attention_graph(problem)),
        lambda: _session(problem.grouped(), _matmul_graph(problem.grouped())),
    ]


def _session(problem: Problem, graph: bytes) -> Contestant:
    """An ONNX Runtime session on the tensors of a problem."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong is raised
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    out, result = problem.new_output()
    binding = session.io_binding()
    for name, x in problem.inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(x.numpy()))  # shares the memory
    binding.bind_ortvalue_output("out", ort.OrtValue.ortvalue_from_numpy(out.numpy()))

    def run() -> Tensor:
        session.run_with_iobinding(binding)
        return result

    return run


def _matmul_graph(problem: Problem) -> bytes:
    """softmax(q k^T * scale + bias) v, operator by operator; engines fuse what they know."""
    from onnx import helper, numpy_helper

    constants = {"scale": torch.tensor(problem.scale), **({"bias": problem.bias()} if problem.causal else {})}
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("Mul", ["q", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "kt"], ["scores"]),
        *([helper.make_node("Add", ["scores", "bias"], ["biased"])] if problem.causal else []),
        helper.make_node("Softmax", ["biased" if problem.causal else "scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["out"]),
    ]
    tensors = [numpy_helper.from_array(x.numpy(), name) for name, x in constants.items()]
    return _onnx_model(problem, nodes, tensors)


def _attention_graph(problem: Problem) -> bytes:
    """ONNX's own operator, which knows groups of query heads and causal attention."""
    from onnx import helper

    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], scale=problem.scale, is_causal=int(problem.causal))
    return _onnx_model(problem, [node])


def _onnx_model(problem: Problem, nodes: list[Any], constants: list[Any] | None = None) -> bytes:
    from onnx import TensorProto, helper

    def value(name: str, x: Tensor) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape))

    inputs = [value(name, x) for name, x in problem.inputs.items()]
    graph = helper.make_graph(nodes, "attention", inputs, [value("out", problem.q)], constants or [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 10  # older runtimes refuse newer ones
    return model.SerializeToString()


# ---- OpenVINO ----


def _openvino(problem: Problem) -> list[Callable[[], Contestant]]:
    import openvino

    core = openvino.Core()
    grouped = problem.grouped()
    return [
        lambda: _request(core, grouped, _sdpa_model(grouped)),
        lambda: _request(core, grouped, core.read_model(_matmul_graph(grouped))),
    ]


def _request(core: Any, problem: Problem, model: Any) -> Contestant:
    """An OpenVINO inference request on the tensors of a problem."""
    import openvino

    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": False,
        "INFERENCE_PRECISION_HINT": "f32",  # not bf16, where the processor has it
    }
    request = core.compile_model(model, "CPU", config).create_infer_request()
    out, result = problem.new_output()
    for name, x in problem.inputs.items():
        request.set_tensor(name, openvino.Tensor(x.numpy(), shared_memory=True))
    request.set_output_tensor(openvino.Tensor(out.numpy(), shared_memory=True))

    def run() -> Tensor:
        request.infer()
        return result

    return run


def _sdpa_model(problem: Problem) -> Any:
    """OpenVINO's own operator."""
    import openvino
    from openvino import opset13

    inputs = [opset13.parameter(list(x.shape), openvino.Type.f32, name=name) for name, x in problem.inputs.items()]
    for x, name in zip(inputs, problem.inputs, strict=True):
        x.output(0).set_names({name})
    return openvino.Model([opset13.scaled_dot_product_attention(*inputs, causal=problem.causal)], inputs, "attention")


def _seconds(run: Contestant) -> float:
    """The fastest of a few calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
