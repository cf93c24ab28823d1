from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dynaspec.bench.demo import (
    KINDS,
    MODES,
    DemoPrompt,
    Measured,
    by_kind,
    load_demo_prompts,
    summarise,
)
from dynaspec.bench.demo_report import as_document, speeds_line, summary_table
from dynaspec.bench.measure import Run, run_once
from dynaspec.bench.plots import plot_summaries
from dynaspec.bench.stream import StreamView
from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams

from .fakes import FakeDecoder


def measured(kind: str, wrong: str = "") -> Measured:
    runs = {}
    for i, policy in enumerate(MODES):
        decoder = FakeDecoder(wrong=0 if policy == wrong else None)
        run = run_once(decoder, [[1, 2]], SamplingParams(max_tokens=6))
        runs[policy] = (Run(1.0 / (i + 1), run.counts, run.outputs),) * 2
    return Measured(DemoPrompt(kind, "a title", "a prompt"), runs)


def test_prompts():
    prompts = load_demo_prompts()
    assert len(prompts) == 12
    assert {prompt.kind for prompt in prompts} == set(KINDS)
    assert len({prompt.prompt for prompt in prompts}) == 12


def test_summaries():
    summaries = summarise([measured("maths"), measured("maths")])
    assert [s.speedup for s in summaries.values()] == pytest.approx([1, 2, 3, 4, 5])
    assert summaries["constant:5"].tokens_per_second == pytest.approx(12)
    assert summaries["constant:5"].acceptance_length == 2
    assert summaries["constant:5"].tokens_per_step == 1.5
    assert summaries["constant:5"].wasted == pytest.approx(2 / 6)


def test_differing_outputs_are_named():
    good, bad = measured("maths"), measured("editing", wrong="constant:5")
    assert good.different == {}
    assert bad.different == {"constant:5": 2}
    assert "identical" in speeds_line(good).plain
    assert "outputs differ: constant:5" in speeds_line(bad).plain
    assert as_document([good])["identical"] is True
    assert as_document([good, bad])["identical"] is False


def test_the_table_fits_a_terminal():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table([measured(kind) for kind in KINDS]))
    lines = console.export_text().splitlines()
    assert sum("auto" in line for line in lines) == len(KINDS) + 1
    assert sum("5.00×" in line for line in lines) == len(KINDS) + 1
    assert max(map(len, lines)) <= 80


def test_the_picture(tmp_path):
    path = tmp_path / "demo.png"
    plot_summaries(by_kind([measured(kind) for kind in KINDS]), path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_the_stream_shows_every_character_once_and_colours_drafts():
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    view = StreamView(console, Letters(), "1\n2\n3\n4\n5\n> ")
    output = RequestOutput("0", None, (), (), False)
    steps = [(1, 0), (4, 2), (5, 2), (8, 4)]  # tokens, accepted
    for tokens, accepted in steps:
        text = "abcdefgh"[:tokens]
        completion = CompletionOutput(
            index=0, text=text, token_ids=tuple(map(ord, text)), metrics=RequestMetrics(accepted=accepted)
        )
        view.update(replace(output, outputs=(completion,), finished=tokens == 8))
    styled = console.export_text(clear=False, styles=True)
    assert "\x1b[32mbc\x1b[0m" in styled
    assert "\x1b[32mfg\x1b[0m" in styled
    assert console.export_text() == "…\n3\n4\n5\n> abcdefgh\n"
