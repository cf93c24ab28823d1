"""What drafts: an assistant model, or a lookup in the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation.candidate_generator import AssistedCandidateGeneratorDifferentTokenizers

from dynaspec.contract.proposer import Offers
from dynaspec.contract.step import StopRule
from dynaspec.control.keys import SuffixSettings
from dynaspec.propose.ngram import longest_match
from dynaspec.propose.suffix import RequestText, ResponseCache

from .draft_loop import DraftLoop


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens for the target to verify."""

    sequence: torch.Tensor
    """[1, L + d] the text, then the draft."""
    length: int
    """d"""
    logits: torch.Tensor | None = None
    """[1, d, V] of the assistant, after its processors; None = the draft is certain."""
    confidence: tuple[float, ...] = ()
    """d entries, or none where the drafter has no confidence; so are the next two."""
    signal: tuple[float, ...] = ()
    repeat_bonus: tuple[float, ...] = ()
    rows_per_pass: tuple[int, ...] = ()
    early_exit: bool = False
    """The stop rule ended it before the granted length."""

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens alone, to be verified."""
        if length == self.length:
            return self
        kept = None if self.logits is None or not length else self.logits[:, :length]
        return Draft(self.sequence[:, : self.sequence.shape[1] - self.length + length], length, kept)


class Drafter(ABC):
    """What the step asks of whoever drafts. Texts are [1, L] token ids of the target."""

    def lag(self, length: int) -> int:
        """Tokens of a text of ``length``, but the last, that the drafter has not read."""
        return 0

    def offer(self, text: torch.Tensor) -> Offers | None:
        """For lookups: what they have found for the text, a batch of one. Others: None."""
        return None

    @abstractmethod
    def draft(self, text: torch.Tensor, depth: int, rule: StopRule | None) -> Draft:
        """At most ``depth`` ≥ 1 tokens."""

    def settle(self, length: int, drafted: int, accepted: int) -> None:  # noqa: B027  # lookups keep nothing
        """Of the draft behind a text of ``length``, so many tokens were accepted."""


class AssistantDrafter(Drafter):
    """A candidate generator of Transformers over an assistant whose passes run in a ``DraftLoop``."""

    def __init__(self, make: Callable[[torch.Tensor], Any], loop: DraftLoop) -> None:
        """
        Args:
            make: Transformers' candidate generator for a text that nothing was drafted for yet.
        """
        self._make = make
        self._loop = loop
        self._generator: Any = None
        self._seen = 0
        self._drafted_at = 0
        """Length of the text behind which the next draft goes on from the latest one, with nothing skipped."""

    def lag(self, length: int) -> int:
        return length - 1 - (0 if self._lost(length) else self._seen)

    def _lost(self, length: int) -> bool:
        """Generators for other vocabularies count on being asked in every step: what came meanwhile is missing."""
        return length != self._drafted_at and self._translates

    @property
    def _translates(self) -> bool:
        return isinstance(self._generator, AssistedCandidateGeneratorDifferentTokenizers)

    def rehearse(self, text: torch.Tensor, depth: int, rule: StopRule) -> int:
        """A draft that nobody verifies: the assistant has read the text afterwards. Returns its passes."""
        passes = len(self.draft(text, depth, rule).rows_per_pass)
        if passes:
            self._seen = text.shape[1] - 1
        return passes

    def begin_anew(self) -> None:
        """As if nothing had been drafted."""
        self._generator, self._seen, self._drafted_at = None, 0, 0

    def draft(self, text: torch.Tensor, depth: int, rule: StopRule | None) -> Draft:
        length = text.shape[1]
        if self._generator is None or self._lost(length):
            self._generator = self._make(text)
            self._loop.begin_anew()
        self._generator.num_assistant_tokens = depth
        self._loop.begin(rule, None if self._translates else self._seen)
        sequence, logits = self._generator.get_candidates(text)
        drafted = sequence.shape[1] - length
        signals = self._loop.signals
        if signals is None:
            return Draft(sequence, drafted, logits)
        ran = Draft(sequence, drafted, logits, rows_per_pass=self._loop.rows_per_pass, early_exit=signals.stopped)
        if logits is None or len(signals.confidence) != drafted:
            return ran  # drafted in another vocabulary: what was said of those tokens says nothing of these
        return replace(
            ran,
            confidence=tuple(signals.confidence),
            signal=tuple(signals.signal),
            repeat_bonus=tuple(signals.repeat_bonus),
        )

    def settle(self, length: int, drafted: int, accepted: int) -> None:
        if drafted:
            self._drafted_at = length + accepted + 1
            self._seen = length + min(accepted, drafted - 1)


class Lookup(Drafter):
    """Is asked before the step is planned, and drafts what it has found then."""

    def __init__(self) -> None:
        self._found: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def offer(self, text: torch.Tensor) -> Offers:
        match, found = self.look_up(text, text[0].cpu().numpy().astype(np.int32))
        self._found = found.astype(np.int64)
        return Offers(np.array([[match, found.size]]), self._found[None])

    @abstractmethod
    def look_up(self, text: torch.Tensor, row: npt.NDArray[np.int32]) -> tuple[int, npt.NDArray[np.integer]]:
        """How many tokens at the text's end were found again, and what follows them there.

        Args:
            row: [L] the text.
        """

    def draft(self, text: torch.Tensor, depth: int, rule: StopRule | None) -> Draft:
        found = torch.from_numpy(self._found[:depth]).to(text.device)[None]
        return Draft(torch.cat([text, found], dim=-1), found.shape[1])


class PromptLookup(Lookup):
    """Transformers' own lookup."""

    def __init__(self, generator: Any, longest: int) -> None:
        """
        Args:
            generator: a ``PromptLookupCandidateGenerator``.
            longest: longest draft.
        """
        super().__init__()
        self._generator = generator
        self._longest = longest

    def look_up(self, text: torch.Tensor, row: npt.NDArray[np.int32]) -> tuple[int, npt.NDArray[np.integer]]:
        self._generator.num_output_tokens = self._longest
        sequence, _ = self._generator.get_candidates(text)
        found, match = sequence[0, text.shape[1] :].cpu().numpy(), 0
        if found.size:
            match, _ = longest_match(row, row.size, 1, self._generator.max_matching_ngram_size, 1)
        return match, found


