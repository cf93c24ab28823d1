from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.control.profile import Profile
from unit.control.seam import FIFTY_CASES, H100_PROFILE, ONLINE_PROFILE

SMALL = Profile({1: {0: 10.0, 2: 14.0}, 5: {0: 20.0, 2: 40.0}}, (0.8, 0.5), 2)

DOCUMENT: dict[str, Any] = json.loads(ONLINE_PROFILE.read_text())


class TestFile:
    def test_a_published_profile_loads_as_it_is(self) -> None:
        profile = Profile.load(H100_PROFILE)
        assert tuple(profile.batch_stats) == (1, 4, 16, 64, 256)
        assert profile.max_num_speculative_tokens == 5
        assert not profile.is_online
        assert profile.itl_ms(16, 3) == pytest.approx(9.518282022327185)

    @pytest.mark.parametrize("path", [H100_PROFILE, ONLINE_PROFILE], ids=lambda path: path.name)
    def test_what_is_saved_loads_again(self, path: Path, tmp_path: Path) -> None:
        profile = Profile.load(path)
        target = tmp_path / "new" / "profile.json"
        profile.save(target)
        assert Profile.load(target) == profile
        document, published = json.loads(target.read_text()), json.loads(path.read_text())
        published.pop("source", None)
        assert document == published
        assert [p.name for p in target.parent.iterdir()] == ["profile.json"], "nothing is left beside it"

    def test_a_failed_save_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = tmp_path / "profile.json"
        SMALL.save(target)
        before = target.read_text()
        monkeypatch.setattr(json, "dump", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            SMALL.save(target)
        assert target.read_text() == before
        assert list(tmp_path.iterdir()) == [target]

    def test_keys_may_be_in_any_order(self) -> None:
        stats = {"16": {"3": 9.0, "0": 6.0}, "2": {"0": 5.0, "3": 7.0}}
        profile = Profile.parse(DOCUMENT | {"batch_stats": stats, "max_num_speculative_tokens": 3}, "here")
        assert list(profile.batch_stats) == [2, 16]
        assert list(profile.batch_stats[16]) == [0, 3]

    def test_other_keys_and_more_rates_do_no_harm(self) -> None:
        rates = [*DOCUMENT["acceptance_rate_per_pos"], 0.1, 0.05]
        profile = Profile.parse(DOCUMENT | {"gpu": "H100", "acceptance_rate_per_pos": rates}, "here")
        assert profile.max_num_speculative_tokens == 4

    def test_it_is_offline_unless_it_says_otherwise(self) -> None:
        assert not Profile.parse({k: v for k, v in DOCUMENT.items() if k != "is_online"}, "here").is_online


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in DOCUMENT.items() if k != key}


ROW = {"0": 1.0, "4": 2.0}
RATES = "acceptance_rate_per_pos"
BAD: list[tuple[Any, str]] = [
    ([], "the profile is []; expected an object"),
    (None, "the profile is None; expected an object"),
    (without("batch_stats"), "there is no batch_stats"),
    (without(RATES), f"there is no {RATES}"),
    (without("max_num_speculative_tokens"), "there is no max_num_speculative_tokens"),
    ({"batch_stats": {}}, "batch_stats is {}; expected an object with at least one entry"),
    ({"batch_stats": [1]}, "batch_stats is [1]; expected an object"),
    ({"batch_stats": {"x": ROW}}, "batch_stats has the key 'x'; expected a batch size, an integer of at least 1"),
    ({"batch_stats": {"1.5": ROW}}, "batch_stats has the key '1.5'"),
    ({"batch_stats": {"0": ROW}}, "batch_stats has the key '0'"),
    ({"batch_stats": {"1": ROW, "01": ROW}}, "batch_stats has a batch size 1 twice"),
    ({"batch_stats": {"1": 7.0}}, "batch_stats[1] is 7.0; expected an object"),
    ({"batch_stats": {"1": {"1": 1.0, "4": 2.0}}}, "batch_stats[1] has no k = 0"),
    ({"batch_stats": {"1": ROW | {"-1": 1.0}}}, "batch_stats[1] has the key '-1'; expected k"),
    ({"batch_stats": {"1": ROW | {"2": 0.0}}}, "batch_stats[1][2] is 0.0; expected a time in ms above 0"),
    ({"batch_stats": {"1": ROW | {"2": -3}}}, "batch_stats[1][2] is -3"),
    ({"batch_stats": {"1": ROW | {"2": math.inf}}}, "batch_stats[1][2] is inf"),
    ({"batch_stats": {"1": ROW | {"2": math.nan}}}, "batch_stats[1][2] is nan"),
    ({"batch_stats": {"1": ROW | {"2": "9"}}}, "batch_stats[1][2] is '9'"),
    ({"batch_stats": {"1": ROW | {"2": True}}}, "batch_stats[1][2] is True"),
    ({"batch_stats": {"1": ROW, "8": {"0": 1.0, "3": 2.0}}}, "is 4 but batch_stats[8] ends at k = 3"),
    ({RATES: []}, f"{RATES} is []; expected a list"),
    ({RATES: 0.5}, f"{RATES} is 0.5; expected a list"),
    ({RATES: [0.5, 1.5, 0.1, 0.1]}, f"{RATES}[1] is 1.5; expected a number from 0 to 1"),
    ({RATES: [0.5, math.nan, 0.1, 0.1]}, f"{RATES}[1] is nan"),
    ({RATES: ["0.5", 0.1, 0.1, 0.1]}, f"{RATES}[0] is '0.5'"),
    ({RATES: [0.5, 0.6, 0.1, 0.1]}, f"{RATES}[1] is 0.6 after 0.5; expected rates that do not increase"),
    ({RATES: [0.5, 0.4]}, f"max_num_speculative_tokens is 4 but {RATES} has 2 entries"),
    ({"max_num_speculative_tokens": 0}, "max_num_speculative_tokens is 0; expected an integer of at least 1"),
    ({"max_num_speculative_tokens": 4.0}, "max_num_speculative_tokens is 4.0"),
    ({"max_num_speculative_tokens": True}, "max_num_speculative_tokens is True"),
    ({"is_online": 1}, "is_online is 1; expected true or false"),
    ({"warmup_steps": -1}, "warmup_steps is -1; expected an integer of at least 0"),
]


