"""Verdicts, and settings to paste."""

from __future__ import annotations

import json
import shlex

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.profile import Profile
from dynaspec.explain.recommend import Names, Predicted, Verdict, decide, pastes

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


SCHEDULE_RANGES = ((1, 4, 3), (5, 16, 0))
NAMES = Names("big", "small", None)
AUTO, PLAIN = Verdict("auto", None, ()), Verdict("plain", None, ())
FIXED, SCHEDULE = Verdict("fixed", 3, ()), Verdict("schedule", None, ())


def flags(text: str) -> dict[str, str]:
    words = shlex.split(text)
    return dict(zip(words[3::2], words[4::2], strict=True))


@pytest.mark.parametrize(("verdict", "policy"), [(AUTO, "auto"), (FIXED, "constant"), (SCHEDULE, "schedule")])
def test_dynaspec(verdict, policy):
    (found,) = pastes("dynaspec", verdict, NAMES, 5, SCHEDULE_RANGES)
    assert shlex.split(found.text)[:3] == ["dynaspec", "serve", "big"]
    config = SpeculativeConfig.parse(flags(found.text)["--speculative-config"])
    assert (config.policy, config.model) == (policy, "small")
    assert config.longest_draft == (5 if verdict is AUTO else 3)


def test_a_profile_is_auto_s_warm_start(tmp_path):
    path = tmp_path / "profile.json"
    Profile({1: {0: 1.0, 5: 2.0}}, (0.5,) * 5, 5).save(path)
    (found,) = pastes("dynaspec", AUTO, Names("big", "small", path), 5, SCHEDULE_RANGES)
    assert SpeculativeConfig.parse(flags(found.text)["--speculative-config"]).profile == Profile.load(path)


def test_vllm_with_and_without_dynaspec():
    ours, scheduler, alone = pastes("vllm", AUTO, NAMES, 5, SCHEDULE_RANGES)
    assert "--backend vllm" in ours.text
    told = flags(scheduler.text)
    assert told["--scheduler-cls"] == "dynaspec.hosts.vllm.Scheduler"
    assert json.loads(told["--additional-config"]) == {"dynaspec": {"policy": "auto"}}
    assert json.loads(told["--speculative-config"])["num_speculative_tokens"] == 5
    assert json.loads(flags(alone.text)["--speculative-config"]) == {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 0]],
    }
    fixed = pastes("vllm", FIXED, NAMES, 5, SCHEDULE_RANGES)[-1]
    assert "per_batch_size" not in fixed.text
    assert len(pastes("vllm", AUTO, NAMES, 5, ((1, 8, 0),))) == 2


def test_transformers():
    (found,) = pastes("transformers", FIXED, NAMES, 5, SCHEDULE_RANGES)
    compile(found.text, "settings", "exec")
    assert "speculative_config={'policy': 'constant', 'num_speculative_tokens': 3}" in found.text


def test_plain_decoding():
    texts = {
        backend: pastes(backend, PLAIN, NAMES, 5, SCHEDULE_RANGES)[0].text
        for backend in ("dynaspec", "vllm", "transformers")
    }
    assert texts == {
        "dynaspec": "dynaspec serve big",
        "vllm": "vllm serve big",
        "transformers": "model.generate(**inputs)",
    }


def test_an_unknown_backend():
    with pytest.raises(ConfigError, match="--backend is 'sglang'; expected dynaspec, vllm or transformers"):
        pastes("sglang", AUTO, NAMES, 5, SCHEDULE_RANGES)
