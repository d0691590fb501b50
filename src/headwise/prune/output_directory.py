"""Where a smaller model goes: whether the directory may be written, and the recovery checkpoint beside it."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError, HeadwiseError
from ..files import remove_leftovers
from ..json_documents import parse_json
from .recovery_checkpoint import run_id

REPORT = "pruning.json"  # the report in a finished directory of `headwise prune`
GROUP_REPORT = "grouping.json"  # and of `headwise group`
STREAM_PLAN = "stream_plan.json"  # the plan in a finished directory of `headwise stream`
RESULTS = {"config.json", STREAM_PLAN}  # a directory with one of these may be replaced
MAX_NAME_BYTES = 255  # of a file name


def recovery_file(out: Path) -> Path:
    """The checkpoint of a recovery, beside the directory of its model."""
    return out.parent / f".{out.name}.recovery.safetensors"


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse a directory that cannot be written or must not be replaced.

    A recovery checkpoint whose model is already saved there is removed.
    """
    if "\0" in str(out) or not out.name:
        raise HeadwiseError(f"{str(out)!r} cannot be made: give a new directory, by its name")
    if Path.cwd().is_relative_to(os.path.realpath(out)):
        raise HeadwiseError(f"{str(out)!r} is the current directory, which is not replaced; give a new directory")
    try:
        os.path.realpath(out).encode()
    except UnicodeEncodeError:  # safetensors cannot write there
        raise HeadwiseError(f"{str(out)!r} is not a path in UTF-8; give another directory") from None
    if len(os.fsencode(recovery_file(out).name)) > MAX_NAME_BYTES:
        raise HeadwiseError(
            f"{out.name[:40]!r}... is too long for a directory and the checkpoint beside it; give a shorter name"
        )
    remove_leftovers(out.parent)  # which finishes a replacement that only lacked its last rename
    remove_leftovers(out)
    existing = next((folder for folder in (out, *out.absolute().parents) if os.path.lexists(folder)), out)
    if existing != out and not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise HeadwiseError(f"{str(out)!r} cannot be made: {str(existing)!r} is no directory that can be written to")
    try:
        names = {path.name for path in out.iterdir()} if out.is_dir() else {""}
    except OSError as error:
        raise HeadwiseError(f"{str(out)!r} cannot be read: {error.strerror or error}") from error
    if existing != out or not names:
        return
    if overwrite and out.is_dir():
        if not names & RESULTS:  # a home directory, given by mistake
            raise HeadwiseError(f"{str(out)!r} holds something else than a model, and is not replaced; empty it first")
        return
    run = run_id(recovery_file(out))
    if run is not None and run == _saved_run(out):  # the process was killed after its last rename
        recovery_file(out).unlink(missing_ok=True)
    raise HeadwiseError(f"{str(out)!r} exists and is not empty; give another directory, or --overwrite")


def make_parent(out: Path) -> None:
    """Create the directory that `out` is in."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{str(out.parent)!r} cannot be made: {error.strerror or error}") from error


def _saved_run(out: Path) -> str | None:
    """The recovery whose model is in a directory, as its report says."""
    for name in (REPORT, GROUP_REPORT):
        try:
            report = parse_json((out / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return report.get("recovery_run") if isinstance(report, dict) else None
    return None
