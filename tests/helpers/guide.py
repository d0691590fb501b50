"""docs/guide/make.py as a module: what finds, runs and rewrites the guide's blocks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "headwise_guide", Path(__file__).parents[2] / "docs" / "guide" / "make.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


guide = _loaded()
