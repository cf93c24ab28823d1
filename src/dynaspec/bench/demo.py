"""The demonstration: real prompts of several kinds, decoded in several ways, timed and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import resources
from operator import add
from statistics import median

from dynaspec.api import LLM
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.observe.counts import SpecCounts

from .measure import Run, different, run_once
from .policies import PLAIN

MODES: Mapping[str, str] = {
    PLAIN: "plain",
    "constant:5": "draft model k=5",
    "ngram:constant:5": "n-gram k=5",
    "confidence:0.4:20": "confidence",
    "auto": "auto",
}
"""Policies in the order they are shown, and what they are called there."""
SHOWN = "confidence:0.4:20"
"""The one whose text appears as it is decoded."""
KINDS: Mapping[str, str] = {"completion": "code completion", "editing": "code editing", "maths": "maths"}


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One of the prompts in ``prompts.json``."""

    kind: str
    title: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt decoded under every policy, several times over."""

    prompt: DemoPrompt
    runs: Mapping[str, tuple[Run, ...]]

    @property
    def different(self) -> dict[str, int]:
        """By policy: runs whose output was not plain decoding's, token for token. Empty if all agree."""
        reference = self.runs[PLAIN][0].tokens
        counts = {name: sum(different(run.tokens, reference) for run in runs) for name, runs in self.runs.items()}
        return {name: count for name, count in counts.items() if count}

    def tokens_per_second(self, policy: str) -> float:
        return median(run.tokens_per_second for run in self.runs[policy])


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on the prompts of one kind."""

    tokens_per_second: float
    speedup: float
    acceptance_length: float | None
    """Tokens per step that had a draft; None without any."""
    tokens_per_step: float
    """Of all steps; 1 for plain decoding."""
    wasted: float
    """Drafted tokens that were thrown away, per token of output."""


def load_demo_prompts() -> list[DemoPrompt]:
    """The prompts that come with the package."""
    text = (resources.files(__package__) / "prompts.json").read_text(encoding="utf-8")
    return [DemoPrompt(**record) for record in json.loads(text)["prompts"]]


def decode_shown(
    llm: LLM, prompt: DemoPrompt, params: SamplingParams, on_output: Callable[[RequestOutput], None]
) -> None:
    """Decodes a prompt untimed, for people to watch."""
    llm.generate(prompt.prompt, params, on_output=lambda _, output: on_output(output))


def measure_prompt(
    llms: Mapping[str, LLM], prompt: DemoPrompt, params: SamplingParams, rounds: int, first: int
) -> Measured:
    """Decodes a prompt ``rounds`` times under every policy, alternating.

    Args:
        first: which policy begins; one that changes from prompt to prompt favours none.
    """
    tokens = next(iter(llms.values())).tokenizer.encode(prompt.prompt)
    names = list(llms)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(first, first + rounds):
        start = turn % len(names)
        for name in (*names[start:], *names[:start]):
            runs[name].append(run_once(llms[name], [tokens], params))
    return Measured(prompt, {name: tuple(several) for name, several in runs.items()})


def summarise(measured: Sequence[Measured]) -> dict[str, Summary]:
    """By policy, over all the prompts given: sums of tokens over sums of median times."""
    plain = _speed(measured, PLAIN)
    return {policy: _summary(measured, policy, plain) for policy in measured[0].runs}


def by_kind(measured: Sequence[Measured]) -> dict[str, dict[str, Summary]]:
    """Kind of prompt → policy → summary."""
    groups = {kind: [m for m in measured if m.prompt.kind == kind] for kind in KINDS}
    return {kind: summarise(group) for kind, group in groups.items() if group}


def _summary(measured: Sequence[Measured], policy: str, plain: float) -> Summary:
    counts = reduce(add, (run.counts for m in measured for run in m.runs[policy]), SpecCounts())
    speed = _speed(measured, policy)
    return Summary(
        tokens_per_second=speed,
        speedup=speed / plain,
        acceptance_length=counts.mean_acceptance_length,
        tokens_per_step=counts.tokens_per_request_step or 1.0,
        wasted=(counts.draft_tokens - counts.accepted) / max(1, counts.emitted),
    )


def _speed(measured: Sequence[Measured], policy: str) -> float:
    tokens = sum(m.runs[policy][0].output_tokens for m in measured)
    return tokens / sum(median(run.seconds for run in m.runs[policy]) for m in measured)
