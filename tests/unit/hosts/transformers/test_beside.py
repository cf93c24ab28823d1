"""A look-up in the text so far, beside an assistant."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.registry import build_controller
from dynaspec.hosts.transformers import Session, generate
from dynaspec.hosts.transformers.setup import resolve_setup
from dynaspec.observe.decision_log import ObserveCall, PlanCall, read_calls, read_header
from dynaspec.simulate.recorded import replay
from support.controllers import VaryingController
from unit.hosts.transformers.driving import decide_with, ours, plain
from unit.hosts.transformers.pairs import Models, llama
from unit.hosts.transformers.test_sampling import DRAWS, _chances
from unit.hosts.transformers.test_tokenizers import Universal, universal  # noqa: F401  a fixture

BESIDE = {"policy": "auto", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "num_assistant_tokens": 6}
REPEATING = {"no_repeat_ngram_size": 0, "max_new_tokens": 40}
ASSISTANT, LOOKUP = 0, 1


class Routed:
    """Each step's draft is from the proposer next in turn, of one length; where the look-up has nothing, so be it."""

    def __init__(self, limits: Limits, turns: Sequence[int], length: int) -> None:
        self._planner = ChainPlanner(limits)
        self._turns, self._length = turns, length
        self.views: list[StepView] = []
        self.outcomes: list[StepOutcome] = []

    def plan(self, view: StepView) -> SpecPlan:
        self.views.append(view)
        turn = self._turns[(len(self.views) - 1) % len(self._turns)]
        return replace(self._planner.plan(view, [self._length]), proposer=(turn,))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing was kept."""

    def of(self, proposer: int) -> list[StepOutcome]:
        return [outcome for outcome in self.outcomes if outcome.proposer == (proposer,) and outcome.drafted[0]]


def routed(monkeypatch: pytest.MonkeyPatch, turns: Sequence[int], length: int = 5) -> list[Routed]:
    made: list[Routed] = []
    decide_with(monkeypatch, lambda limits: made.append(Routed(limits, turns, length)) or made[-1])
    return made


def test_both_draft_and_the_assistant_catches_up(looping: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made = routed(monkeypatch, [ASSISTANT, LOOKUP, LOOKUP])
    output, counts = ours(looping, BESIDE, **REPEATING)
    assert torch.equal(output, plain(looping, **REPEATING))
    (controller,) = made
    by_assistant, by_lookup = controller.of(ASSISTANT), controller.of(LOOKUP)
    assert sum(outcome.accepted[0] for outcome in by_lookup) > 0
    assert sum(outcome.accepted[0] for outcome in by_assistant) > 0
    assert all(outcome.work.rows_per_pass == () and not outcome.confidence[0] for outcome in by_lookup)
    assert all(len(outcome.work.rows_per_pass) == outcome.drafted[0] for outcome in by_assistant)
    for view in controller.views:
        assert len(view.lag) == len(view.offers) == 2
        assert view.lag[LOOKUP] == (0,)
        assert view.offers[ASSISTANT] is None
    assert max(view.lag[ASSISTANT][0] for view in controller.views) > 2
    assert counts.drafter_passes == sum(outcome.drafted[0] for outcome in by_assistant)


@pytest.mark.parametrize("lookup", [BESIDE, {"policy": "auto", "suffix_decoding_max_tree_depth": 16}])
def test_what_lookups_offered_is_compared_with_what_came(
    looping: Models, lookup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = routed(monkeypatch, [ASSISTANT, LOOKUP], length=3)
    ours(looping, lookup, **REPEATING)
    views = {view.step: view for view in made[0].views}
    right = [0, 0]
    for outcome in made[0].outcomes:
        assistant, told = outcome.came_true
        ((match, compared, agreed),) = told or ()
        ((found, offered),) = views[outcome.plan_step].offers[LOOKUP] or ()
        assert (assistant, match) == (None, found)
        assert agreed <= compared == min(offered, outcome.emitted[0])
        if outcome.proposer == (LOOKUP,) and outcome.drafted[0]:
            assert agreed >= outcome.accepted[0]
        right[outcome.proposer[0] == LOOKUP] += agreed
    assert min(right) > 0


def test_suffix_trees_beside_an_assistant(looping: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made = routed(monkeypatch, [ASSISTANT, LOOKUP])
    config = {"policy": "auto", "suffix_decoding_max_tree_depth": 16, "num_assistant_tokens": 6}
    output, _ = ours(looping, config, **REPEATING)
    assert torch.equal(output, plain(looping, **REPEATING))
    assert sum(outcome.accepted[0] for outcome in made[0].of(LOOKUP)) > 0
    assert sum(outcome.accepted[0] for outcome in made[0].of(ASSISTANT)) > 0


def test_every_kind_of_model(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(models, no_repeat_ngram_size=0)
    assert torch.equal(ours(models, BESIDE, no_repeat_ngram_size=0)[0], expected)
    routed(monkeypatch, [ASSISTANT, LOOKUP])  # `auto` may find that nothing pays here
    output, counts = ours(models, BESIDE, no_repeat_ngram_size=0)
    assert torch.equal(output, expected)
    assert counts.accepted > 0


@pytest.mark.parametrize("seed", range(3))
def test_proposers_lengths_and_trims_that_vary(models: Models, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decide_with(monkeypatch, lambda limits: VaryingController(limits, seed=seed))
    output, counts = ours(models, BESIDE, no_repeat_ngram_size=0)
    assert torch.equal(output, plain(models, no_repeat_ngram_size=0))
    assert 0 < counts.drafts < counts.steps


def test_a_text_without_any_match(decoder: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made = routed(monkeypatch, [LOOKUP])
    config = {**BESIDE, "prompt_lookup_min": 3}  # no two tokens occur twice
    output, counts = ours(decoder, config)
    assert torch.equal(output, plain(decoder))
    assert counts.drafts == counts.accepted == 0
    assert counts.skipped["no_match"] > 0
    assert all(view.offers[LOOKUP] == ((0, 0),) for view in made[0].views)


def test_no_drafts_at_all(decoder: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    routed(monkeypatch, [ASSISTANT, LOOKUP], length=0)
    output, counts = ours(decoder, BESIDE)
    assert torch.equal(output, plain(decoder))
    assert counts.draft_tokens == 0


@pytest.mark.parametrize("most", range(1, 12))
def test_the_length_is_reached_inside_a_lookup(looping: Models, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    routed(monkeypatch, [LOOKUP])
    options = {**REPEATING, "max_new_tokens": 20 + most}
    output, counts = ours(looping, BESIDE, **options)
    assert torch.equal(output, plain(looping, **options))
    assert counts.accepted > 0


def test_the_end_is_inside_a_lookup(looping: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to be in the prompt already; here that is the text so far, which goes on repeating itself."""
    made = routed(monkeypatch, [LOOKUP])
    text = plain(looping, **REPEATING)
    for end in sorted(set(text[0, 20:28].tolist())):
        options = {**REPEATING, "decoder_input_ids": text[:, :20], "eos_token_id": end}
        output, _ = ours(looping, BESIDE, **options)
        assert torch.equal(output, plain(looping, **options))
        assert output[0, -1] == end
    assert any(controller.outcomes[-1].ended == ("stopped",) for controller in made)


