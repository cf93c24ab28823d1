"""Decoding a known text under any rule for draft lengths: its drafts, passes and time, and the best rule in hindsight.

One pass over the text gives its first guess everywhere. While a draft's tokens are right they are the text itself, so
these guesses already tell how far each draft is right; the signals of the tokens behind a mismatch need the drafts
themselves, which are drafted from all positions at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.costs import Drafting, PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.signals import logits
from dynaspec.contract.step import ProposerTraits
from dynaspec.control.estimate.acceptance import AcceptanceModel
from dynaspec.control.estimate.costs import MeasuredStep, StepCosts
from dynaspec.control.estimate.settings import AutoSettings
from dynaspec.kv.blocks import Arena
from dynaspec.kv.rows import ragged_rows
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.propose.drawing import ahead_on_device
from dynaspec.propose.ngram import gather_signal
from dynaspec.sampling import ops

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_COST_EPOCHS = 8
"""Times that the few lengths are taught: as medians, they are surer than single steps."""
_GRID = np.round(np.arange(0.0, 1.0, 0.05), 2)
_SURVIVALS = np.round(np.arange(0.02, 0.9, 0.02), 2)
_POSITIONS = 8
"""Positions with a threshold of their own; later ones share the last."""
_SWEEPS = 2
_SETTINGS = AutoSettings(memory=1e9, surprise=1e9, request_shrinkage=1e9)
"""Nothing is forgotten, and texts do not differ."""
_ACCEPTANCE_EPOCHS = 6


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Greedy drafts from each of the n positions of a continuation."""

    runs: Ints
    """[n] tokens of the draft that are right before the first wrong one, or before the text ends; in a draft without
    end."""
    confidence: Floats
    """[n, longest] largest probability of the drafter, at each of its first tokens."""
    signal: Floats
    """[n, longest] what the proposer says for each of these tokens, as in ``DraftView.signal``."""


@torch.inference_mode()
def draft_everywhere(drafter: Model, prompt: Sequence[int], continuation: Sequence[int], longest: int) -> Rollouts:
    """
    Args:
        continuation: the target's own greedy text.
        longest: tokens of each draft.

    Raises:
        ConfigError: text and draft are longer than the drafter's positions.
    """
    text = np.array([*prompt, *continuation], dtype=np.int64)
    if len(text) + longest > drafter.config.max_position:
        raise ConfigError(
            f"a text of {len(text)} tokens and a draft of {longest} are longer than the drafter's "
            f"{drafter.config.max_position} positions; expected shorter prompts"
        )
    lengths = np.arange(len(prompt), len(text), dtype=np.int64)
    branches = _Branches(drafter, text, lengths, longest)
    drafts = _Drafts(text, lengths, longest)
    drafts.draw(branches.first(), 0)
    for position in range(1, longest):
        drafts.draw(branches.extend(drafts.tokens[:, position - 1], position), position)
    runs = run_lengths(drafts.tokens[:, 0] == text[len(prompt) :])
    return Rollouts(runs, drafts.confidence.astype(np.float64), drafts.signal.astype(np.float64))


def run_lengths(equal: npt.NDArray[np.bool_]) -> Ints:
    """[n] → [n]: how many entries from each on are true without a break."""
    runs = np.zeros(len(equal), dtype=np.int64)
    run = 0
    for i in range(len(equal) - 1, -1, -1):
        run = run + 1 if equal[i] else 0
        runs[i] = run
    return runs


