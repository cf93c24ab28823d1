"""What came of drafts, read off the texts: vLLM's verification is played by whoever writes the text on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from dynaspec.contract.proposer import Drafts, Offers
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView
from dynaspec.hosts.vllm.texts import DraftResult, MatchedBatch, PendingStep, Texts, build_outcome, draft_result

TEXT = [5, 6, 7, 8]
DRAFT = [11, 12, 13, 14]
OTHER = 40
"""A token that was not drafted."""


@dataclass
class Case:
    """Requests of one step, their drafts, and what the next step brings."""

    texts: Sequence[Sequence[int]]
    drafts: Sequence[Sequence[int]]
    """What was handed over."""
    drawn: Sequence[int] | None = None
    """Tokens that were drafted, before the trim; as many as were handed over unless told otherwise."""
    granted: Sequence[int] | None = None
    met: MatchedBatch = field(init=False)
    came: DraftResult = field(init=False)

    def __post_init__(self) -> None:
        self.known = Texts(4, 300)
        self.planned = self.meet(self.texts, [1] * len(self.texts))
        self.handed = tuple(map(len, self.drafts))
        self.tokens = np.zeros((len(self.drafts), max(self.handed, default=0) + 1), dtype=np.int64)
        for place, tokens in enumerate(self.drafts):
            self.tokens[place, : len(tokens)] = tokens

    def bring(self, *rows: tuple[int, Sequence[int]] | None, unseen: int = 0) -> DraftResult:
        """Rows of the next step: whose text it goes on from, and the tokens that it brings. None: still reads.

        Args:
            unseen: how many of these tokens an earlier step has brought.
        """
        texts = [[99] if row is None else [*self.texts[row[0]], *row[1]] for row in rows]
        self.met = self.meet(texts, [0 if row is None else len(row[1]) - unseen for row in rows])
        self.came = draft_result(self.met, self.known.tokens, self.planned.lanes, self.tokens, self.handed)
        return self.came

    def outcome(self, pass_rows: int | None = None, *, prefill: bool = False, early: bool = False) -> StepOutcome:
        ids = tuple("abcd"[: len(self.texts)])
        handed = self.handed
        drawn = handed if self.drawn is None else tuple(self.drawn)
        granted = drawn if self.granted is None else tuple(self.granted)
        nobody = (0,) * len(ids)
        view = StepView(7, ids, nobody, nobody, nobody, nobody, (0.0,) * len(ids), (), (), 0, 0, Limits((0, 4)))
        made = Drafts(self.tokens, np.array(drawn), rows_per_pass=(9, 2), kv_skipped=3, kv_redone=4)
        made.early_exit = np.array([early] * len(ids)) if early else None
        confidence = tuple((0.5 + i / 8,) * n for i, n in enumerate(drawn))
        opened = PendingStep(
            view,
            self.planned.lanes,
            SpecPlan(7, granted, nobody, granted),
            SpecPlan(7, handed, tuple(range(len(ids))), handed),
            made,
            DraftView(drawn, confidence),
            (None, Offers(np.array([(2, n) for n in handed], dtype=np.int64).reshape(-1, 2), self.tokens)),
            began_s=10.0,
            ended_s=10.5,
        )
        return build_outcome(opened, self.came, self.known.tokens, pass_rows, 12.5, prefill=prefill)

    def meet(self, texts: Sequence[Sequence[int]], brought: Sequence[int]) -> MatchedBatch:
        tokens = np.zeros((4, 300), dtype=np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        lengths = np.array([*map(len, texts), *[0] * (4 - len(texts))], dtype=np.int32)
        return self.known.meet([[0] * n for n in brought], lengths, tokens)


# --- one request's draft ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "brought", "verified", "accepted", "ended"),
    [
        (DRAFT, [*DRAFT, OTHER], 4, 4, "all_accepted"),
        (DRAFT, [*DRAFT, DRAFT[0]], 4, 4, "all_accepted"),
        (DRAFT, [OTHER], 4, 0, "rejected"),
        (DRAFT, [*DRAFT[:1], OTHER], 4, 1, "rejected"),
        (DRAFT, [*DRAFT[:3], OTHER], 4, 3, "rejected"),
        # The scheduler has cut the draft, and the target's own token is what was drafted next.
        (DRAFT, [DRAFT[0]], 0, 0, "all_accepted"),
        (DRAFT, DRAFT[:2], 1, 1, "all_accepted"),
        (DRAFT, DRAFT, 3, 3, "all_accepted"),
        (DRAFT[:1], [DRAFT[0], OTHER], 1, 1, "all_accepted"),
        ([], [OTHER], 0, 0, "none"),
        ([], [DRAFT[0]], 0, 0, "none"),
    ],
)
def test_a_draft_ends_where_the_text_goes_on_otherwise(
    draft: list[int], brought: list[int], verified: int, accepted: int, ended: str
) -> None:
    case = Case([TEXT], [draft])
    case.bring((0, brought))
    outcome = case.outcome()
    assert (outcome.verified, outcome.accepted, outcome.ended) == ((verified,), (accepted,), (ended,))
    assert outcome.emitted == (len(brought),)
    assert outcome.ids == ("a",)
    # As an offer it is compared with all that came, verified or not.
    same = [ours == theirs for ours, theirs in zip(draft, brought, strict=False)]
    assert outcome.came_true == (None, ((2, len(same), (*same, False).index(False)),))


def test_what_was_cut_off_a_draft_does_not_count_though_it_has_become_text() -> None:
    case = Case([TEXT], [[11, 11]], drawn=[3])
    case.tokens[:] = 11
    case.bring((0, [11, 11, 11]))
    assert (case.outcome().accepted, case.outcome().drafted, case.outcome().verified) == ((2,), (3,), (2,))


# --- who is still there -------------------------------------------------------------------------------------------


def test_each_request_has_its_own_draft_wherever_its_row_is() -> None:
    case = Case([TEXT, [9, 9], [1]], [DRAFT, [21, 22], [31]])
    came = case.bring((2, [31, OTHER]), (0, [11, OTHER]), (1, [OTHER]))
    assert came.places.tolist() == [2, 0, 1]
    assert came.met.tolist() == [0, 1, 2]
    assert came.before.tolist() == [1, 4, 2]
    assert came.accepted.tolist() == [1, 1, 0]
    assert came.emitted.tolist() == [2, 2, 1]
    assert came.rejected.tolist() == [False, True, True]
    outcome = case.outcome()
    assert outcome.ids == ("c", "a", "b")
    assert outcome.proposer == (2, 0, 1)
    assert outcome.confidence == ((0.75,), (0.5,) * 4, (0.625,) * 2)
    assert outcome.came_true == (None, ((2, 1, 1), (2, 2, 1), (2, 1, 0)))


def test_a_request_that_has_vanished_says_nothing() -> None:
    case = Case([TEXT, [9, 9]], [DRAFT, [21, 22]])
    assert case.bring((1, [21, OTHER])).places.tolist() == [1]
    assert case.outcome().ids == ("b",)


def test_a_new_request_on_the_lane_of_another_says_nothing() -> None:
    case = Case([TEXT, [9, 9], [1], [2]], [DRAFT, [21], [22], [23]])
    new_texts = [[60, 61], [9, 9, 21, OTHER], [1, OTHER], [2, OTHER]]
    met = case.meet(new_texts, [2, 2, 1, 1])
    came = draft_result(met, case.known.tokens, case.planned.lanes, case.tokens, case.handed)
    assert met.lanes[0] == case.planned.lanes[0]
    assert came.places.tolist() == [1, 2, 3]


def test_rows_that_read_their_prompts_say_nothing() -> None:
    case = Case([TEXT], [DRAFT])
    came = case.bring(None, (0, [11, OTHER]))
    assert (came.places.tolist(), came.met.tolist(), case.met.rows.tolist()) == ([0], [0], [1])


def test_after_a_step_that_passed_unseen_nobody_knows() -> None:
    case = Case([TEXT, [9, 9]], [DRAFT, [21]])
    came = case.bring((0, [11, 12, OTHER]), (1, [21, OTHER]), unseen=1)
    assert came.places.size == 0


def test_with_nobody_left_nothing_came() -> None:
    case = Case([TEXT], [DRAFT])
    assert case.bring().places.size == 0


# --- the step -----------------------------------------------------------------------------------------------------


def test_what_was_granted_drawn_and_kept_are_told_apart() -> None:
    case = Case([TEXT, [9, 9]], [DRAFT[:2], [21]], drawn=[3, 2], granted=[5, 4])
    case.bring((0, [11, 12, OTHER]), (1, [OTHER]))
    outcome = case.outcome(early=True)
    assert (outcome.requested, outcome.drafted, outcome.verified) == ((5, 4), (3, 2), (2, 1))
    assert outcome.early_exit == (True, True)
    assert case.outcome().early_exit == (False, False)
    assert (outcome.plan_step, outcome.work.rows_per_pass) == (7, (9, 2))
    assert (outcome.work.kv_skipped, outcome.work.kv_redone) == (3, 4)


def test_seconds_are_those_of_drafting_and_of_the_rest() -> None:
    case = Case([TEXT], [DRAFT])
    case.bring((0, [OTHER]))
    outcome = case.outcome()
    assert (outcome.draft_s, outcome.verify_s, outcome.step_s) == (0.5, 2.0, 2.5)


def seen(length: int, drafts: int) -> int:
    """KV entries that the rows of one request see, each its text up to itself."""
    return sum(length + i for i in range(1 + drafts))


@pytest.mark.parametrize(
    ("pass_rows", "prefill", "verify_rows", "prefill_rows"),
    [
        (None, False, 7, 0),
        (7, False, 7, 0),
        (9, False, 9, 0),  # those who have ended verified, too
        (5, False, 5, 0),  # the scheduler has cut drafts
        (None, True, 7, 0),
        (27, True, 7, 20),
        (6, True, 6, 0),
    ],
)
def test_rows_of_the_pass_are_verified_ones_and_those_of_prompts(
    pass_rows: int | None, prefill: bool, verify_rows: int, prefill_rows: int
) -> None:
    case = Case([TEXT, [9] * 30], [DRAFT, [21]])
    case.bring((0, [OTHER]), (1, [OTHER]))
    work = case.outcome(pass_rows, prefill=prefill).work
    assert (work.verify_rows, work.prefill_rows) == (verify_rows, prefill_rows)
    read = sum(range(prefill_rows + 1))  # of one prompt, from its first token on
    assert work.kv_tokens == seen(len(TEXT), 4) + seen(30, 1) + read


def test_rows_of_requests_that_have_gone_are_known_from_the_pass_alone() -> None:
    case = Case([TEXT, [9] * 30], [DRAFT, [21]])
    case.bring((1, [OTHER]))
    assert case.outcome().work.verify_rows == 2
    assert case.outcome(7).work.verify_rows == 7
    assert case.outcome().work.kv_tokens == case.outcome(7).work.kv_tokens == seen(30, 1)
