from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Thread

import numpy as np

from dynaspec.contract.proposer import Drafts, NewText
from dynaspec.contract.step import StopRule, TreeRule
from dynaspec.control.keys import SuffixSettings
from dynaspec.propose.guard import nonsense
from dynaspec.propose.suffix import SuffixProposer
from support.suffix_reference import SuffixReference
from unit.propose.batches import batch, plan

FREE = SuffixSettings(max_spec_factor=4.0)


class Desk:
    """Requests as an engine would tell of them."""

    def __init__(self, settings: SuffixSettings = FREE, longest: int = 8) -> None:
        self.proposer = SuffixProposer(settings, longest)
        self.texts: dict[int, list[int]] = {}

    def open(self, lane: int, prompt: Sequence[int], salt: str = "") -> None:
        self.proposer.admit(lane, (), salt)
        self.texts[lane] = list(prompt)

    def emit(self, lane: int, *tokens: int) -> None:
        start = len(self.texts[lane])
        self.texts[lane] += tokens
        column = np.array([[lane], [start], [len(self.texts[lane])]], dtype=np.int64)
        self.proposer.commit(NewText(column[0], self.batch(lane).tokens, column[1], column[2]))

    def close(self, lane: int) -> None:
        self.proposer.evict(lane)
        del self.texts[lane]

    def batch(self, *lanes: int):  # type: ignore[no-untyped-def]
        return batch(*(self.texts[lane] for lane in lanes), lanes=lanes)

    def peek(self, *lanes: int) -> tuple[tuple[int, int], ...]:
        return tuple(map(tuple, self.proposer.peek(self.batch(*lanes)).found.tolist()))

    def draft(self, lane: int, depth: int = 8) -> list[int]:
        drafts = self.drafts((lane,), (depth,))
        return drafts.tokens[0, : drafts.lens[0]].tolist()

    def drafts(self, lanes: Sequence[int], depth: Sequence[int]) -> Drafts:
        return self.proposer.propose(self.batch(*lanes), plan(*depth))


def test_a_request_drafts_from_its_own_prompt_and_output() -> None:
    desk = Desk()
    desk.open(0, [1, 2, 3, 4, 9])
    desk.emit(0, 2)
    assert desk.peek(0) == ((1, 4),)
    assert desk.draft(0) == [3, 4, 9, 2]
    assert desk.draft(0, depth=2) == [3, 4]
    desk.emit(0, 3, 7, 2)
    assert desk.draft(0) == [3, 7, 2]  # as often as 4 after 3, and later


def test_what_is_offered_is_drafted() -> None:
    desk = Desk()
    for lane, prompt in enumerate(([1, 2, 3, 1, 2, 3, 1], [5, 6, 7], [4, 4, 4, 4])):
        desk.open(lane, prompt)
    for lane, token in enumerate((2, 8, 4)):
        desk.emit(lane, token)
    offers = desk.peek(0, 1, 2)
    drafts = desk.drafts((0, 1, 2), (8, 8, 0))
    assert [n for _, n in offers[:2]] == drafts.lens.tolist()[:2]
    assert desk.proposer.peek(desk.batch(0)).tokens.tolist() == [drafts.tokens[0, : drafts.lens[0]].tolist()]
    assert offers[1] == (0, 0)
    assert drafts.lens[2] == 0
    assert drafts.skipped == {"b": "no_match"}
    assert (drafts.q, drafts.confidence, drafts.rows_per_pass) == (None, None, ())


def test_where_trees_are_asked_for_they_are_drafted_and_offers_stay_those_of_paths() -> None:
    desk = Desk()
    desk.open(0, [2, 3, 4, 2, 3, 4, 2, 5])
    desk.open(1, [7])
    desk.emit(0, 2)
    desk.emit(1, 8)
    before, asked = desk.peek(0, 1), replace(plan(2, 2), nodes=(4, 4), tree=TreeRule(2))
    drafts = desk.proposer.propose(desk.batch(0, 1), asked)
    assert drafts.parents is not None
    assert drafts.lens.tolist() == [4, 0]
    assert drafts.tokens[0].tolist() == [3, 4, 5, 2]
    assert drafts.parents[0].tolist() == [-1, 0, -1, 2]
    assert drafts.skipped == {"b": "no_match"}
    assert not nonsense(drafts, asked, 10).any()
    assert desk.peek(0, 1) == before
    assert drafts.confidence is None


def test_a_tree_ends_where_survival_is_too_low_for_the_place_but_for_the_first_node() -> None:
    desk = Desk()
    desk.open(0, [2, 3, 4, 2, 3, 4, 2, 5])
    desk.emit(0, 2)
    for below, lens in (((0.9,), 1), ((0.9, 0.5), 2), ((0.0, 0.5, 0.2), 4)):
        asked = replace(plan(2), nodes=(4,), tree=TreeRule(2, below))
        assert desk.proposer.propose(desk.batch(0), asked).lens.tolist() == [lens]


