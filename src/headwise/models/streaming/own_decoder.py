"""streaming for headwise's own Decoder: its blocks know which of their heads stream, and its caches follow them."""

from __future__ import annotations

from types import TracebackType

from ...attention.nn.blocks import TransformerBlock
from ...attention.nn.stack import Decoder
from ...errors import HeadwiseError, UnsupportedError
from ...plans import StreamPlan
from .plan_layers import streaming_heads


class DecoderStreaming:
    """A `headwise.Decoder` whose heads stream, for as long as the `with` lasts."""

    def __init__(self, model: Decoder, plan: StreamPlan) -> None:
        self.model, self.plan = model, plan
        blocks = [block for block in model.blocks if isinstance(block, TransformerBlock)]
        if any(block.cross is not None for block in blocks):
            raise UnsupportedError("this Decoder has cross-attention; heads of decoders alone can stream")
        for layer in plan.layers:
            own = blocks[layer.layer].window
            if (None if own is None else own[0] + 1) != layer.window:
                raise HeadwiseError(
                    f"layer {layer.layer} of this Decoder has a window of {own and own[0] + 1} keys, and the plan says "
                    f"{layer.window}"
                )
        self._streams = {blocks[index]: heads for (_, index), heads in streaming_heads(plan).items()}
        self._blocks = blocks

    def __enter__(self) -> DecoderStreaming:
        if any(block.streams is not None for block in self._blocks):
            raise HeadwiseError("heads of this Decoder stream already; leave that headwise.streaming first")
        for block, heads in self._streams.items():
            block.streams = heads
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for block in self._blocks:
            block.streams = None

    def __repr__(self) -> str:
        return f"DecoderStreaming({self.plan.streaming} of {self.plan.total} KV heads)"
