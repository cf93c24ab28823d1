from __future__ import annotations

import io

import pytest
from rich.console import Console

from dynaspec.bench.decoders import TimedRun, run_once
from dynaspec.bench.demo import (
    KINDS,
    DemoPrompt,
    PromptTimes,
    as_document,
    as_tokens,
    by_kind,
    kinds_table,
    load_demo_prompts,
    name_of,
    shown_way,
    speeds_line,
    summarise,
    summary_table,
    ways,
)
from dynaspec.bench.plots import plot_summaries
from dynaspec.contract.sampling_params import SamplingParams

from .fakes import FakeDecoder

WAYS = ways("nowhere")


def measured(kind: str, wrong: str = "") -> PromptTimes:
    runs = {}
    for i, policy in enumerate(WAYS):
        decoder = FakeDecoder(wrong=0 if policy == wrong else None)
        run = run_once(decoder, [[1, 2]], SamplingParams(max_tokens=6))
        runs[policy] = (TimedRun(1.0 / (i + 1), run.counts, run.outputs),) * 2
    return PromptTimes(DemoPrompt(kind, "a title", "a prompt"), runs)


def test_prompts():
    prompts = load_demo_prompts()
    assert len(prompts) == 12
    assert {prompt.kind for prompt in prompts} == set(KINDS)
    assert len({prompt.prompt for prompt in prompts}) == 12


def test_ways_follow_the_drafter(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Eagle3Speculator"]}')
    assert [name_of(way) for way in ways(str(tmp_path))] == ["plain", "n-gram k=5", "EAGLE-3 k=3", "auto"]
    assert [name_of(way) for way in WAYS] == ["plain", "n-gram k=5", "draft model k=3", "auto"]
    assert shown_way(str(tmp_path)) == "eagle3:constant:3"


class Chats:
    """A tokenizer that knows of chats."""

    def render_chat(self, messages):
        return f"<{messages[0]['role']}> {messages[0]['content']}"

    def encode(self, text, *, special_tokens=True):
        return [text, special_tokens]


def test_prompts_are_asked_through_the_chat_template():
    assert as_tokens(Chats(), DemoPrompt("code", "a title", "hello")) == ["<user> hello", False]


def test_summaries():
    summaries = summarise([measured("maths"), measured("maths")])
    assert [s.speedup for s in summaries.values()] == pytest.approx([1, 2, 3, 4])
    assert summaries["ngram:constant:5"].tokens_per_second == pytest.approx(12)
    assert summaries["ngram:constant:5"].acceptance_length == 2
    assert summaries["ngram:constant:5"].tokens_per_step == 1.5
    assert summaries["ngram:constant:5"].wasted == pytest.approx(2 / 6)
    assert (summaries["auto"].outputs, summaries["auto"].different) == (4, 0)


def test_differing_outputs_are_named():
    good, bad = measured("maths"), measured("editing", wrong="ngram:constant:5")
    assert good.different == {}
    assert bad.different == {"ngram:constant:5": 2}
    assert "identical" in speeds_line(good).plain
    assert "outputs differ: ngram:constant:5" in speeds_line(bad).plain
    assert as_document([good])["identical"] is True
    assert as_document([good, bad])["identical"] is False


def test_the_tables_fit_a_terminal():
    console = Console(width=80, record=True, file=io.StringIO())
    several = [measured(kind, wrong="auto" if kind == "maths" else "") for kind in KINDS]
    console.print(summary_table(several))
    console.print(kinds_table(several))
    lines = console.export_text().splitlines()
    [overall] = [line for line in lines if line.strip().startswith("auto")]
    assert "4.00×" in overall
    assert "10 of 12" in overall
    assert [line.split()[0] for line in lines if line.count("×") == 3] == [*KINDS]
    assert max(map(len, lines)) <= 80


def test_the_picture(tmp_path):
    path = tmp_path / "demo.png"
    plot_summaries(by_kind([measured(kind) for kind in KINDS]), path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
