"""headwise imports and computes without each name that is private to PyTorch and read at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise
from headwise.attention import torch_internals
from headwise.attention.torch_internals import NAMES
from headwise.models.watching import function_source

PACKAGE = Path(headwise.__file__).parent
LIBRARIES = ("torch", "transformers")

# torch keeps using its own names: they are hidden from headwise alone
WITHOUT_NAMES = """
import importlib, types
import torch
import_module = importlib.import_module

def import_without(name, package=None):
    module = import_module(name, package)
    copy = types.SimpleNamespace(**vars(module))
    for hidden, place in PLACES.items():
        if place == name:
            delattr(copy, hidden)
        if place.rpartition(".")[0] == name:
            delattr(copy, place.rpartition(".")[2])
    return copy if vars(copy) != vars(module) else module

importlib.import_module = import_without
from headwise.attention import torch_internals
importlib.import_module = import_module

import headwise
from headwise.models.watching import function_source
assert torch_internals.TensorGuards is None and function_source.pop_function_mode is None
q, k, v = torch.randn(3, 1, 2, 5, 16).double()
for _ in range(3):
    out = headwise.attend(q, k, v, causal=True)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
"""


def test_without_the_private_names_of_torch_headwise_imports_and_computes():
    command = [sys.executable, "-c", f"PLACES = {NAMES!r}\n{WITHOUT_NAMES}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_each_private_name_exists_in_this_torch(name):
    """Else the fallback serves here unnoticed."""
    assert torch_internals._find(name) is not None


def test_watching_undeclared_attention_is_refused_without_torchs_stack_of_modes(monkeypatch):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(function_source, "push_function_mode", None)
    model = Attention()
    with pytest.raises(headwise.UnsupportedError, match="_push_mode.*headwise.adapt"), headwise.watch(model):
        model(torch.randn(1, 5, 16))


def private_imports(path: Path) -> list[str]:
    """Names of torch and transformers with an underscore that a module reads when it is imported."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.col_offset == 0 and (node.module or "").startswith(LIBRARIES):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            lines += [f"{path.name}: {node.module}" for word in words if word.startswith("_")]
    return lines


def test_private_names_are_imported_in_one_guarded_place():
    modules = sorted(PACKAGE.rglob("*.py"))
    assert modules
    assert [line for path in modules for line in private_imports(path)] == []
