"""Progress bars for long work, and what is said when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..terminal import console

Progress = Callable[[str, int, int | None], None]  # the kind of work, steps done, steps in all where that is known


@contextmanager
def pieces_named(out: Path) -> Iterator[None]:
    """Whoever interrupts a run whose finished pieces are stored beside `out` is told that it can be resumed."""
    from ..prune.pieces import pieces_folder

    try:
        yield
    except KeyboardInterrupt as stop:
        if stop.args or not pieces_folder(out).exists():
            raise
        words = "interrupted; what was measured so far is stored, and the same command resumes"
        raise KeyboardInterrupt(words) from None


@contextmanager
def progress_bars(visible: bool = True) -> Iterator[Progress]:
    """One bar per kind of work on stderr, with the time left, removed at the end; none where stderr is a file."""
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    screen = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=screen, transient=True, disable=not (visible and screen.is_terminal)) as bars:
        tasks: dict[str, TaskID] = {}

        def update(work: str, step: int, total: int | None) -> None:
            if work not in tasks:
                tasks[work] = bars.add_task(work, total=total)
            bars.update(tasks[work], completed=step, total=total, visible=total is None or step < total)

        yield update
