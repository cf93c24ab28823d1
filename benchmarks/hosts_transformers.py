"""Transformers against itself: plain decoding, its assisted generation, and the same with draft lengths by dynaspec.

Transformers' own sides run in a process that knows nothing of dynaspec, dynaspec's in another, each with models of its
own; the sides take turns at every prompt, in an order that moves on.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import transformers_side
from dynaspec.bench.datasets import BenchPrompt
from dynaspec.bench.offline import lower_bound, ratios, rotated
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.result_output import Tell
from study import SideProcess
from transformers_side import ASSISTED, OURS, PLAIN, Arguments

WANTED = 1.1
"""dynaspec's speed over that of Transformers' assisted generation."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured, and how much of it."""

    rounds: int = 5
    max_tokens: int = 128
    speculative_config: Mapping[str, Any] | None = None
    """None = ``auto``."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.max_tokens < 2:
            raise ConfigError(
                f"there are {self.rounds} rounds of {self.max_tokens} tokens; expected at least one and two"
            )


@dataclass(frozen=True, slots=True)
class Result:
    """Every side's speed in every round."""

    version: str
    """Transformers'."""
    rates: Mapping[str, tuple[float, ...]]
    """Side → tokens/s over all prompts, round by round."""
    counts: Mapping[str, Any]
    """dynaspec's side, over all rounds: ``SpecCounts`` as JSON values."""
    different: Mapping[str, int]
    """Side → outputs that were not token for token those of plain decoding: a pass over several tokens rounds otherwise
    than one over a single token, in Transformers' own assisted generation too."""

    def ratio(self, side: str) -> tuple[float, float]:
        """dynaspec's speed over a side's in the same round: median, and its 95 % lower bound."""
        found = ratios(self.rates[OURS], self.rates[side])
        return median(found), lower_bound(found)

    def as_document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "transformers": self.version,
            "tokens_per_second": {side: median(rates) for side, rates in self.rates.items()},
            "tokens_per_second_rounds": {side: list(rates) for side, rates in self.rates.items()},
            "ratios": {
                side: dict(zip(("median", "lower_bound"), self.ratio(side), strict=True)) for side in self.rates
            },
            "different_outputs": dict(self.different),
            "counts": dict(self.counts),
        }


@dataclass(frozen=True, slots=True)
class Decoded:
    """One prompt, decoded once by one side."""

    tokens: tuple[int, ...]
    """Of the output."""
    seconds: float


Side = Callable[[Sequence[int]], Decoded]
"""Decodes one prompt, given as token ids."""


class Process(SideProcess):
    """A process with sides on Transformers."""

    def __init__(self, arguments: Arguments) -> None:
        command = [sys.executable, "-P", transformers_side.__file__, json.dumps(arguments)]
        super().__init__(OURS if arguments["dynaspec"] else "Transformers", command)

    def side(self, name: str) -> Side:
        """One of those that the process has."""

        def decode(prompt: Sequence[int]) -> Decoded:
            answer = self.ask({"side": name, "prompt": list(prompt)})
            return Decoded(tuple(answer["tokens"]), float(answer["seconds"]))

        return decode

    def counts(self) -> dict[str, Any]:
        """Of dynaspec's side, since the last time."""
        return self.ask({"counts": None})


def run(models: tuple[Path, Path], prompts: Sequence[BenchPrompt], options: Options, tell: Tell) -> Result:
    """Decodes all prompts greedily on every side, round by round.

    A round before the first one warms the sides up, and is where the policy learns what passes cost. It does not count.

    Args:
        models: target and assistant, which share a tokenizer.

    Raises:
        ConfigError: no prompts.
        DynaspecError: a process did not start, or has ended.
    """
    if not prompts:
        raise ConfigError("there are no prompts; expected one at least")
    tokenizer = Tokenizer(str(models[0]))
    texts = [tokenizer.encode(prompt.text) for prompt in prompts]
    with ExitStack() as stack:
        theirs, ours = (
            stack.enter_context(Process(_arguments(models, options, dynaspec=one))) for one in (False, True)
        )
        version = theirs.wait_ready()
        ours.wait_ready()
        sides = {PLAIN: theirs.side(PLAIN), ASSISTED: theirs.side(ASSISTED), OURS: ours.side(OURS)}
        return measure(sides, texts, options.rounds, version, ours.counts, tell)


def measure(
    sides: Mapping[str, Side],
    texts: Sequence[Sequence[int]],
    rounds: int,
    version: str,
    counts: Callable[[], Mapping[str, Any]],
    tell: Tell,
) -> Result:
    """
    Args:
        sides: plain decoding first, which the others' outputs are compared with.
        texts: token ids of each prompt.
        version: Transformers'.
        counts: of dynaspec's side, since it was asked last.
    """
    names = list(sides)
    rates: dict[str, list[float]] = defaultdict(list)
    different = dict.fromkeys(names, 0)
    for turn in range(rounds + 1):
        if turn == 1:
            counts()  # those of the warm-up
        seconds, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for i, text in enumerate(texts):
            tell(f"round {turn} of {rounds}" if turn else "warm-up", turn * len(texts) + i, (rounds + 1) * len(texts))
            decoded = {name: sides[name](text) for name in rotated(names, turn + i)}
            for name in names:
                seconds[name] += decoded[name].seconds
                tokens[name] += len(decoded[name].tokens)
                different[name] += turn > 0 and decoded[name].tokens != decoded[names[0]].tokens
        for name in names if turn else ():
            rates[name].append(tokens[name] / seconds[name])
    return Result(
        version=version, rates={name: tuple(rates[name]) for name in names}, counts=counts(), different=different
    )


def _arguments(models: tuple[Path, Path], options: Options, *, dynaspec: bool) -> Arguments:
    target, assistant = map(str, models)
    config = None if options.speculative_config is None else dict(options.speculative_config)
    return Arguments(
        target=target,
        assistant=assistant,
        dynaspec=dynaspec,
        max_tokens=options.max_tokens,
        inference_mode=False,
        speculative_config=config,
    )
