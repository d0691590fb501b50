"""docs/grouping.md: quality against the number of KV heads, on stories15M and on a model of the lab.

python tools/grouping_page.py lab    group a model of the lab into build/grouped-lab
python tools/grouping_page.py page   write the page's tables and pictures from both results (`make grouping` does all)
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from markdown_sections import write_section

from headwise.lab.model import Recipe
from headwise.lab.tasks import Text
from headwise.lab.train import train
from headwise.prune import TextBatches
from headwise.prune.group_report import GroupOptions
from headwise.prune.group_session import group_and_measure, save_grouped
from headwise.ui.curves import save_grouping

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "grouping.md"
RESULTS = {"stories15m": ROOT / "build" / "grouped-stories", "lab": ROOT / "build" / "grouped-lab"}
RECIPE = Recipe(task="text", heads=8, seed=0, layers=2, batch=8, steps=1000, rate=5e-3)
STEPS, RATE, BATCHES, BATCH = 200, 1e-3, 50, 16


def lab_texts(task: Text, held_out: bool, seed: int) -> list[dict[str, torch.Tensor]]:
    """Batches of random passages of the lab's novel, of the part that the model learns from or of the other."""
    random = torch.Generator().manual_seed(seed)
    return [{"ids": task.batch(BATCH, random, held_out).inputs} for _ in range(BATCHES if not held_out else 8)]


def group_lab_model() -> None:
    """Train a model of the lab, with eight heads, and merge its KV heads into two."""
    out = RESULTS["lab"]
    shutil.rmtree(out, ignore_errors=True)
    model = train(RECIPE).decoder
    task = Text()
    scoring, measuring = lab_texts(task, False, 1), lab_texts(task, True, 2)
    texts = TextBatches(scoring, measuring, BATCH * len(scoring), BATCH * len(measuring))
    options = GroupOptions(2, "similar", STEPS, BATCH, task.length, RATE)
    name = "a decoder of the lab, 2 layers of 8 heads"
    grouped, report = group_and_measure(model, name, texts, options, out, progress=lambda *_: None)
    save_grouped(grouped, report, out, False, lambda folder, final: save_grouping(final, folder / "grouping.png"))


def write_page() -> None:
    """The tables of both results between the page's markers, and their pictures beside it."""
    for name, folder in RESULTS.items():
        if not folder.exists():
            sys.stderr.write(f"{folder} is missing: its section stays as it is\n")
            continue
        text = (folder / "grouping.md").read_text(encoding="utf-8")
        begin, end = "## Quality against the number of KV heads\n\n", "\n## Which heads were merged"
        section = text[text.index(begin) + len(begin) : text.index(end)].strip()
        write_section(PAGE, name, section.replace("(grouping.png)", f"(grouping-{name}.png)"))
        shutil.copyfile(folder / "grouping.png", PAGE.with_name(f"grouping-{name}.png"))


if __name__ == "__main__":
    {"lab": group_lab_model, "page": write_page}[sys.argv[1]]()
