"""headwise.save to a GGUF file: models of the Llama family, with head counts per layer where llama.cpp reads them.

The tokenizer is copied from the GGUF file that the model was loaded from.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ...errors import CheckpointError, HeadwiseError, UnsupportedError
from ...files import scratch_folder, write_atomically
from ..loading.gguf import convert, file_hash, is_gguf
from ..loading.gguf_tensors import (
    ARCHITECTURES,
    CONFIG_KEY,
    INTERLEAVED,
    RECORD_KEY,
    copy_fields,
    gguf_name,
    interleave,
    is_rotated,
)
from ..loading.locate import missing
from ..loading.quiet import quiet_transformers
from ..loading.source import model_source
from ..structure.projections import projections
from ..structure.sites import attention_sites
from .dummy_inputs import close, difference, dummy_inputs
from .plain_config import full_config
from .pruned_directory import build_record, tied_names

Precision = Literal["f32", "f16", "bf16", "q8_0"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
LOSSLESS: dict[torch.dtype, Precision] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
PER_LAYER = "deci"  # Llama with head counts per layer, and a bias of W_O
AS_WIDE_AS_MODEL = ("qwen2",)  # architectures whose loader wants all heads together as wide as the model
OUTPUT_BIAS = ("llama", PER_LAYER)  # architectures whose loader reads a bias of W_O
NOT_COPIED = (
    "general.architecture", "general.file_type", "general.quantization_version", "general.size_label",
    "general.alignment",
)  # fmt: skip
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


@dataclass(frozen=True)
class GgufTarget:
    """How a model is written as GGUF."""

    architecture: str  # llama.cpp's
    query: list[int]  # heads of each layer
    kv: list[int]
    head_dim: int
    precision: Precision

    def describe(self) -> str:
        """Why this architecture, in words."""
        uneven = len({*zip(self.query, self.kv, strict=True)}) > 1
        counts = "head counts per layer" if uneven else "the same number of heads in every layer"
        return f"architecture {self.architecture}, {counts}, weights in {self.precision}"


def check_precision(precision: Precision | None) -> None:
    """Refuse a precision that is not known."""
    if precision is not None and precision not in PRECISIONS:
        raise HeadwiseError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")


def write_gguf(
    model: Any, restored: Any, path: Path, form: str, precision: Precision | None, source: Path | None
) -> tuple[GgufTarget, float]:
    """Write a model to a GGUF file, read it again and compare; what was written, and the difference of the outputs.

    Args:
        model: the model.
        restored: what is written: the model, or with form "zeroed" the model with zeros in the place of removed heads.
        path: the file.
        form: "compact" or "zeroed".
        precision: of the matrices; by default the model's own.
        source: the GGUF file whose tokenizer is copied; by default the one that the model was loaded from.
    """
    try:
        import gguf
    except ImportError as error:
        raise missing(error) from error
    target = _target(restored, precision)
    source_file = _source_file(model, source)
    metadata = gguf.GGUFReader(source_file)
    _check_source(restored, metadata, source_file)
    with write_atomically(path, CheckpointError) as file, quiet_transformers():
        rounded = _write_file(file, restored, target, metadata, build_record(model, form))
        with scratch_folder(file.parent, CheckpointError) as scratch:
            convert(file, scratch, quiet=True)
            distance = _compare(restored, rounded, scratch)
    return target, distance


def _target(model: Any, precision: Precision | None) -> GgufTarget:
    """How a model can be written; a model that llama.cpp would compute differently is refused."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", type(model).__name__)
    name = type(model).__name__
    if model_type not in ARCHITECTURES or not name.endswith("ForCausalLM"):
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(f"{name} cannot be written as GGUF: language models of the types {known} can")
    if precision is None and model.dtype not in LOSSLESS:
        raise HeadwiseError(f"a model in {model.dtype} loses digits in GGUF; give precision={'f32'!r}")
    sites = attention_sites(model)
    layers = [projections(model, site) for site in sites]
    query, kv = [layer.query for layer in layers], [layer.kv for layer in layers]
    modules: list[Any] = [site.module for site in sites]
    head_dim: int = modules[0].head_dim
    for problem in _differences(model, config, modules, head_dim):
        raise UnsupportedError(f"{name} cannot be written as GGUF: {problem}")
    architecture = ARCHITECTURES[model_type]
    output_bias = any(layer.out._parameters.get("bias") is not None for layer in layers)
    uneven = len({*zip(query, kv, strict=True)}) > 1
    narrow = query[0] * head_dim != config.hidden_size
    if uneven or (output_bias and architecture not in OUTPUT_BIAS) or (narrow and architecture in AS_WIDE_AS_MODEL):
        if any(gguf_name(key) and "_norm.weight" in key and "self_attn" in key for key in model.state_dict()):
            problem = "its layers have different numbers of heads" if uneven else "it has a bias of W_O"
            remedy = "; use form='zeroed'" if not output_bias else ""
            raise UnsupportedError(
                f"{name} cannot be written as GGUF: {problem}, which llama.cpp reads only for models without norms of "
                f"queries and keys{remedy}"
            )
        architecture = PER_LAYER
    return GgufTarget(architecture, query, kv, head_dim, precision or LOSSLESS[model.dtype])


