"""headwise.save to an ONNX file: any batch and length, run in onnxruntime and compared before it is kept."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, UnsupportedError
from ...files import write_atomically
from ...logs import quiet_logger
from ..loading.quiet import quiet_transformers
from ..structure.wrappers import is_transformers_model
from .dummy_inputs import close, dummy_inputs, first_line, output_tensors

ATTENTION = ("sdpa", "eager")  # functions that PyTorch's exporter may understand
LARGEST = 2_000_000_000  # bytes of weights: one ONNX file is a protobuf message, of at most 2 GiB
SHORTEST_CHECKED, LONGEST_CHECKED = 4, 13  # tokens of the inputs that the file is compared on


@dataclass(frozen=True)
class OnnxTarget:
    """What an ONNX file was made of."""

    inputs: list[str]
    outputs: list[str]
    images: bool

    def describe(self) -> str:
        """The inputs and outputs, in words."""
        sizes = "of any batch" if self.images else "of any batch and length"
        return f"inputs {', '.join(self.inputs)} {sizes}, outputs {', '.join(self.outputs)}, without a KV cache"


class TensorModule(nn.Module):
    """A model with tensors as inputs and outputs, as exporters need them."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.options = {"use_cache": False} if getattr(model, "can_generate", lambda: False)() else {}

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        return tuple(output_tensors(self.model(**dict(zip(self.names, batch, strict=True)), **self.options)))


def write_onnx(model: Any, path: Path) -> tuple[OnnxTarget, float]:
    """Write a model to an ONNX file and run it; what was written, and the largest difference of the outputs."""
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise CheckpointError(f"ONNX files need {', '.join(missing)}; install: pip install 'headwise[onnx]'")
    inputs = _check_model(model)
    duplicate = copy.deepcopy(model).cpu().eval()
    with torch.no_grad():
        cases = [(case, duplicate(**case)) for case in _checked_inputs(duplicate)]
    target = OnnxTarget([*inputs], _output_names(cases[0][1]), "pixel_values" in inputs)
    with write_atomically(path, CheckpointError) as file, quiet_transformers(), quiet_logger("torch.onnx"):
        _export_first(duplicate, inputs, target, file)
        distance = _compare(file, cases)
        if not distance <= close(model):
            raise CheckpointError(
                f"the ONNX file gives other outputs than the model, off by {distance:.2g}; nothing was kept"
            )
    return target, distance


def _export_first(model: Any, inputs: dict[str, Tensor], target: OnnxTarget, file: Path) -> None:
    """Export with the first attention function that the exporter understands, the model's own before others."""
    own = model.config._attn_implementation
    message = ""
    for name in dict.fromkeys([own if own in ATTENTION else ATTENTION[0], *ATTENTION]):
        model.set_attn_implementation(name)
        try:
            _export(TensorModule(model, target.inputs).eval(), inputs, target, file)
            return
        except Exception as error:  # the exporter fails in any way on code that it does not understand
            message = first_line(error)
    raise UnsupportedError(f"{type(model).__name__} cannot be written as ONNX: PyTorch's exporter says {message}")


def _check_model(model: Any) -> dict[str, Tensor]:
    """The inputs that a model is exported with; what cannot be written is refused."""
    name = type(model).__name__
    inputs = dummy_inputs(model) if is_transformers_model(model) else None
    if inputs is None:
        raise UnsupportedError(f"{name} cannot be written as ONNX: it is no transformers model of tokens or images")
    if model.dtype != torch.float32:
        raise UnsupportedError(f"{name} cannot be written as ONNX in {model.dtype}; give model.float()")
    size = sum(x.numel() * x.element_size() for x in {id(x): x for x in model.state_dict().values()}.values())
    if size > LARGEST:
        raise UnsupportedError(
            f"{name} cannot be written as ONNX: its weights are {size / 2**30:.1f} GiB, and one file holds 2"
        )
    return {key: x.cpu() for key, x in inputs.items()}


def _output_names(output: Any) -> list[str]:
    """Names of the tensors that a model gives, as its output class has them."""
    names = []
    for key, value in output.items():
        count = len([*output_tensors({key: value})])
        names += [key] if count == 1 else [f"{key}_{i}" for i in range(count)]
    return names


def _export(module: TensorModule, inputs: dict[str, Tensor], target: OnnxTarget, file: Path) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    decoder_length = torch.export.Dim("decoder_length")
    dims: dict[str, dict[int, Any]] = {
        "pixel_values": {0: batch},
        "decoder_input_ids": {0: batch, 1: decoder_length},
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            dynamo=True,
            input_names=target.inputs,
            output_names=target.outputs,
            dynamic_shapes=(tuple(dims.get(name, {0: batch, 1: length}) for name in inputs),),
            verbose=False,
        )
    assert program is not None
    program.save(str(file), external_data=False)


def _compare(file: Path, cases: list[tuple[dict[str, Tensor], Any]]) -> float:
    """Run the file in onnxruntime; the largest difference from the model's outputs."""
    from onnxruntime import InferenceSession

    session = InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = 0.0
    for inputs, expected in cases:
        outputs = session.run(None, {name: x.numpy() for name, x in inputs.items()})
        tensors = [*output_tensors(expected)]
        if len(outputs) != len(tensors):
            return float("inf")
        visible = inputs.get("attention_mask") if "decoder_input_ids" not in inputs else None
        for output, tensor in zip(outputs, tensors, strict=True):
            worst = max(worst, _distance(torch.from_numpy(output), tensor, visible))
    return worst


def _distance(output: Tensor, expected: Tensor, visible: Tensor | None) -> float:
    """The largest difference relative to the largest output; outputs at padding are undefined."""
    if output.shape != expected.shape:
        return float("inf")
    if visible is not None and expected.shape[:2] == visible.shape:
        output, expected = output[visible.bool()], expected[visible.bool()]
    distance = (output - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    return float(distance.nan_to_num(torch.inf))


def _checked_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """The inputs of the export, and others of other sizes, some of them padded."""
    inputs = dummy_inputs(model)
    assert inputs is not None
    yield inputs
    if "pixel_values" in inputs:
        yield {"pixel_values": inputs["pixel_values"].repeat(3, 1, 1, 1).flip(-1)}
        return
    longest = getattr(model.config, "max_position_embeddings", None) or LONGEST_CHECKED
    for batch, length, padding in ((1, SHORTEST_CHECKED, 0), (3, min(LONGEST_CHECKED, longest - 2), 2)):
        ids = inputs["input_ids"].repeat(3, 2)[:batch, :length]
        mask = torch.ones_like(ids)
        mask[0, length - padding :] = 0
        others = {"decoder_input_ids": ids[:, : length - 1]} if "decoder_input_ids" in inputs else {}
        yield {"input_ids": ids, "attention_mask": mask, **others}
