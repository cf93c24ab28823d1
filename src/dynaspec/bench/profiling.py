"""Measures a profile: step time by batch size and draft length, and acceptance per position."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.profile import Profile
from dynaspec.engine.engine import Engine
from dynaspec.result_output import Tell, new_table

from .decoders import ClosedLoop, Job, run_all

WARM_STEPS, TIMED_STEPS = 2, 16
"""Of one batch, in steps in which all its requests decode."""
ACCEPTANCE_TOKENS = 96
"""Of each continuation that acceptance is counted on."""


class Cells:
    """Measurements by batch size and draft length. The file's first line says what they were made with."""

    def __init__(self, path: Path, made_with: Mapping[str, Any]) -> None:
        """Reads what there is; begins anew if it was made with something else. A torn last line is dropped.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        self._path = path
        self._steps: dict[tuple[int, int, int], list[float]] = {}
        self._acceptance: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.stale = False
        """There were measurements, but made with something else."""
        header = {"made_with": json.loads(json.dumps(made_with))}
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            if lines and _parsed(lines[0]) == header:
                whole = [line for line in lines if line.endswith("\n")]
                if len(whole) < len(lines):
                    path.write_text("".join(whole), encoding="utf-8")
                for line in whole[1:]:
                    self._read(_parsed(line))
            else:
                self.stale = bool(lines)
                path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the measurements in {path} cannot be kept: {error}") from None

    def __len__(self) -> int:
        return len(self._steps) + len(self._acceptance)

    def step_ms(self, turn: int, batch: int, k: int) -> list[float] | None:
        """Milliseconds of the steps of one batch; None if it has not been measured."""
        return self._steps.get((turn, batch, k))

    def times(self, grid: Grid) -> dict[tuple[int, int], list[float]]:
        """(batch size, draft length) → milliseconds of the steps of all the grid's batches."""
        return {
            (size, k): [ms for turn in range(grid.batches) for ms in self._steps[turn, size, k]]
            for size in grid.batch_sizes
            for k in grid.lengths
        }

    def acceptance(self, longest: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(drafted, accepted) by position, of drafts of this length; None if not counted."""
        return self._acceptance.get(longest)

    def add_step_ms(self, turn: int, batch: int, k: int, times: Sequence[float]) -> None:
        self._add({"turn": turn, "batch": batch, "k": k, "ms": [round(ms, 4) for ms in times]})

    def add_acceptance(self, longest: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._add({"longest": longest, "drafted": list(drafted), "accepted": list(accepted)})

    def _add(self, record: dict[str, Any]) -> None:
        self._read(record)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise ConfigError(f"the measurements in {self._path} cannot be kept: {error}") from None

    def _read(self, record: Any) -> None:
        if isinstance(record, dict) and "ms" in record:
            self._steps[record["turn"], record["batch"], record["k"]] = record["ms"]
        elif isinstance(record, dict) and "accepted" in record:
            self._acceptance[record["longest"]] = (tuple(record["drafted"]), tuple(record["accepted"]))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured."""

    batch_sizes: tuple[int, ...]
    """Ascending."""
    lengths: tuple[int, ...]
    """Draft lengths, ascending from 0."""
    batches: int
    """Batches of prompts decoded for every batch size and length."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))
        object.__setattr__(self, "lengths", tuple(sorted({0, *self.lengths})))
        for name, values, least in (("batch sizes", self.batch_sizes, 1), ("draft lengths", self.lengths, 0)):
            if not values or values[0] < least:
                raise ConfigError(f"{name} are {list(values)}; expected integers of at least {least}")
        if self.longest == 0:
            raise ConfigError("draft lengths are [0]; expected at least one above 0")

    @property
    def longest(self) -> int:
        return self.lengths[-1]


def prompt_room(max_model_len: int, grid: Grid) -> int:
    """Longest prompt that leaves room for the steps of a batch, and for the acceptance."""
    steps = WARM_STEPS + TIMED_STEPS + 2
    return max_model_len - max(steps * (grid.longest + 1), ACCEPTANCE_TOKENS + 1)


def check_prompts(grid: Grid, prompts: int, *, oversample: bool) -> None:
    """
    Raises:
        ConfigError: more requests in a batch than prompts, without oversampling.
    """
    largest = grid.batch_sizes[-1]
    if not oversample and largest > prompts:
        raise ConfigError(
            f"the largest batch is {largest} but there are {prompts} prompts; expected no more than that, or "
            "oversampling"
        )


def measure(
    engine: Engine,
    grid: Grid,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    cells: Cells,
    progress: Tell,
    *,
    oversample: bool = True,
) -> Profile:
    """Fills every cell that is not filled yet, and makes the profile of all.

    Rounds go through all batch sizes and lengths, so that a machine that is slower for a while slows all of them.

    Args:
        engine: always drafts ``grid.longest`` tokens, unless a request asks for fewer.
        prompts: token ids, none longer than ``prompt_room``.
        oversample: a batch may hold a prompt more than once.

    Raises:
        ConfigError: more requests in a batch than prompts, without oversampling; or a batch never decoded all at once.
    """
    check_prompts(grid, len(prompts), oversample=oversample)
    wanted = [(turn, b, k) for turn in range(grid.batches) for b in grid.batch_sizes for k in grid.lengths]
    for done, (turn, size, k) in enumerate(wanted):
        progress("step times", done, len(wanted))
        if cells.step_ms(turn, size, k) is None:
            batch = [prompts[(turn * size + i) % len(prompts)] for i in range(size)]
            cells.add_step_ms(turn, size, k, time_steps(engine, batch, k, params))
    progress("step times", len(wanted), len(wanted))
    counted = cells.acceptance(grid.longest)
    if counted is None:
        progress("acceptance", 0, 1)
        counted = count_acceptance(engine, prompts, grid, params)
        cells.add_acceptance(grid.longest, *counted)
    progress("acceptance", 1, 1)
    return as_profile(grid, cells.times(grid), *counted)


def time_steps(engine: Engine, batch: Sequence[tuple[int, ...]], k: int, params: SamplingParams) -> list[float]:
    """Milliseconds of steps in which every request of the batch decodes with a draft of k tokens, and none prefills.

    Raises:
        ConfigError: there were no such steps.
    """
    endless = replace(params, max_tokens=None, ignore_eos=True, max_draft_tokens=k)
    loop = ClosedLoop(engine, [Job(prompt, endless) for prompt in batch], len(batch))
    times: list[float] = []
    try:
        while len(times) < WARM_STEPS + TIMED_STEPS and (step := loop.step()) is not None:
            counts = step.counts
            full = counts.request_steps == len(batch) and counts.draft_tokens == k * len(batch)
            if full and counts.prefill_rows == 0:
                times.append(1e3 * step.seconds)
    finally:
        loop.close()
    if len(times) <= WARM_STEPS:
        raise _never_at_once(len(batch), k)
    return times[WARM_STEPS:]


def _never_at_once(size: int, k: int) -> ConfigError:
    return ConfigError(
        f"{size} requests never decoded at once with drafts of {k} tokens; expected more KV cache or smaller batches"
    )


def count_acceptance(
    engine: Engine, prompts: Sequence[tuple[int, ...]], grid: Grid, params: SamplingParams
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(drafts that have a token at each position, drafts whose token there was accepted), of the longest drafts."""
    some = replace(params, max_tokens=ACCEPTANCE_TOKENS)
    before = engine.stats()
    run_all(engine, [Job(prompt, some) for prompt in prompts], min(grid.batch_sizes[-1], 8))
    counts = engine.stats() - before
    return counts.drafted_per_pos, counts.accepted_per_pos


def acceptance_rates(drafted: Sequence[int], accepted: Sequence[int], longest: int) -> tuple[float, ...]:
    """Unconditional rate of each position, non-increasing.

    Of the drafts that had a token there: those that a request's end cut short say nothing about later positions.
    """
    filled = (*accepted, *(0,) * (longest - len(accepted)))
    rates = [a / d if d else 0.0 for a, d in zip(filled, (*drafted, *(0,) * longest), strict=False)]
    return tuple(accumulate(rates[:longest], min))


def as_profile(
    grid: Grid, times: Mapping[tuple[int, int], Sequence[float]], drafted: Sequence[int], accepted: Sequence[int]
) -> Profile:
    """Medians of the grid's steps.

    Args:
        times: (batch size, draft length) → milliseconds.
        drafted: drafts that have a token at each position.
        accepted: drafts whose token there was accepted.

    Raises:
        ConfigError: a batch size and length without a step, or no draft at all.
    """
    for size in grid.batch_sizes:
        for k in grid.lengths:
            if not times.get((size, k)):
                raise _never_at_once(size, k)
    if not drafted:
        raise ConfigError("nothing was drafted, so that acceptance is unknown; expected longer outputs")
    return Profile(
        batch_stats={size: {k: round(median(times[size, k]), 4) for k in grid.lengths} for size in grid.batch_sizes},
        acceptance_rate_per_pos=acceptance_rates(drafted, accepted, grid.longest),
        max_num_speculative_tokens=grid.longest,
        is_online=False,
    )


def default_batches() -> int:
    """A minute on a CPU; a GPU is quick enough for more."""
    return 5 if torch.cuda.is_available() else 2


def as_table(profile: Profile, title: str) -> Table:
    """One batch size a line: milliseconds by draft length, and the length of the largest goodput."""
    lengths = list(next(iter(profile.batch_stats.values())))
    table = new_table(title, ("batch", *(f"k = {k}" for k in lengths), "best k"))
    for batch, row in profile.batch_stats.items():
        best = best_length(profile, batch)
        cells = [Text(f"{row[k]:.2f}", style="bold green" if k == best else "") for k in lengths]
        table.add_row(str(batch), *cells, str(best))
    return table


def acceptance_line(profile: Profile) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in profile.acceptance_rate_per_pos)
    return f"acceptance by position: {rates}; length of full drafts: {1 + sum(profile.acceptance_rate_per_pos):.2f}"


def best_length(profile: Profile, batch: int) -> int:
    """What the ``goodput`` policy would draft."""
    return profile.best_length(batch, profile.acceptance_rate_per_pos, profile.max_num_speculative_tokens)


def goodput(profile: Profile, batch: int, k: int) -> float:
    """Expected tokens per second of one request."""
    lengths = tuple(accumulate(profile.acceptance_rate_per_pos, initial=1.0))
    return 1e3 * lengths[k] / profile.itl_ms(batch, k)