@pytest.mark.parametrize(("document", "said"), BAD, ids=[said[:50] for _, said in BAD])
def test_what_is_no_profile_is_refused_in_one_sentence(document: Any, said: str, tmp_path: Path) -> None:
    complete = document if document is None or not document or len(document) > 1 else DOCUMENT | document
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(complete))
    with pytest.raises(ConfigError) as caught:
        Profile.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), (None, "no such")])
def test_a_file_that_cannot_be_read_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="(?i)" + said) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


def test_a_profile_built_in_place_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^batch_stats\[1\] has no k = 0"):
        Profile({1: {1: 3.0}}, (0.5,), 1)


class TestInterpolation:
    @pytest.mark.parametrize(
        ("batch", "k", "time"),
        [
            (1, 0, 10.0),
            (1, 1, 12.0),
            (5, 1, 30.0),
            (3, 0, 15.0),
            (3, 1, 21.0),
            (2, 2, 20.5),
            (0, 2, 14.0),
            (99, 1, 30.0),
            (1, 9, 14.0),
        ],
    )
    def test_it_is_linear_in_between_and_constant_beyond(self, batch: int, k: int, time: float) -> None:
        assert SMALL.itl_ms(batch, k) == pytest.approx(time)

    def test_rows_may_have_been_measured_at_different_k(self) -> None:
        profile = Profile({1: {0: 10.0, 4: 18.0}, 3: {0: 10.0, 1: 11.0, 4: 30.0}}, (0.5,) * 4, 4)
        assert profile.itl_ms(2, 1) == pytest.approx((12.0 + 11.0) / 2)

    @FIFTY_CASES
    @given(st.integers(0, 300), st.integers(0, 8))
    def test_it_stays_between_what_was_measured(self, batch: int, k: int) -> None:
        profile = Profile.load(H100_PROFILE)
        times = [time for row in profile.batch_stats.values() for time in row.values()]
        assert min(times) <= profile.itl_ms(batch, k) <= max(times)


class TestBestLength:
    @pytest.mark.parametrize(
        ("acceptance", "lengths"),
        [(0.3, [1, 1, 1, 0, 0]), (0.5, [2, 2, 1, 0, 0]), (0.7, [4, 4, 2, 2, 0]), (0.9, [5, 5, 5, 5, 4])],
    )
    def test_the_published_goodput_on_an_h100(self, acceptance: float, lengths: list[int]) -> None:
        profile = Profile.load(H100_PROFILE)
        rates = [acceptance**position for position in range(1, 6)]
        assert [profile.best_length(batch, rates, 5) for batch in (1, 17, 64, 128, 256)] == lengths

    def test_the_smallest_of_equals(self) -> None:
        profile = Profile({1: {0: 1.0, 1: 2.0, 2: 2.5}}, (1.0, 0.5), 2)
        assert profile.best_length(1, (1.0, 0.5), 2) == 0
        assert profile.best_length(1, (1.0, 0.51), 2) == 2

    def test_cap_rates_and_maximum_bound_it(self) -> None:
        free = Profile({1: dict.fromkeys(range(9), 1.0)}, (1.0,) * 8, 6)
        ones = (1.0,) * 8
        assert free.best_length(1, ones, 64) == 6
        assert free.best_length(1, ones, 4) == 4
        assert free.best_length(1, ones[:3], 64) == 3
        assert free.best_length(1, ones, 0) == 0
        assert free.best_length(1, ones, 64, among=(0, 4, 8)) == 4
        assert free.best_length(1, ones, 3, among=(0, 4, 8)) == 0
