"""Token streams on disk, and rows drawn from them in an order that depends on the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from dynaspec.contract.errors import ConfigError
from dynaspec.train.corpus import Document
from dynaspec.train.files import write_atomically
from dynaspec.train.tokenizer import END_OF_TEXT_ID

Tokens = npt.NDArray[np.uint16]


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

    For rows about which something dear is remembered, such as what the target thinks of them.
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
