"""What deploy/ and docs/metrics.md say of the metrics is what a scrape has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynaspec.observe.families import ENGINE_FAMILIES, HEALTH, Family, HistogramFamily
from dynaspec.server.middleware import ADMISSION_FAMILIES, HTTP_FAMILIES

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FAMILIES: tuple[Family[Any], ...] = (*HEALTH, *ENGINE_FAMILIES, *HTTP_FAMILIES, *ADMISSION_FAMILIES)
ALWAYS = {"model_name", "instance", "job"}


def sample_labels() -> dict[str, set[str]]:
    """Names of samples, and the labels that they can have."""
    found = {}
    for family in FAMILIES:
        if isinstance(family, HistogramFamily):
            found |= {f"{family.name}_{part}": set(ALWAYS) for part in ("count", "sum")}
            found[f"{family.name}_bucket"] = ALWAYS | {"le"}
        else:
            found[family.name] = ALWAYS | set(family.labels)
    return found


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana/dynaspec.json").read_text())


def panels() -> list[dict[str, Any]]:
    return dashboard()["panels"]


def dashboard_queries() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0]


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


QUERIES = [*dashboard_queries(), *(rule["expr"] for rule in alerts())]


@pytest.mark.parametrize("query", QUERIES)
def test_queries_ask_for_what_there_is(query: str) -> None:
    known = sample_labels()
    asked = re.findall(r"\bdynaspec:(\w+)(?:\{([^}]*)\})?", query)
    assert asked or query.startswith("up{")
    for name, matchers in asked:
        assert name in known
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= known[name]
    names = [name for name, _ in asked]
    for grouped in re.findall(r"\bby \(([^)]*)\)", query):
        assert all(set(grouped.split(", ")) <= known[name] for name in names)
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)


def test_counters_are_read_as_rates() -> None:
    for query in QUERIES:
        for name in re.findall(r"dynaspec:(\w+_(?:total|bucket|sum|count))\b", query):
            if name in sample_labels() and name != "iteration_tokens_total":
                assert re.search(rf"(?:rate|increase)\(dynaspec:{name}\b", query), query


def test_the_dashboard_shows_what_matters() -> None:
    shown = " ".join(dashboard_queries())
    for name in (
        *(
            "time_to_first_token_seconds_bucket",
            "inter_token_latency_seconds_bucket",
            "e2e_request_latency_seconds_bucket",
        ),
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("spec_decode_num_accepted_tokens_per_pos_total", "draft_length_bucket", "guard_state"),
        *("goodput_predicted", "goodput_measured", "proposer_faults_total", "http_requests_total"),
    ):
        assert f"dynaspec:{name}" in shown


def test_panels_have_places_of_their_own() -> None:
    places = [panel["gridPos"] for panel in panels()]
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


def test_panels_use_the_variables_that_there_are() -> None:
    text = json.dumps(panels())
    defined = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == defined


def test_alerts_say_what_is_wrong() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)


def test_prometheus_and_grafana_find_each_other() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).is_file() for name in prometheus["rule_files"])
    jobs = {job["job_name"] for job in prometheus["scrape_configs"]}
    assert set(re.findall(r'job="(\w+)"', " ".join(rule["expr"] for rule in alerts()))) <= jobs
    provisioning = DEPLOY / "grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    [provider] = yaml.safe_load((provisioning / "dashboards/dynaspec.yml").read_text())["providers"]
    assert provider["type"] == "file"


def documented_rows() -> list[str]:
    rows = []
    for family in FAMILIES:
        histogram = isinstance(family, HistogramFamily)
        kind = "histogram" if histogram else family.kind
        labels = "" if histogram else ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {kind} | {labels} | {family.meaning} |")
    return rows


def test_the_documentation_lists_every_family() -> None:
    lines = (ROOT / "docs/metrics.md").read_text().splitlines()
    listed = [line for line in lines if line.startswith("| `") and line.count("|") == 5]
    assert sorted(listed) == sorted(documented_rows())


def test_the_documentation_lists_every_attribute_of_a_span() -> None:
    sources = (ROOT / "src/dynaspec/server/tracing.py").read_text()
    told = set(re.findall(r'"((?:gen_ai|dynaspec|error)\.[\w.]+)"', sources))
    assert len(told) > 20
    assert told == set(re.findall(r"`((?:gen_ai|dynaspec|error)\.[\w.]+)`", (ROOT / "docs/metrics.md").read_text()))