class _Branches:
    """A lane for the text, and one for each position: it shares the text's whole blocks and has its own from there."""

    def __init__(self, model: Model, text: Ints, lengths: Ints, longest: int) -> None:
        """
        Args:
            lengths: [n] tokens of the text before each draft.
        """
        self._model = model
        self._text = text
        self._lengths = lengths
        shared = -(-len(text) // BLOCK_SIZE)
        own = (BLOCK_SIZE - 1 + longest) // BLOCK_SIZE + 1
        count = len(lengths)
        self._tables = np.zeros((count + 1, shared + own), dtype=np.int32)
        self._tables[:, :shared] = np.arange(shared)
        for i, length in enumerate(lengths.tolist()):
            first = length // BLOCK_SIZE
            self._tables[i + 1, first : first + own] = shared + i * own + np.arange(own)
        blocks = shared + count * own
        self._arena = Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), model.dtype, model.device)

    def first(self) -> torch.Tensor:
        """Logits [n, V] of the drafts' first tokens."""
        zero = np.zeros(1, dtype=np.int64)
        hidden = self._forward(self._text[:-1], zero, zero, np.array([len(self._text) - 1]))
        return self._model.logits(hidden[int(self._lengths[0]) - 1 :])

    def extend(self, tokens: Ints, done: int) -> torch.Tensor:
        """Logits [n, V] of what follows ``tokens`` [n], which are those number ``done`` (1-based) of the drafts."""
        lanes = np.arange(1, len(self._lengths) + 1)
        if done > 1:
            start, count, rows = self._lengths + done - 1, np.ones_like(lanes), tokens
        else:  # the own blocks begin with what the text has in its last, unfinished block
            start = self._lengths // BLOCK_SIZE * BLOCK_SIZE
            count = self._lengths - start + 1
            tails = zip(start.tolist(), self._lengths.tolist(), tokens.tolist(), strict=True)
            rows = np.concatenate([np.append(self._text[low:high], token) for low, high, token in tails])
        hidden = self._forward(rows, lanes, start, count)
        return self._model.logits(hidden[torch.from_numpy(np.cumsum(count) - 1).to(hidden.device)])

    def _forward(self, tokens: Ints, lanes: Ints, start: Ints, count: Ints) -> torch.Tensor:
        rows = ragged_rows(self._tables, BLOCK_SIZE, lanes, start, count)
        batch = ForwardBatch(
            tokens=torch.from_numpy(np.ascontiguousarray(tokens)).to(self._model.device),
            positions=rows.positions,
            slots=rows.slots,
            query_start=rows.query_start,
            context_lens=start.astype(np.int32),
            block_tables=rows.block_tables,
        )
        return self._model.forward(batch, self._arena.layers)


class _Drafts:
    """The drafts from all positions, filled one draft position a pass, with what the proposer would tell of them."""

    def __init__(self, text: Ints, lengths: Ints, longest: int) -> None:
        self._text = text.astype(np.int32)[None]
        self._lengths = lengths
        self._rows = np.arange(len(lengths), dtype=np.int64)
        self.tokens = np.zeros((len(lengths), longest), dtype=np.int64)
        self.confidence = np.zeros(self.tokens.shape, dtype=np.float32)
        self.signal = np.zeros(self.tokens.shape, dtype=np.float32)
        self._repeat_bonuses = np.zeros(self.tokens.shape, dtype=np.float32)

    def draw(self, logits: torch.Tensor, position: int) -> None:
        """The most probable token of each row [n, V]."""
        tokens, confidence, lead = ops.leaders(logits)
        self.tokens[:, position] = ops.to_host(tokens)
        self.confidence[:, position] = confidence.cpu().numpy()
        if logits.device.type != "cpu":  # there the proposer does without repeat_bonuses
            self.signal[:, position] = ahead_on_device(lead, confidence).cpu().numpy()
            return
        gather_signal(
            lead.numpy(),
            confidence.numpy(),
            self._text,
            np.zeros_like(self._rows),
            self._lengths,
            self.tokens,
            self._rows,
            position,
            self.signal,
            self._repeat_bonuses,
        )


@dataclass(frozen=True, slots=True)
class Iteration:
    """One verification step. It emits one token more than it accepts, or the accepted ones if the last ends the text,
    of which one less counts here."""

    drafted: int
    accepted: int
    looked_up: int = 0
    """Drafted tokens that were found in the text, without a drafter pass."""


