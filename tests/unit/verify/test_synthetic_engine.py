"""Synthetic acceptance through the whole engine: real passes, rollback and preemption at any acceptance."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dynaspec import SamplingParams, StructuredOutputsParams
from dynaspec.contract.outputs import RequestOutput
from support.checkpoints import Pair
from support.engines import kv_bytes, open_llm
from support.workloads import PROMPTS

RATES = (0.9, 0.6, 0.3, 0.3)
KINDS = ({"temperature": 0.0}, {"temperature": 0.7, "seed": 5}, {"temperature": 0.7})


def params(count: int, **options: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**KINDS[i % len(KINDS)], max_tokens=40, ignore_eos=True, detokenize=False, **options)
        for i in range(count)
    ]


def speculation(tiny: Pair, rates: Sequence[float] = RATES) -> dict[str, Any]:
    return {
        "model": tiny.drafter,
        "policy": "constant",
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(rates),
    }


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("scheduling", ["serial", "async"])
def test_the_engine_measures_the_rates_it_was_given(scheduling: str, tiny: Pair) -> None:
    prompts = PROMPTS * 12
    with open_llm(
        tiny.target,
        speculative_config=speculation(tiny),
        max_num_seqs=16,
        async_scheduling=scheduling == "async",
    ) as llm:
        llm.generate(prompts, params(len(prompts)))
        stats = llm.stats()
    for j, rate in enumerate(RATES):
        drafts = stats.drafted_per_pos[j]  # the last steps of a request have room for fewer
        assert abs(stats.accepted_per_pos[j] / drafts - rate) < 0.02 + 4.5 * np.sqrt(rate * (1 - rate) / drafts)


@pytest.mark.parametrize(("rate", "length"), [(0.0, 1.0), (1.0, 5.0)])
def test_nothing_and_everything(rate: float, length: float, tiny: Pair) -> None:
    with open_llm(tiny.target, speculative_config=speculation(tiny, (rate,) * 4), max_num_seqs=3) as llm:
        outputs = llm.generate(PROMPTS[:3], params(3, min_tokens=40))
        stats = llm.stats()
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)
    assert stats.accepted == rate * stats.verified
    assert stats.mean_acceptance_length == pytest.approx(length, abs=0.5)


def test_runs_are_alike_and_preemption_changes_nothing_that_is_drawn(tiny: Pair) -> None:
    seeded = [SamplingParams(temperature=0.7, seed=i, max_tokens=40, ignore_eos=True) for i in range(8)]
    memory = kv_bytes(8, tiny.target, tiny.drafter)
    found, preemptions = [], []
    for options in ({}, {}, {"kv_cache_memory": memory}):
        with open_llm(tiny.target, speculative_config=speculation(tiny), max_num_seqs=8, **options) as llm:
            found.append(tokens(llm.generate(PROMPTS, seeded)))
            preemptions.append(llm.stats().preemptions)
    assert found[0] == found[1]
    assert preemptions[0] == preemptions[1] == 0 < preemptions[2]
    assert [len(output) for output in found[2]] == [40] * 8


def test_a_grammar_is_kept_to_all_the_same(tiny: Pair) -> None:
    form = StructuredOutputsParams(regex="([a-z]{2} ){9}[a-z]")
    asked = [SamplingParams(**kind, max_tokens=60, structured_outputs=form) for kind in KINDS] * 2
    drafter = speculation(tiny, (1.0,) * 4)
    rest = {name: value for name, value in drafter.items() if name != "model"}
    for config in (drafter, rest | {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}):
        with open_llm(tiny.target, speculative_config=config, max_num_seqs=6) as llm:
            outputs = llm.generate(["ab cd ab ab cd de de ab"] * len(asked), asked)
        for output in outputs:
            assert re.fullmatch(form.regex or "", output.outputs[0].text)


def test_it_says_so_loudly(tiny: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_llm(tiny.target, speculative_config=speculation(tiny)):
        pass
    assert any("SYNTHETIC ACCEPTANCE" in record.getMessage() for record in caplog.records)
