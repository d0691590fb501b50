"""Live pages for the site: exported files of the view, which need no server, each by the command that makes it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
import transformers

import headwise
from headwise.cli.app import app
from headwise.roles.atlas.bundled import bundled_atlas
from headwise.ui.atlas import save_page

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
# file -> the command that writes it
COMMANDS = {
    "head.html": ("inspect", TIRED, "--html", "head.html"),
    "compare.html": ("inspect", TIRED, WIDE, "--html", "compare.html"),
    "training.html": ("record", "heads.jsonl", "--html", "training.html"),
}
ATLAS = "atlas.html"
NAMES = (*COMMANDS, ATLAS)
STEPS = 200  # of the training that is recorded


def write_live_pages(folder: Path) -> None:
    """Write every live page into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the models are small, and other programs may be running
    transformers.logging.set_verbosity_error()
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _train(Path("heads.jsonl"))
        for command in COMMANDS.values():
            app.main(list(command), standalone_mode=False)
        atlas = bundled_atlas("minilm")
        assert atlas is not None
        save_page(atlas, ATLAS)
        Path("heads.jsonl").unlink()


def _train(log: Path) -> None:
    """Record a small decoder while it learns to repeat: the second half of each text is the first half again."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with headwise.Recorder(model, every=10, path=str(log)):
        for _ in range(STEPS):
            half = torch.randint(1, 32, (16, 16))
            ids = torch.cat([half, half], 1)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
