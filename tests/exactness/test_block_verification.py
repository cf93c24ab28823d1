"""Does block verification have the target's distribution? Chi-square tests of several tokens together.

The samplers' own tests are ``test_sampler_statistics``, ``test_bias_trap`` and ``test_grammar``; what is different here
is that whether an early token is accepted hangs on those drafted behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.sampling.grammar import Grammar
from dynaspec.verify import chain
from dynaspec.verify.chain import BlockVerification, Bools, Int64, RejectionSampling
from exactness.controlled import Controlled
from exactness.test_bias_trap import PAIR, LooksAhead, StopsAtTheFirstLoss, build, first_true, limits_for
from exactness.test_grammar import PAIRS, DrawsAnything, PairWorld, StopsAtRefused
from exactness.test_sampler_statistics import PARAMS, PART
from exactness.toy import ABSURD, PLAUSIBLE, REQUESTS, Decoder, World, decode_plainly, p_value
from support.letters import letters_grammar

TOKENS = 4
"""Looked at together: more than the shortest draft of the tests and fewer than the longest."""


def in_blocks(decoder: type[Decoder], sampling: type[RejectionSampling] = BlockVerification) -> type[Decoder]:
    return type(f"{decoder.__name__}InBlocks", (decoder,), {"sampling": sampling})


Blocks = in_blocks(Decoder)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
@pytest.mark.parametrize("spread", [0.05, 0.8, 4.0])
def test_several_tokens_have_the_targets_law(spread: float, depth: int) -> None:
    """With drafters from nearly right to quite wrong."""
    world = World.random(depth, vocab=4)
    noise = np.random.default_rng(6).normal(0, spread, world.target.shape).astype(np.float32)
    assert p_value(Blocks(World(world.target, world.target + noise), REQUESTS, depth), TOKENS) > PLAUSIBLE


@pytest.mark.parametrize("known", [None, PART], ids=["all known", "a part known"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled drafts", "deterministic drafts"])
@pytest.mark.parametrize("name", PARAMS)
def test_so_they_have_with_every_processor(name: str, deterministic: bool, known: tuple[int, ...] | None) -> None:
    world = World.random(29, params=PARAMS[name], deterministic_drafts=deterministic, known=known)
    assert p_value(Blocks(world, REQUESTS, 3), 3) > PLAUSIBLE


@pytest.mark.parametrize("known", [None, PART], ids=["all known", "a part known"])
def test_bad_words_in_the_middle_of_a_draft(known: tuple[int, ...] | None) -> None:
    world = World.random(3, bad_words=((2,), (1, 3), (4, 4)), known=known)
    assert p_value(Blocks(world, REQUESTS, 3), 3) > PLAUSIBLE


class OneHot(Decoder):
    """Deterministic drafts in the form that they have beside drawn ones."""

    def draft(self, lanes: np.ndarray) -> Drafts:
        drafts = super().draft(lanes)
        q = torch.nn.functional.one_hot(torch.from_numpy(drafts.tokens), self.world.vocab).float()
        return replace(drafts, q=q)


def test_one_hot_drafts_have_it_too() -> None:
    world = World.random(13, vocab=4, deterministic_drafts=True)
    assert p_value(in_blocks(OneHot)(world, REQUESTS, 3), TOKENS) > PLAUSIBLE


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("params", [{"seed": 0}, {"temperature": 0.0}], ids=["seeded", "greedy"])
def test_seeded_and_greedy_output_is_that_of_plain_decoding(params: dict[str, Any], depth: int) -> None:
    world = World.random(4, vocab=30, spread=3.0, params=params, bad_words=((3,), (4, 5)))
    np.testing.assert_array_equal(Blocks(world, 60, depth).run(9), decode_plainly(world, 60, 9))


# --- where chains end -------------------------------------------------------------------------------------------------


class EndsBehindAToken(Decoder):
    """Verifies up to the first token 0 or 2, and that one too."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        return np.minimum(first_true(np.isin(drafts.tokens, (0, 2))) + 1, self.depth)


class EndsBeforeAToken(Decoder):
    """The same without that one: whether it is verified hangs on itself."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        return first_true(np.isin(drafts.tokens, (0, 2)))


@pytest.mark.parametrize("causal", [EndsBehindAToken, StopsAtTheFirstLoss])
def test_chains_may_end_where_the_tokens_up_to_there_say_so(causal: type[Decoder]) -> None:
    world = World.random(8, vocab=4)
    decoder = in_blocks(causal)(world, REQUESTS, 4)
    assert len(set(decoder.verified(decoder.draft(np.arange(REQUESTS))).tolist())) > 1
    assert p_value(decoder, TOKENS) > PLAUSIBLE


@pytest.mark.parametrize("broken", [EndsBeforeAToken, LooksAhead])
def test_chains_that_end_where_other_tokens_say_so_are_caught(broken: type[Decoder]) -> None:
    assert p_value(in_blocks(broken)(World.random(8, vocab=4), REQUESTS, 4), TOKENS) < ABSURD


@pytest.mark.parametrize("policy", ["auto", "confidence_token_prob", "confidence_batch_mean"])
def test_production_trims_keep_the_law(policy: str) -> None:
    """A budget has them cut drafts short by what other requests drafted, too."""
    limits = limits_for(4, 13)
    controller = build(policy, limits)
    decoder = in_blocks(Controlled)(PAIR, REQUESTS, controller, limits, batch=6, first_seed=1_000_000)
    assert isinstance(decoder, Controlled)
    assert p_value(decoder, 3) > PLAUSIBLE
    assert decoder.drafted > decoder.accepted > 0
    assert decoder.trimmed > 0


@pytest.fixture(scope="module")
def pairs() -> Grammar:
    return letters_grammar(PAIRS)


@pytest.mark.parametrize("decoder", [Decoder, DrawsAnything, StopsAtRefused])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.8, "presence_penalty": 0.7}], ids=["plain", "processed"])
def test_letters_have_the_law_within_a_grammar(decoder: type[Decoder], params: dict[str, Any], pairs: Grammar) -> None:
    world = PairWorld.random(8, params=params, grammar=pairs)
    assert p_value(in_blocks(decoder)(world, REQUESTS, 3), TOKENS) > PLAUSIBLE


# --- the check can fail -----------------------------------------------------------------------------------------------


class ReplacesAsTokenByToken(BlockVerification):
    """Draws from P less Q behind the accepted prefix, without the prefix's ratio."""

    def replace(self, index: Int64, tokens: Int64) -> Int64:
        self._joint[...] = 1.0
        return super().replace(index, tokens)


