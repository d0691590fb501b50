"""`headwise prune` with recovery, killed at random moments and run again.

Half of the kills come after a random time, half at a random operation on files, so that the short moments in which
files are written are met too. Whatever the moment: the next run resumes from what was saved, gives the model and the
losses of a run that nobody killed, and leaves nothing behind. A process that has imported everything forks the runs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from campaigns import Report

TESTS = Path(__file__).parents[1]
SHORT, LONG = 2, 40
STEPS, CHECKPOINT_EVERY = 7, 2  # of recovery, and between its checkpoints
FILES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree", "shutil.copyfile")


def campaign(tries: int, seed: int) -> Report:
    """In a process of its own: PyTorch's backward passes refuse to run in a fork of one that has run some."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HEADWISE_THREADS": "own"}
    line = [sys.executable, "-m", "campaigns.kills_prune", str(tries), str(seed)]
    process = subprocess.run(
        line, capture_output=True, text=True, timeout=120 + 60 * tries, check=False, env=environment
    )
    if process.returncode:
        return Report(tries, [f"the campaign ended with {process.returncode}: {process.stderr[-2000:]}"])
    return Report(**json.loads(process.stdout.splitlines()[-1]))


def _main(tries: int, seed: int) -> None:
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(Path(folder))
        for number in range(tries):
            report.tries += 1
            try:
                report.count(runs.killed_and_again(random.Random(f"{seed} {number}")))
            except AssertionError as error:
                report.failures.append(f"try {number} of seed {seed}: {error}")
    sys.stdout.write("\n" + json.dumps(asdict(report)) + "\n")


class _Runs:
    """One command, run whole once; then killed and run again, each time in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _prepare(folder)
        self.whole = folder / "whole"
        start = time.monotonic()
        result = _forked(self.whole, folder)
        self.seconds = time.monotonic() - start
        assert result["code"] == 0, f"a run that nobody killed failed: {result}"
        self.events = int(result["events"])
        self.losses, self.weights = _result(self.whole / "out")

    def killed_and_again(self, chance: random.Random) -> str:
        work = self.folder / "work"
        overwrite = chance.random() < 0.3
        if overwrite:
            shutil.copytree(self.whole / "out", work / "out")
        if chance.random() < 0.5:
            moment = {"after": chance.uniform(0.01, self.seconds)}
            words = f"killed after {moment['after']:.3f} of {self.seconds:.3f} s"
        else:
            moment = {"event": chance.randrange(self.events)}
            words = f"killed at operation {moment['event']} of {self.events} on files"
        result = _forked(work, self.folder, overwrite=overwrite, **moment)
        try:
            outcome = self._run_again(work, overwrite, killed=result["code"] is None)
        except AssertionError as error:
            raise AssertionError(f"{words}{', replacing a folder' if overwrite else ''}: {error}") from None
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return outcome

    def _run_again(self, work: Path, overwrite: bool, killed: bool) -> str:
        saved_steps = _saved_steps(work / ".out.recovery.safetensors")
        whole = (work / "out").exists() and not overwrite
        if whole:
            assert _result(work / "out") == (self.losses, self.weights), "a folder is there that is not whole"
        result = _forked(work, self.folder, overwrite=overwrite)
        leftovers = {path.name for path in work.iterdir()} - {"out"}
        if whole:
            assert result["code"] == 2 and "exists and is not empty" in result["err"], (
                f"expected a refusal, got {result}"
            )
        else:
            assert result["code"] == 0, f"the next run failed: {result['err']}"
            assert result["trained"] == STEPS - saved_steps, (
                f"{saved_steps} steps were kept, {result['trained']} were trained again"
            )
        assert not leftovers, f"left behind after the next run: {leftovers}"
        assert _result(work / "out") == (self.losses, self.weights), "the result is another than that of a whole run"
        return (
            "ended before"
            if not killed
            else "whole"
            if whole
            else f"resumed from {saved_steps}"
            if saved_steps
            else "began again"
        )


def _result(out: Path) -> tuple[list[float], bytes]:
    for name in ("plan.json", "pruning.md", "pruning.html", "config.json", "tokenizer.json"):
        assert (out / name).exists(), f"{name} is missing"
    return json.loads((out / "pruning.json").read_text())["recovery_losses"], (out / "model.safetensors").read_bytes()


def _saved_steps(file: Path) -> int:
    from safetensors import safe_open

    if not file.exists():
        return 0
    with safe_open(file, "pt") as checkpoint:
        return int(checkpoint.metadata()["step"])


def _prepare(folder: Path) -> None:
    """A model and texts; and everything imported that a run imports."""
    import rich.progress  # noqa: F401
    import torch
    import transformers.models.bert.modeling_bert  # noqa: F401

    import headwise.prune.session
    import headwise.scale.train  # noqa: F401
    from headwise.prune import recovery
    from helpers.prune_command import save_model, write_similar_texts

    torch.set_num_threads(1)
    recovery.CHECKPOINT_STEPS = CHECKPOINT_EVERY
    save_model(folder / "source")
    write_similar_texts(folder / "texts.txt")


def _forked(
    work: Path, sources: Path, *, overwrite: bool = False, after: float | None = None, event: int | None = None
) -> dict[str, Any]:
    """One run in a child: its exit code (None if it was killed), words, steps trained and operations on files."""
    work.mkdir(exist_ok=True)
    report_file = sources / "told.json"
    report_file.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            _run_child(work, sources, report_file, overwrite, after, event)
        finally:
            os._exit(70)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"code": None}
    result: dict[str, Any] = json.loads(report_file.read_text())
    return result


def _run_child(
    work: Path, sources: Path, report_file: Path, overwrite: bool, after: float | None, event: int | None
) -> None:
    from headwise.cli import main
    from headwise.prune import recovery

    counts = {"events": 0, "trained": 0}
    step = recovery._step

    def counting(*args: Any) -> float:
        counts["trained"] += 1
        return step(*args)

    def look(name: str, args: tuple[Any, ...]) -> None:
        if name in FILES and args and str(args[0]).startswith(str(work)):
            if counts["events"] == event:
                os.kill(os.getpid(), signal.SIGKILL)
            counts["events"] += 1

    recovery._step = counting
    sys.addaudithook(look)
    words = sources / "words.txt"
    out = os.open(words, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    line = ["prune", "--model", sources / "source", "--texts", sources / "texts.txt", "--out", work / "out"]
    line += ["--batch", 6, "--context", 16, "--recover", STEPS, *(["--overwrite"] if overwrite else [])]
    if after is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, as SIGKILL does
        signal.setitimer(signal.ITIMER_REAL, after)
    code = main([str(part) for part in line])
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stderr.flush()
    report_file.write_text(json.dumps({"code": code, "err": words.read_text()[-500:], **counts}))
    os._exit(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
