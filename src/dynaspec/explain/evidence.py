"""What is known of a target, its drafter and their machine: read from a profile, from decision logs, or from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynaspec.contract.costs import Drafting, PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Limits
from dynaspec.control.profile import Profile
from dynaspec.observe.decision_log import is_log
from dynaspec.simulate.costs import CostModel, ProfileCosts, StepLoad, StepTime, batch_sizes, profile_of
from dynaspec.simulate.recorded import from_decision_logs
from dynaspec.simulate.simulator import HostConfig
from dynaspec.simulate.traces import Ints, Trace, build_trace

from .estimates import LogCosts, fit_costs
from .log_data import LogData, load

LONGEST = 16
"""Beyond this no draft is simulated."""
_ROWS = 1 << 16
"""More than any step has: prompts are not to be cut by the simulated host."""
_REQUESTS, _OUTPUT_TOKENS = 64, 128
"""Of the trace that stands for a profile's acceptance."""


class FittedCosts:
    """Prices by the work of a step.

    Args:
        costs: of the log's steps.
        measured: passes measured when the host started, which controllers are told; None = none.
        idle_pass: the drafter's first pass runs in every step, drafts or not.
    """

    kv_tokens: int | None = None

    def __init__(self, costs: LogCosts, measured: PassCosts | None, *, name: str, idle_pass: bool) -> None:
        self.name = name
        self._costs = costs
        self._measured = measured or PassCosts()
        self._idle_pass = idle_pass

    def without_drafter(self) -> FittedCosts:
        """What steps cost where no drafter is loaded."""
        return FittedCosts(self._costs, self._measured, name=self.name, idle_pass=False)

    def time(self, load: StepLoad) -> StepTime:
        work = load.work
        drafting = self._drafting(load)
        steps = self._costs.steps
        return StepTime(
            draft_s=steps.draft_s(drafting) if drafting.passes else 0.0,
            verify_s=steps.target_s(work.verify_rows + work.prefill_rows, load.context, work.kv_tokens),
        )

    def pass_costs(self) -> PassCosts:
        return self._measured

    def _drafting(self, load: StepLoad) -> Drafting:
        rows, drawn = load.work.rows_per_pass, sum(load.drafting)
        total, passes = sum(rows), len(rows)
        if self._idle_pass:
            # The first pass has the rows of the target's.
            total += load.work.verify_rows + load.work.prefill_rows - (rows[0] if rows else 0)
            passes = max(1, passes)
        return Drafting(self._costs.drafter, passes, drawn, total - drawn)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a recommendation rests on."""

    trace: Trace
    costs: CostModel
    """Of steps of an engine that has a drafter."""
    plain_costs: CostModel
    """Of one that has none."""
    profile: Profile
    """As it was given, or as it follows from the logs."""
    profile_path: Path | None
    """None: it was not given."""
    limits: Limits | None
    """Of the host whose logs these are; None without a log."""
    model: str | None
    """The target's name and the drafter's, where a log says them."""
    drafter: str | None
    backend: str
    """Whose logs these are; dynaspec where there are none."""
    sources: tuple[str, ...]
    """Names of the files."""

    @property
    def most(self) -> int:
        """Largest batch that something is known of."""
        return max(self.profile.batch_stats)

    @property
    def longest(self) -> int:
        return min(LONGEST, self.profile.max_num_speculative_tokens)

    def host(self, load: int) -> HostConfig:
        """The simulated engine, with seats for a load."""
        limits = self.limits
        return HostConfig(
            max_num_seqs=load,
            max_num_batched_tokens=max(_ROWS, 2 * load * (self.longest + 1)),
            max_draft=self.longest,
            passes_per_draft="per_token" if limits is None else limits.proposers[0].passes_per_draft,
            ragged=limits is None or limits.ragged,
            can_stop=limits is not None and limits.can_stop,
            can_trim=limits is None or limits.can_trim,
        )


def gather(paths: Sequence[Path]) -> Evidence:
    """Reads the files; what is no log is taken for a profile. A profile's times are taken before those of logs, and the
    acceptance of logs before a profile's.

    Raises:
        ConfigError: no file, one that is neither, two profiles, logs of several hosts, or of a drafter that looks up.
    """
    logs = [path for path in paths if is_log(path)]
    profiles = [path for path in paths if path not in logs]
    if not paths:
        raise ConfigError("no file is given; expected a profile, decision logs, or both")
    if len(profiles) > 1:
        raise ConfigError(f"{profiles[0]} and {profiles[1]} are both profiles; expected one, and any number of logs")
    given = Profile.load(profiles[0]) if profiles else None
    names = tuple(path.name for path in paths)
    if not logs and given is not None:
        costs = ProfileCosts(given, name=profiles[0].name)
        trace = trace_of(given, np.random.default_rng(0))
        return Evidence(trace, costs, costs, given, profiles[0], None, None, None, "dynaspec", names)
    return _from_logs(logs, given, profiles[0] if profiles else None, names)


def trace_of(profile: Profile, rng: np.random.Generator) -> Trace:
    """Requests whose drafts are accepted as often as the profile says, each draft independent of the others.

    A profile knows neither prompts nor confidences: prompts have one token, and there are no confidences.
    """
    output = np.full(_REQUESTS, _OUTPUT_TOKENS)
    rates = np.array(profile.acceptance_rate_per_pos[: profile.max_num_speculative_tokens])
    drawn = rng.random(int(output.sum()))
    runs: Ints = (drawn[:, None] < rates[None, :]).sum(axis=1)
    left = np.tile(np.arange(_OUTPUT_TOKENS, 0, -1), _REQUESTS)
    return build_trace(np.ones(_REQUESTS, dtype=np.int64), output, np.minimum(runs, left))


def _from_logs(logs: Sequence[Path], given: Profile | None, path: Path | None, names: tuple[str, ...]) -> Evidence:
    data = load(*logs)
    _check_drafter(data.limits)
    rng = np.random.default_rng(0)
    trace = from_decision_logs(logs, rng)
    costs: CostModel
    plain: CostModel
    if given is None:
        costs = fitted = _fitted(data, names[0])
        plain = fitted.without_drafter()
    else:
        costs = plain = ProfileCosts(given)
    most = int(data.steps.requests.max())
    longest = min(LONGEST, data.limits.draft_lens[-1])
    profile = given or profile_of(costs, trace, data.limits.proposers[0], batches=batch_sizes(most), longest=longest)
    fields = data.header.fields
    return Evidence(
        trace, costs, plain, profile, path, data.limits, _name(fields.get("model")), _drafter(fields), data.host, names
    )


def _fitted(data: LogData, name: str) -> FittedCosts:
    costs = fit_costs(data)
    if costs is None:
        raise ConfigError(f"{name} has no times; expected a log of a host that measures its steps, or a profile too")
    return FittedCosts(costs, data.header.costs, name=name, idle_pass=data.limits.proposers[0].idle_pass)


def _check_drafter(limits: Limits) -> None:
    if not limits.proposers or limits.proposers[0].passes_per_draft == "none":
        raise ConfigError(
            "the log's drafter looks drafts up, and how much it would find elsewhere is not known; expected a log of a "
            "drafter that is a model"
        )


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _drafter(fields: Mapping[str, Any]) -> str | None:
    config = fields.get("speculative_config")
    told = config.get("model") if isinstance(config, Mapping) else None
    return _name(fields.get("assistant")) or _name(told)