class StopsAtTheFirstFailure(BlockVerification):
    """Accepts only prefixes whose own prefixes pass, too."""

    def accept(self, index: Int64, tokens: Int64) -> Bools:
        assert self._q is not None
        request, depth = self._slots(index)
        passed = self._passing(index, tokens, self._q)[:, 1:]
        return np.asarray(np.logical_and.accumulate(passed, axis=1)[request, depth])


class PassesByTheRatio(BlockVerification):
    """Every prefix passes with the chance that only a whole chain has."""

    def _passing(self, index: Int64, tokens: Int64, q: torch.Tensor) -> Bools:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain, "passes", lambda numbers, joint, excess, tested: numbers < joint)
            return super()._passing(index, tokens, q)


class ForgetsThatRatiosEndAtOne(BlockVerification):
    """Lets what P likes better than Q make up for any later token."""

    def _passing(self, index: Int64, tokens: Int64, q: torch.Tensor) -> Bools:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "minimum", lambda ratio, one: ratio)
            return super()._passing(index, tokens, q)


FAULTS = (StopsAtTheFirstFailure, PassesByTheRatio, ForgetsThatRatiosEndAtOne)


def world_of(*rows: tuple[list[float], list[float]]) -> World:
    """By the distributions P and Q after each token."""
    p, q = (np.log(np.array(side, np.float32)) for side in zip(*rows, strict=True))
    return World(p, q)


EVEN = [0.25, 0.25, 0.25, 0.25]
OVERRATED = world_of(
    ([0.1, 0.4, 0.25, 0.25], [0.06, 0.8, 0.07, 0.07]),
    ([0.05, 0.05, 0.45, 0.45], [0.449, 0.25, 0.001, 0.3]),
    (EVEN, EVEN),
    (EVEN, EVEN),
)
"""A drafter that draws token 1 first, twice as often as it should, and hardly ever token 2 behind it."""
WORLDS = {
    "overrated": OVERRATED,
    "all known": World.random(0, vocab=4),
    "a part known": World.random(0, vocab=4, known=PART),
}


@pytest.mark.parametrize(
    ("faulty", "name"),
    [(ReplacesAsTokenByToken, "overrated"), *((fault, name) for fault in FAULTS for name in WORLDS)],
)
def test_the_check_catches(faulty: type[BlockVerification], name: str) -> None:
    world = WORLDS[name]
    assert p_value(Blocks(world, REQUESTS, 3), TOKENS) > PLAUSIBLE
    assert p_value(in_blocks(Decoder, faulty)(world, REQUESTS, 3), TOKENS) < ABSURD


# --- what it is for ---------------------------------------------------------------------------------------------------


def mean_accepted(decoder: Decoder) -> float:
    lanes = np.arange(REQUESTS)
    drafts = decoder.draft(lanes)
    return float(decoder.verify(lanes, drafts, drafts.lens).accepted.mean())


def test_it_accepts_what_the_publication_says() -> None:
    """Its first example: P = (⅓, ⅔), Q = (⅔, ⅓), two tokens: 10/9 tokens are accepted one by one, 11/9 in blocks."""
    p, q = (np.log(np.array([row, row], np.float32)) for row in ((1 / 3, 2 / 3), (2 / 3, 1 / 3)))
    one_by_one, blocks = (mean_accepted(decoder(World(p, q), REQUESTS, 2)) for decoder in (Decoder, Blocks))
    assert one_by_one == pytest.approx(10 / 9, abs=0.04)
    assert blocks == pytest.approx(11 / 9, abs=0.04)


def test_an_early_token_is_accepted_as_often_however_long_the_draft() -> None:
    world = World.random(5)
    rates = []
    for depth in (1, 2, 6):
        decoder, lanes = Blocks(world, REQUESTS, 6), np.arange(REQUESTS)
        accepted = decoder.verify(lanes, decoder.draft(lanes), np.full(REQUESTS, depth)).accepted
        rates.append(np.mean(accepted >= 1))
    assert rates[1:] == pytest.approx(rates[:1] * 2, abs=0.04)
