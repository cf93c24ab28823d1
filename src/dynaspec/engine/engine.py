"""One engine: requests in, outputs out, a step at a time. Not thread-safe; callers bring their own loop."""

from __future__ import annotations

from dataclasses import dataclass

from dynaspec.contract.errors import RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.decision_log import DecisionLog
from dynaspec.observe.periodic import PeriodicLog
from dynaspec.observe.stats import SpecStats
from dynaspec.schedule.scheduler import Scheduler

from .config import EngineConfig
from .intake import Group, Intake, Prompt
from .loop import Loop
from .outputs import OutputBuilder
from .tokenizer import Tokenizer


@dataclass(slots=True)
class _Live:
    """A group that is not finished."""

    group: Group
    outputs: OutputBuilder


class Engine:
    """Built by ``engine.build.build_engine``."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        intake: Intake,
        scheduler: Scheduler,
        loop: Loop,
        stats: SpecStats,
        max_model_len: int,
        decision_log: DecisionLog | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._intake = intake
        self._scheduler = scheduler
        self._loop = loop
        self._stats = stats
        self._decision_log = decision_log
        self._periodic = PeriodicLog(stats)
        self._live: dict[str, _Live] = {}
        self._group_of: dict[str, str] = {}
        """Id of a continuation → id of its group."""

    @property
    def unfinished(self) -> bool:
        return bool(self._live)

    def stats(self) -> SpecCounts:
        """Totals since the engine was built; subtract two of them for a span."""
        return self._stats.snapshot()

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queues a prompt.

        Raises:
            RequestError: it cannot be served; nothing has changed.
        """
        if request_id in self._live:
            raise RequestError(f"the request id {request_id!r} is already running; expected a new one")
        group = self._intake.make(request_id, prompt, params)
        self._scheduler.ensure_fits(group.requests[0])
        taken = [request.id for request in group.requests if request.id in self._group_of]
        if taken:
            raise RequestError(f"the request id {taken[0]!r} is already running; expected a new one")
        for request in group.requests:
            self._scheduler.add(request)
            self._group_of[request.id] = request_id
        self._live[request_id] = _Live(group, OutputBuilder(group, self.tokenizer))

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its output so far, or None if it is not running."""
        live = self._live.get(request_id)
        if live is None:
            return None
        for request in live.group.requests:
            self._scheduler.abort(request)
        return self._retire(live)

    def step(self) -> list[RequestOutput]:
        """Runs until one step is committed; the outputs that have changed (final ones only, for FINAL_ONLY)."""
        preemptions = self._scheduler.preemptions
        touched = self._loop.advance()
        self._stats.preemption(self._scheduler.preemptions - preemptions)
        ids = dict.fromkeys(self._group_of[request.id] for request in touched if request.id in self._group_of)
        outputs = []
        for live in [self._live[request_id] for request_id in ids]:
            if live.group.finished:
                outputs.append(self._retire(live))
            elif live.group.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(live.outputs.build())
        return outputs

    def log_stats(self, now: float) -> None:
        """Logs a line about speculation every ten seconds.

        Args:
            now: monotonic seconds.
        """
        self._periodic.tick(now)

    def verify_integrity(self) -> None:
        """Compares the books of the KV cache with each other; for tests and idle moments.

        Raises:
            IntegrityError: they differ.
        """
        self._scheduler.verify_integrity()

    def close(self) -> None:
        """Aborts what is running, frees the step thread and closes the decision log, if there are any."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._loop.close()
        if self._decision_log is not None:
            self._decision_log.close()

    def _retire(self, live: _Live) -> RequestOutput:
        del self._live[live.group.id]
        for request in live.group.requests:
            del self._group_of[request.id]
        return live.outputs.build()
