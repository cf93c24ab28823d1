"""What is recommended, given what every policy is predicted to do."""

from __future__ import annotations

import pytest

from dynaspec.bench.recommend.comparison import Predicted
from dynaspec.bench.recommend.verdict import decide

RANGES = ((1, 3, 4), (4, 8, 0))


def predicted(**speeds):
    named = {name.replace("fixed_", "constant:"): tuple(map(float, found)) for name, found in speeds.items()}
    return Predicted((1, 8), named, RANGES)


def test_auto_where_it_is_as_good_as_any():
    found = decide(
        predicted(plain=(100, 400), fixed_1=(130, 410), fixed_4=(180, 300), schedule=(179, 400), auto=(178, 405))
    )
    assert found.choice == "auto"
    said = " ".join(found.reasons)
    assert "it is 4 at 1 and 1 at 8 requests at once" in said
    assert "auto is preferred" not in said


@pytest.mark.parametrize(
    ("rival", "called"), [("fixed_4", "The fixed length 4"), ("schedule", "A schedule by batch size")]
)
def test_auto_where_another_is_a_little_faster(rival, called):
    speeds = {"fixed_4": (178, 520), "schedule": (178, 520), rival: (182, 540)}
    found = decide(predicted(plain=(100, 400), auto=(176, 520), **speeds))
    assert found.choice == "auto"
    assert found.reasons[-1].startswith(f"{called} is faster, but by no more than 5 % of its speed: auto is preferred")


def test_auto_with_loads_at_which_nothing_pays():
    found = decide(predicted(plain=(100, 400), fixed_4=(180, 300), schedule=(180, 390), auto=(181, 380)))
    assert found.choice == "auto"
    said = " ".join(found.reasons)
    assert "From 8 requests at once on, no fixed length is faster" in said
    assert "At 8 requests at once it is slower than an engine without a drafter" in said


@pytest.mark.parametrize(
    ("speeds", "choice", "length"),
    [
        ({"fixed_4": (180, 700), "schedule": (150, 600), "auto": (150, 600)}, "fixed", 4),
        ({"fixed_4": (180, 300), "schedule": (180, 420), "auto": (150, 380)}, "schedule", None),
        ({"fixed_4": (101, 300), "schedule": (100, 400), "auto": (99, 398)}, "plain", None),
        ({"fixed_4": (110, 100), "schedule": (105, 350), "auto": (108, 300)}, "plain", None),
    ],
)
def test_other_choices(speeds, choice, length):
    found = decide(predicted(plain=(100, 400), **speeds))
    assert (found.choice, found.length) == (choice, length)
    assert found.reasons


def test_what_a_useless_drafter_gains():
    found = decide(predicted(plain=(100, 400), fixed_4=(101, 300), schedule=(100, 400), auto=(99, 398)))
    assert found.reasons == ("The drafter does not pay at any load: the best policy gains 1 % at most.",)
