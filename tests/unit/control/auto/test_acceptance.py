"""What is learnt of drafted tokens' chances, and where requests have their places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.control.auto.acceptance import POSITIONS, AcceptanceModel, Places, Verdicts, logit, logits


def chance(model: AcceptanceModel, position: int, place: int = 0, feature: float = 0.0) -> float:
    score = model.weight[0] * feature + model.bias[min(position, POSITIONS - 1)] + model.offset[place]
    return float(1 / (1 + np.exp(-score)))


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def draft(model: AcceptanceModel, feature: Sequence[float], accepted: int, place: int = 0) -> None:
    """One draft, verified up to its first rejection."""
    drafted = len(feature)
    seen = Verdicts(column(place), column(drafted), column(min(accepted + 1, drafted)), column(accepted))
    model.observe(seen, np.array(feature, dtype=np.float64))


def decode(model: AcceptanceModel, rng: np.random.Generator, chances: Sequence[float], place: int = 0) -> None:
    """One step of one request, whose tokens are right with these conditional chances."""
    right = rng.random(len(chances)) < chances
    draft(model, np.zeros(len(chances)).tolist(), int(np.cumprod(right).sum()), place)


def known(model: AcceptanceModel) -> list[list[float]]:
    return [part.tolist() for part in (model.weight, model.bias, model.bias_var, model.offset)]


def test_learns_the_chance_of_each_position() -> None:
    model, rng = AcceptanceModel(weight=0.0, bias=0.0), np.random.default_rng(0)
    model.grow(1)
    history = []
    for _ in range(3000):
        model.age()
        decode(model, rng, (0.9, 0.6, 0.3))
        history.append([chance(model, j) for j in range(3)])
    chances = np.array(history[300:])
    assert chances.mean(0) == pytest.approx([0.9, 0.6, 0.3], abs=0.04)
    assert (chances.std(0) < 0.12).all()


def test_learns_what_evidence_is_worth() -> None:
    model, rng = AcceptanceModel(weight=0.7, bias=0.0), np.random.default_rng(0)
    model.grow(1)
    for _ in range(3000):
        model.age()
        x = float(rng.normal(1, 2))
        draft(model, [x], int(rng.random() < 1 / (1 + np.exp(-(1.5 * x - 1.0)))))
    assert model.weight[0] == pytest.approx(1.5, abs=0.35)
    assert model.bias[0] + model.offset[0] == pytest.approx(-1.0, abs=0.5)


def test_a_model_without_a_feature_learns_no_weight() -> None:
    model = AcceptanceModel(weight=0.0, bias=0.0)
    model.grow(1)
    for _ in range(50):
        draft(model, [0.0, 0.0], 1)
    assert model.weight[0] == 0.0


def test_a_request_that_differs_is_told_apart_from_the_others() -> None:
    model, rng = AcceptanceModel(weight=0.0, bias=0.0), np.random.default_rng(0)
    model.grow(4)
    for n in range(800):
        decode(model, rng, [0.1 if n % 4 == 0 else 0.8], place=n % 4)
        if n % 4 == 3:
            model.age()
    assert model.offset[0] < min(model.offset[1:]) - 1.0


def test_a_drafter_that_turns_useless_is_noticed_within_some_ten_drafts() -> None:
    model, rng = AcceptanceModel(weight=0.0, bias=0.85), np.random.default_rng(0)
    model.grow(1)
    for _ in range(300):
        model.age()
        decode(model, rng, [0.9] * 4)
    assert chance(model, 0) > 0.8
    for _ in range(10):
        model.age()
        decode(model, rng, [0.0] * 4)
    assert chance(model, 0) < 0.5


def test_a_model_that_is_doubted_believes_as_before_and_learns_as_at_first() -> None:
    doubted, sure = AcceptanceModel(weight=0.0, bias=1.0), AcceptanceModel(weight=0.0, bias=1.0)
    for model in (doubted, sure):
        model.grow(1)
        rng = np.random.default_rng(0)
        for _ in range(300):
            decode(model, rng, [0.9] * 4)
    doubted.doubt()
    assert doubted.bias.tolist() == sure.bias.tolist()
    for model in (doubted, sure):
        for _ in range(3):
            draft(model, [0.0] * 4, 0)
    assert chance(doubted, 0) < 0.6 < 0.7 < chance(sure, 0)


def test_one_that_was_given_up_comes_back_to_the_average() -> None:
    model = AcceptanceModel(weight=0.0, bias=1.0)
    model.grow(1)
    for _ in range(20):
        draft(model, [0.0], 0)
    low = model.offset[0]
    model.age(300)
    assert abs(model.offset[0]) < 0.1 * abs(low)


@pytest.mark.parametrize(("rate", "remembered"), [(0.9, True), (0.3, False)])
def test_without_drafts_what_is_good_is_remembered_and_what_is_not_forgotten(rate: float, remembered: bool) -> None:
    drafting, idle = (AcceptanceModel(weight=0.0, bias=1.0) for _ in range(2))
    for model in (drafting, idle):
        model.grow(1)
        rng = np.random.default_rng(0)
        for _ in range(300):
            decode(model, rng, [rate] * 4)
    drafting.age(200, 200)
    idle.age(200, 0)
    assert bool(idle.bias_var[0] < 0.5 * drafting.bias_var[0]) is remembered
    before = chance(idle, 0)
    for model in (drafting, idle):
        draft(model, [0.0], 0)
    assert bool(before - chance(idle, 0) < 0.7 * (before - chance(drafting, 0))) is remembered


def test_several_steps_pass_at_once_as_one_by_one() -> None:
    models = []
    for spans in ([1] * 7, [7], [3, 4]):
        model = AcceptanceModel(weight=1.0, bias=0.0)
        model.grow(1)
        for _ in range(30):
            draft(model, [2.0, -1.0], 1)
        for steps in spans:
            model.age(steps)
        models.append(known(model))
    for other in models[1:]:
        for mine, theirs in zip(models[0], other, strict=True):
            assert mine == pytest.approx(theirs, abs=0.01)


def test_a_position_of_which_nothing_is_known_comes_to_be_like_the_one_before() -> None:
    """Drafts that a poor first guess keeps short would stay so."""
    model, rng = AcceptanceModel(weight=0.0, bias=-1.0), np.random.default_rng(0)
    model.grow(1)
    for _ in range(400):
        model.age()
        decode(model, rng, [0.9, 0.9])
    assert chance(model, 1) == pytest.approx(0.9, abs=0.1)
    for _ in range(600):
        model.age()
        decode(model, rng, [0.9, 0.9])
    assert chance(model, 5) > 0.75


def test_a_position_that_is_well_known_is_taken_for_itself() -> None:
    model, rng = AcceptanceModel(weight=0.0, bias=0.0), np.random.default_rng(0)
    model.grow(1)
    found = []
    for _ in range(1500):
        model.age()
        decode(model, rng, [1.0, 0.2])
        found.append(chance(model, 1))
    assert np.mean(found[200:]) == pytest.approx(0.2, abs=0.12)


def test_growing_old_is_knowing_less() -> None:
    model = AcceptanceModel(weight=1.0, bias=0.0)
    model.grow(1)
    for _ in range(100):
        draft(model, [1.0], 1)
    before = model.bias_var[0], model.weight[1]
    model.age(50)
    assert model.bias_var[0] > before[0]
    assert model.weight[1] > before[1]
    model.age(10**6)
    assert model.bias_var.max() <= 1.0
    assert model.weight[1] <= 0.5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_only_what_was_verified_teaches(drafts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever a drafter says of tokens behind the first rejection, or of requests that are none of the model's."""
    drafted = [max(pair) for pair in drafts]
    accepted = [min(pair) for pair in drafts]
    tested = [min(a + data.draw(st.integers(0, 1)), n) for a, n in zip(accepted, drafted, strict=True)]
    place = [data.draw(st.sampled_from([i, -1])) for i in range(len(drafts))]
    shown = [data.draw(st.lists(st.floats(-6, 6), min_size=n, max_size=n)) for n in drafted]
    other = [
        row[: n if at >= 0 else 0] + [9.0] * (len(row) - (n if at >= 0 else 0))
        for row, n, at in zip(shown, tested, place, strict=True)
    ]
    found = []
    for rows in (shown, other):
        model = AcceptanceModel(weight=1.0, bias=0.0)
        model.grow(len(drafts))
        seen = Verdicts(column(*place), column(*drafted), column(*tested), column(*accepted))
        model.observe(seen, np.array([x for row in rows for x in row]))
        found.append(known(model))
    assert found[0] == found[1]
    for i, (n, at) in enumerate(zip(tested, place, strict=True)):
        assert (found[0][3][i] != 0.0) or not n or at < 0 or (n > 1)


