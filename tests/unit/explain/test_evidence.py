"""What profiles and logs say, as the simulator takes it."""

from __future__ import annotations

import numpy as np
import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Limits, ProposerTraits, Work
from dynaspec.control.profile import Profile
from dynaspec.explain.estimates import fit_costs
from dynaspec.explain.evidence import FittedCosts, gather, trace_of
from dynaspec.explain.log_data import load
from dynaspec.simulate.costs import ProfileCosts, StepLoad
from unit.explain.logs import Fixed, Host

PROFILE = Profile({1: {0: 10.0, 4: 14.0}, 8: {0: 12.0, 4: 40.0}}, (0.8, 0.7, 0.5, 0.2), 4)
LOOKUP = Limits(tuple(range(9)), proposers=(ProposerTraits("ngram", passes_per_draft="none"),))
IDLE = Limits(tuple(range(9)), proposers=(ProposerTraits("draft_model", has_confidence=False, idle_pass=True),))


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    return path


def test_a_profile_s_acceptance():
    trace = trace_of(PROFILE, np.random.default_rng(0))
    assert trace.survival(4) == pytest.approx(PROFILE.acceptance_rate_per_pos, abs=0.02)
    assert trace.runs.max() == 4


def test_a_profile_alone(profile):
    found = gather([profile])
    assert (found.most, found.longest, found.backend) == (8, 4, "dynaspec")
    assert found.profile_path == profile
    assert found.limits is None


def test_logs_alone(tmp_path):
    header = {"host": "vllm", "model": "big", "speculative_config": {"model": "small"}}
    logs = [
        Host(tmp_path / f"{k}", rates=(0.7,), header=header, limits=IDLE, whole=True).run(Fixed(k), 60)
        for k in (0, 1, 4)
    ]
    found = gather(logs)
    assert (found.backend, found.model, found.drafter) == ("vllm", "big", "small")
    assert (found.most, found.longest) == (2, 8)
    assert found.trace.survival(1)[0] == pytest.approx(0.7, abs=0.1)
    assert found.host(2).limits(has_confidence=False).can_stop
    # An engine without a drafter is spared the pass that one with it always has.
    plain = StepLoad(Work(verify_rows=2, kv_tokens=100), requests=2, context=100)
    assert found.costs.time(plain).step_s >= found.plain_costs.time(plain).step_s > 0


def test_times_of_a_profile_and_acceptance_of_a_log(tmp_path, profile):
    log = Host(tmp_path / "log", rates=(0.3,)).run(Fixed(4), 60)
    found = gather([log, profile])
    assert isinstance(found.costs, ProfileCosts)
    assert found.trace.survival(1)[0] == pytest.approx(0.3, abs=0.1)
    assert found.profile == PROFILE


def test_fitted_costs_are_those_of_the_steps(tmp_path):
    paths = [Host(tmp_path / f"{k}", rates=(0.7,)).run(Fixed(k), 60) for k in (0, 3)]
    for path, k in zip(paths, (0, 3), strict=True):
        data = load(path)
        costs = FittedCosts(fit_costs(data), None, name="log", idle_pass=False)
        steps = data.steps
        work = Work((2,) * k, int(steps.verify_rows[9]), int(steps.kv_tokens[9]))
        time = costs.time(StepLoad(work, requests=2, context=100, drafting=(2,) * k))
        assert time.step_s == pytest.approx(steps.step_s[9], rel=0.05)
        assert (time.draft_s > 0) == (k > 0)


def test_what_cannot_be_used(tmp_path, profile):
    log = Host(tmp_path / "log").run(Fixed(2), 10)
    other = Host(tmp_path / "other", header={"host": "vllm"}).run(Fixed(2), 10)
    lookup = Host(tmp_path / "lookup", limits=LOOKUP, offers=lambda step: ((2, 2), (2, 2))).run(Fixed(2), 10)
    untimed = Host(tmp_path / "untimed", timed=False, whole=True).run(Fixed(2), 10)
    silent = Host(tmp_path / "silent").run(Fixed(0), 10)
    text = tmp_path / "text"
    text.write_text("hello\n")
    cases = {
        "no file is given": [],
        "cannot be read": [tmp_path / "none"],
        "is not JSON": [text],
        "are both profiles": [profile, profile],
        "expected logs of one host": [log, other],
        "looks drafts up": [lookup],
        "no draft was verified": [silent],
        "has no times": [untimed],
    }
    for message, paths in cases.items():
        with pytest.raises(ConfigError, match=message):
            gather(paths)
