"""All rows of facts in one table."""

from __future__ import annotations

from .encoders import ENCODERS, PAIRS
from .facts import DECODERS
from .hybrids import HYBRIDS
from .recipe import Facts
from .visions import JOINT, TOWERS

FACTS: dict[str, Facts] = {**DECODERS, **ENCODERS, **PAIRS, **TOWERS, **JOINT, **HYBRIDS}
