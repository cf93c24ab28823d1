from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

import dynaspec
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.families import ENGINE_FAMILIES, FAULTS, SKIP_REASONS, draft_lengths
from dynaspec.observe.prometheus import FamilyCollector, render
from dynaspec.observe.stats import EngineSnapshot
from dynaspec.propose.guard import Fault
from unit.observe.snapshots import snapshot

MODEL = 'a "model" of\n two lines'
OPENMETRICS = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6"
PROMETHEUS = (
    f"{OPENMETRICS},application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def collector(of: EngineSnapshot, namespace: str = "dynaspec") -> FamilyCollector[EngineSnapshot]:
    return FamilyCollector(ENGINE_FAMILIES, of, namespace=namespace, labels={"model_name": MODEL})


def samples(of: EngineSnapshot, namespace: str = "dynaspec") -> list[Sample]:
    return [sample for family in collector(of, namespace).collect() for sample in family.samples]


def values(of: EngineSnapshot, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric by its own labels."""
    return {
        tuple(value for label, value in sample.labels.items() if label != "model_name"): sample.value
        for sample in samples(of)
        if sample.name == f"dynaspec:{name}"
    }


def test_counters_and_gauges_say_what_was_counted() -> None:
    found = snapshot()
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 400,
        "prefix_cache_hits_total": 100,
        "num_preemptions_total": 1,
        "spec_decode_num_drafts_total": 60,
        "spec_decode_num_draft_tokens_total": 140,
        "spec_decode_num_verified_tokens_total": 130,
        "spec_decode_num_accepted_tokens_total": 80,
        "dsl_num_proposals_total": 70,
        "dsl_num_early_exits_total": 20,
        "dsl_tokens_requested_total": 300,
        "dsl_tokens_generated_total": 140,
        "step_seconds_total": 2.5,
        "draft_seconds_total": 0.5,
        "verify_seconds_total": 1.5,
        "target_passes_total": 40,
        "drafter_passes_total": 90,
        "prefill_rows_total": 321,
        "request_steps_total": 100,
        "decode_tokens_total": 180,
        "drafter_kv_skipped_total": 4,
        "drafter_kv_redone_total": 3,
        "goodput_predicted": 123.5,
    }
    assert {name: values(found, name) for name in expected} == {name: {(): value} for name, value in expected.items()}


def test_every_position_is_there_before_it_counts() -> None:
    accepted = values(snapshot(), "spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted == {("0",): 50, ("1",): 30, ("2",): 0, ("3",): 0, ("4",): 0}
    idle = values(snapshot(counts=SpecCounts()), "spec_decode_num_draft_tokens_per_pos_total")
    assert idle == {(str(position),): 0 for position in range(5)}


def test_reasons_are_a_bounded_set() -> None:
    skipped = values(snapshot(), "skipped_drafts_total")
    assert set(skipped) == {(reason,) for reason in SKIP_REASONS}
    assert (skipped["policy",], skipped["no_match",], skipped["other",]) == (7, 2, 5)


def test_reasons_are_those_of_the_engine() -> None:
    """None of them ends up among the others unnoticed."""
    package = Path(dynaspec.__file__).parent
    sources = [package / "engine/outcome.py", package / "schedule/scheduler.py", *(package / "propose").glob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    patterns = (r'"(requested_off|policy)"', r'"(no_\w+)"', r'_reasons\([^)]*"(\w+)"\)', r'request: "(\w+)"')
    given = {reason for pattern in patterns for reason in re.findall(pattern, text)}
    assert {"requested_off", "no_match", "catching_up", "proposer_fault"} <= given
    assert given <= set(SKIP_REASONS)


def test_faults_by_kind() -> None:
    assert {*get_args(Fault), "other"} == set(FAULTS)
    faults = values(snapshot(), "proposer_faults_total")
    assert faults == {("raised",): 1, ("nonsense",): 0, ("overrun",): 0, ("other",): 1}


def test_the_policy_is_in_one_mode() -> None:
    states = values(snapshot(), "guard_state")
    assert states == {("plain",): 0, ("speculate",): 1, ("probe_plain",): 0, ("probe_draft",): 0}
    assert values(snapshot(estimates={}), "guard_state") == {}, "other policies have no modes"


def test_goodput_is_told_only_while_requests_run() -> None:
    assert values(snapshot(running=0), "goodput_predicted") == {}
    assert values(snapshot(estimates={}), "goodput_predicted") == {}


@pytest.mark.parametrize("seconds", [0.0, -0.05, float("nan"), float("inf"), None, "fast"])
def test_a_goodput_that_cannot_be_is_not_told(seconds: object) -> None:
    expected = {"mode": "speculate", "expected_tokens": 5.0, "expected_step_s": seconds}
    assert values(snapshot(estimates=expected), "goodput_predicted") == {}


def test_proposers_and_policy() -> None:
    assert values(snapshot(), "proposer_enabled") == {("draft_model",): 1, ("ngram",): 0}
    assert values(snapshot(), "engine_info") == {("auto",): 1}


def test_draft_lengths_from_what_reached_each_position() -> None:
    counts = SpecCounts(request_steps=10, drafts=6, draft_tokens=14, drafted_per_pos=(6, 5, 3))
    lengths = dict(draft_lengths(counts).cumulative())
    assert (lengths[0], lengths[1], lengths[2], lengths[3], lengths[64]) == (4, 5, 7, 10, 10)
    assert (draft_lengths(counts).count, draft_lengths(counts).total) == (10, 14.0)


def test_draft_lengths_between_the_bounds_and_beyond() -> None:
    counts = SpecCounts(request_steps=3, drafts=3, draft_tokens=119, drafted_per_pos=(3,) * 9 + (2,) * 11 + (1,) * 70)
    lengths = dict(draft_lengths(counts).cumulative())
    assert (lengths[8], lengths[10], lengths[16], lengths[24], lengths[64], lengths[float("inf")]) == (0, 1, 1, 2, 2, 3)
    assert draft_lengths(SpecCounts()).count == 0


@pytest.mark.parametrize("namespace", ["dynaspec", "vllm"])
def test_a_scrape_can_be_read_in_both_formats(namespace: str) -> None:
    body, content_type = render([collector(snapshot(), namespace)], "")
    open_body, open_type = render([collector(snapshot(), namespace)], PROMETHEUS)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert open_type.startswith("application/openmetrics-text; version=1.0.0")
    text, openmetrics = list(parse_text(body.decode())), list(parse_openmetrics(open_body.decode()))
    assert [f.name for f in text] == [f.name for f in openmetrics]
    assert [f.type for f in text] == [f.type for f in openmetrics]
    assert len(text) == len(ENGINE_FAMILIES)
    expected = {(s.name, *sorted(s.labels.items())): s.value for s in samples(snapshot(), namespace)}
    for families in (text, openmetrics):
        assert {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples} == expected
    assert all(name.startswith(f"{namespace}:") for name, *_ in expected)
    assert not any(name.endswith("_created") for name, *_ in expected)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/plain, application/openmetrics-text", "text/plain"),
        ("application/openmetrics-text", "application/openmetrics-text"),
        ("text/html, application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        (PROMETHEUS.replace("escaping=allow-utf-8", "escaping=underscores"), "application/openmetrics-text"),
    ],
)
def test_the_format_is_the_one_asked_for(accept: str, kind: str) -> None:
    body, content_type = render([collector(snapshot())], accept)
    assert content_type.split(";")[0] == kind
    assert b"dynaspec:num_requests_running{" in body, "a colon is no character to escape"


def test_samples_carry_the_families_labels() -> None:
    labels = {family.name: set(getattr(family, "labels", ())) for family in ENGINE_FAMILIES}
    for family in collector(snapshot()).collect():
        name = family.name.removeprefix("dynaspec:")
        own = labels[name] if name in labels else labels[f"{name}_total"]
        assert all(set(sample.labels) - {"le"} == {"model_name", *own} for sample in family.samples)


def test_names_follow_prometheus() -> None:
    names = [family.name for family in ENGINE_FAMILIES]
    assert len(set(names)) == len(names)
    for family in collector(snapshot()).collect():
        assert family.documentation.endswith(".")
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
