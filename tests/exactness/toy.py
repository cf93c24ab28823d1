"""A toy world for statistical tests: a target and a drafter with a handful of tokens, and ways to decode with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.propose.drawing import Spread
from dynaspec.sampling.draw import draw
from dynaspec.sampling.grammar import Grammar
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState
from dynaspec.verify.chain import Accepted, RejectionSampling, accept_chain
from unit.sampling.oracle import probabilities, process_row

PROMPT = [0]
REQUESTS = 5_000
PLAUSIBLE, ABSURD = 1e-3, 1e-9
"""p-values: above the first all is well; below the second something is wrong."""


@dataclass(frozen=True)
class World:
    """Two models whose logits depend on the newest token, and the parameters of all requests."""

    target: np.ndarray
    """[V, V] float32"""
    drafter: np.ndarray
    """[V, V] float32"""
    params: dict[str, Any] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    deterministic_drafts: bool = False
    grammar: Grammar | None = None
    known: tuple[int, ...] | None = None
    """Tokens that the drafter knows, as an EAGLE-3 head does; None = all."""

    @classmethod
    def random(cls, seed: int, vocab: int = 5, spread: float = 1.2, **options: Any) -> World:
        rng = np.random.default_rng(seed)
        target, drafter = (rng.normal(0, spread, (vocab, vocab)).astype(np.float32) for _ in range(2))
        return cls(target, drafter, **options)

    @property
    def vocab(self) -> int:
        return len(self.target)

    def drafter_logits(self, last: np.ndarray) -> torch.Tensor:
        """[n, V] of the drafter after these tokens; what it does not know is filled in by the production code."""
        logits = torch.from_numpy(self.drafter[last])
        if self.known is None:
            return logits
        places = torch.tensor(self.known)
        return Spread(self.vocab, places)(logits[:, places])

    def pairs(self) -> np.ndarray:
        """[V, V] the true probability of each first and second output token."""
        return self.law(2)

    def law(self, count: int) -> np.ndarray:
        """[V] · count: the true probability of each beginning of so many tokens."""
        params, law = SamplingParams(**self.params), np.ones(())
        for _ in range(count):
            # Where a beginning is impossible, what follows it does not matter.
            after = [
                self._distribution(params, list(x)) if law[x] else [0.0] * self.vocab for x in np.ndindex(law.shape)
            ]
            law = law[..., None] * np.array(after).reshape(*law.shape, self.vocab)
        return law

    def _distribution(self, params: SamplingParams, output: list[int]) -> list[float]:
        logits = self.target[[*PROMPT, *output][-1]].tolist()
        return probabilities(process_row(logits, params, prompt=PROMPT, output=output, bad_words=self.bad_words))


class Decoder:
    """Speculative decoding of many independent requests at once; subclasses put faults into it.

    ``sampling``: how drafts of unseeded requests are verified.

    Args:
        world: models and parameters
        requests: how many
        depth: tokens drafted in each step
        seed: the request's seed, where it has one; else a different random seed for each
    """

    sampling: type[RejectionSampling] = RejectionSampling

    def __init__(self, world: World, requests: int, depth: int, first_seed: int = 1_000_000) -> None:
        self.world, self.depth = world, depth
        self.state = SamplerState(requests, world.vocab)
        self.output: list[list[int]] = [[] for _ in range(requests)]
        self.newest = np.full(requests, PROMPT[-1])
        params = SamplingParams(**world.params)
        for lane in range(requests):
            self.state.add(
                lane,
                params,
                seed=first_seed + lane,
                n_index=0,
                eos_token_ids=[],
                bad_words=world.bad_words,
                prompt=PROMPT,
                grammar=world.grammar,
            )

    def run(self, count: int) -> np.ndarray:
        """[requests, count] the first tokens of every request."""
        lanes = np.arange(len(self.output))
        while min(len(tokens) for tokens in self.output) < count:
            drafts = self.draft(lanes)
            lens = self.verified(drafts)
            self.commit(lanes, self.verify(lanes, drafts, lens))
        return np.array([tokens[:count] for tokens in self.output])

    def draft(self, lanes: np.ndarray) -> Drafts:
        """``depth`` tokens for each lane, whatever will be verified; the confidence is the raw softmax's largest."""
        tokens, places = np.zeros((lanes.size, self.depth), np.int64), np.arange(lanes.size)
        confidence = np.zeros(tokens.shape, np.float32)
        q, last = [], self.newest[lanes]
        for depth in range(self.depth):
            logits = self.world.drafter_logits(last)
            confidence[:, depth] = logits.softmax(-1).amax(-1).numpy()
            rows = Rows(lanes, places, np.full_like(lanes, depth), tokens)
            scores = self.state.process(logits, rows)
            if self.world.deterministic_drafts:
                tokens[:, depth] = scores.argmax(-1).numpy()
            else:
                tokens[:, depth], row = draw(scores, rows, self.state, Purpose.DRAFT)
                q.append(row)
            last = tokens[:, depth]
        needed = q and q[0] is not None
        lens = np.full(lanes.size, self.depth)
        return Drafts(tokens, lens, confidence, q=torch.stack(q, 1) if needed else None)

    def verified(self, drafts: Drafts) -> np.ndarray:
        """How many of the drafted tokens are verified."""
        return drafts.lens

    def verify(self, lanes: np.ndarray, drafts: Drafts, lens: np.ndarray) -> Accepted:
        request = np.repeat(np.arange(lanes.size), lens + 1)
        depth = np.arange(request.size) - np.repeat(np.cumsum(lens + 1) - lens - 1, lens + 1)
        rows = Rows(lanes[request], request, depth, drafts.tokens)
        seen = np.concatenate([self.newest[lanes, None], drafts.tokens], 1)[request, depth]
        scores = self.state.process(torch.from_numpy(self.world.target[seen]), rows)
        return accept_chain(scores, rows, drafts, lens, self.state, self.sampling)

    def commit(self, lanes: np.ndarray, accepted: Accepted) -> None:
        counts = (accepted.accepted + 1).tolist()
        for lane, tokens, count in zip(lanes.tolist(), accepted.tokens.tolist(), counts, strict=True):
            self.output[lane] += tokens[:count]
            self.state.commit(lane, tokens[:count])
            self.newest[lane] = tokens[count - 1]


def decode_plainly(world: World, requests: int, count: int) -> np.ndarray:
    """The first ``count`` tokens without speculation."""
    return Decoder(world, requests, depth=0).run(count)


def p_value(decoder: Decoder, count: int = 2) -> float:
    """How plausible the decoder's first ``count`` tokens are under the target's distribution: a chi-square test."""
    world = decoder.world
    tokens = decoder.run(count)
    counts = np.bincount(tokens @ world.vocab ** np.arange(count)[::-1], minlength=world.vocab**count)
    expected = world.law(count).ravel() * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5  # pooled, as the statistic needs cells that are filled
    counts, expected = (np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected))
    return float(stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue)
