"""Write the comparison of context parallel in docs/scale.md: python tools/context_parallel_page.py"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_sections import write_section

from headwise.errors import HeadwiseError
from headwise.scale.cost_model import format_bytes

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "scale.md", ROOT / "benchmarks" / "results"
SECTION = "context"
OURS = "direct sends"


def comparison(data: dict[str, Any]) -> Iterator[str]:
    """The tables of one file of results."""
    yield f"{data['settings']['what']}, PyTorch {data['settings']['torch']}, {data['machine']['cpu']}"
    yield ""
    yield "| ranks | case | way | forward | CPU | with backward | CPU | peak of a rank | largest error, float64 |"
    yield "|---:|---|---|---:|---:|---:|---:|---:|---:|"
    counts = [name for name in data if name.endswith(" ranks")]
    for count in counts:
        speed, errors = data[count]["speed"], data[count]["errors"]
        for case, error_case in (("causal", "causal"), ("causal, fewer KV heads", "fewer KV heads")):
            for way, run in speed[case]["forward"].items():
                training = speed[case]["forward and backward"].get(way)
                cells = [count.split()[0], case, way, *_times(run), *(_times(training) if training else ["", ""])]
                cells += [format_bytes(round(speed[case]["peak"][way])), f"{errors[error_case][way]['float64']:.0e}"]
                yield f"| {' | '.join(cells)} |"
    yield ""
    for count in counts:
        ours = data[count]["speed"]["ours"]
        cpu = {name: run["cpu_seconds"] for name, run in ours.items()}
        window = cpu["a window, true ring"] / cpu["a window, direct sends"]
        yield (
            f"- {count}: statistics take {cpu['statistics'] / cpu['attend']:.2f} times the CPU time of the output; "
            f"with a window of 512, a true ring takes {window:.2f} times that of direct sends."
        )
    for case, outcome in data["PyTorch's context_parallel"].items():
        outcome = re.sub(r"\[/\S+\] ", "", outcome)  # where gloo was built
        yield f"- `context_parallel` around `F.scaled_dot_product_attention` on a CPU, {case}: {outcome}"


def _times(run: dict[str, float]) -> list[str]:
    return [f"{run[name] * 1e3:.0f} ms" for name in ("seconds", "cpu_seconds")]


def comparisons(results: Path = RESULTS) -> str:
    """The section of docs/scale.md between its markers."""
    parts = [""]
    for path in sorted(results.glob("context-parallel-*.json")):
        parts += [*comparison(json.loads(path.read_text(encoding="utf-8"))), ""]
    return "\n".join(parts)


def main() -> None:
    try:
        write_section(PAGE, SECTION, comparisons())
    except (HeadwiseError, OSError, json.JSONDecodeError) as error:
        sys.exit(f"headwise: {error}")


if __name__ == "__main__":
    main()