def test_requests_of_a_step_are_taken_one_after_the_other() -> None:
    together, alone = (AcceptanceModel(weight=1.0, bias=0.3) for _ in range(2))
    for model in (together, alone):
        model.grow(3)
    seen = Verdicts(column(2, 0, 1), column(3, 0, 2), column(2, 0, 2), column(1, 0, 2))
    together.observe(seen, np.array([1.0, -2.0, 0.5, 3.0, 0.2]))
    draft(alone, [1.0, -2.0, 0.5], 1, place=2)
    draft(alone, [3.0, 0.2], 2, place=1)
    assert known(together) == known(alone)
    assert together.offset[0] == 0.0


def test_what_a_caller_expects_is_where_a_request_starts() -> None:
    model = AcceptanceModel(weight=0.0, bias=0.0)
    model.grow(2)
    model.admit(0, 0.9)
    model.admit(1, None)
    assert chance(model, 0) == pytest.approx(0.9)
    assert model.offset[1] == 0.0


def test_a_place_that_is_taken_over_starts_anew() -> None:
    model = AcceptanceModel(weight=0.0, bias=1.0)
    model.grow(1)
    for _ in range(20):
        draft(model, [0.0], 0)
    assert model.offset[0] < -0.5
    model.admit(0, None)
    assert model.offset[0] == 0.0


