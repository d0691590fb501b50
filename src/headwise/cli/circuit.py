"""`headwise circuit`: which heads give an answer, directly and through other heads, and the circuit that they form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from ..errors import HeadwiseError
from ..terminal import console, echo
from .checks import check_output_file
from .options import PATH, LazyChoice, Whole, json_option
from .progress import progress_bars
from .requirements import check_requirements

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..circuits.effects import Effects
    from ..circuits.metric import LogitDifference
    from ..circuits.pair_values import PairValues
    from ..circuits.tasks.prompt_pairs import Accuracy

PAIRS = 32  # of a task
MODEL = "smollm2"
Method = Literal["gradient", "exact"]


def _task_names() -> Iterable[str]:
    from ..circuits.tasks.registry import task_names

    return task_names()


@click.command
@click.argument("text", required=False)
@click.option("--answer", metavar="TOKEN", help='The token that continues TEXT, with its space: " Mary".')
@click.option("--other", metavar="TOKEN", help="The token to compare it with; without it, the answer's logit alone.")
@click.option(
    "--corrupted", metavar="TEXT", help="TEXT with the words that decide the answer changed; the same number of tokens."
)
@click.option(
    "--model", default=MODEL, help="A decoder: smollm2, a directory with safetensors, a GGUF file or a hub id."
)
@click.option(
    "--task",
    type=LazyChoice(_task_names),
    metavar="NAME",
    help="Bundled pairs of prompts instead of TEXT: agreement, colour, greater-than, induction, ioi or successor.",
)
@click.option("--pairs", type=Whole(1, 100), show_default=str(PAIRS), help="With --task: how many pairs.")
@click.option(
    "--method",
    type=click.Choice(["gradient", "exact"]),
    default="gradient",
    help="Patching: a gradient's estimate of all heads at once, or one pass per head.",
)
@click.option("--size", type=Whole(1), show_default="the fewest that explain 80 %", help="Edges of the circuit.")
@click.option("--html", type=PATH, help="Also write a page with the circuit's graph, as one offline file.")
@json_option
def command(
    text: str | None, answer: str | None, other: str | None, corrupted: str | None, model: str, task: str | None,
    pairs: int | None, method: Method, size: int | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the heads that give an answer.

    TEXT is a prompt that --answer continues; --corrupted is the same prompt, in which the words that decide the answer
    are changed. The heads are ranked by their direct effect on the answer and by patching, and the circuit that they
    form is verified.
    """
    _check_options(text, answer, other, corrupted, task, pairs)
    if html is not None:
        check_output_file(html)
    check_requirements("models", models=[model])
    from ..models.loading.resolve import resolve

    name, loaded, tokenizer = resolve(model)
    if task is not None:
        prompts = _task_prompts(task, tokenizer, PAIRS if pairs is None else pairs, loaded)
    else:
        prompts = _one_prompt(str(text), str(corrupted), str(answer), other, tokenizer)
    report = _measure(name, loaded, tokenizer, prompts, method, size)
    if html is not None:
        _write_page(report, loaded, tokenizer, html)
    if as_json:
        echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        console().print(report.drawing())


def _check_options(
    text: str | None, answer: str | None, other: str | None, corrupted: str | None, task: str | None, pairs: int | None
) -> None:
    own = {"TEXT": text, "--answer": answer, "--other": other, "--corrupted": corrupted}
    if task is not None:
        for option, value in own.items():
            if value is not None:
                raise HeadwiseError(f"--task brings its own prompts and answers; leave {option} out")
        return
    if pairs is not None:
        raise HeadwiseError("--pairs is for --task; leave it out, or give --task")
    if text is None:
        raise HeadwiseError("give a prompt with --answer and --corrupted, or --task ioi")
    if not answer:
        raise HeadwiseError('--answer is missing: the token that continues the prompt, with its space, as in " Mary"')
    if corrupted is None:
        raise HeadwiseError(
            "--corrupted is missing: the prompt with the words that decide the answer changed, as many tokens as before"
        )
    if answer == other:
        raise HeadwiseError(f"--answer and --other are both {answer!r}; compare two tokens, or leave --other out")


class Prompts(NamedTuple):
    """The pairs of prompts of one call."""

    task: str | None
    clean: list[str]
    corrupted: list[str]
    answers: list[str]
    others: list[str] | None
    metric: LogitDifference
    accuracy: Accuracy | None


