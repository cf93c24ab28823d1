"""What a profile is made of, read from decision logs: the same for every host that keeps one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import StepOutcome, StepView
from dynaspec.control.profile import Profile
from dynaspec.observe.log_reader import Record, read_log

from .profiling import WARM_STEPS, Grid, acceptance_rates

_CLOSING_STEPS = 1
"""Of a run of equal steps: the last one may already draft for others than it verifies for."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Step times and acceptance."""

    step_ms: Mapping[tuple[int, int], Sequence[float]]
    """(batch size, draft length) → milliseconds of steps in which every request decoded with such a draft, and none
    prefilled."""
    drafted: tuple[int, ...]
    """Drafts that have a token at each position."""
    accepted: tuple[int, ...]
    """Drafts whose token there was accepted."""

    def profile(self, grid: Grid) -> Profile:
        """The grid's part of it: medians.

        Raises:
            ConfigError: a batch size and length without a step, or no draft at all.
        """
        for size in grid.batch_sizes:
            for k in grid.lengths:
                if not self.step_ms.get((size, k)):
                    raise ConfigError(
                        f"{size} requests never decoded at once with drafts of {k} tokens; expected more KV cache or "
                        "smaller batches"
                    )
        if not self.drafted:
            raise ConfigError("nothing was drafted, so that acceptance is unknown; expected longer outputs")
        return Profile(
            batch_stats={
                size: {k: round(median(self.step_ms[size, k]), 4) for k in grid.lengths} for size in grid.batch_sizes
            },
            acceptance_rate_per_pos=acceptance_rates(self.drafted, self.accepted, grid.longest),
            max_num_speculative_tokens=grid.longest,
            is_online=False,
        )


def measured_in(paths: Iterable[Path]) -> Measured:
    """Reads logs of one host, with whatever policies they were made.

    Raises:
        ConfigError: no readable decision log.
    """
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    told: list[Record] = []
    for path in paths:
        records = [record for record in read_log(path) if record.outcome is not None]
        for key, run in groupby(records, _steady):
            if key is not None:
                times[len(key[0]), key[1]].extend(_settled(list(run)))
        told.extend(records)
    return Measured(times, *_positions(told))


def _steady(record: Record) -> tuple[tuple[str, ...], int] | None:
    """(requests, draft length) where all of them decoded with drafts of one length; None elsewhere."""
    outcome = record.outcome
    if outcome is None or not outcome.ids or outcome.work.prefill_rows or not outcome.step_s > 0:
        return None
    k = outcome.verified[0]
    whole = all(drafted == verified == k for drafted, verified in zip(outcome.drafted, outcome.verified, strict=True))
    return (outcome.ids, k) if whole else None


def _settled(run: Sequence[Record]) -> list[float]:
    return [1e3 * record.outcome.step_s for record in run[WARM_STEPS:-_CLOSING_STEPS] if record.outcome is not None]


def _positions(records: Sequence[Record]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(drafted, accepted) by position, of requests that let the policy choose; of all where there are none.

    A request that names a length of its own is one whose steps were to be timed: what it continues is beside the point.
    """
    drafts = [draft for record in records for draft in _drafts(record.view, record.outcome)]
    free = [(drafted, accepted) for drafted, accepted, wish in drafts if wish is None]
    counted = free or [(drafted, accepted) for drafted, accepted, _ in drafts]
    longest = max((drafted for drafted, _ in counted), default=0)
    return (
        tuple(sum(drafted > at for drafted, _ in counted) for at in range(longest)),
        tuple(sum(accepted > at for _, accepted in counted) for at in range(longest)),
    )


def _drafts(view: StepView, outcome: StepOutcome | None) -> Iterable[tuple[int, int, int | None]]:
    """(tokens tested, tokens accepted, the request's own limit) of every draft."""
    if outcome is None:
        return ()
    wishes = dict(zip(view.ids, view.max_draft, strict=True))
    columns = zip(outcome.ids, outcome.verified, outcome.accepted, strict=True)
    return [(tested, accepted, wishes.get(request)) for request, tested, accepted in columns if tested]
