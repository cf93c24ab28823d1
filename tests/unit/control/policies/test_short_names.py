from __future__ import annotations

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control.keys import SuffixSettings
from dynaspec.control.policies.short_names import parse_policies, parse_policy
from dynaspec.control.profile import Profile


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant:4", ("draft_model", "constant", 4, None)),
        ("draft_model:constant:4", ("draft_model", "constant", 4, None)),
        ("ngram:constant:5", ("ngram", "constant", 5, None)),
        ("heuristic", ("draft_model", "heuristic", 5, None)),
        ("heuristic_transient:3", ("draft_model", "heuristic_transient", 3, None)),
        ("ngram:heuristic:2", ("ngram", "heuristic", 2, None)),
        ("confidence", ("draft_model", "confidence", 20, "auto")),
        ("confidence:0.4", ("draft_model", "confidence", 20, 0.4)),
        ("confidence:auto:8", ("draft_model", "confidence", 8, "auto")),
        ("auto", ("draft_model", "auto", 16, None)),
        ("ngram:auto:4", ("ngram", "auto", 4, None)),
        ("elastic", ("draft_model", "elastic", 15, None)),
        ("schedule:1-4=5/5-32=2", ("draft_model", "schedule", 5, None)),
        ("schedule:1-4=5+stop:0.4", ("draft_model", "schedule", 5, 0.4)),
    ],
)
def test_forms(name, expected):
    spec = parse_policy(name, "draft")
    config = spec.config
    assert spec.name == name
    found = (config.method, config.policy, config.num_speculative_tokens, config.draft_confidence_threshold)
    assert found == expected
    assert config.model == (None if config.method == "ngram" else "draft")


def test_a_prediction_layer_of_the_target_s_own_needs_no_draft_model():
    config = parse_policy("mtp:constant:3", None).config
    assert (config.method, config.model, config.hybrid_lookup) == ("mtp", None, False)
    assert parse_policy("mtp:constant:3", "layer").config.model == "layer"
    with pytest.raises(ConfigError, match="'eagle:auto' needs a draft model; expected --draft-model"):
        parse_policy("eagle:auto", None)


def test_what_the_policies_take(tmp_path):
    schedule = parse_policy("schedule:1-4=5/5=2", "draft").config
    assert schedule.num_speculative_tokens_per_batch_size == ((1, 4, 5), (5, 5, 2))
    elastic = parse_policy("elastic:2/4/8:0.3", "draft").config
    assert elastic.draft_length_options == (2, 4, 8)
    assert elastic.kv_write_gating_threshold == 0.3
    both = parse_policy("both:auto", "draft").config
    assert both.method == "draft_model"
    assert both.lookup == (4, 16)
    everything = parse_policy("all:auto", "draft").config
    assert (everything.lookup, everything.suffix) == (None, SuffixSettings())
    assert parse_policy("suffix:constant:3", None).config.method == "suffix"
    assert parse_policy("constant:5+off:8", "draft").config.disable_by_batch_size == 8
    profile = tmp_path / "profile.json"
    Profile({1: {0: 1.0, 2: 1.5}}, (0.8, 0.6), 2).save(profile)
    goodput = parse_policy(f"goodput:{profile}", "draft").config
    assert goodput.profile.max_num_speculative_tokens == 2
    assert parse_policy(f"goodput:{profile}:1", "draft").config.longest_draft == 1


def test_plain_comes_first_given_or_not():
    assert [s.name for s in parse_policies("constant:4, ngram:constant:4", "d")] == [
        "plain",
        "constant:4",
        "ngram:constant:4",
    ]
    specs = parse_policies("confidence:0.4,plain", "d")
    assert [s.name for s in specs] == ["plain", "confidence:0.4"]
    assert specs[0].config is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected plain"),
        ("magic", "'magic' is not known; expected plain, auto"),
        ("goodput", "names no profile; expected goodput:FILE"),
        ("goodput:/nowhere.json", "'goodput:/nowhere.json': .*cannot be read"),
        ("schedule:1-4", "range '1-4'; expected LO-HI=K"),
        ("schedule:2-4=5", "'schedule:2-4=5': "),
        ("elastic:5/x", "value 'x'; expected an integer"),
        ("elastic:5:high", "value 'high'; expected a number"),
        ("elastic:5:0.1:2", "expected elastic\\[:A/B/C\\[:GATE\\]\\]"),
        ("constant:4+fast:1", "addition 'fast:1'; expected stop:T, off:B or tree"),
        ("both:constant:4", "policy 'auto', which looks up beside the model"),
        ("ngram", "'ngram' is not known"),
        ("constant", "expected constant:K"),
        ("constant:four", "value 'four'; expected an integer"),
        ("constant:0", "'constant:0': num_speculative_tokens is 0"),
        ("confidence:high", "expected a number or auto"),
        ("confidence:1.5", "'confidence:1.5': draft_confidence_threshold is 1.5"),
        ("confidence:0.4:5:request:1", "4 values; expected confidence"),
        ("heuristic:1:2", "2 values; expected heuristic"),
        ("ngram:confidence:0.4", "ngram"),
        ("constant:4,constant:4", "given twice"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_policies(text, "draft")


def test_a_draft_model_is_needed():
    with pytest.raises(ConfigError, match="needs a draft model; expected --draft-model, or ngram:constant:4"):
        parse_policy("constant:4", None)
    with pytest.raises(ConfigError, match="needs a draft model"):
        parse_policy("both:auto", None)
    assert parse_policy("ngram:constant:4", None).config.method == "ngram"