def _task_prompts(task: str, tokenizer: Any, count: int, model: Any) -> Prompts:
    from ..circuits.tasks.prompt_pairs import task as load_task

    pairs = load_task(task, tokenizer, count=count)
    accuracy = pairs.accuracy(model)
    return Prompts(task, pairs.clean, pairs.corrupted, pairs.answers, pairs.others, pairs.metric, accuracy)


def _one_prompt(text: str, corrupted: str, answer: str, other: str | None, tokenizer: Any) -> Prompts:
    from ..circuits.metric import LogitDifference, token_ids

    for token in filter(None, (answer, other)):
        token_ids(token, 1, tokenizer)  # refuses several tokens, before anything runs
    metric = LogitDifference(answer, other, tokenizer)
    return Prompts(None, [text], [corrupted], [answer], None if other is None else [other], metric, None)


class Report(NamedTuple):
    """All that was measured."""

    model: str
    prompts: Prompts
    values: PairValues
    direct: Effects
    patching: Effects
    circuit: dict[str, Any]  # its JSON

    def to_json(self) -> dict[str, Any]:
        prompts = self.prompts
        accuracy = None if prompts.accuracy is None else prompts.accuracy._asdict()
        return {
            "model": self.model,
            "task": prompts.task,
            "prompts": {name: getattr(prompts, name) for name in ("clean", "corrupted", "answers", "others")},
            "accuracy": accuracy,
            "metric": {"name": self.direct.metric, **self.values._asdict()},
            "direct": self.direct.to_json(),
            "patching": self.patching.to_json(),
            "circuit": self.circuit,
        }

    def drawing(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from ..circuits.terminal import draw_circuit, draw_effects

        return Group(
            self._title(),
            Text(),
            draw_effects([self.direct, self.patching]),
            Text(),
            draw_circuit(self.circuit),
        )

    def _title(self) -> RenderableType:
        from rich.text import Text

        prompts, values = self.prompts, self.values
        count = len(prompts.clean)
        what = f"task {prompts.task}, {count} pairs of prompts, such as" if prompts.task else "1 pair of prompts"
        against = f", not {prompts.others[0]!r}" if prompts.others else ""
        lines = [
            f"{self.model}, {what}",
            f"  clean      {prompts.clean[0]!r}",
            f"  corrupted  {prompts.corrupted[0]!r}",
            f"  answer     {prompts.answers[0]!r}{against}",
            f"  metric     {self.direct.metric} = {values.clean:.3f} clean, {values.corrupted:.3f} corrupted",
        ]
        if prompts.accuracy is not None:
            lines.append(f"  accuracy   {prompts.accuracy}")
        return Text("\n".join(lines))


def _measure(name: str, model: Any, tokenizer: Any, prompts: Prompts, method: Method, size: int | None) -> Report:
    import headwise

    from ..circuits.pair_values import measure_pairs

    clean, corrupted, metric = prompts.clean, prompts.corrupted, prompts.metric
    values = measure_pairs(model, clean, corrupted, metric, tokenizer)
    chosen_size = {} if size is None else {"size": size}
    with progress_bars() as update:

        def bar(work: str) -> Any:
            return lambda done, total: update(work, done, total)

        direct = headwise.attribute(model, clean, metric, tokenizer=tokenizer, progress=bar("direct effects"))
        patching = headwise.patch(
            model, clean, corrupted, metric, method=method, tokenizer=tokenizer, progress=bar("patching")
        )
        found = headwise.circuit(
            model, clean, corrupted, metric, tokenizer=tokenizer, progress=bar("circuit"), **chosen_size
        )
    circuit = replace(found, model=name).to_json()
    return Report(name, prompts, values, direct, patching, circuit)


def _write_page(report: Report, model: Any, tokenizer: Any, path: Path) -> None:
    from ..ui import capture
    from ..ui.circuit_page import save_circuit_page

    prompts = report.prompts
    pass_ = capture.run(prompts.clean[0], model, tokenizer=tokenizer, name=report.model)
    save_circuit_page(pass_, path, report.circuit, [report.direct, report.patching], corrupted=prompts.corrupted[0])
    echo(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB); open it in a browser", err=True)
