"""Does speculative sampling have the target's distribution? Chi-square tests of the first two tokens.

The same check must accept the real sampler and catch faulty ones, each with a fault that has been made before. Faulty
trims are in ``test_bias_trap``. Drafters know all tokens, as a draft model does, or a part of them, as a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dynaspec.contract.proposer import Drafts
from dynaspec.sampling.rng import Purpose, nth, uniforms
from dynaspec.sampling.state import SamplerState
from dynaspec.verify import chain
from exactness.toy import ABSURD, PLAUSIBLE, REQUESTS, Decoder, World, decode_plainly, p_value

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "min_p and bias": {"min_p": 0.15, "logit_bias": {1: 1.0}},
}
PART = (0, 2, 3)
"""Tokens that a drafter knows which does not know all five."""
Known = tuple[int, ...] | None


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled drafts", "deterministic drafts"])
@pytest.mark.parametrize("name", PARAMS)
def test_rejection_sampling_has_the_targets_distribution(name: str, deterministic: bool, depth: int) -> None:
    world = World.random(7 * depth + len(name), params=PARAMS[name], deterministic_drafts=deterministic)
    assert p_value(Decoder(world, REQUESTS, depth)) > PLAUSIBLE


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled drafts", "deterministic drafts"])
@pytest.mark.parametrize("name", PARAMS)
def test_it_has_with_a_drafter_that_knows_a_part(name: str, deterministic: bool) -> None:
    world = World.random(19 + len(name), params=PARAMS[name], deterministic_drafts=deterministic, known=PART)
    assert p_value(Decoder(world, REQUESTS, 2)) > PLAUSIBLE


def test_it_has_where_the_drafter_knows_no_token_that_is_allowed() -> None:
    world = World.random(6, params={"allowed_token_ids": [1, 4]}, known=PART)
    decoder = Decoder(world, REQUESTS, 2)
    assert p_value(decoder) > PLAUSIBLE
    assert {int(token) for output in decoder.output for token in output} == {1, 4}


@pytest.mark.parametrize("known", [None, PART], ids=["all known", "a part known"])
@pytest.mark.parametrize("depth", [1, 3])
def test_bad_words_in_the_middle_of_a_draft(depth: int, known: Known) -> None:
    world = World.random(3, bad_words=((2,), (1, 3), (4, 4)), known=known)
    assert world.pairs()[1, 3] == 0
    assert p_value(Decoder(world, REQUESTS, depth)) > PLAUSIBLE


@pytest.mark.parametrize("spread", [0.05, 4.0])
def test_drafters_that_are_nearly_right_or_quite_wrong(spread: float) -> None:
    world = World.random(5)
    noise = np.random.default_rng(6).normal(0, spread, world.target.shape).astype(np.float32)
    assert p_value(Decoder(World(world.target, world.target + noise), REQUESTS, 3)) > PLAUSIBLE


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("depth", [0, 2])
def test_coupled_sampling_has_the_targets_distribution_over_seeds(name: str, depth: int) -> None:
    world = World.random(11, params={**PARAMS[name], "seed": 0})
    assert p_value(Decoder(world, REQUESTS, depth)) > PLAUSIBLE


@pytest.mark.parametrize("params", [*PARAMS.values(), {"temperature": 0.0}], ids=[*PARAMS, "greedy"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled drafts", "deterministic drafts"])
@pytest.mark.parametrize("known", [None, tuple(range(1, 30, 2))], ids=["all known", "a part known"])
def test_seeded_and_greedy_output_is_that_of_plain_decoding(
    params: dict[str, Any], known: Known, deterministic: bool
) -> None:
    for seed in range(2):
        world = World.random(
            seed,
            vocab=30,
            spread=3.0,
            params={**params, "seed": 0},
            bad_words=((3,), (4, 5)),
            deterministic_drafts=deterministic,
            known=known,
        )
        plain = decode_plainly(world, 60, 9)
        for depth in (1, 4):
            np.testing.assert_array_equal(Decoder(world, 60, depth).run(9), plain)


def test_coupling_accepts_most_of_what_a_good_drafter_proposes() -> None:
    world = World.random(1, vocab=30, spread=2.0, params={"seed": 0})
    noise = np.random.default_rng(0).normal(0, 0.2, world.target.shape).astype(np.float32)
    decoder = Decoder(World(world.target, world.target + noise, world.params), 2000, 1)
    lanes = np.arange(2000)
    drafts = decoder.draft(lanes)
    coupled = decoder.verify(lanes, drafts, drafts.lens).accepted.mean()
    overlap = np.minimum(*(torch.from_numpy(m[0]).softmax(-1).numpy() for m in (world.target, world.target + noise)))
    assert overlap.sum() - 0.15 < coupled < overlap.sum() + 0.03


class TakesDraftsAsCertain(Decoder):
    """Not faulty, merely wasteful: treats drawn drafts as if they were deterministic."""

    def verify(self, lanes: np.ndarray, drafts: Drafts, lens: np.ndarray) -> chain.Accepted:
        return super().verify(lanes, Drafts(drafts.tokens, drafts.lens), lens)


class ForgetsTheResidual(Decoder):
    """Draws from p where it has rejected."""

    def verify(self, *args: Any) -> chain.Accepted:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain, "residual", lambda p, q, tokens: p)
            return super().verify(*args)


class ReusesTheDraftsNumber(Decoder):
    """Decides about a token with the very random number that has drawn it."""

    def verify(self, lanes: np.ndarray, drafts: Drafts, lens: np.ndarray) -> chain.Accepted:
        def accept(self: chain.RejectionSampling, index: np.ndarray, tokens: np.ndarray) -> np.ndarray:
            keys = self._state.keys(self._rows, index, Purpose.DRAFT)
            noise = np.array([nth(key, token) for key, token in zip(keys, tokens, strict=True)], np.uint64)
            u = noise / 2.0**64
            q = drafts.q[index * 0 + self._rows.request[index], self._rows.depth[index], tokens].numpy()
            return u * q < self._p[self._place[index], tokens].numpy()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain.RejectionSampling, "accept", accept)
            return super().verify(lanes, drafts, lens)


class SharesStreams(Decoder):
    """Draws replacements with the noise of the rejected draft."""

    def verify(self, *args: Any) -> chain.Accepted:
        honest = SamplerState.keys

        def keys(self: SamplerState, rows: Any, index: np.ndarray, purpose: Purpose) -> np.ndarray:
            return honest(self, rows, index, Purpose.DRAFT if purpose is Purpose.RESIDUAL else purpose)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SamplerState, "keys", keys)
            return super().verify(*args)


class RecomputesQ(Decoder):
    """Tests against the drafter's distribution without the processors that were applied before drawing."""

    def draft(self, lanes: np.ndarray) -> Drafts:
        drafts = super().draft(lanes)
        last = np.concatenate([self.newest[:, None], drafts.tokens[:, :-1]], 1)
        drafts.q = self.world.drafter_logits(last.ravel()).softmax(-1).unflatten(0, last.shape)
        return drafts


