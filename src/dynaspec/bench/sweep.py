"""Plain decoding, fixed lengths and ``auto`` at several loads: closed loop, alternating rounds, ratios with bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from statistics import median

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.model.batch import BLOCK_SIZE

from .datasets import BenchPrompt
from .drive import Job, cacheable, steady_window, warm_prompts
from .engines import SharedModels, open_engine
from .policies import PLAIN, PolicySpec, parse_policy
from .statistics import best_on_odd_rounds, even_rounds, lower_bound, ratios, shuffled

Progress = Callable[[str, int, int], None]

LOADS = (1, 2, 4, 8, 16, 32)
FIXED = tuple(range(1, 9))
_PROBE_TOKENS = 24
"""Tokens a request in the first, untimed window of a load."""
_STRIDE = 5
"""Prompts by which the start moves on from round to round; the sides of a round have the same."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a ratio should reach."""

    median: float
    bound: float


AGAINST_BEST, AGAINST_PLAIN = Bar(0.97, 0.94), Bar(0.99, 0.97)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How much is measured."""

    policy: str = "auto"
    """What is compared with plain decoding and the fixed lengths."""
    loads: tuple[int, ...] = LOADS
    fixed: tuple[int, ...] = FIXED
    rounds: int = 31
    window_s: float = 0.4
    """Seconds that plain decoding takes for one window; all sides decode as many tokens."""
    request_tokens: int = 64
    longest_prompt: int = 256

    def __post_init__(self) -> None:
        if self.rounds < 2 or not self.loads or not self.fixed or min(*self.loads, *self.fixed) < 1:
            raise ConfigError(
                f"rounds are {self.rounds}, loads {list(self.loads)}, fixed lengths {list(self.fixed)}; expected at "
                "least 2 rounds, and loads and lengths of at least 1"
            )


@dataclass(frozen=True, slots=True)
class Side:
    """An engine, and what its requests ask for."""

    engine: Engine
    max_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Round by round quotients, and what they should reach."""

    rounds: tuple[float, ...]
    bar: Bar

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def bound(self) -> float:
        """95 % lower bound of the median."""
        return lower_bound(self.rounds)

    @property
    def holds(self) -> bool:
        return self.median >= self.bar.median and self.bound >= self.bar.bound


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load: tokens per second of every side in every round."""

    load: int
    policy: str
    rates: Mapping[str, tuple[float, ...]]
    mean_draft: tuple[float, ...]
    """Tokens drafted per request and step by the policy, in every round."""

    @property
    def best(self) -> str:
        """The fastest of plain decoding and the fixed lengths on odd rounds."""
        return best_on_odd_rounds({side: rates for side, rates in self.rates.items() if side != self.policy})

    @property
    def against_best(self) -> Ratio:
        """On even rounds alone."""
        found = ratios(even_rounds(self.rates[self.policy]), even_rounds(self.rates[self.best]))
        return Ratio(tuple(found), AGAINST_BEST)

    @property
    def against_plain(self) -> Ratio:
        """On all rounds: plain decoding was not chosen by them."""
        return Ratio(tuple(ratios(self.rates[self.policy], self.rates[PLAIN])), AGAINST_PLAIN)


def run_sweep(
    model: str, draft_model: str, prompts: Sequence[BenchPrompt], options: SweepOptions, progress: Progress
) -> list[LoadResult]:
    """Measures every load.

    Engines are built once. Prefix caching is on, and all prompts are in the cache but for their last token, so that it
    is decoding alone that is measured: a request that starts decodes at once. Fixed lengths share an engine, whose
    requests ask for shorter drafts. The policy's engine keeps what it has learned, as a server would.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    with ExitStack() as stack:
        sides = open_sides(model, draft_model, options, stack, progress)
        engines = {id(side.engine): side.engine for side in sides.values()}
        texts = mixed(prompts)
        encoded = [
            cacheable(sides[PLAIN].engine.tokenizer.encode(text.text), options.longest_prompt, BLOCK_SIZE)
            for text in texts
        ]
        for engine in engines.values():
            warm_prompts(engine, encoded, max(options.loads))
        return [_one_load(load, sides, encoded, options, progress) for load in options.loads]


def open_sides(
    model: str, draft_model: str, options: SweepOptions, stack: ExitStack, progress: Progress
) -> dict[str, Side]:
    """Plain decoding, every fixed length, and the policy."""
    seqs = max(options.loads)
    longest = max(options.fixed)
    specs = {
        PLAIN: PolicySpec(PLAIN, None),
        "fixed": parse_policy(f"constant:{longest}", draft_model),
        options.policy: parse_policy(options.policy, draft_model),
    }
    engines = {}
    load = SharedModels()
    for done, (name, spec) in enumerate(specs.items()):
        progress("loading", done, len(specs))
        engines[name] = open_engine(
            model, spec, load=load, max_num_seqs=seqs, max_num_batched_tokens=max(1024, seqs * (longest + 1))
        )
        stack.callback(engines[name].close)
    progress("loading", len(specs), len(specs))
    return {
        PLAIN: Side(engines[PLAIN]),
        **{f"constant:{k}": Side(engines["fixed"], k) for k in options.fixed},
        options.policy: Side(engines[options.policy]),
    }


def mixed(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The kinds in turn: code, maths, editing, code, …"""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[i] for i in range(max(map(len, groups.values()))) for group in groups.values() if i < len(group)]


def endless(prompts: Sequence[tuple[int, ...]], params: SamplingParams, first: int) -> Iterator[Job]:
    """Requests for the prompts in turn, from number ``first`` on, without end."""
    for i in count(first):
        yield Job(prompts[i % len(prompts)], params)


def _one_load(
    load: int, sides: Mapping[str, Side], prompts: Sequence[tuple[int, ...]], options: SweepOptions, progress: Progress
) -> LoadResult:
    stage = f"{load} at a time"
    total = options.rounds * len(sides)
    progress(stage, 0, total)
    params = SamplingParams(temperature=0, max_tokens=options.request_tokens, ignore_eos=True, detokenize=False)

    def window(name: str, first: int, tokens: int) -> tuple[float, float]:
        side = sides[name]
        asked = replace(params, max_draft_tokens=side.max_draft_tokens)
        done = steady_window(side.engine, endless(prompts, asked, first), load, tokens)
        return done.tokens_per_second, done.counts.draft_tokens / max(1, done.counts.request_steps)

    for name in sides:
        window(name, 0, load * _PROBE_TOKENS)
    speed, _ = window(PLAIN, 0, load * _PROBE_TOKENS)
    tokens = round(speed * options.window_s)
    names = list(sides)
    rates: dict[str, list[float]] = {name: [] for name in names}
    drafted = []
    for turn in range(options.rounds):
        for name in shuffled(names, turn):
            rate, mean_draft = window(name, turn * _STRIDE, tokens)
            rates[name].append(rate)
            if name == options.policy:
                drafted.append(mean_draft)
            progress(stage, sum(map(len, rates.values())), total)
    return LoadResult(load, options.policy, {name: tuple(of_side) for name, of_side in rates.items()}, tuple(drafted))
