"""Trees and synthetic acceptance, as configurations ask for them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS, WITH_TREES
from dynaspec.contract.step import TreeRule
from dynaspec.contract.tree import MAX_NODES, TokenTree
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.keys import synthetic_rates
from unit.control.seam import FIFTY_CASES, controller, limits, view

SHAPE = [(0,), (1,), (0, 0)]


def draft(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(model="drafter", **keys)


class TestKeys:
    @pytest.mark.parametrize("value", [SHAPE, "[(0,), (1,), (0, 0)]", [[0, 0], [0], [1]]], ids=str)
    @pytest.mark.parametrize("length", [None, 2, 3], ids=["no length", "depth", "nodes"])
    def test_a_shape_says_depth_and_policy(self, value: Any, length: int | None) -> None:
        keys = {} if length is None else {"num_speculative_tokens": length}
        config = draft(speculative_token_tree=value, **keys)
        assert config.speculative_token_tree == ((0,), (1,), (0, 0))
        assert (config.num_speculative_tokens, config.policy, config.most_nodes) == (2, "constant", 3)
        assert config.tree == TreeRule(2, shape=TokenTree.parse(SHAPE))

    def test_a_width_makes_trees_of_a_size(self) -> None:
        config = draft(policy="constant", num_speculative_tokens=5, tree_width=3)
        assert (config.tree, config.most_nodes) == (TreeRule(3), 15)
        config = draft(policy="constant", num_speculative_tokens=5, tree_width=3, tree_nodes=8)
        assert (config.tree, config.most_nodes) == (TreeRule(3), 8)
        assert draft(policy="constant", num_speculative_tokens=30, tree_width=8).most_nodes == MAX_NODES

    @pytest.mark.parametrize("keys", [{}, {"tree_width": 1}])
    def test_a_width_of_one_or_none_is_a_chain(self, keys: dict[str, int]) -> None:
        assert draft(policy="constant", **keys).tree is None

    def test_sglangs_words(self) -> None:
        given = {"speculative_num_steps": 4, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
        ours = {"num_speculative_tokens": 4, "tree_width": 2, "tree_nodes": 7}
        assert draft(policy="constant", **given) == draft(policy="constant", **ours)

    @pytest.mark.parametrize("keys", [{"speculative_token_tree": SHAPE}, {"tree_width": 2}], ids=["shape", "width"])
    @pytest.mark.parametrize("method", sorted(set(METHODS) - set(WITH_TREES)))
    def test_methods_that_draft_chains_refuse(self, method: str, keys: dict[str, Any]) -> None:
        needs: dict[str, Any] = {} if METHODS[method].checkpoint is None else {"model": "drafter"}
        needs |= {own: 1 for own in (METHODS[method].key,) if own is not None}
        (key,) = keys
        with pytest.raises(
            ConfigError, match=rf"^{key} is .* but method is '{method}', which drafts chains; .*'eagle'"
        ):
            SpeculativeConfig(method=method, **needs, **keys)

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"speculative_token_tree": SHAPE, "policy": "auto"}, "policy is 'auto'; expected no speculative_token_tr"),
            ({"speculative_token_tree": SHAPE, "policy": "heuristic"}, "but policy is 'heuristic'; expected no spec"),
            (
                {"tree_width": 2, "policy": "heuristic"},
                "2 but policy is 'heuristic'; expected no tree_width, or",
            ),
            ({"tree_width": 2, "draft_length_options": [2, 4]}, "tree_width is 2 but policy is 'elastic'"),
            ({"tree_width": 2, "draft_confidence_threshold": 0.5}, "tree_width is 2 but policy is 'confidence'"),
            (
                {"tree_width": 2, "policy": "constant", "kv_write_gating_threshold": 0.5},
                "tree_width is 2 beside a kv_write_gating_threshold; expected one",
            ),
            (
                {"speculative_token_tree": SHAPE, "kv_write_gating_threshold": 0.5},
                "beside a kv_write_gating_threshold; expected one",
            ),
            ({"speculative_token_tree": SHAPE, "tree_width": 2}, "tree_width is 2 beside a speculative_token_tree"),
            ({"speculative_token_tree": SHAPE, "tree_nodes": 3}, "tree_nodes is 3 beside a speculative_token_tree"),
            (
                {"speculative_token_tree": SHAPE, "num_speculative_tokens": 4},
                "num_speculative_tokens is 4 but speculative_token_tree has 3 nodes and depth 2; expected either",
            ),
            (
                {"tree_width": 2, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]},
                "tree_width is 2 beside rejection_sample_method 'synthetic', which accepts chains; expected one",
            ),
            ({"tree_nodes": 5}, "tree_nodes is 5 but there is no tree_width above 1; expected one"),
            ({"tree_nodes": 5, "tree_width": 1}, "tree_nodes is 5 but there is no tree_width above 1; expected one"),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_contradictions(self, keys: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            draft(**keys)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


class TestHosts:
    @pytest.mark.parametrize(
        ("key", "keys"),
        [
            ("speculative_token_tree", {"speculative_token_tree": SHAPE}),
            ("tree_width", {"policy": "constant", "tree_width": 2}),
        ],
    )
    def test_one_that_verifies_chains_only_refuses(self, key: str, keys: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"^{key} is set, but this host verifies chains only; expected no {key}$"):
            controller(limits(), **keys)
        host = limits(can_branch=True)
        plan = controller(host, **keys).plan(view("a", host))
        assert plan.tree is not None
        assert plan.nodes[0] >= plan.depth[0] > 0

    def test_auto_refuses_there_too(self) -> None:
        with pytest.raises(ConfigError, match=r"^tree_width is set, but this host verifies chains only"):
            controller(limits(), tree_width=2)
        assert controller(limits(), tree_width=1).plan(view("a", limits())).tree is None

    def test_a_plan_without_drafts_has_no_tree(self) -> None:
        host = limits(can_branch=True)
        made = controller(host, policy="constant", tree_width=2)
        plan = made.plan(view("ab", host, max_draft=(0, 0)))
        assert plan.nodes == (0, 0)
        assert plan.tree is None


def config(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(model="m", rejection_sample_method="synthetic", **keys)


def test_tested_drafts_have_no_rates() -> None:
    assert SpeculativeConfig(model="m").synthetic_rates is None


def test_rates_are_kept_and_are_as_many_as_the_draft_is_long() -> None:
    made = config(synthetic_acceptance_rates=[0.8, 0.5, 0.5])
    assert made.synthetic_rates == (0.8, 0.5, 0.5)
    assert made.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [
        (2.6, 3, (1.0, 0.6, 0.0)),
        (1.0, 3, (0.0, 0.0, 0.0)),
        (4.0, 3, (1.0, 1.0, 1.0)),
        (2.0, 3, (1.0, 0.0, 0.0)),
        (3.5, 4, (1.0, 1.0, 0.5, 0.0)),
    ],
)
def test_a_mean_length_is_spread_as_in_vllm(length: float, k: int, rates: tuple[float, ...]) -> None:
    made = config(synthetic_acceptance_length=length, num_speculative_tokens=k)
    assert made.synthetic_rates == pytest.approx(rates)


@FIFTY_CASES
@given(st.integers(1, 64), st.floats(0, 1))
def test_the_mean_is_met_and_rates_never_increase(k: int, share: float) -> None:
    length = 1 + share * k
    rates = synthetic_rates(None, length, k)
    assert 1 + sum(rates) == pytest.approx(length)
    assert list(rates) == sorted(rates, reverse=True)
    assert len(rates) == k


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 1.5}, "with both of synthetic"),
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, r"is \[0.5, 0.6\]; expected rates that do not increase"),
        ({"synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 2}, "has 1 entries but .* is 2"),
        ({"synthetic_acceptance_length": 4.5, "num_speculative_tokens": 3}, "4.5 with .* 3; expected .* from 1 to 4"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**keys)