class ClaimsToKnowAll(Decoder):
    """Says that it might have drawn the tokens that it does not know, too."""

    def draft(self, lanes: np.ndarray) -> Drafts:
        drafts = super().draft(lanes)
        assert drafts.q is not None
        drafts.q = 0.7 * drafts.q + 0.3 / self.world.vocab
        return drafts


class GoesByItsOwnIds(Decoder):
    """Leaves q in the order of the tokens that it knows."""

    def draft(self, lanes: np.ndarray) -> Drafts:
        drafts, known = super().draft(lanes), list(self.world.known or ())
        assert drafts.q is not None
        q = torch.zeros_like(drafts.q)
        q[..., : len(known)] = drafts.q[..., known]
        drafts.q = q
        return drafts


@pytest.mark.parametrize("known", [None, PART], ids=["all known", "a part known"])
def test_wasteful_but_exact(known: Known) -> None:
    assert p_value(TakesDraftsAsCertain(World.random(2, known=known), REQUESTS, 3)) > PLAUSIBLE


FAULTS: tuple[type[Decoder], ...] = (ForgetsTheResidual, ReusesTheDraftsNumber, SharesStreams, RecomputesQ)


@pytest.mark.parametrize(
    ("faulty", "known"),
    [*((f, k) for f in FAULTS for k in (None, PART)), (ClaimsToKnowAll, PART), (GoesByItsOwnIds, PART)],
)
def test_the_check_catches(faulty: type[Decoder], known: Known) -> None:
    world = World.random(2, params={"temperature": 0.5}, known=known)
    assert p_value(Decoder(world, REQUESTS, 2)) > PLAUSIBLE
    assert p_value(faulty(world, REQUESTS, 2)) < ABSURD


def test_accept_numbers_are_independent_of_the_drafts() -> None:
    world = World.random(4)
    decoder = Decoder(world, REQUESTS, 1)
    lanes = np.arange(REQUESTS)
    drafts = decoder.draft(lanes)
    rows = chain.Rows(lanes, lanes, np.zeros_like(lanes), drafts.tokens)
    u = uniforms(decoder.state.keys(rows, lanes, Purpose.ACCEPT))
    groups = [u[drafts.tokens[:, 0] == token] for token in range(world.vocab)]
    assert stats.kruskal(*groups).pvalue > PLAUSIBLE
