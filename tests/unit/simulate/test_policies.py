from __future__ import annotations

import numpy as np
import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control.policies.goodput import schedule_of
from dynaspec.control.profile import Profile
from dynaspec.simulate import traces as at
from dynaspec.simulate.comparison import Case, compare
from dynaspec.simulate.costs import batch_sizes, profile_of, with_acceptance
from dynaspec.simulate.policies import parse_policies
from dynaspec.simulate.roofline import RooflineCosts, find_gpu, find_model
from dynaspec.simulate.simulator import HostConfig
from unit.simulate.scenes import flat_costs, synthetic

HOST = HostConfig(max_num_seqs=16, max_draft=6)
COSTS = RooflineCosts(find_model("llama-3.1-8b"), find_model("llama-3.2-1b"), find_gpu("H100"))
ALL = (
    "constant:2,heuristic,heuristic:3,heuristic_transient,confidence,confidence:0.5,confidence:auto:6,"
    "confidence:0.6:6:request,schedule:1-4=4/5-16=2,goodput,elastic,elastic:2/4/6,auto,auto:4,oracle,oracle:cost"
)


def profile():
    traits = HOST.limits(has_confidence=True).proposers[0]
    return profile_of(COSTS, synthetic(20), traits, batches=batch_sizes(16), longest=6)


def test_every_form_runs(tmp_path):
    profile().save(tmp_path / "profile.json")
    specs = parse_policies(f"{ALL},goodput:{tmp_path / 'profile.json'}:4", profile)
    trace = synthetic(10)
    results = compare(specs, [[Case(0, trace, at.rollout(10))]], COSTS, HOST)
    assert [result.name for result in results] == ["plain", *ALL.split(","), specs[-1].name]
    assert {result.totals.tokens for result in results} == {trace.output_tokens}
    by_name = {result.name: result.totals for result in results}
    assert by_name["plain"].drafted == 0
    assert by_name["oracle"].wasted == 0
    assert all(totals.drafted > 0 for name, totals in by_name.items() if name not in ("plain", "auto", "auto:4"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "best",
        "constant",
        "constant:x",
        "constant:0",
        "constant:2:3",
        "constant:1,constant:1",
        "confidence:2",
        "confidence:0.5:4:each",
        "schedule",
        "schedule:4",
        "schedule:1-4=5;5-32=2",
        "schedule:2-4=1",
        "elastic:2-5",
        "goodput:/nowhere",
        "auto:0",
    ],
)
def test_wrong_forms_say_what_is_expected(text):
    with pytest.raises(ConfigError, match=r"expected|cannot be read"):
        parse_policies(text, profile)


def test_a_profile_of_the_cost_model():
    made = profile()
    assert tuple(made.batch_stats) == (1, 2, 4, 8, 16)
    assert made.acceptance_rate_per_pos == tuple(round(rate, 4) for rate in synthetic(20).survival(6))
    for batch, row in made.batch_stats.items():
        assert list(row) == list(range(7))
        assert list(row.values()) == sorted(row.values()), batch
    assert Profile.parse(made.document(), "here") == made


def test_the_schedule_falls_with_load_and_rises_with_acceptance():
    costs = RooflineCosts(find_model("llama-3.1-8b"), find_model("llama-3.2-1b"), find_gpu("L40S"))
    traits = HOST.limits(has_confidence=True).proposers[0]
    made = profile_of(costs, synthetic(20), traits, batches=batch_sizes(512), longest=6)
    firsts, lasts = [], []
    for acceptance in (0.2, 0.5, 0.7, 0.9):
        lengths = [k for _, _, k in schedule_of(with_acceptance(made, acceptance), 6, 512)]
        firsts.append(lengths[0])
        lasts.append(lengths[-1])
        assert lengths[0] > lengths[-1]
    assert firsts == sorted(firsts)
    assert lasts == sorted(lasts)


def test_batch_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert batch_sizes(24) == [1, 2, 4, 8, 16, 24]


def test_seeds_and_nodes_add_up():
    traces = [synthetic(6, seed=seed) for seed in range(2)]
    cases = [[Case(seed, trace, at.rollout(6)) for _ in range(3)] for seed, trace in enumerate(traces)]
    (result,) = compare(parse_policies("plain", profile), cases, flat_costs(), HOST)
    totals = result.totals
    assert totals.tokens == 3 * sum(trace.output_tokens for trace in traces)
    assert totals.tokens_per_second_by_seed[0] == pytest.approx(
        3 * traces[0].output_tokens / max(run.seconds for run in totals.by_seed[0])
    )
    assert len(totals.latency_s()) == totals.requests == 36
    assert np.isfinite(totals.per_token_s()).all()
