"""What steps look like to a controller."""

from __future__ import annotations

import numpy as np
import pytest

from dynaspec.contract.step import StopRule
from dynaspec.engine.outcome import how_ended
from dynaspec.schedule.batch import Committed, StepResult
from unit.engine.fakes import Rig, prompt, request

SIZES = (3, 20, 17)


@pytest.mark.parametrize("overlapped", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("drafter", ["draft_model", ("draft_model", "ngram")])
def test_outcomes_tell_the_evidence_that_decided(overlapped: bool, drafter: str | tuple[str, ...]) -> None:
    rule = StopRule((0.6,), signal="survival", weight=0.7)
    rig = Rig((4, 0, 3), drafter, overlapped, stop=rule, order=1)
    rig.run([request(f"r{i}", prompt(size, i)) for i, size in enumerate(SIZES)])
    assert all(guard.enabled for guard in rig.guards)
    stopped = 0
    for outcome in rig.controller.outcomes:
        assert len(outcome.signal) in (0, len(outcome.ids))
        for i, row in enumerate(outcome.signal):
            assert len(row) == (outcome.drafted[i] if outcome.proposer[i] == 0 else 0)
            assert len(row) == len(outcome.confidence[i])
            survival = np.cumprod(1 / (1 + np.exp(-0.7 * np.array(row))))
            assert (survival[:-1] >= 0.6 - 1e-6).all()
            assert not (row and outcome.early_exit[i]) or survival[-1] < 0.6 + 1e-6
            stopped += outcome.early_exit[i]
        if any(n and p == 0 for n, p in zip(outcome.drafted, outcome.proposer, strict=True)):
            assert outcome.signal
    assert stopped > 0


def test_without_a_rule_that_reads_it_there_is_no_evidence() -> None:
    rig = Rig((4, 0, 3), "draft_model", stop=StopRule((0.3,)))
    rig.run([request(f"r{i}", prompt(size, i)) for i, size in enumerate(SIZES)])
    assert {outcome.signal for outcome in rig.controller.outcomes} == {()}


def test_how_runs_of_drafts_ended() -> None:
    columns = ([0, 4, 4, 4, 4], [0, 4, 2, 2, 2], [1, 5, 2, 3, 3], [0, 0, 1, 1, 0])
    verified, accepted, emitted, refused = (np.array(column) for column in columns)
    result = StepResult(verified, verified, accepted, np.zeros((5, 5), np.int64), [], refused=refused.astype(bool))
    ended = ("none", "all_accepted", "stopped", "invalid", "rejected")
    assert how_ended(result, Committed(emitted, [])) == ended
    result.refused = None
    assert how_ended(result, Committed(emitted, [])) == (*ended[:3], "rejected", "rejected")
