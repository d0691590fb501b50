"""The optional packages of a command, checked before it begins: what is missing is named all at once."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from ..errors import HeadwiseError

MODULES = {  # extra of pyproject.toml -> the modules without which its commands cannot begin
    "models": ("transformers",),
    "plot": ("matplotlib",),
    "serve": ("starlette", "uvicorn", "h11"),
    "images": ("PIL",),
}


def check_requirements(*extras: str, models: Iterable[str] = ()) -> None:
    """Refuse a command whose optional packages and bundled models are not all installed.

    Args:
        extras: names in MODULES.
        models: the models of the command; a bundled one is a package too, and GGUF files need one.
    """
    names = list(dict.fromkeys(models))
    modules = {extra: MODULES[extra] for extra in extras}
    if any(name == "smollm2" or name.endswith(".gguf") for name in names):
        modules["models"] = (*MODULES["models"], "gguf")
    absent = {extra: [name for name in members if find_spec(name) is None] for extra, members in modules.items()}
    packages = [name for members in absent.values() for name in members]
    requirements = _absent_models(names)
    if not packages and not requirements:
        return
    needed = [*packages, *(f"the model {name}" for name in requirements)]
    commands = []
    if packages:
        commands.append(f"pip install 'headwise[{','.join(extra for extra, members in absent.items() if members)}]'")
    commands += [f"pip install --no-deps {requirement}" for requirement in requirements.values()]
    if len(needed) == 1:
        words, all_of = needed[0], ""
    else:
        words, all_of = f"{', '.join(needed[:-1])} and {needed[-1]}", "all of "
    raise HeadwiseError(f"this needs {words}; get {all_of}it with: {' && '.join(commands)}")


def _absent_models(names: Iterable[str]) -> dict[str, str]:
    """The bundled models that are not installed, with their packages."""
    from ..models.loading.locate import BUNDLED

    bundled = {name: BUNDLED[name] for name in names if name in BUNDLED}
    return {name: model.requirement for name, model in bundled.items() if not model.installed()}
