"""The demonstration: real prompts of several kinds, decoded in several ways, timed, compared and shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from importlib import resources
from operator import add
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from dynaspec.api import LLM
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.control.policies.short_names import PLAIN, parse_policy
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.observe.counts import SpecCounts
from dynaspec.result_output import new_table

from .decoders import SharedModels, TimedRun, different, open_engine, run_once
from .offline import SCHEMA, rotated
from .provenance import provenance

_LOOKUP_LENGTH, _DRAFT_LENGTH = 5, 3
"""Tokens of drafts of fixed length: for the demonstration's models on two cores the best there are."""
KINDS = ("writing", "code", "maths", "knowledge", "reading", "rewriting")
_METHODS = {
    "ngram": "n-gram",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "mlp_speculator": "MLP speculator",
    "eagle": "EAGLE",
    "mtp": "MTP",
    "draft_model": "draft model",
}


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One of the prompts in ``demo_prompts.json``."""

    kind: str
    title: str
    prompt: str


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """One prompt decoded under every policy, several times over."""

    prompt: DemoPrompt
    runs: Mapping[str, tuple[TimedRun, ...]]

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
    outputs: int
    different: int
    """Outputs that were not plain decoding's, token for token."""


def ways(draft_model: str) -> tuple[str, ...]:
    """The policies that are shown, in their order: none, lookup, the drafter, and what decides between them."""
    return (PLAIN, f"ngram:constant:{_LOOKUP_LENGTH}", shown_way(draft_model), "auto")


def shown_way(draft_model: str) -> str:
    """The one whose text appears as it is decoded, since with it every step has a draft."""
    return f"{checkpoint_method(draft_model)}:constant:{_DRAFT_LENGTH}"


def name_of(policy: str) -> str:
    """A policy as people read it."""
    method, _, form = policy.partition(":")
    return f"{_METHODS[method]} k={form.rpartition(':')[2]}" if method in _METHODS else policy


def load_demo_prompts() -> list[DemoPrompt]:
    """The prompts that come with the package."""
    text = (resources.files(__package__) / "demo_prompts.json").read_text(encoding="utf-8")
    return [DemoPrompt(**record) for record in json.loads(text)["prompts"]]


def open_ways(model: str, draft_model: str, **options: Any) -> dict[str, LLM]:
    """An engine for every way, over the same weights.

    Args:
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError, CheckpointError, CapacityError: see ``build_engine``.
    """
    load = SharedModels()
    return {
        name: LLM.over(open_engine(model, parse_policy(name, draft_model), load=load, **options))
        for name in ways(draft_model)
    }


def as_tokens(tokenizer: Tokenizer, prompt: DemoPrompt) -> list[int]:
    """The prompt as a chat model is asked it."""
    text = tokenizer.render_chat([{"role": "user", "content": prompt.prompt}])
    return tokenizer.encode(text, special_tokens=False)


def decode_shown(
    llm: LLM, prompt: DemoPrompt, params: SamplingParams, on_output: Callable[[RequestOutput], None]
) -> None:
    """Decodes a prompt untimed, for people to watch."""
    given = {"prompt_token_ids": as_tokens(llm.tokenizer, prompt)}
    llm.generate(given, params, on_output=lambda _, output: on_output(output))


def measure_prompt(
    llms: Mapping[str, LLM], prompt: DemoPrompt, params: SamplingParams, rounds: int, first: int
) -> PromptTimes:
    """Decodes a prompt ``rounds`` times under every policy, alternating.

    Args:
        first: which policy begins; one that changes from prompt to prompt favours none.
    """
    tokens = as_tokens(next(iter(llms.values())).tokenizer, prompt)
    runs: dict[str, list[TimedRun]] = {name: [] for name in llms}
    for turn in range(first, first + rounds):
        for name in rotated(list(llms), turn):
            runs[name].append(run_once(llms[name], [tokens], params))
    return PromptTimes(prompt, {name: tuple(several) for name, several in runs.items()})


def summarise(measured: Sequence[PromptTimes]) -> dict[str, Summary]:
    """By policy, over all the prompts given: sums of tokens over sums of median times."""
    plain = _speed(measured, PLAIN)
    return {policy: _summary(measured, policy, plain) for policy in measured[0].runs}


def by_kind(measured: Sequence[PromptTimes]) -> dict[str, dict[str, Summary]]:
    """Kind of prompt → policy → summary."""
    groups = {kind: [m for m in measured if m.prompt.kind == kind] for kind in KINDS}
    return {kind: summarise(group) for kind, group in groups.items() if group}


