"""The attention layers of a model, with what each head costs, under the name that pruning uses."""

from __future__ import annotations

from ..models.structure.attention_layers import UNITS as UNITS
from ..models.structure.attention_layers import AttentionLayer as AttentionLayer
from ..models.structure.attention_layers import attention_layers as attention_layers
