from __future__ import annotations

import typer
from typer.testing import CliRunner

from dynaspec.cli.explain import explain
from dynaspec.contract.errors import ConfigError
from unit.explain.logs import Fixed, Host

app = typer.Typer()
app.command()(explain)


def test_a_report_is_written_and_summed_up(tmp_path):
    log = Host(tmp_path / "decisions.jsonl").run(Fixed(3), 50)
    out = tmp_path / "why.html"
    result = CliRunner().invoke(app, [str(log), "--output", str(out)])
    assert result.exit_code == 0, result.output
    assert "50 steps decoded 2 requests" in result.stdout
    assert "written to" in result.stderr
    html = out.read_text("utf-8")
    assert html.startswith("<!DOCTYPE html>")
    assert "<title>Decisions in decisions.jsonl</title>" in html


def test_bad_input(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"a": 1}\n')
    for given, message in ((log, "line 1"), (tmp_path / "none", "cannot be read")):
        result = CliRunner().invoke(app, [str(given)])
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


def test_a_folder_that_does_not_exist(tmp_path):
    log = Host(tmp_path / "log", ids=()).run(Fixed(3), 2)
    result = CliRunner().invoke(app, [str(log), "-o", str(tmp_path / "no" / "report.html")])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written: No such file" in str(result.exception)
