"""Compose: what is mounted is there, what is started takes its options, nothing is open to the outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from dynaspec.server.config import API_KEY_VARIABLE
from unit.deploy.serve_command import DEPLOY, parsed
from unit.deploy.stopping import needed_to_stop_s

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def with_defaults(text: str) -> str:
    """Variables as they are where nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def mounts(name: str) -> dict[str, Path | str]:
    """Path in the container → file here, or name of a volume."""
    found: dict[str, Path | str] = {}
    for mount in SERVICES[name]["volumes"]:
        source, target, *mode = with_defaults(mount).split(":")
        if source.startswith("."):
            assert mode == ["ro"]
            found[target] = (DEPLOY / source).resolve()
        else:
            assert source in COMPOSE["volumes"]
            found[target] = source
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert {"cpus", "memory"} == service["deploy"]["resources"]["limits"].keys()
    assert service["pids_limit"] > 0
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_there(name: str) -> None:
    assert all(source.exists() for source in mounts(name).values() if isinstance(source, Path))


def test_the_server_gets_its_options() -> None:
    server = SERVICES["server"]
    options = parsed(server["command"])
    assert mounts("server")[str(options["config"])] == DEPLOY / "serve.yaml"
    assert mounts("server")["/srv/dynaspec/models"] == DEPLOY / "models"
    assert "/var/cache/dynaspec" in mounts("server")
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    assert server["init"] is True


def test_keys_come_from_the_environment_alone() -> None:
    given = SERVICES["server"]["environment"]
    assert given[API_KEY_VARIABLE] == f"${{{API_KEY_VARIABLE}:-}}"


def test_there_are_as_many_threads_as_processors() -> None:
    server = SERVICES["server"]
    assert server["environment"]["OMP_NUM_THREADS"] == server["deploy"]["resources"]["limits"]["cpus"]


def test_the_server_has_time_to_end() -> None:
    assert int(SERVICES["server"]["stop_grace_period"].removesuffix("s")) >= needed_to_stop_s()


def test_prometheus_is_as_outside_but_for_the_address() -> None:
    [inside, outside] = [
        yaml.safe_load((DEPLOY / folder / "prometheus.yml").read_text()) for folder in ("docker", "prometheus")
    ]
    [target] = inside["scrape_configs"][0]["static_configs"][0].pop("targets")
    outside["scrape_configs"][0]["static_configs"][0].pop("targets")
    assert inside == outside
    host, port = target.split(":")
    assert SERVICES[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    [config] = [flag.partition("=")[2] for flag in SERVICES["prometheus"]["command"] if "config.file" in flag]
    assert mounts("prometheus")[config] == DEPLOY / "docker/prometheus.yml"
    for rules in inside["rule_files"]:
        assert mounts("prometheus")[str(Path(config).parent / rules)] == DEPLOY / "prometheus" / rules


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    inside = yaml.safe_load((DEPLOY / "docker/datasource.yml").read_text())
    outside = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    url = urlsplit(inside["datasources"][0].pop("url"))
    outside["datasources"][0].pop("url")
    assert inside == outside
    assert url.hostname is not None
    assert SERVICES[url.hostname]["ports"] == [f"127.0.0.1:{url.port}:{url.port}"]
    [provider] = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/dynaspec.yml").read_text())["providers"]
    shown = mounts("grafana")
    dashboard = f"{provider['options']['path']}/dynaspec.json"
    assert shown[dashboard] == DEPLOY / "grafana/dynaspec.json"
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    for path in shown:
        if path.startswith("/etc/grafana"):
            assert path.startswith(("/etc/grafana/provisioning/dashboards/", "/etc/grafana/provisioning/datasources/"))
