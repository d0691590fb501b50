"""The cost model agrees with the plans and the card; docs/scale.md has its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwise import UnsupportedError
from headwise.card import read
from headwise.cli import main
from headwise.scale.cost_model import NVLINK, Cost, costs, crossings, format_bytes
from headwise.scale.head_plan import HeadPlan, all_reduce_bytes
from headwise.scale.sequence_plan import SequencePlan
from helpers.tools import load_tool

ROOT = Path(__file__).parents[2]


def by_way(name: str, ranks: int, tokens: int, batch: int = 1) -> dict[str, Cost]:
    return {cost.way: cost for cost in costs(read(name), ranks, tokens, batch)}


def test_the_tables_of_the_page_are_up_to_date() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    sections, tool = load_tool("markdown_sections"), load_tool("scale_page")
    new = sections.replace_section(page, tool.SECTION, tool.computed_tables())
    assert new == page, "python tools/scale_page.py writes it again"


def test_costs_send_the_bytes_of_the_plans() -> None:
    ways, layer = by_way("llama2-70b", 16, 4096, 3), read("llama2-70b").attention.layers[0]
    plan = HeadPlan(layer.heads, 16)
    activations = all_reduce_bytes(3 * 4096 * 8192 * 2, 16)  # after W_O, and after the feed-forward layer
    weights = plan.kv_rows.sent_count(0) * 2 * 8192 * 2  # of W_K and W_V: a rank stores half a KV head
    assert ways["heads"].forward == plan.bytes_sent(3, 4096, 2, bias=False) + activations == 2 * activations + weights
    assert ways["heads"].note == "KV heads on several ranks"
    long = SequencePlan(4096, 16, right=0)
    assert ways["sequence"].forward == max(long.tokens_sent(rank) for rank in range(16)) * 3 * 8 * 256 * 2
    assert by_way("llama2-70b", 128, 4096)["heads"].note == "64 ranks have no head"
    assert by_way("gpt2", 5, 512)["heads"].note == ""  # uneven, but each KV head on one rank


def test_flops_and_weights_of_all_ranks_add_up_to_the_card() -> None:
    card = read("gpt3")
    flops = card.flops(2048)
    head = 2 * 50_257 * 12_288 * 2048  # the output layer belongs to no layer
    whole = (flops.prefill_attention + flops.prefill_linear - head) / 96
    assert by_way("gpt3", 8, 2048)["heads"].flops * 8 == pytest.approx(whole, rel=1e-3)
    assert by_way("gpt3", 8, 2048)["sequence"].flops * 8 == pytest.approx(whole, rel=1e-3)
    assert by_way("gpt3", 8, 2048, 8)["corpus"].flops == pytest.approx(whole, rel=1e-3)
    weights = 2 * (card.parameters.attention + card.parameters.ffn) / 96
    assert by_way("gpt3", 8, 2048)["heads"].weights * 8 == pytest.approx(weights, rel=1e-3)


def test_crossings_are_where_costs_cross() -> None:
    at = crossings(read("llama2-70b"), 4096)["tokens_heads_against_weights"]
    below, above = by_way("llama2-70b", 8, at - 1), by_way("llama2-70b", 8, at + 1)
    assert below["heads"].forward < below["weights"].forward
    assert above["heads"].forward > above["weights"].forward
    ratio = crossings(read("gpt3"), 4096)["heads_against_sequence"]
    ways = by_way("gpt3", 1024, 1 << 17)
    assert ways["heads"].forward / ways["sequence"].forward == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("tokens", [2048, 131_072])
def test_computation_takes_as_long_as_communication_at_the_crossing(tokens: int) -> None:
    card = read("gpt3")  # no KV head on several ranks, whose computation would be repeated
    ranks = crossings(card, tokens)["ranks_heads_nvlink"]
    for count in (8, 16, 32):
        cost = next(cost for cost in costs(card, count, tokens) if cost.way == "heads")
        computation, communication = cost.seconds(NVLINK)
        assert computation / communication == pytest.approx((ranks - 1) / (count - 1), rel=1e-4)


def test_headwise_scale_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "llama2-70b", "--ranks", "3", "--context", "512"]) == 0
    shown = capsys.readouterr().out
    assert "64 query and 8 key/value heads of 128 over 3 ranks" in shown and "works on 1, 2, 4, 8 ranks" in shown
    assert main(["scale", "llama2-70b", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [cost["way"] for cost in data["costs"]] == ["heads", "sequence", "weights", "corpus"]
    assert data["plans"][0]["shares"][7]["query"] == list(range(56, 64))
    assert main(["scale", "nothing-of-this-name"]) == 2


def test_the_cost_model_needs_no_torch() -> None:
    code = "import sys, headwise.scale.cost_model; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_without_plain_heads_is_refused() -> None:
    config = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 11, "state_size": 4}
    with pytest.raises(UnsupportedError, match="no attention of plain heads to split"):
        costs(read(config), 2, 16)
    assert [format_bytes(x) for x in (3, 4200, 5.3e6, 7e9)] == ["3 B", "4.2 kB", "5.3 MB", "7 GB"]