def _summary(measured: Sequence[PromptTimes], policy: str, plain: float) -> Summary:
    counts = reduce(add, (run.counts for m in measured for run in m.runs[policy]), SpecCounts())
    speed = _speed(measured, policy)
    return Summary(
        tokens_per_second=speed,
        speedup=speed / plain,
        acceptance_length=counts.mean_acceptance_length,
        tokens_per_step=counts.tokens_per_request_step or 1.0,
        wasted=(counts.draft_tokens - counts.accepted) / max(1, counts.emitted),
        outputs=sum(len(m.runs[policy]) for m in measured),
        different=sum(m.different.get(policy, 0) for m in measured),
    )


def _speed(measured: Sequence[PromptTimes], policy: str) -> float:
    tokens = sum(m.runs[policy][0].output_tokens for m in measured)
    return tokens / sum(median(run.seconds for run in m.runs[policy]) for m in measured)


def speeds_line(measured: PromptTimes) -> Text:
    """Tokens per second of every policy on one prompt, and whether the outputs are alike."""
    speeds = {policy: measured.tokens_per_second(policy) for policy in measured.runs}
    fastest = max(speeds, key=lambda policy: speeds[policy])
    line = Text("tokens/s: ", "dim")
    for policy, speed in speeds.items():
        style = "bold" if policy == fastest else "dim"
        line.append(f"{name_of(policy)} {speed:.0f}", style).append(" · " if policy != [*speeds][-1] else "   ", "dim")
    if measured.different:
        return line.append("outputs differ: " + ", ".join(measured.different), "bold red")
    return line.append("✓ identical", "green")


def summary_table(measured: Sequence[PromptTimes]) -> Table:
    """A line for every way, over all prompts."""
    numbers = ("\ntokens/s", "\n× plain", "tokens\n/ step", "accept.\nlength", "wasted\n/ token", "\nidentical")
    title = "Greedy decoding, one request at a time, all prompts"
    table = new_table(title, ("\nway", *numbers), left=("\nway",), dense=True)
    summaries = summarise(measured)
    fastest = _fastest(summaries)
    for policy, summary in summaries.items():
        table.add_row(name_of(policy), *_cells(policy, summary), style="bold green" if policy == fastest else "")
    return table


def kinds_table(measured: Sequence[PromptTimes]) -> Table:
    """A line for every kind of prompt: plain decoding's speed, and how many times that the others had."""
    ways = ["plain, tokens/s" if policy == PLAIN else name_of(policy) for policy in measured[0].runs]
    table = new_table("By kind of prompt, × plain", ("kind", *ways), left=("kind",), dense=True)
    for kind, summaries in by_kind(measured).items():
        fastest = _fastest(summaries)
        cells = [
            Text(
                f"{summary.tokens_per_second:.1f}" if policy == PLAIN else f"{summary.speedup:.2f}×",
                style="bold green" if policy == fastest else "",
            )
            for policy, summary in summaries.items()
        ]
        table.add_row(kind, *cells)
    return table


def verdict(measured: Sequence[PromptTimes]) -> Text:
    """One sentence: all outputs are plain decoding's."""
    outputs = sum(len(runs) for m in measured for runs in m.runs.values())
    return Text(f"✓ All {outputs} outputs are token for token those of plain decoding.", style="green")


def as_document(measured: Sequence[PromptTimes]) -> dict[str, Any]:
    """Everything measured, with its provenance, as JSON values."""
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "identical": not any(m.different for m in measured),
        "by_kind": {
            kind: {policy: asdict(summary) for policy, summary in summaries.items()}
            for kind, summaries in by_kind(measured).items()
        },
        "all": {policy: asdict(summary) for policy, summary in summarise(measured).items()},
        "prompts": [_prompt(m) for m in measured],
    }


def _fastest(summaries: Mapping[str, Summary]) -> str:
    return max(summaries, key=lambda policy: summaries[policy].tokens_per_second)


def _cells(policy: str, summary: Summary) -> tuple[str, ...]:
    drafts = policy != PLAIN
    return (
        f"{summary.tokens_per_second:.1f}",
        f"{summary.speedup:.2f}×",
        f"{summary.tokens_per_step:.2f}",
        f"{summary.acceptance_length:.2f}" if summary.acceptance_length else "-",
        f"{summary.wasted:.2f}" if drafts else "-",
        f"{summary.outputs - summary.different} of {summary.outputs}" if drafts else "-",
    )


def _prompt(measured: PromptTimes) -> dict[str, Any]:
    return {
        "kind": measured.prompt.kind,
        "title": measured.prompt.title,
        "text": measured.runs[PLAIN][0].outputs[0].outputs[0].text,
        "tokens_per_second": {policy: measured.tokens_per_second(policy) for policy in measured.runs},
        "different": measured.different,
    }
