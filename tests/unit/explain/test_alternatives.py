"""Reasons of steps, and other ways to have decoded the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Limits, ProposerTraits
from dynaspec.explain import alternatives as why
from dynaspec.explain.alternatives import Alternative, alternatives, reasons
from dynaspec.explain.estimates import chances, fit_costs, learn_acceptance
from dynaspec.explain.log_data import LogData, LogRows, load
from unit.explain.logs import KV_S, READ_S, ROW_S, STEP_S, Fixed, Host


def counted(path, columns: dict[str, list[int]]) -> dict[str, int]:
    """The reasons for rows with these columns; all others are drafted for and verified."""
    data = load(path)
    size = data.rows.step.size
    rows = {name: np.array((values + [None] * size)[:size]) for name, values in columns.items()}
    changed = {
        name: np.array([getattr(data.rows, name)[i] if v is None else v for i, v in enumerate(values)])
        for name, values in rows.items()
    }
    fields = {name: changed.get(name, getattr(data.rows, name)) for name in LogRows.__dataclass_fields__}
    return dict(
        reasons(LogData(**{f: getattr(data, f) for f in LogData.__dataclass_fields__} | {"rows": LogRows(**fields)}))
    )


def test_each_reason(tmp_path):
    path = Host(tmp_path / "log", ids=tuple("abcdefgh")).run(Fixed(2, believed={"reason": "too slow"}), 1)
    found = counted(
        path,
        {
            "verified": [0, 0, 0, 0, 0, 0, 0],
            "drafted": [2, 0, 0, 0, 0, 0, 0],
            "granted": [2, 2, 0, 0, 0, 0, 0],
            "planned": [2, 2, 0, 0, 2, 0, -1],
            "requested_max": [-1, -1, 0, -1, -1, -1, -1],
            "room": [9, 9, 9, 0, 9, 9, 9],
        },
    )
    assert found == {
        why.TRIMMED: 1,
        why.NOTHING: 1,
        why.REQUESTED_OFF: 1,
        why.NO_ROOM: 1,
        why.HOST: 1,
        f"{why.POLICY}: too slow": 1,
        "not known": 1,
        why.DRAFTED: 1,
    }


def test_plain_decoding_by_choice(tmp_path):
    data = load(Host(tmp_path / "log").run(Fixed(0), 7))
    assert reasons(data) == {why.POLICY: 14}


CURVE = tuple((rows, STEP_S + ROW_S * rows) for rows in (1, 2, 4, 8, 16, 32))
PROFILE = {"costs": PassCosts(CURVE, context_s=KV_S, read_s=READ_S)}
RATES = (0.9, 0.8, 0.7, 0.6)


def estimated(path: Path) -> tuple[LogData, dict[str, Alternative]]:
    data = load(path)
    costs = fit_costs(data)
    assert costs is not None
    return data, {one.name: one for one in alternatives(data, costs)}


def measured(path: Path) -> float:
    steps = load(path).steps
    return steps.emitted.sum() / steps.step_s.sum()


@pytest.mark.parametrize("ids", [("a",), ("a", "b", "c", "d")], ids=len)
def test_what_other_lengths_would_have_done(tmp_path, ids) -> None:
    """The log of one length says what others would have done: as they do when they are run."""
    host = Host(tmp_path / "8", rates=RATES, ids=ids, header=PROFILE)
    _, found = estimated(host.run(Fixed(8), 600))
    for length in (0, 1, 3, 5):
        run = replace(host, path=tmp_path / str(length), seed=length).run(Fixed(length), 600)  # contexts as long
        name = f"fixed {length}" if length else "plain decoding"
        assert found[name].tokens_per_s == pytest.approx(measured(run), rel=0.06), name
        assert found[name].extrapolated < 0.1
    assert found["this policy"].tokens_per_s == pytest.approx(measured(tmp_path / "8"), rel=0.06)
    best = max(one.tokens_per_s for name, one in found.items() if name != "oracle")
    assert found["oracle"].tokens_per_s > best


def test_longer_drafts_are_extrapolated(tmp_path) -> None:
    host = Host(tmp_path / "2", rates=(0.8,), header=PROFILE)
    _, found = estimated(host.run(Fixed(2), 1500))
    shares = [found[f"fixed {k}"].extrapolated for k in (1, 2, 3, 6, 8)]
    assert shares[:2] == [0.0, 0.0]
    assert 0.1 < shares[2] < shares[3] < shares[4]
    run = replace(host, path=tmp_path / "6", seed=9).run(Fixed(6), 1500)
    assert found["fixed 6"].tokens_per_s == pytest.approx(measured(run), rel=0.06)


def test_one_step_by_hand(tmp_path) -> None:
    """Right, right, wrong: what each length would have emitted is known."""
    data, _ = estimated(Host(tmp_path / "log", rates=(1.0, 1.0, 0.0), ids=("a",)).run(Fixed(5), 1))
    assert data.rows.accepted.tolist() == [2]
    _, found = estimated(tmp_path / "log")
    emitted = {name: one.tokens_per_request_step for name, one in found.items()}
    assert emitted["plain decoding"] == 1
    assert [emitted[f"fixed {k}"] for k in range(1, 9)] == [2, 3, 3, 3, 3, 3, 3, 3]
    assert emitted["oracle"] == emitted["this policy"] == 3
    assert found["oracle"].drafted_per_token == pytest.approx(2 / 3)
    assert found["fixed 5"].drafted_per_token == pytest.approx(5 / 3)
    assert all(one.extrapolated == 0 for one in found.values())


def test_requests_that_are_rejected_more_often(tmp_path) -> None:
    data = load(Host(tmp_path / "log", rates=(0.5,), ids=("a", "b")).run(Fixed(1), 200))
    accepted = np.where(data.verdicts.request == 0, True, np.arange(data.verdicts.request.size) // 2 % 4 == 0)
    data = replace(data, verdicts=replace(data.verdicts, accepted=accepted))
    easy, hard = chances(learn_acceptance(data.verdicts, 2), np.arange(2), 1)[:, 0]
    assert easy > 0.95
    assert hard == pytest.approx(0.25, abs=0.03)


def test_lengths_keep_to_their_limits(tmp_path) -> None:
    path = Host(tmp_path / "log", rates=(0.99,)).run(Fixed(2), 50, room_depth=(3, 100), max_draft=(None, 1))
    _, found = estimated(path)
    assert found["fixed 8"].tokens_per_request_step < (1 + 3 + 1 + 1) / 2 + 0.01
    assert found["fixed 8"].drafted_per_token * found["fixed 8"].tokens_per_request_step == pytest.approx(2.0)


def test_lookup_drafts_keep_to_what_was_on_offer_and_cost_no_passes(tmp_path) -> None:
    limits = Limits(tuple(range(9)), proposers=(ProposerTraits("ngram", passes_per_draft="none"),))
    offers = lambda step: ((3, 4 if step % 2 else 0),) * 2  # noqa: E731
    path = Host(tmp_path / "log", rates=(1.0,), limits=limits, offers=offers, header=PROFILE).run(Fixed(8), 60)
    _, found = estimated(path)
    assert found["fixed 8"].tokens_per_request_step == pytest.approx(3.0)
    assert found["fixed 8"].tokens_per_s == pytest.approx(measured(path), rel=0.05)


def test_prefill_is_the_same_for_all(tmp_path) -> None:
    """With prefill in every step, faster decoding gains less than without."""
    gains = {}
    for prefill in (0, 100):
        path = Host(tmp_path / str(prefill), rates=(0.9,), prefill=prefill, header=PROFILE).run(Fixed(4), 300)
        _, found = estimated(path)
        gains[prefill] = found["this policy"].tokens_per_s / found["plain decoding"].tokens_per_s
    assert gains[0] > 1.5
    assert 1.0 < gains[100] < 0.7 * gains[0]


def test_without_any_draft_nothing_is_said_of_drafts(tmp_path) -> None:
    _, found = estimated(Host(tmp_path / "log").run(Fixed(0), 20))
    assert set(found) == {"plain decoding", "this policy"}
    assert found["plain decoding"].tokens_per_s == pytest.approx(found["this policy"].tokens_per_s)


def test_many_lengths_are_thinned_out(tmp_path) -> None:
    _, found = estimated(Host(tmp_path / "log", limits=Limits(tuple(range(65)))).run(Fixed(4), 5))
    assert [one.length for one in found.values()] == [*range(9), 12, 16, 20, 24, 28, 32, None, None]
