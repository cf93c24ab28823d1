"""What the models read: the interpreter's own standard library and grade-school maths problems.

A *document* is one source file or one problem. Documents named in ``holdout.json`` never enter the
training split; they are what evaluation reads.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal

from dynaspec.contract.errors import ConfigError

Kind = Literal["code", "maths"]

SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "encodings",  # 120 generated tables
        "pydoc_data",  # one generated 750 kB table of prose
    }
)
SKIPPED_FILES = frozenset({"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "msilib/text.py"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

HELD_OUT_SHARE = 0.03
HELD_OUT_BYTES = (4_000, 60_000)  # code files outside this range make poor or overweight probes


@dataclass(frozen=True, slots=True)
class Document:
    """One text. ``name`` is a path relative to the library, or ``gsm8k/<line number from 0>``."""

    name: str
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Holdout:
    """Names that training must not see: relative library paths and zero-based problem indices."""

    code: frozenset[str]
    maths: frozenset[int]

    def contains(self, document: Document) -> bool:
        """Whether ``document`` is held out."""
        if document.kind == "code":
            return document.name in self.code
        return problem_index(document) in self.maths


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents, split; ``train`` and ``held_out`` are disjoint by name."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def problem_index(document: Document) -> int:
    """Zero-based line number of a maths document."""
    return int(document.name.removeprefix("gsm8k/"))


def load_holdout() -> Holdout:
    """Read the list that is committed beside this module."""
    raw = json.loads(resources.files(__package__).joinpath("holdout.json").read_text("utf-8"))
    return Holdout(code=frozenset(raw["code"]), maths=frozenset(raw["maths"]))


def standard_library() -> Path:
    """The folder the running interpreter imports its standard library from."""
    return Path(sysconfig.get_paths()["stdlib"])


def _is_source(relative: PurePosixPath) -> bool:
    if str(relative) in SKIPPED_FILES or relative.name.startswith(SKIPPED_PREFIXES):
        return False
    return not any(part in SKIPPED_FOLDERS or part.startswith(SKIPPED_PREFIXES) for part in relative.parts[:-1])


def read_code(root: Path) -> list[Document]:
    """Every Python source under ``root`` that is worth learning from, in path order.

    Raises:
        ConfigError: ``root`` is no folder, or holds no usable source.
    """
    if not root.is_dir():
        raise ConfigError(f"corpus: got {str(root)!r}, expected a folder of Python sources")
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if not _is_source(relative):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:  # a handful of sources declare another encoding
            continue
        if text.strip():
            documents.append(Document(str(relative), "code", text))
    if not documents:
        raise ConfigError(f"corpus: got {str(root)!r}, which holds no usable .py file, expected Python sources")
    return documents


def format_problem(question: str, answer: str) -> str:
    """A maths document, in the form the chat template renders as well."""
    return f"Question: {question}\nAnswer: {answer}"


def read_maths(path: Path) -> list[Document]:
    """GSM8K problems from a JSON-lines file with ``question`` and ``answer``.

    Raises:
        ConfigError: the file is missing, or a line is not such an object.
    """
    if not path.is_file():
        raise ConfigError(f"gsm8k: got {str(path)!r}, expected a JSON-lines file of problems")
    documents = []
    for index, line in enumerate(path.read_text("utf-8").splitlines()):
        try:
            row = json.loads(line)
            text = format_problem(str(row["question"]), str(row["answer"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"gsm8k: line {index + 1} of {str(path)!r} is {line[:60]!r}, "
                'expected an object with "question" and "answer"'
            ) from error
        documents.append(Document(f"gsm8k/{index}", "maths", text))
    return documents


def split(documents: Iterable[Document], holdout: Holdout) -> Corpus:
    """Put each document on the side of the split that ``holdout`` says."""
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        (held_out if holdout.contains(document) else train).append(document)
    return Corpus(tuple(train), tuple(held_out))


def load_corpus(library: Path, gsm8k: Path | None, holdout: Holdout | None = None) -> Corpus:
    """Read and split everything; without ``gsm8k`` the corpus is code alone."""
    documents: list[Document] = read_code(library)
    if gsm8k is not None:
        documents += read_maths(gsm8k)
    return split(documents, load_holdout() if holdout is None else holdout)


def choose_holdout(documents: Sequence[Document], share: float = HELD_OUT_SHARE) -> Holdout:
    """Pick ``share`` of each kind by the order of the SHA-256 of the names: no seed, no luck.

    This made ``holdout.json``; the committed list is what counts from then on, so that another
    interpreter version trains and evaluates on the same side of the split.
    """
    low, high = HELD_OUT_BYTES
    code = [d for d in documents if d.kind == "code"]
    maths = [d for d in documents if d.kind == "maths"]
    sized = [d for d in code if low <= len(d.text) <= high]

    def first(pool: Sequence[Document], count: int) -> list[Document]:
        return sorted(pool, key=lambda d: hashlib.sha256(d.name.encode()).digest())[:count]

    return Holdout(
        code=frozenset(d.name for d in first(sized, round(share * len(code)))),
        maths=frozenset(problem_index(d) for d in first(maths, round(share * len(maths)))),
    )
