"""The time of `headwise card config.json`, in units of a bare start of Python. Run: python benchmarks/card.py"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
CONFIG = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


def best_time(*args: str) -> float:
    """Seconds of the fastest of ROUNDS runs."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG), encoding="utf-8")
        bare = best_time("-c", "pass")
        for extra in ((), ("--json",)):
            seconds = best_time("-m", "headwise", "card", str(path), *extra)
            command = " ".join(("headwise card config.json", *extra))
            print(f"{command}: {seconds * 1000:.0f} ms, {seconds / bare:.1f} bare starts of {bare * 1000:.0f} ms")  # noqa: T201


if __name__ == "__main__":
    main()
