"""All rows of facts in one table."""

from __future__ import annotations

from .decoders import DECODERS
from .encoders import ENCODERS, PAIRS
from .hybrids import HYBRIDS
from .spec import Facts
from .vision import JOINT, TOWERS

FACTS: dict[str, Facts] = {**DECODERS, **ENCODERS, **PAIRS, **TOWERS, **JOINT, **HYBRIDS}
