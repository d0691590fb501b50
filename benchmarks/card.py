"""How long `headwise card config.json` takes, counted in bare starts of Python. Run: python benchmarks/card.py"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
CONFIG = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


def best(*args: str) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG), encoding="utf-8")
        bare = best("-c", "pass")
        for extra in ((), ("--json",)):
            took = best("-m", "headwise", "card", str(path), *extra)
            words = " ".join(("headwise card config.json", *extra))
            print(f"{words}: {took * 1000:.0f} ms, {took / bare:.1f} bare starts of {bare * 1000:.0f} ms")  # noqa: T201


if __name__ == "__main__":
    main()
