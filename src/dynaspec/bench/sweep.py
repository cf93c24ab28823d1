"""Plain decoding, fixed lengths and ``auto`` at several loads: closed loop, sides in turns, ratios with bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from statistics import median

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.model.batch import BLOCK_SIZE

from .datasets import BenchPrompt
from .drive import Job, SteadyLoop, Window, cacheable, steady_window, warm_prompts
from .engines import SharedModels, open_engine
from .policies import PLAIN, PolicySpec, parse_policy
from .statistics import best_on_odd_rounds, even_rounds, in_the_running, lower_bound, ratios, shuffled

Progress = Callable[[str, int, int], None]

LOADS = (1, 2, 4, 8, 16, 32)
FIXED = tuple(range(1, 9))
TURNS = 5
"""Stretches of a window, between which all other sides have one of theirs."""
_PROBE_TOKENS = 24
"""Tokens a request in the first, untimed window of a load."""
_TRIAL_ROUNDS, _BEHIND = 9, 0.9
"""After so many rounds a fixed length that is below this share of the best for certain sits out the rest."""
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
    rounds: int = 61
    window_s: float = 0.4
    """Seconds that plain decoding takes for one window; all sides decode as many tokens, in ``TURNS`` turns."""
    request_tokens: int = 64
    longest_prompt: int = 256

    def __post_init__(self) -> None:
        if self.rounds < 2 or not self.loads or not self.fixed or min(*self.loads, *self.fixed) < 1:
            raise ConfigError(
                f"rounds are {self.rounds}, loads {list(self.loads)}, fixed lengths {list(self.fixed)}; expected at "
                "least 2 rounds, and loads and lengths of at least 1"
            )


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
    """Fixed lengths that were far behind have fewer rounds than the others."""
    mean_draft: tuple[float, ...]
    """Tokens drafted per request and step by the policy, in every round."""

    @property
    def best(self) -> str:
        """The fastest of plain decoding and the fixed lengths on odd rounds."""
        rivals = {side: rates for side, rates in self.rates.items() if side != self.policy}
        return best_on_odd_rounds(rivals)

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

    Engines are built once, one for each side, on the same weights. Prefix caching is on, and all prompts are in the
    cache but for their last token, so that it is decoding alone that is measured: a request that starts decodes at
    once. The policy's engine keeps what it has learned, as a server would.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    with ExitStack() as stack:
        engines = open_sides(model, draft_model, options, stack, progress)
        tokenizer = engines[PLAIN].tokenizer
        encoded = [
            cacheable(tokenizer.encode(text.text), options.longest_prompt, BLOCK_SIZE) for text in mixed(prompts)
        ]
        for engine in engines.values():
            warm_prompts(engine, encoded, max(options.loads))
        return [_one_load(load, engines, encoded, options, progress) for load in options.loads]


def open_sides(
    model: str, draft_model: str, options: SweepOptions, stack: ExitStack, progress: Progress
) -> dict[str, Engine]:
    """An engine each for plain decoding, every fixed length, and the policy."""
    seqs = max(options.loads)
    fixed = {f"constant:{k}": parse_policy(f"constant:{k}", draft_model) for k in options.fixed}
    specs = {PLAIN: PolicySpec(PLAIN, None), **fixed, options.policy: parse_policy(options.policy, draft_model)}
    engines = {}
    load = SharedModels()
    for done, (name, spec) in enumerate(specs.items()):
        progress("loading", done, len(specs))
        engines[name] = open_engine(
            model,
            spec,
            load=load,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(1024, seqs * (max(options.fixed) + 1)),
        )
        stack.callback(engines[name].close)
    progress("loading", len(specs), len(specs))
    return engines


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
    load: int, engines: Mapping[str, Engine], prompts: Sequence[tuple[int, ...]], options: SweepOptions, tell: Progress
) -> LoadResult:
    """Rounds of all sides; fixed lengths that turn out far behind leave the others closer to each other in time."""
    stage = f"{load} at a time"
    tell(stage, 0, options.rounds)
    params = SamplingParams(temperature=0, max_tokens=options.request_tokens, ignore_eos=True, detokenize=False)
    warm_up = load * _PROBE_TOKENS
    for engine in engines.values():
        steady_window(engine, endless(prompts, params, 0), load, warm_up)
    speed = steady_window(engines[PLAIN], endless(prompts, params, 0), load, warm_up).tokens_per_second
    turn_tokens = max(1, round(speed * options.window_s / TURNS))
    rates: dict[str, list[float]] = {name: [] for name in engines}
    drafted = []
    left = dict(engines)
    for number in range(options.rounds):
        if number == _TRIAL_ROUNDS:
            stays = in_the_running(rates, _BEHIND, always=(PLAIN, options.policy))
            left = {name: engines[name] for name in stays}
        loops = {
            name: SteadyLoop(engine, endless(prompts, params, number * _STRIDE), load) for name, engine in left.items()
        }
        windows = _one_round(loops, turn_tokens, number)
        for name, window in windows.items():
            rates[name].append(window.tokens_per_second)
        counts = windows[options.policy].counts
        drafted.append(counts.draft_tokens / max(1, counts.request_steps))
        tell(stage, number + 1, options.rounds)
    return LoadResult(load, options.policy, {name: tuple(of_side) for name, of_side in rates.items()}, tuple(drafted))


def _one_round(loops: Mapping[str, SteadyLoop], turn_tokens: int, number: int) -> dict[str, Window]:
    """A window of each side, in turns of a fraction of it, so that the machine is the same for all in each."""
    for turn in range(1, TURNS + 1):
        for name in shuffled(list(loops), number * TURNS + turn):
            loops[name].go_on(turn * turn_tokens)
    for loop in loops.values():
        loop.close()
    return {name: loop.window for name, loop in loops.items()}