def test_a_stopping_criterion(looping: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Transformers' own look-up, a criterion is asked after a step, so it may end some tokens late."""
    routed(monkeypatch, [LOOKUP], length=3)
    criteria = StoppingCriteriaList([MaxLengthCriteria(25)])
    output, _ = ours(looping, BESIDE, stopping_criteria=criteria, **REPEATING)
    text = plain(looping, **REPEATING)
    assert 25 <= output.shape[1] <= 28
    assert torch.equal(output, text[:, : output.shape[1]])


def test_an_assistant_with_another_tokenizer(universal: Universal, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """What is looked up are the target's tokens."""
    made = routed(monkeypatch, [LOOKUP, ASSISTANT])
    options = {**REPEATING, **universal.tokenizers}
    output, _ = ours(universal.models, BESIDE, **options)
    assert torch.equal(output, plain(universal.models, **REPEATING))
    assert made[0].of(LOOKUP)
    assert made[0].of(ASSISTANT)


def test_sampled_output_has_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two of some tokens, drafted for by either, against the target's probabilities."""
    decide_with(monkeypatch, lambda limits: VaryingController(limits, seed=2))
    models = llama(seed=3, vocab=12)
    torch.manual_seed(1)
    session, seen = Session(), Counter[tuple[int, ...]]()
    start = models.inputs.shape[1]
    for _ in range(DRAWS):
        output = generate(
            models.target,
            models.inputs,
            assistant_model=models.assistant,
            session=session,
            speculative_config=BESIDE,
            do_sample=True,
            max_new_tokens=5,
            top_k=0,
        )
        seen[tuple(output[0, start : start + 2].tolist())] += 1
    counts = session.stats.snapshot()
    assert counts.accepted > DRAWS // 5
    assert counts.drafter_passes < counts.draft_tokens  # the look-up has drafted, too
    expected = {pair: DRAWS * chance for pair, chance in _chances(models).items()}
    common = [pair for pair, count in expected.items() if count >= 8]
    rest = DRAWS - sum(expected[pair] for pair in common)
    squares = sum((seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in common)
    squares += (DRAWS - sum(seen[pair] for pair in common) - rest) ** 2 / rest
    assert squares < len(common) + 4 * (2 * len(common)) ** 0.5  # χ² with that many degrees of freedom


def test_a_log_replays_to_identical_plans(looping: Models, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Session(decision_log=path) as session:
        for _ in range(3):
            ours(looping, BESIDE, session=session, **REPEATING)
    header = read_header(path)
    calls = list(read_calls(path))
    limits = next(call.view.limits for call in calls if isinstance(call, PlanCall))
    assert [traits.name for traits in limits.proposers] == ["assistant", "ngram"]
    assert {call.outcome.proposer for call in calls if isinstance(call, ObserveCall)} == {(ASSISTANT,), (LOOKUP,)}
    config = SpeculativeConfig.parse(header.speculative_config, {})
    result = replay(path, build_controller(config, limits, costs=header.costs))
    assert result.first is None, str(result.first)
    assert result.plans == session.stats.snapshot().steps


def test_what_is_looked_up_by_itself(decoder: Models) -> None:
    """By ``auto``, unless told otherwise, where an assistant can skip steps."""

    def names(given: Any, **options: Any) -> list[str]:
        setup = resolve_setup(given, decoder.target, decoder.assistant, options)
        return [traits.name for traits in setup.limits.proposers]

    other = {"assistant_tokenizer": object()}
    assert names(None) == ["assistant", "ngram"]
    assert names({"policy": "auto"}) == ["assistant", "ngram"]
    assert names({"policy": "constant"}) == names({"prompt_lookup_max": 0}) == ["assistant"]
    assert names(None, **other) == names({"policy": "auto"}, **other) == ["assistant"]
    assert names({"prompt_lookup_max": 3}, **other) == ["assistant", "ngram"]


def test_settings_that_cannot_be(decoder: Models) -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_max is -1; expected an integer of at least 0"):
        ours(decoder, {"prompt_lookup_max": -1})
    with pytest.raises(ConfigError, match="prompt_lookup_min is 5 but prompt_lookup_max is 3"):
        ours(decoder, {"prompt_lookup_min": 5, "prompt_lookup_max": 3})
    with pytest.raises(ConfigError, match="or policy 'auto', which looks up beside the model"):
        ours(decoder, {"policy": "elastic", "prompt_lookup_max": 3})


def test_models_are_left_as_they_were(looping: Models) -> None:
    models = looping.target, looping.assistant
    before = copy.deepcopy([model.generation_config.to_dict() for model in models])
    ours(looping, BESIDE, **REPEATING)
    assert [model.generation_config.to_dict() for model in models] == before
