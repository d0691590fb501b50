"""Files that headwise reads again, changed at random: each is read, or refused by a HeadwiseError of one line.

Atlases and their sums, checkpoints of unfinished runs, relations, ablations, CoNLL-U, texts as lines and as JSON
lines, Winograd sentences, pieces and results of the lab.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headwise.errors import HeadwiseError
from headwise.lab import session
from headwise.lab.store import Lab
from headwise.resampling import poisson_counts
from headwise.role_definitions import CAUSAL, columns
from headwise.roles.ablation.ablate import Ablation
from headwise.roles.atlas import corpus
from headwise.roles.atlas.accumulator import Accumulator, PendingBatch
from headwise.roles.atlas.corpus_run import CorpusRun
from headwise.roles.atlas.file_format import SUMS
from headwise.roles.atlas.observer import BatchSums
from headwise.roles.atlas.result import Atlas
from headwise.roles.atlas.sums import Tally
from headwise.roles.relations import conllu, winograd
from headwise.roles.relations.result import Relation, Relations

from . import Report

SHORT, LONG = 300, 30_000

HEADS, LAYERS, TEXTS, REPLICATES = 3, 2, 5, 2
NASTY: list[Any] = [
    None, True, False, 0, -1, 7, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, 1e-320, "", "a", "self",
    "\0", "é\u2028", "²", "٣", "9" * 5000, "x" * 3000, [], [[]], {}, {"": {}}, [None], [1, 2, 3], {"self": 7},
    {"self": [0]}, [[0, 1], [2]], "nan", "../..",
]  # fmt: skip
TOKENS = [
    b"NaN", b"Infinity", b"1e999", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, "²٣".encode(), b"\0", b"\xff\xfe",
    b'"\\ud800"', b"\r\n", b"\n\n", b"\t", b"-", b"1-2", b"1.1", b"{}", b"[]", b"null", b",", b'"', b"\xef\xbb\xbf",
    b"\xe2\x80\xa8", b"x" * 30_000,
]  # fmt: skip
CONLLU = "\n".join(
    [
        "# newdoc id = a",
        "1\tWe\twe\tPRON\t_\tPerson=3|PronType=Prs\t3\tnsubj\t_\tEntity=(e1-person)",
        "2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_",
        "2\tdo\tdo\tAUX\t_\t_\t3\taux\t_\t_",
        "3\tn't\tnot\tPART\t_\t_\t0\troot\t_\tSpaceAfter=No",
        "3.1\tgone\t_\t_\t_\t_\t_\t_\t_\t_",
        "",
        "1\tThe\tthe\tDET\t_\t_\t2\tdet\t_\tEntity=(e1-person",
        "2\tcat\tcat\tNOUN\t_\t_\t3\tnsubj\t_\tEntity=e1)",
        "3\tsat\tsit\tVERB\t_\t_\t0\troot\t_\t_",
        "4\t.\t.\tPUNCT\t_\t_\t3\tpunct\t_\t_",
        "",
        "",
    ]
)


def tally() -> Tally:
    """Sums of a small causal model."""
    result = Tally(replicates=REPLICATES)
    fill(Accumulator(result)).flush()
    return result


def fill(sums: Accumulator) -> Accumulator:
    generator = np.random.default_rng(0)
    names = columns(CAUSAL)
    layers = {}
    for layer in range(LAYERS):
        top, bottom = generator.random((TEXTS, len(names), HEADS + 1)), np.ones((TEXTS, len(names)))
        layers["self", layer] = BatchSums(names, CAUSAL, top, bottom)
    sums.pending.append(PendingBatch(layers, np.arange(TEXTS, dtype=np.uint64), 31, 1))
    return sums


def relations() -> Relations:
    row = Relation("amod > head", "self", 1, 2, 70, 60, 1.0, 0.5, 0.25, "-1", 0.3, 0.2, 0.4, 0.4, 0.6, 0.2, 0.3, 0.1)
    heads = tuple(("self", layer, head) for layer in range(LAYERS) for head in range(HEADS))
    return Relations("m", True, 7, 0.01, (row,), (row,), heads, {"amod > head": np.linspace(0, 1, len(heads))})


class NoCorpus:
    """In the place of a corpus that is not read."""

    fingerprint = "0" * 32


def unfinished(file: Path) -> CorpusRun:
    run = CorpusRun(None, NoCorpus(), file, {"replicates": REPLICATES, "weights": "a"}, (0, 1), None, None)  # type: ignore[arg-type]
    run.tally = Tally(replicates=REPLICATES)
    run.accumulator = Accumulator(run.tally)
    return run


def read_atlas(file: Path) -> None:
    use_atlas(Atlas.load(file))


def use_atlas(atlas: Atlas) -> None:
    str(atlas)
    Atlas.from_json(json.loads(json.dumps(atlas.to_json(), allow_nan=False)))
    list(atlas.rows())
    str(atlas.diff(atlas))
    if atlas.tally is not None:
        poisson_counts(np.arange(3, dtype=np.uint64), 3)
        atlas.tally.plus(Tally(atlas.tally.names, atlas.tally.ways, atlas.tally.sums, 0, replicates=REPLICATES))


def read_unfinished(file: Path) -> None:
    run = unfinished(file)
    run._resume()
    run.accumulator.flush()


def read_relations(file: Path) -> None:
    result = Relations.load(file)
    str(result), result.markdown()
    json.dumps(result.to_json(), allow_nan=False)


def read_matter(file: Path) -> None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return  # whoever keeps it reads the JSON
    str(Ablation.from_json(data))


def read_conllu(file: Path) -> None:
    bank = conllu.read_conllu(file)
    assert all(sentence.words for sentence in bank.syntax())
    bank.coreference()


def read_texts(file: Path) -> None:
    texts, total = corpus.read(file)
    lines = list(texts)
    assert len(lines) == total
    for text in lines:
        text.encode()
    corpus.check_file(file)


def read_piece(file: Path) -> None:
    Lab(work=file.parent)._piece("sum", {"of": 7}, lambda: 11)


def read_result(file: Path) -> None:
    session.read_results([file.parent])


def documents(folder: Path) -> dict[str, tuple[Path, bytes, Callable[[Path], None]]]:
    """By kind: where it lies, its content, and what reads it."""
    atlas = Atlas.from_sums(tally(), None, "m", {}, {"corpus": "c", "notes": ["a note"], "part": [0, 1]})
    atlas.about["likeness"] = {"self": {"map": [{"kind": "self", "layer": 1, "head": 2, "x": 0.5, "y": 0.25}]}}
    places = {name: folder / name for name in ("plain", "with sums", "unfinished", "piece", "result")}
    for place in places.values():
        place.mkdir()
    atlas.save(places["with sums"] / "atlas.json", sums=True)
    run = unfinished(places["unfinished"] / "a.safetensors")
    fill(run.accumulator).flush()
    fill(run.accumulator)
    run._save_checkpoint()
    Lab(work=places["piece"])._piece("sum", {"of": 7}, lambda: 11)
    [piece] = places["piece"].iterdir()
    files: dict[str, tuple[Path, bytes | None, Callable[[Path], None]]] = {
        "atlas": (places["plain"] / "atlas.json", (places["with sums"] / "atlas.json").read_bytes(), read_atlas),
        "atlas with sums": (places["with sums"] / "atlas.json", None, read_atlas),
        "sums": (places["with sums"] / f"atlas.json{SUMS}", None, lambda file: read_atlas(file.parent / "atlas.json")),
        "unfinished run": (places["unfinished"] / "a.safetensors", None, read_unfinished),
        "relations": (places["plain"] / "r.json", json.dumps(relations().to_json()).encode(), read_relations),
        "matter": (
            places["plain"] / "m.json",
            json.dumps(Ablation("t", (("self", 0, 1),), 0.5, 0.1, 0.0, 0.2, (0.1, 0.2), 7).to_json()).encode(),
            read_matter,
        ),
        "conllu": (places["plain"] / "a.conllu", CONLLU.encode(), read_conllu),
        "lines": (places["plain"] / "a.txt", "A cat sat.\n\nÜber 7 Hügel.\n".encode(), read_texts),
        "json lines": (places["plain"] / "a.jsonl", b'{"text": "a cat"}\n{"id": 7, "text": "a dog"}\n', read_texts),
        "winograd": (
            places["plain"] / "w.json",
            json.dumps({"examples": [{"input": "The cup fell. The 'it' refers to the cup because so."}] * 2}).encode(),
            lambda file: str(winograd.read_winograd(file)),
        ),
        "piece": (piece, None, read_piece),
        "result": (places["result"] / "claim03.json", b'{"claim": 3, "figures": {"a": [1]}}', read_result),
    }
    return {
        kind: (file, file.read_bytes() if data is None else data, reader)
        for kind, (file, data, reader) in files.items()
    }


def change_document(data: bytes, chance: random.Random, binary: bool) -> bytes:
    """Content that was changed: as JSON where it is that, else byte by byte."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        if binary and chance.random() < 0.6:
            data = change_header(data, chance)
        elif not binary and chance.random() < 0.6:
            data = change_json(data, chance)
        else:
            data = change_bytes(data, chance)
    return data


