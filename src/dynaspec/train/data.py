"""Documents and their held-out part, a byte-level tokenizer, and rows of tokens in an order that the seed decides.

A *document* is one source file or one problem. Documents named in ``holdout.json`` never enter the
training split; they are what evaluation reads.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dynaspec.contract.errors import ConfigError

from .run import write_atomically

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)

# Words with their leading space, digits one at a time (numbers of any length then have one
# reading), runs of punctuation, and white space that leaves its last space to the next word.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# System text stands above the dialogue; a turn looks like a training document of GSM8K.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- message['content'] + '\n\n' -}}"
    "{%- elif message['role'] == 'user' -%}{{- 'Question: ' + message['content'] + '\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- 'Answer: ' + message['content'] + eos_token -}}"
    "{%- else -%}{{- raise_exception('role: got ' + message['role']"
    " + ', expected system, user or assistant') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Answer:' -}}{%- endif -%}"
)
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
Tokens = npt.NDArray[np.uint16]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges until the vocabulary has ``vocab_size`` entries (bytes and end-of-text included).

    Raises:
        ConfigError: ``vocab_size`` has no room for the 256 bytes and the end-of-text token.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size: got {vocab_size}, expected at least 257 (256 bytes and end of text)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as ``AutoTokenizer`` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # The name that Transformers 4 and 5 and vLLM all know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a checkpoint's tokenizer as it is, chat template included."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read a checkpoint's tokenizer, or the one that the stage ``prepare`` has left.

    Raises:
        ConfigError: the folder has no ``tokenizer.json``.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"tokenizer: {str(path)!r} does not exist, expected what the stage 'prepare' writes")
    return Tokenizer.from_file(str(path))


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
    """Read the list that is committed beside this module.

    It was chosen by the order of the names' SHA-256: as many as 3 % of each kind, of code among the files of 4,000 to
    60,000 characters.
    """
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


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Tokenised documents, end to end; document i is ``tokens[starts[i]:starts[i + 1]]``.

    Every document ends with the end-of-text token, which belongs to it.
    """

    tokens: Tokens
    starts: npt.NDArray[np.int64]

    def document(self, index: int) -> Tokens:
        """The tokens of one document, end of text included."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1

    def save(self, path: Path) -> None:
        """Write to one ``.npz`` file, whole or not at all."""
        write_atomically(path, lambda temporary: _savez(temporary, self))

    @classmethod
    def load(cls, path: Path) -> TokenSet:
        """Read what :meth:`save` wrote."""
        if not path.is_file():
            raise ConfigError(f"tokens: {str(path)!r} does not exist, expected what the stage 'prepare' writes")
        with np.load(path) as stored:
            return cls(stored["tokens"], stored["starts"])


def _savez(path: Path, tokens: TokenSet) -> None:
    with path.open("wb") as file:
        np.savez(file, tokens=tokens.tokens, starts=tokens.starts)


def encode(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenSet:
    """Tokenise ``documents`` in order, each followed by end of text."""
    encodings = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    pieces = [np.array([*e.ids, END_OF_TEXT_ID], dtype=np.uint16) for e in encodings]
    return token_set(pieces)


def token_set(pieces: Sequence[Tokens]) -> TokenSet:
    """Join documents that are tokenised already (end of text included)."""
    starts = np.zeros(len(pieces) + 1, dtype=np.int64)
    np.cumsum([len(p) for p in pieces], out=starts[1:])
    return TokenSet(np.concatenate(pieces) if pieces else np.zeros(0, np.uint16), starts)


class Sampler(Protocol):
    """Rows to train on, addressed by a running number."""

    def batch(self, first_row: int, rows: int) -> torch.Tensor:
        """Rows ``first_row`` … as int64 [rows, seq_len + 1]."""
        ...


class RowSampler:
    """Rows of ``seq_len + 1`` tokens for training, addressed by a running number.

    Each epoch joins the documents in a new order and cuts the stream into rows, which come in a new
    order too. Row n is a function of (seed, n): a resumed run needs nothing but its row counter.
    """

    def __init__(self, tokens: TokenSet, seq_len: int, seed: int) -> None:
        self._set = tokens
        self._seq_len = seq_len
        self._seed = seed
        self.rows_per_epoch = (len(tokens.tokens) - 1) // seq_len
        if self.rows_per_epoch < 1:
            raise ConfigError(
                f"seq_len: got {seq_len}, expected fewer than the {len(tokens.tokens)} tokens of the corpus"
            )
        self._epoch = -1
        self._stream = tokens.tokens
        self._order = np.arange(self.rows_per_epoch)

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        rng = np.random.default_rng((self._seed, epoch))
        documents = rng.permutation(self._set.documents)
        self._stream = np.concatenate([self._set.document(i) for i in documents])
        self._order = rng.permutation(self.rows_per_epoch)
        self._epoch = epoch

    def batch(self, first_row: int, rows: int) -> torch.Tensor:
        """Rows ``first_row`` … as int64 [rows, seq_len + 1]; column t + 1 is the label of column t."""
        out = np.empty((rows, self._seq_len + 1), dtype=np.int64)
        for i in range(rows):
            epoch, row = divmod(first_row + i, self.rows_per_epoch)
            self._enter(epoch)
            start = self._order[row] * self._seq_len
            out[i] = self._stream[start : start + self._seq_len + 1]
        return torch.from_numpy(out)


class Pool:
    """The first rows of a sampler, over and over, in a new order each time.

    For rows about which something expensive is remembered, such as what the target thinks of them.
    """

    def __init__(self, sampler: Sampler, rows: int, seed: int) -> None:
        if rows < 1:
            raise ConfigError(f"rows: got {rows}, expected at least 1")
        self._rows = sampler.batch(0, rows)
        self._seed = seed

    def batch(self, first_row: int, rows: int) -> torch.Tensor:
        """Like :meth:`RowSampler.batch`."""
        size = len(self._rows)
        chosen: list[int] = []
        while len(chosen) < rows:
            epoch, start = divmod(first_row + len(chosen), size)
            order = np.random.default_rng((self._seed, epoch)).permutation(size)
            chosen += order[start : start + rows - len(chosen)].tolist()
        return self._rows[chosen]


class Mixture:
    """Batches of which a fixed number of rows comes from a second sampler."""

    def __init__(self, main: Sampler, other: Sampler, other_share: float) -> None:
        if not 0.0 <= other_share <= 1.0:
            raise ConfigError(f"share: got {other_share}, expected 0 to 1")
        self._main = main
        self._other = other
        self._share = other_share

    def batch(self, first_row: int, rows: int) -> torch.Tensor:
        """Like :meth:`RowSampler.batch`; the size of the batches must not change between calls."""
        step, others = first_row // rows, round(self._share * rows)
        parts = [
            sampler.batch(step * count, count)
            for sampler, count in ((self._main, rows - others), (self._other, others))
            if count
        ]
        return torch.cat(parts)