def _differences(model: Any, config: Any, modules: list[Any], head_dim: int) -> Iterator[str]:
    """What llama.cpp would compute differently for this model."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        yield f"its RoPE is scaled ({rope['rope_type']}), which headwise does not write"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "RoPE rotates only a part of each head"
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding or (config.model_type == "mistral" and window and window < config.max_position_embeddings):
        yield f"its attention has a window ({window}), which llama.cpp does not read for this architecture"
    if getattr(config, "hidden_act", "silu") != "silu":
        yield f"its activation is {config.hidden_act}, and llama.cpp computes silu"
    scale = head_dim**-0.5
    if any(abs(getattr(module, "scaling", scale) - scale) > 1e-6 * scale for module in modules):
        yield "its scores are not divided by the square root of the width of a head"
    unknown = next((name for name in model.state_dict() if gguf_name(name) is None), None)
    if unknown is not None:
        yield f"llama.cpp has no name for its tensor {unknown!r}"


def _source_file(model: Any, source: Path | None) -> Path:
    """The GGUF file whose tokenizer is copied."""
    if source is not None:
        if not source.is_file() or not is_gguf(source):
            raise HeadwiseError(f"source {str(source)!r} is no GGUF file; give the one whose tokenizer is copied")
        return source
    origin = model_source(model)
    if origin is None or origin.gguf is None:
        raise HeadwiseError(
            "a GGUF file needs its tokenizer from another GGUF file, and this model was not loaded from one; "
            "give source=FILE, a GGUF file of the same model"
        )
    try:
        unchanged = file_hash(origin.gguf) == origin.sha256
    except CheckpointError:
        unchanged = False
    if not unchanged:
        raise CheckpointError(
            f"{str(origin.gguf)!r}, from which this model was loaded, is gone or has changed; give source=FILE"
        )
    return origin.gguf


def _check_source(model: Any, metadata: Any, source: Path) -> None:
    """Refuse a file with another vocabulary, or whose RoPE transformers does not read as llama.cpp does."""
    tokens = metadata.get_field("tokenizer.ggml.tokens")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if tokens is None or len(tokens.data) != vocabulary:
        count = "no" if tokens is None else len(tokens.data)
        raise HeadwiseError(f"{str(source)!r} has {count} tokens, the model has {vocabulary}: not the same vocabulary")
    architecture = metadata.get_field("general.architecture").contents()
    scaled = [name for name in metadata.fields if name.startswith(f"{architecture}.rope.scaling.")]
    scaled += [tensor.name for tensor in metadata.tensors if tensor.name.startswith("rope_f")]
    if scaled:
        raise UnsupportedError(
            f"{str(source)!r} scales its RoPE ({scaled[0]}), which transformers does not read from GGUF: this model is "
            "not the same, and is not written"
        )


def _write_file(
    file: Path, model: Any, target: GgufTarget, source: Any, record: dict[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Write the file; the weights as a reader gets them, {name in the state dict: array}."""
    import gguf

    writer = gguf.GGUFWriter(file, target.architecture)
    _write_metadata(writer, model, target, source, record)
    later_names = {name for name, first in tied_names(model).items() if name != first}
    matrix_type = gguf.GGMLQuantizationType[target.precision.upper()]
    rounded = {}
    for name, tensor in model.state_dict().items():
        if name in later_names:
            continue
        array = _array(tensor)
        tensor_type = _tensor_type(array, matrix_type)
        data = gguf.quants.quantize(array, tensor_type)
        rounded[name] = gguf.quants.dequantize(data, tensor_type)
        if is_rotated(name) and target.architecture in INTERLEAVED:
            data = interleave(data, target.head_dim)
        writer.add_tensor(gguf_name(name), data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().float().contiguous().numpy()
    return array


def _tensor_type(array: np.ndarray[Any, Any], matrix_type: Any) -> Any:
    """The type of a tensor: vectors stay in f32, and rows that are no whole blocks of q8_0 become f16."""
    import gguf

    if array.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[matrix_type]
    return matrix_type if array.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _write_metadata(writer: Any, model: Any, target: GgufTarget, source: Any, record: dict[str, Any]) -> None:
    """The source's tokenizer and description, the model's own sizes, and headwise's two keys."""
    import gguf

    config = model.config
    copy_fields(source, writer, ("general.", "tokenizer."), NOT_COPIED)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[target.precision]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model.get_input_embeddings().weight.shape[0])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    uneven = target.architecture == PER_LAYER
    writer.add_head_count(target.query if uneven else target.query[0])
    writer.add_head_count_kv(target.kv if uneven else target.kv[0])
    writer.add_key_length(target.head_dim)
    writer.add_value_length(target.head_dim)
    writer.add_rope_dimension_count(target.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_string(RECORD_KEY, json.dumps(record))
    cls, whole = full_config(model)  # which the record starts from
    description = whole.to_dict() | {"architectures": [cls.__name__]}
    writer.add_string(CONFIG_KEY, json.dumps({k: x for k, x in description.items() if not k.startswith("_")}))


def _compare(model: Any, rounded: dict[str, np.ndarray[Any, Any]], folder: Path) -> float:
    """Compare what was read again with the model, weight by weight and in its outputs."""
    from ..loading.loader import load

    reloaded = load(folder, attn_implementation=model.config._attn_implementation)
    theirs = reloaded.state_dict()
    for name, array in rounded.items():
        if name not in theirs or not np.array_equal(theirs[name].numpy(), array):
            raise CheckpointError(f"what was written differs from the model in {name!r}; nothing was kept")
    inputs = dummy_inputs(model)
    assert inputs is not None  # every model of these types reads tokens
    reloaded = reloaded.to(model.device)
    expected = copy.deepcopy(model).float()
    own = expected.state_dict()
    with torch.no_grad():
        for name, array in rounded.items():
            own[name].copy_(torch.from_numpy(array))
    distance = difference(expected, reloaded, inputs)
    if not distance <= close(model):  # in 16 bits RoPE's frequencies may be rounded too
        raise CheckpointError(f"the model read again gives other outputs, off by {distance:.2g}; nothing was kept")
    return difference(model, reloaded, inputs)