Walk = tuple[Iteration, ...]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A greedy continuation of n tokens, and what the drafter makes of it."""

    rollouts: Rollouts
    max_tokens: int
    """What the request may have: the engine drafts up to its end, not knowing where the text ends."""

    @property
    def tokens(self) -> int:
        return len(self.rollouts.runs)


def walk(text: KnownText, lengths: Ints) -> Walk:
    """The steps that decode a text. Its first token comes from the prompt's pass, which is not counted.

    Args:
        lengths: [n] draft length that the rule takes at each position.
    """
    runs, n = text.rollouts.runs.tolist(), text.tokens
    wanted = lengths.tolist()
    steps = []
    at = 1
    while at < n:
        drafted = min(wanted[at], text.max_tokens - at - 1)
        accepted = min(drafted, runs[at], n - at - 1)  # behind the text's end nothing counts
        steps.append(Iteration(drafted, accepted))
        at += accepted + 1
    return tuple(steps)


def fixed(text: KnownText, k: int) -> Walk:
    """Always k tokens."""
    return walk(text, np.full(text.tokens, k, dtype=np.int64))


def oracle(text: KnownText) -> Walk:
    """Drafts exactly to the first mismatch: all that is accepted, and nothing that is not."""
    left = text.tokens - 1 - np.arange(text.tokens)
    return walk(text, np.minimum(text.rollouts.runs, left))


def stopped(signal: Floats, below: npt.ArrayLike) -> Ints:
    """[n, longest] → [n]: draft lengths when drafting ends after the first token whose signal is below.

    Args:
        below: one threshold, or one a position.
    """
    low = signal < np.asarray(below)
    lengths: Ints = np.where(low.any(axis=1), low.argmax(axis=1) + 1, signal.shape[1]).astype(np.int64)
    return lengths


def fit_costs(seconds: Mapping[int, float], row_s: float, pass_s: float) -> StepCosts:
    """What the steps of one request cost, taught with those of fixed draft lengths.

    Args:
        seconds: of a step that drafts so many tokens, k drafter passes and one target pass; 0 = plain decoding.
        row_s: of another row of the target's pass; 0 = next to nothing.
        pass_s: of a drafter pass; 0 = not known.
    """
    curve = tuple((1 + k, seconds[0] + k * row_s) for k in sorted(seconds))
    measured = PassCosts(curve, (((1, pass_s),) if pass_s else (),))
    costs = StepCosts(measured, (ProposerTraits("draft_model"),), AutoSettings(drift=0.0))
    for _ in range(_COST_EPOCHS):
        for k in sorted(seconds):
            drafter = (0, k, k) if k else (-1,)
            costs.observe(MeasuredStep(1 + k, 0.0, 0.0, seconds[k], -1.0, *drafter))
    return costs


def step_s(costs: StepCosts, drafted: int, looked_up: int = 0) -> float:
    """Seconds of a step; a token that was looked up is a row of the target's pass and no drafter pass."""
    drafting = _drafting(drafted - looked_up)
    return costs.target_s(1 + drafted, 0.0, 0.0) + (0.0 if drafting is None else costs.draft_s(drafting))


def total_s(steps: Iterable[Iteration], costs: StepCosts) -> float:
    """Seconds of all of them."""
    alike = Counter((step.drafted, step.looked_up) for step in steps)
    return sum(count * step_s(costs, *step) for step, count in alike.items())


def _drafting(passes: int) -> Drafting | None:
    return Drafting(0, passes, passes) if passes else None


@dataclass(frozen=True, slots=True)
class Passes:
    """What decoding took, in passes."""

    target: int
    drafter: int
    tokens: int
    """Emitted by these steps."""

    @classmethod
    def of(cls, steps: Sequence[Iteration]) -> Passes:
        drafter = sum(s.drafted - s.looked_up for s in steps)
        return cls(len(steps), drafter, sum(s.accepted + 1 for s in steps))


def tokens_per_second(walks: Sequence[Walk], costs: StepCosts) -> float:
    """Of several texts one after the other."""
    steps = [step for of_text in walks for step in of_text]
    return Passes.of(steps).tokens / total_s(steps, costs)


Signal = Callable[[Rollouts], Floats]
"""[n, longest] what speaks for each drafted token, on the scale of a logit."""


@dataclass(frozen=True, slots=True)
class Hindsight:
    """A rule, and what it gives on the texts that it was chosen on."""

    tokens_per_second: float
    thresholds: tuple[float, ...]
    lengths: tuple[Ints, ...]
    """For each text, the draft length at each position."""


