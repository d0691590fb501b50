"""What headwise.Recorder adds to a training step. Run: python benchmarks/recorder.py [ROUNDS]

The model is a GPT-2 of 6 layers, width 512, 8 heads; a step has 4 x 256 tokens, with dropout and without. A recorded
step includes setting the recorder up and writing its file, so the figures are upper bounds. Times are CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import torch
import transformers

import headwise
from headwise.timing.interleaved_race import race

VOCABULARY, BATCH, LENGTH = 2003, 4, 256


def measure(dropout: float, rounds: int, folder: Path) -> str:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=512, n_layer=6, n_head=8, n_positions=LENGTH, attn_pdrop=dropout,
        resid_pdrop=dropout, embd_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    numbers = count()

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def record_step() -> torch.Tensor:
        with headwise.Recorder(model, every=1, path=folder / f"{dropout}-{next(numbers)}.jsonl"):
            return step()

    def count_step() -> torch.Tensor:
        with headwise.Recorder(model, every=50, path=None, resume=1):  # step 2 is not recorded
            return step()

    contestants = {"plain": step, "recorded": record_step, "counted": count_step}
    best = race(contestants, rounds=rounds, clock=time.process_time)
    recorded_cost, counted_cost = (best[name] / best["plain"] - 1 for name in ("recorded", "counted"))
    return (
        f"dropout {dropout}: a step {best['plain']:.3f} s; a recorded step {recorded_cost:+.1%} (every=1), another "
        f"{counted_cost:+.2%}; every=50: {recorded_cost / 50:+.2%} from recorded steps"
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as folder:
        for dropout in (0.0, 0.1):
            print(measure(dropout, rounds, Path(folder)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
