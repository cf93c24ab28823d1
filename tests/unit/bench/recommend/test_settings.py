"""Settings that can be pasted are settings that are understood."""

from __future__ import annotations

import json
import shlex

import pytest

from dynaspec.bench.recommend.settings import Names, pastes
from dynaspec.bench.recommend.verdict import Verdict
from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.profile import Profile

RANGES = ((1, 4, 3), (5, 16, 0))
NAMES = Names("big", "small", None)
AUTO, PLAIN = Verdict("auto", None, ()), Verdict("plain", None, ())
FIXED, SCHEDULE = Verdict("fixed", 3, ()), Verdict("schedule", None, ())


def flags(text: str) -> dict[str, str]:
    words = shlex.split(text)
    return dict(zip(words[3::2], words[4::2], strict=True))


@pytest.mark.parametrize(("verdict", "policy"), [(AUTO, "auto"), (FIXED, "constant"), (SCHEDULE, "schedule")])
def test_dynaspec(verdict, policy):
    (found,) = pastes("dynaspec", verdict, NAMES, 5, RANGES)
    assert shlex.split(found.text)[:3] == ["dynaspec", "serve", "big"]
    config = SpeculativeConfig.parse(flags(found.text)["--speculative-config"])
    assert (config.policy, config.model) == (policy, "small")
    assert config.longest_draft == (5 if verdict is AUTO else 3)


def test_a_profile_is_auto_s_warm_start(tmp_path):
    path = tmp_path / "profile.json"
    Profile({1: {0: 1.0, 5: 2.0}}, (0.5,) * 5, 5).save(path)
    (found,) = pastes("dynaspec", AUTO, Names("big", "small", path), 5, RANGES)
    assert SpeculativeConfig.parse(flags(found.text)["--speculative-config"]).profile == Profile.load(path)


def test_vllm_with_and_without_dynaspec():
    ours, scheduler, alone = pastes("vllm", AUTO, NAMES, 5, RANGES)
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
    fixed = pastes("vllm", FIXED, NAMES, 5, RANGES)[-1]
    assert "per_batch_size" not in fixed.text
    assert len(pastes("vllm", AUTO, NAMES, 5, ((1, 8, 0),))) == 2


def test_transformers():
    (found,) = pastes("transformers", FIXED, NAMES, 5, RANGES)
    compile(found.text, "settings", "exec")
    assert "speculative_config={'policy': 'constant', 'num_speculative_tokens': 3}" in found.text


def test_plain_decoding():
    texts = {
        backend: pastes(backend, PLAIN, NAMES, 5, RANGES)[0].text for backend in ("dynaspec", "vllm", "transformers")
    }
    assert texts == {
        "dynaspec": "dynaspec serve big",
        "vllm": "vllm serve big",
        "transformers": "model.generate(**inputs)",
    }


def test_an_unknown_backend():
    with pytest.raises(ConfigError, match="--backend is 'sglang'; expected dynaspec, vllm or transformers"):
        pastes("sglang", AUTO, NAMES, 5, RANGES)
