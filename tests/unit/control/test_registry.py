from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import DraftView, Explains, Limits, ProposerTraits
from dynaspec.control import registry
from dynaspec.control.auto import CachedPlan
from dynaspec.control.config import MAX_DRAFT_TOKENS, Policy, SpeculativeConfig
from dynaspec.control.profile import Profile
from dynaspec.control.registry import POLICIES, build_controller
from dynaspec.control.resolve import POLICIES as POLICY_NAMES
from unit.control.seam import H100_PROFILE, accepted, controller, limits, outcome, view


def test_every_policy_name_has_a_builder() -> None:
    allowed = get_args(get_args(Policy)[0])
    assert tuple(POLICIES) == POLICY_NAMES == allowed


def test_no_configuration_is_plain_decoding() -> None:
    host = limits()
    made = build_controller(None, host)
    seen = view("ab", host)
    plan = made.plan(seen)
    assert plan.depth == plan.nodes == plan.proposer == (0, 0)
    assert made.trim(seen, plan, DraftView(length=(0, 0), confidence=((), ()))) is plan


def test_constant_is_constant() -> None:
    host = limits()
    made = controller(host, policy="constant", num_speculative_tokens=3)
    made.plan(view("a", host))
    made.observe(outcome(0, a=accepted(3)))
    assert made.plan(view("ab", host)).depth == (3, 3)


@pytest.mark.parametrize("lens", [(0,), (0, 4, 8)])
def test_a_length_that_the_host_cannot_run_is_refused(lens: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 3"):
        controller(limits(*lens), num_speculative_tokens=3)


def test_the_off_switch_counts_decoding_requests_only() -> None:
    host = limits()
    made = controller(host, policy="constant", disable_by_batch_size=2)
    assert made.plan(view("ab", host, prefill=500)).depth == (5, 5)
    assert made.plan(view("abc", host)).depth == (0, 0, 0)


def test_the_off_switch_composes_with_a_policy_that_learns() -> None:
    host = limits()
    made = controller(host, policy="heuristic", disable_by_batch_size=1)
    made.plan(view("a", host))
    assert made.plan(view("ab", host)).depth == (0, 0)
    made.observe(outcome(0, a=accepted(5)))
    assert made.plan(view("a", host)).depth == (7,)
    made.forget(["a"])
    assert made.plan(view("c", host)).depth == (7,)


@pytest.mark.parametrize("keys", [{"draft_confidence_threshold": 0.5}, {"policy": "elastic"}, {}], ids=str)
def test_gating_composes_with_every_policy(keys: dict) -> None:
    host = limits()
    plan = controller(host, kv_write_gating_threshold=0.3, **keys).plan(view("ab", host))
    assert plan.gate_kv_below == (0.3 if any(plan.depth) else 0.0)
    assert controller(host, kv_write_gating_threshold=0.0, **keys).plan(view("ab", host)).gate_kv_below == 0.0


def test_gating_on_a_host_that_cannot_is_refused() -> None:
    host = limits(can_gate=False)
    with pytest.raises(ConfigError, match="kv_write_gating_threshold is set, but this host"):
        controller(host, policy="constant", kv_write_gating_threshold=0.3)
    controller(host, policy="constant", kv_write_gating_threshold=0.0)


@pytest.mark.parametrize(
    "keys",
    [
        {"num_speculative_tokens_per_batch_size": [[1, 8, 4]]},
        {"dynamic_config_path": H100_PROFILE},
        {"policy": "elastic"},
    ],
    ids=str,
)
class TestThresholdBesideAPolicy:
    def test_the_policy_caps_and_the_threshold_stops(self, keys: dict) -> None:
        host = limits()
        made = controller(host, draft_confidence_threshold=0.5, draft_confidence_scope="request", **keys)
        plan, capped = made.plan(view("a", host)), controller(host, **keys).plan(view("a", host))
        assert plan.depth == capped.depth
        assert capped.stop is None
        assert plan.stop is not None
        assert (plan.stop.below[0], plan.stop.scope) == (0.5, "request")
        assert len(plan.stop.below) >= plan.depth[0]

    def test_a_host_that_cannot_stop_is_refused(self, keys: dict) -> None:
        host = limits(can_stop=False)
        with pytest.raises(ConfigError, match=r"draft_confidence_threshold is 0\.5, but this host cannot stop"):
            controller(host, draft_confidence_threshold=0.5, **keys)
        controller(host, **keys)

    def test_a_proposer_without_confidence_is_refused(self, keys: dict) -> None:
        host = Limits(tuple(range(30)), proposers=(ProposerTraits("heads", has_confidence=False),))
        with pytest.raises(ConfigError, match=r"0\.5, but the proposer 'heads' has no confidence"):
            controller(host, draft_confidence_threshold=0.5, **keys)


class TestAuto:
    def test_it_is_the_default_and_keeps_to_its_cap(self) -> None:
        host = limits()
        config = SpeculativeConfig(model="m", num_speculative_tokens=3)
        made = build_controller(config, host, costs=PassCosts(target=((1, 0.01), (8, 0.011))))
        assert isinstance(made, CachedPlan)
        assert max(made.plan(view("abcd", host)).depth) <= 3

    def test_the_off_switch_and_its_estimates_reach_through(self) -> None:
        made = controller(limits(), disable_by_batch_size=1, kv_write_gating_threshold=0.5)
        assert isinstance(made, Explains)
        bare = controller(limits())
        assert isinstance(bare, Explains)
        assert set(made.estimates()) == set(bare.estimates())

    def test_a_profile_is_its_warm_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: dict[str, object] = {}
        monkeypatch.setattr(registry, "AutoController", lambda limits, **options: given.update(options))
        controller(limits(), policy="auto", dynamic_config_path=H100_PROFILE)
        assert given["warm_start"] == Profile.load(H100_PROFILE)
        controller(limits())
        assert given["warm_start"] is None


@pytest.mark.parametrize(
    ("keys", "longest"),
    [
        ({"policy": "constant"}, 5),
        ({"draft_confidence_threshold": 0.4}, 20),
        ({"policy": "heuristic"}, MAX_DRAFT_TOKENS),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 7]]}, 7),
        ({"policy": "elastic"}, 15),
        ({"draft_length_options": [2, 6], "num_speculative_tokens": 8}, 6),
    ],
)
def test_the_longest_draft_is_known_beforehand(keys: dict, longest: int) -> None:
    config = SpeculativeConfig(model="m", **keys)
    assert config.longest_draft == longest
    host = limits(*range(longest + 1))
    made = build_controller(config, host)
    made.plan(view("a", host))
    for _ in range(100):
        made.observe(outcome(0, a=accepted(longest)))
    assert made.plan(view("a", host)).depth == (longest,)


LOADED = """
from numba.core.dispatcher import Dispatcher
from dynaspec.control.auto import lengths
from dynaspec.control.registry import load_kernels

load_kernels()
own = {name: value for name, value in vars(lengths).items() if getattr(value, "__module__", "") == lengths.__name__}
functions = {name: one for name, one in own.items() if isinstance(one, Dispatcher) and not name.startswith("_")}
print(*functions, "|", *(name for name, one in functions.items() if not one.signatures))
"""


def test_no_step_waits_for_what_the_controller_has_compiled() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, env=environment, check=True)
    functions, missing = found.stdout.split("|")
    assert functions.strip()
    assert not missing.strip()