def test_beside_a_models_stop_rule_drafts_are_chains() -> None:
    desk = Desk()
    desk.open(0, [2, 3, 4, 2, 3, 4, 2, 5])
    desk.emit(0, 2)
    asked = replace(plan(2, stop=StopRule((0.5,))), nodes=(4,), tree=TreeRule(2))
    drafts = desk.proposer.propose(desk.batch(0), asked)
    assert (drafts.parents, drafts.tokens.tolist()) == (None, [[3, 4]])


def test_answers_of_others_are_drafted_from_and_their_prompts_are_not() -> None:
    desk = Desk()
    desk.open(0, [20, 21, 22])
    desk.emit(0, 1)
    desk.emit(0, 2, 3)
    desk.open(1, [8])
    desk.emit(1, 1)
    assert desk.draft(1) == [2, 3]
    desk.close(0)
    assert desk.draft(1) == [2, 3]  # an ended request's answer stays
    desk.open(0, [9])
    desk.emit(0, 20)
    assert desk.draft(0) == []


def test_the_last_tokens_of_a_request_are_kept() -> None:
    desk = Desk()
    desk.open(0, [9])
    desk.emit(0, 1)
    desk.emit(0, 2)
    desk.close(0)
    desk.open(1, [9])
    desk.emit(1, 1)
    assert desk.draft(1) == [2]


def test_salts_share_nothing() -> None:
    desk = Desk()
    desk.open(0, [9], "a")
    desk.emit(0, 1)
    desk.emit(0, 2)
    desk.open(1, [9], "b")
    desk.emit(1, 1)
    assert desk.draft(1) == []
    desk.open(2, [9], "a")
    desk.emit(2, 1)
    assert desk.draft(2) == [2]


def test_a_preempted_request_comes_back_with_its_output_as_prompt() -> None:
    desk = Desk(SuffixSettings(max_cached_requests=0, max_spec_factor=4.0))
    desk.open(0, [1, 2])
    desk.emit(0, 3)
    text = desk.texts[0]
    desk.close(0)
    desk.open(2, text)
    desk.emit(2, 1)
    assert desk.draft(2) == [2, 3, 1]


def test_a_lane_that_has_nothing_yet_drafts_nothing() -> None:
    desk = Desk()
    desk.open(0, [1, 1, 1])
    assert desk.peek(0) == ((0, 0),)
    assert desk.draft(0) == []


def test_the_longer_promise_of_own_text_and_others_wins() -> None:
    settings = SuffixSettings(max_spec_factor=1.0, min_token_prob=0.0)
    desk = Desk(settings)
    random = np.random.default_rng(3)
    own, everybody = {}, SuffixReference(settings.max_tree_depth)
    for lane in range(4):
        prompt = random.integers(0, 3, 6).tolist()
        desk.open(lane, prompt)
        own[lane] = SuffixReference(settings.max_tree_depth)
        own[lane].start(0)
        own[lane].append(0, prompt)
        everybody.start(lane)
    seen = set()
    for _ in range(200):
        lane, token = int(random.integers(4)), int(random.integers(3))
        desk.emit(lane, token)
        own[lane].append(0, [token])
        everybody.append(lane, [token])
        asked = desk.texts[lane], 8, settings.max_spec_factor, 0.0, settings.min_token_prob
        mine, theirs = own[lane].speculate(*asked), everybody.speculate(*asked)
        wanted = theirs if theirs[3] > mine[3] else mine
        assert desk.draft(lane) == list(wanted[0])
        seen.add(theirs[3] > mine[3])
    assert seen == {True, False}


def test_memory_is_told() -> None:
    desk = Desk()
    desk.open(0, list(range(200)))
    desk.emit(0, 1)
    answers, tokens, taken = desk.proposer.kept()
    assert (answers, tokens) == (1, 1)
    desk.close(0)
    after = desk.proposer.kept()
    assert after[:2] == (1, 1)
    assert 0 < after.bytes < taken


def test_offers_may_be_asked_for_while_another_thread_drafts() -> None:
    desk = Desk()
    for lane in range(3):
        desk.open(lane, [1, 2, 3, lane])
    stop: list[bool] = []
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop:
                desk.proposer.peek(table)
        except BaseException as error:
            failed.append(error)

    for lane in range(3):
        desk.emit(lane, 1)
    table = desk.batch(0, 1, 2)
    asking = Thread(target=ask)
    asking.start()
    random = np.random.default_rng(0)
    for i in range(1500):
        lane = i % 3
        if len(desk.texts[lane]) > 250:
            desk.close(lane)
            desk.open(lane, [1, 2])
        desk.emit(lane, int(random.integers(4)))
        desk.draft(lane)
    stop.append(True)
    asking.join()
    assert not failed