def best_threshold(texts: Sequence[KnownText], costs: StepCosts) -> Hindsight:
    """One confidence threshold for all positions."""
    return max((_by_confidence(texts, costs, (float(t),)) for t in _GRID), key=lambda h: h.tokens_per_second)


def best_threshold_per_position(texts: Sequence[KnownText], costs: StepCosts) -> Hindsight:
    """A confidence threshold for every position, improved in turn from the best common one."""
    start = best_threshold(texts, costs)
    best = _by_confidence(texts, costs, start.thresholds * _POSITIONS)
    for _ in range(_SWEEPS):
        for position in range(_POSITIONS):
            for threshold in _GRID:
                tried = list(best.thresholds)
                tried[position] = float(threshold)
                found = _by_confidence(texts, costs, tuple(tried))
                best = max(best, found, key=lambda h: h.tokens_per_second)
    return best


def signal(rollouts: Rollouts) -> Floats:
    """All that the proposer knows of a token: how far its first choice is ahead, and what the text said before."""
    return rollouts.signal


def confidence_alone(rollouts: Rollouts) -> Floats:
    """logit(confidence), cut to ±``LOGIT_RANGE``: what a proposer tells that has no other signal."""
    return logits(rollouts.confidence)


def best_survival(texts: Sequence[KnownText], costs: StepCosts, signal: Signal) -> Hindsight:
    """Stops where the chance that the whole draft is right falls below a threshold.

    The chance is what an ``AcceptanceModel`` says that was taught with these very texts.
    """
    chances = survivals(texts, signal)
    found = []
    for threshold in _SURVIVALS:
        lengths = tuple(stopped(chance, threshold) for chance in chances)
        found.append(Hindsight(_speed(texts, lengths, costs), (float(threshold),), lengths))
    return max(found, key=lambda h: h.tokens_per_second)


def fit_acceptance(texts: Sequence[KnownText], signal: Signal) -> AcceptanceModel:
    """Acceptance by position and signal, taught with all drafts, several times over.

    A draft begins at every place of a text. Its right tokens are tested, and the first wrong one.
    """
    told = [signal(text.rollouts) for text in texts]
    runs = np.concatenate([text.rollouts.runs for text in texts])
    longest = np.concatenate([np.full(each.shape[0], each.shape[1]) for each in told])
    # Nothing is expected of a signal before.
    model = AcceptanceModel(_SETTINGS, weights=(1.0, 0.0, 0.0), variances=(1.0, 1.0, 1.0))
    model.admit(0)
    flat = np.concatenate([each.ravel() for each in told])
    for _ in range(_ACCEPTANCE_EPOCHS):
        model.observe(np.zeros_like(runs), longest, np.minimum(runs + 1, longest), np.minimum(runs, longest), flat)
    return model


def survivals(texts: Sequence[KnownText], signal: Signal) -> list[Floats]:
    """For each text, the chance that a draft is right up to each token [n, longest], after ``fit_acceptance``."""
    model, found = fit_acceptance(texts, signal), []
    for text in texts:
        told = signal(text.rollouts)
        slots, lens = np.zeros(len(told), dtype=np.int64), np.full(len(told), told.shape[1])
        found.append(model.survival(slots, lens, told.shape[1], told.ravel()))
    return found


def _by_confidence(texts: Sequence[KnownText], costs: StepCosts, thresholds: tuple[float, ...]) -> Hindsight:
    lengths = []
    for text in texts:
        confidence = text.rollouts.confidence
        below = np.array(thresholds)[np.minimum(np.arange(confidence.shape[1]), len(thresholds) - 1)]
        lengths.append(stopped(confidence, below))
    return Hindsight(_speed(texts, lengths, costs), thresholds, tuple(lengths))


def _speed(texts: Sequence[KnownText], lengths: Sequence[Ints], costs: StepCosts) -> float:
    walks = [walk(text, rule) for text, rule in zip(texts, lengths, strict=True)]
    return tokens_per_second(walks, costs)
