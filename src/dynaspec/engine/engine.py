"""One engine: requests in, outputs out, a step at a time. Not thread-safe; callers bring their own loop."""

from __future__ import annotations

from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.contract.step import Controller, Explains
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.decision_log import DecisionLog
from dynaspec.observe.families import ENGINE_FAMILIES, Metric, readings
from dynaspec.observe.format import PeriodicLog
from dynaspec.observe.stats import EngineSnapshot, LiveRequest, RequestMeter, SpecStats
from dynaspec.propose.router import Router
from dynaspec.schedule.request import Request
from dynaspec.schedule.scheduler import Scheduler

from .config import EngineConfig
from .intake import Intake, Prompt
from .loop import Loop
from .outputs import OutputBuilder
from .sampling_defaults import NEUTRAL, SamplingDefaults
from .tokenizer import Tokenizer


class Engine:
    """Built by ``engine.build.build_engine``."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        intake: Intake,
        scheduler: Scheduler,
        controller: Controller,
        proposers: Router,
        loop: Loop,
        stats: SpecStats,
        max_model_len: int,
        decision_log: DecisionLog | None = None,
        sampling_defaults: SamplingDefaults = NEUTRAL,
    ) -> None:
        self.config = config
        self.sampling_defaults = sampling_defaults
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._intake = intake
        self._scheduler = scheduler
        self._controller = controller
        self._proposers = proposers
        self._loop = loop
        self._stats = stats
        self._requests = RequestMeter()
        self._decision_log = decision_log
        self._live: dict[str, OutputBuilder] = {}
        """By its id, each group that is not finished."""
        self._closed = False
        self._group_of: dict[str, str] = {}
        """Id of a continuation → id of its group."""
        self._periodic = PeriodicLog(self.snapshot)

    @property
    def unfinished(self) -> bool:
        return bool(self._live)

    def stats(self) -> SpecCounts:
        """Totals since the engine was built; subtract two of them for a span."""
        return self._stats.snapshot()

    def metrics(self) -> list[Metric]:
        """What a server's ``/metrics`` has of the engine, under vLLM's names."""
        labels = {"model_name": self.config.model, "engine": "0"}
        return list(readings(ENGINE_FAMILIES, self.snapshot(), namespace="vllm", labels=labels))

    def snapshot(self) -> EngineSnapshot:
        """What it is doing; to be taken between two steps, in the thread that steps."""
        speculation, pool = self.config.speculative_config, self._scheduler.tables.pool
        return EngineSnapshot(
            counts=self._stats.snapshot(),
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_blocks=pool.num_blocks,
            kv_blocks_used=pool.num_blocks - pool.free_count,
            policy="none" if speculation is None else speculation.policy,
            longest_draft=0 if speculation is None else speculation.longest_draft,
            prefix_cache_queries=self._scheduler.prefix_queries,
            prefix_cache_hits=self._scheduler.prefix_hits,
            totals=self._requests.snapshot(),
            steps=self._stats.steps.snapshot(),
            estimates=self._controller.estimates() if isinstance(self._controller, Explains) else {},
            proposers={} if speculation is None else self._proposers.enabled,
            kept_text=self._proposers.kept(),
            requests=tuple(
                _live_request(request)
                for live in self._live.values()
                for request in live.group.requests
                if not request.finished
            ),
        )

    def prepare(self, params: SamplingParams) -> None:
        """Does what can take long about parameters, so that ``add`` does not; may be called from any thread.

        Raises:
            RequestError: they cannot be served.
        """
        self._intake.prepare(params)

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams, *, arrived_s: float | None = None) -> None:
        """Queues a prompt.

        Args:
            arrived_s: when its caller handed it in, monotonic seconds; None = now.

        Raises:
            RequestError: it cannot be served; nothing has changed.
            DynaspecError: the engine was closed.
        """
        if self._closed:
            raise DynaspecError("the engine was closed; expected a running one")
        if request_id in self._live:
            raise RequestError(f"the request id {request_id!r} is already running; expected a new one")
        group = self._intake.make(request_id, prompt, params)
        self._scheduler.ensure_fits(group.requests[0])
        taken = [request.id for request in group.requests if request.id in self._group_of]
        if taken:
            raise RequestError(f"the request id {taken[0]!r} is already running; expected a new one")
        for request in group.requests:
            if arrived_s is not None:
                request.arrival_s = arrived_s
            self._scheduler.add(request)
            self._requests.arrived(request)
            self._group_of[request.id] = request_id
        self._live[request_id] = OutputBuilder(group, self.tokenizer)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its output so far, or None if it is not running."""
        live = self._live.get(request_id)
        if live is None:
            return None
        for request in live.group.requests:
            self._scheduler.abort(request)
            self._requests.ended(request)
        return self._retire(live)

    def step(self) -> list[RequestOutput]:
        """Runs until one step is committed; the outputs that have changed (final ones only, for FINAL_ONLY)."""
        preemptions = self._scheduler.preemptions
        touched = self._loop.advance()
        self._stats.preemption(self._scheduler.preemptions - preemptions)
        self._requests.step(touched)
        ids = dict.fromkeys(self._group_of[request.id] for request in touched if request.id in self._group_of)
        outputs = []
        for live in [self._live[request_id] for request_id in ids]:
            if live.group.finished:
                outputs.append(self._retire(live))
            elif live.group.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(live.build())
        return outputs

    def log_stats(self, now: float) -> None:
        """Logs what has been going on, every ten seconds.

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
        """Aborts what is running, frees the step thread and closes the decision log, if there are any. From then on no
        request is taken."""
        self._closed = True
        for request_id in list(self._live):
            self.abort(request_id)
        self._loop.close()
        if self._decision_log is not None:
            self._decision_log.close()

    def _retire(self, live: OutputBuilder) -> RequestOutput:
        del self._live[live.group.id]
        for request in live.group.requests:
            del self._group_of[request.id]
        return live.build()


def _live_request(request: Request) -> LiveRequest:
    counts = request.draft_counts
    drafted, accepted = (0, 0) if counts is None else (counts.drafted, counts.accepted)
    return LiveRequest(  # by position, as names would double the time
        request.id,
        "waiting" if request.lane is None else "running",
        len(request.prompt),
        len(request.output),
        drafted,
        accepted,
        request.preemptions,
    )
