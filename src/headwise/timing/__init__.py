"""Fair timing: interleaved races, races in processor time, the machine's description."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .cpu_time import one_thread as one_thread
    from .cpu_time import race_on_one_thread as race_on_one_thread
    from .interleaved_race import Contestant as Contestant
    from .interleaved_race import Mismatch as Mismatch
    from .interleaved_race import Output as Output
    from .interleaved_race import race as race
    from .interleaved_race import synchronize as synchronize
    from .interleaved_race import verify as verify
    from .machine import describe_machine as describe_machine
    from .machine import machine_summary as machine_summary
    from .machine import restrict_instructions as restrict_instructions

_MODULES = {
    "Contestant": "interleaved_race",
    "Mismatch": "interleaved_race",
    "Output": "interleaved_race",
    "describe_machine": "machine",
    "machine_summary": "machine",
    "one_thread": "cpu_time",
    "race": "interleaved_race",
    "race_on_one_thread": "cpu_time",
    "restrict_instructions": "machine",
    "synchronize": "interleaved_race",
    "verify": "interleaved_race",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
