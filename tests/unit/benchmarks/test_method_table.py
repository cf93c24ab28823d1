"""The table of docs/methods.md is what the registry and the hosts say."""

from __future__ import annotations

from pathlib import Path

import pytest

import method_table
from dynaspec.contract import methods
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS, Method
from dynaspec.contract.step import ProposerTraits
from dynaspec.hosts.vllm import launch
from method_table import COLUMNS, as_markdown, replaced, rows, write

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)


def test_the_page_is_what_the_registry_says():
    page = PAGE.read_text("utf-8")
    assert page == replaced(page), "run benchmarks/method_table.py --write"


def test_a_row_a_method():
    assert [row[0].split("`")[1] for row in rows()] == list(METHODS)
    assert all(len(row) == len(COLUMNS) for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_says_what_hosts_do(row):
    cells = dict(zip(COLUMNS, row, strict=True))
    assert cells["dynaspec"] == "yes"
    if cells["reads the target's hidden states"] == "yes":  # nobody hands them over there
        assert cells["Transformers"] == "no"
        assert cells["vLLM"] == "its own drafter"
    assert (cells["simulator"] == "no") == (cells["drafter passes a draft"] == "none")


def test_a_new_method_changes_the_table(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{method_table.BEGIN}old\n{method_table.END}after\n")
    write(page)
    assert page.read_text() == f"before\n{method_table.BEGIN}{as_markdown()}{method_table.END}after\n"
    new = Method("guess", "nobody", ProposerTraits("guess", passes_per_draft="one"), aliases=("[guess]",))
    monkeypatch.setattr(method_table, "METHODS", {**methods.METHODS, "guess": new})
    assert replaced(page.read_text()) != page.read_text()
    assert "| `guess`, `[guess]` | nobody | none | no | one | " in as_markdown()


def test_a_page_without_a_place():
    with pytest.raises(ConfigError, match="no place for the table"):
        replaced("nothing")
