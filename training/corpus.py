"""The third-party corpus: files of documents separated by a marker line. It is not part of the repository.

data.py splits it by story, prepare.py tokenises it; docs/training.md lists sources and licences.
"""

import lzma
from dataclasses import dataclass
from pathlib import Path

_SEPARATOR = "\n<|endoftext|>\n"


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus."""

    source: str  # "01" ... "08", the first characters of its file's name
    text: str  # prose, or a chat in ChatML


def read_corpus(folder: Path) -> list[Document]:
    """All documents of `folder`/NN_*.txt.xz in the order of the files.

    Raises FileNotFoundError where the folder holds no such file.
    """
    paths = sorted(folder.glob("[0-9][0-9]_*.txt.xz"))
    if not paths:
        raise FileNotFoundError(f"no corpus file NN_*.txt.xz in {folder}")
    return [
        Document(path.name[:2], text.strip("\n"))
        for path in paths
        for text in lzma.open(path, "rt", encoding="utf-8").read().split(_SEPARATOR)
        if text.strip()
    ]