def test_logits_are_finite_whatever_a_drafter_says() -> None:
    values = logits(np.array([0.0, 1.0, float("nan"), 0.5]))
    assert np.isfinite(values).all()
    assert values[3] == 0.0
    assert values[:3].tolist() == pytest.approx([-6.0, 6.0, -6.0])
    assert logit(0.9) == pytest.approx(np.log(9.0))


# --- places -------------------------------------------------------------------------------------------------------


def test_places_are_used_again() -> None:
    places = Places()
    assert places.get(["a", "b"])[0].tolist() == [0, 1]
    places.forget(["a", "never seen"])
    at, new = places.get(["b", "c", "d"])
    assert at.tolist() == [1, 0, 2]
    assert new == [1, 2]
    assert places.find(["a", "d"]).tolist() == [-1, 2]


def test_what_was_forgotten_is_not_found_though_it_was_asked_for_last() -> None:
    places = Places()
    ids = ("a", "b")
    assert places.get(ids)[1] == [0, 1]
    assert places.find(ids).tolist() == [0, 1]
    places.forget(["a"])
    assert places.find(ids).tolist() == [-1, 1]
    at, new = places.get(ids)
    assert (at.tolist(), new) == ([0, 1], [0])
    assert len(places) == 2


@given(
    st.lists(st.tuples(st.sampled_from(["get", "find", "forget"]), st.lists(st.sampled_from("abcdef"), unique=True)))
)
@settings(max_examples=150, deadline=None)
def test_places_are_those_of_a_plain_dict(calls: list[tuple[str, list[str]]]) -> None:
    """Requests keep their place while they are known; no two have the same; there are no more than at most needed."""
    places, where, most = Places(), dict[str, int](), 0
    for call, ids in calls:
        key = tuple(ids)
        if call == "forget":
            places.forget(key)
            for request in ids:
                where.pop(request, None)
        elif call == "find":
            assert places.find(key).tolist() == [where.get(request, -1) for request in ids]
        else:
            at, new = places.get(key)
            assert [ids[i] for i in new] == [request for request in ids if request not in where]
            assert all(where.get(request, place) == place for request, place in zip(ids, at.tolist(), strict=True))
            where |= zip(ids, at.tolist(), strict=True)
        assert len(set(where.values())) == len(where)
        most = max(most, len(where))
        assert len(places) == most
