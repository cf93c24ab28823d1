"""Transformers against itself: plain decoding, its assisted generation, and the same with draft lengths by dynaspec.

One process and one pair of models; the sides take turns at every prompt, in an order that moves on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from dynaspec.contract.errors import ConfigError
from dynaspec.hosts.transformers import generate
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.stats import SpecStats

from ..datasets import BenchPrompt
from ..statistics import lower_bound, ratios

Progress = Callable[[str, int, int], None]
"""Told what runs, and how far all of it is: done, of how many."""

PLAIN, ASSISTED, OURS = "generate", "assisted generate", "dynaspec"
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
    counts: SpecCounts
    """dynaspec's side, over all rounds."""
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
            "counts": self.counts.as_dict(),
        }


Side = Callable[[torch.Tensor], torch.Tensor]
"""Decodes a prompt [1, L]; returns text and output [1, L + n]."""


def run(models: tuple[Path, Path], prompts: Sequence[BenchPrompt], options: Options, tell: Progress) -> Result:
    """Decodes all prompts greedily on every side, round by round.

    A round before the first one warms the sides up, and is where the policy learns what passes cost. It does not count.

    Args:
        models: target and assistant, which share a tokenizer.

    Raises:
        ConfigError: no prompts.
    """
    if not prompts:
        raise ConfigError("there are no prompts; expected one at least")
    transformers.utils.logging.disable_progress_bar()
    target, assistant = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[0])
    texts = [tokenizer(prompt.text, return_tensors="pt").input_ids for prompt in prompts]
    stats = SpecStats()
    return measure(_sides(target, assistant, options, stats), texts, options.rounds, stats, tell)


def measure(
    sides: Mapping[str, Side],
    texts: Sequence[torch.Tensor],
    rounds: int,
    stats: SpecStats,
    tell: Progress,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """
    Args:
        sides: plain decoding first, which the others' outputs are compared with.
        stats: of dynaspec's side.
        clock: seconds.
    """
    names = list(sides)
    rates: dict[str, list[float]] = defaultdict(list)
    different = dict.fromkeys(names, 0)
    warm = stats.snapshot()
    for turn in range(rounds + 1):
        if turn == 1:
            warm = stats.snapshot()
        seconds, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for i, text in enumerate(texts):
            tell(f"round {turn} of {rounds}" if turn else "warm-up", turn * len(texts) + i, (rounds + 1) * len(texts))
            first = (turn + i) % len(names)
            outputs = {}
            for name in (*names[first:], *names[:first]):
                started = clock()
                outputs[name] = sides[name](text)
                seconds[name] += clock() - started
                tokens[name] += outputs[name].shape[1] - text.shape[1]
            for name in names:
                different[name] += turn > 0 and not torch.equal(outputs[name], outputs[names[0]])
        for name in names if turn else ():
            rates[name].append(tokens[name] / seconds[name])
    return Result(
        version=transformers.__version__,
        rates={name: tuple(rates[name]) for name in names},
        counts=stats.snapshot() - warm,
        different=different,
    )


def _sides(target: Any, assistant: Any, options: Options, stats: SpecStats) -> dict[str, Side]:
    common: dict[str, Any] = {"max_new_tokens": options.max_tokens, "do_sample": False}

    def plain(text: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = target.generate(text, attention_mask=torch.ones_like(text), **common)
        return output

    def assisted(text: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = target.generate(
            text, attention_mask=torch.ones_like(text), assistant_model=assistant, **common
        )
        return output

    def ours(text: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = generate(
            target,
            text,
            attention_mask=torch.ones_like(text),
            assistant_model=assistant,
            speculative_config=options.speculative_config,
            stats=stats,
            **common,
        )
        return output

    return {PLAIN: plain, ASSISTED: assisted, OURS: ours}