def change_json(data: bytes, chance: random.Random) -> bytes:
    """One value somewhere inside replaced, removed, doubled or moved."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(data, chance)
    if not isinstance(tree, (dict, list)) or not tree:
        return json.dumps(chance.choice(NASTY)).encode()
    node = tree
    while True:
        key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
        inside = node[key]
        if not isinstance(inside, (dict, list)) or not inside or chance.random() < 0.2:
            break
        node = inside
    action = chance.randrange(4)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, list):
        node.insert(key, inside)
    elif action == 1:
        node[str(chance.choice(NASTY))] = inside
    else:
        node[key] = chance.choice(NASTY)
    try:
        return json.dumps(tree, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    except ValueError:  # a number of more digits than Python prints
        return change_bytes(data, chance)


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    end = min(len(data), start + chance.choice((1, 1, 2, 7, 50)))
    action = chance.randrange(6)
    if action == 0:
        return data[:start]
    if action == 1:
        return data[:start] + data[end:]
    if action == 2:
        return data[:start] + data[start:end] * chance.choice((2, 3)) + data[end:]
    if action == 3:
        return data[:start] + chance.choice(TOKENS) + data[start:]
    if action == 4:
        return data[:start] + chance.choice(TOKENS) + data[end:]
    return data[:start] + bytes([chance.randrange(256)]) + data[end:]


def change_header(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose header, or the JSON inside it, was changed."""
    try:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        facts = header["__metadata__"]["facts"].encode("utf-8", "surrogatepass")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return change_bytes(data, chance)
    if chance.random() < 0.7:
        header["__metadata__"]["facts"] = change_json(facts, chance).decode("utf-8", "replace")
        new = json.dumps(header).encode()
    else:
        new = change_json(json.dumps(header).encode(), chance)
    return struct.pack("<Q", len(new)) + new + data[8 + size :]


def campaign(tries: int, seed: int) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as place:
        kinds = documents(Path(place))
        for kind, (_, _, reader) in kinds.items():  # as they are, all of them can be read
            file, data, _ = kinds[kind]
            file.write_bytes(data)
            reader(file)
        for number in range(tries):
            chance = random.Random(f"{seed}/{number}")
            kind = chance.choice(list(kinds))
            file, data, reader = kinds[kind]
            file.write_bytes(change_document(data, chance, data[8:9] == b"{" and data[:1] != b"{"))
            report.tries += 1
            label = f"try {number} of seed {seed}, {kind}"
            try:
                reader(file)
                report.count("read")
            except HeadwiseError as error:
                report.count("refused")
                if "\n" in str(error) or len(str(error)) > 1000:
                    report.failures.append(f"{label}: a message of {len(str(error))} signs")
            except Exception as error:  # what a campaign looks for
                report.failures.append(f"{label}: {type(error).__name__} {str(error)[:200]!r}")
            file.write_bytes(data)
    return report