class TextLookup(Lookup):
    """The lookup that ``method: ngram`` means everywhere in dynaspec: the longest match, the most recent one."""

    def __init__(self, min_n: int, max_n: int, longest: int) -> None:
        super().__init__()
        self._min_n, self._max_n, self._longest = min_n, max_n, longest

    def look_up(self, text: torch.Tensor, row: npt.NDArray[np.int32]) -> tuple[int, npt.NDArray[np.integer]]:
        match, start = longest_match(row, row.size, self._min_n, self._max_n, self._longest)
        return match, row[start : start + self._longest]


class SuffixLookup(Lookup):
    """Suffix decoding, as ``method: suffix`` means it everywhere in dynaspec; see ``propose.suffix``.

    It reads a text whenever it is asked, so the tokens of a text's last step are not kept.

    Args:
        longest: longest draft.
        answers: to earlier calls, which this one adds to.
    """

    def __init__(self, settings: SuffixSettings, longest: int, answers: ResponseCache) -> None:
        super().__init__()
        self._text = RequestText(settings, longest, answers)

    def look_up(self, text: torch.Tensor, row: npt.NDArray[np.int32]) -> tuple[int, npt.NDArray[np.integer]]:
        self._text.append(row, self._text.length or row.size, row.size)  # what is there at first is the prompt
        found = self._text.draft(row)
        return (0, self._found[:0]) if found is None else (found.match_length, found.tokens)
