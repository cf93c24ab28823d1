"""What measurements decode with: engines stepped by hand at a number of requests; on every host a decoder a policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from uuid import uuid4

from dynaspec.api import LLM
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.proposer import Proposer
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.control.policies.short_names import PolicySpec
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.hosts import check_backend
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.observe.counts import SpecCounts
from dynaspec.runtime import settle

Wrap = Callable[[Proposer], Proposer]
Tokens = tuple[tuple[int, ...], ...]
"""Output token ids of every prompt."""
_CARRIED = ("dtype", "device", "max_num_seqs", "enable_prefix_caching")
"""Engine options that mean something to Transformers; the last two need not be given to it."""


class SharedModels:
    """Loads each checkpoint once: engines that are held against each other run on the same weights in the same memory,
    since where a copy happens to lie makes a pass a few per cent faster or slower."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Any, ...], Model] = {}

    def __call__(self, path_or_id: str, **options: Any) -> Model:
        """See ``load_model``."""
        key = (path_or_id, *sorted(options.items()))
        if key not in self._loaded:
            self._loaded[key] = load_model(path_or_id, **options)
        return self._loaded[key]


def open_engine(
    model: str,
    spec: PolicySpec,
    *,
    wrap: Wrap | None = None,
    load: Callable[..., Model] = load_model,
    **options: Any,
) -> Engine:
    """An engine under a policy, in a process that does nothing else.

    Args:
        wrap: puts something around the proposer that the policy's configuration asks for.
        load: ``SharedModels`` where engines are compared.
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError, CheckpointError, CapacityError: see ``build_engine``.
    """
    config = EngineConfig.build(model=model, speculative_config=spec.config, **options)
    engine = build_engine(config, wrap=wrap, load=load)
    settle()
    return engine


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step of an engine."""

    end_s: float
    """Since the loop began."""
    seconds: float
    counts: SpecCounts
    """Of this step alone."""


class ClosedLoop:
    """So many clients: each sends its next request as soon as the one before is answered."""

    def __init__(self, engine: Engine, jobs: Iterable[Job], concurrency: int) -> None:
        """
        Args:
            jobs: may be endless; started in this order.
        """
        self._engine = engine
        self._jobs: Iterator[Job] = iter(jobs)
        self._concurrency = concurrency
        self._live: set[str] = set()
        self._started = 0
        self._began = time.perf_counter()
        self._counts = engine.stats()
        self.outputs: dict[int, tuple[int, ...]] = {}
        """Number of the job → its output's token ids, for those that have finished."""

    def step(self) -> StepTrace | None:
        """Starts requests for clients that wait, and runs one step; None when all is done."""
        self._refill()
        if not self._live:
            return None
        before = time.perf_counter()
        outputs = self._engine.step()
        after = time.perf_counter()
        for output in outputs:
            self._live.remove(output.request_id)
            self.outputs[int(output.request_id)] = tuple(output.outputs[0].token_ids)
        counts, self._counts = self._counts, self._engine.stats()
        return StepTrace(after - self._began, after - before, self._counts - counts)

    def close(self) -> None:
        """Aborts what is still running."""
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()

    def _refill(self) -> None:
        while len(self._live) < self._concurrency:
            job = next(self._jobs, None)
            if job is None:
                return
            name = str(self._started)
            self._engine.add(name, job.prompt, replace(job.params, output_kind=RequestOutputKind.FINAL_ONLY))
            self._live.add(name)
            self._started += 1


@dataclass(frozen=True, slots=True)
class Finished:
    """All of some jobs, decoded."""

    steps: tuple[StepTrace, ...]
    outputs: tuple[tuple[int, ...], ...]
    """Token ids, in the order of the jobs."""

    @property
    def seconds(self) -> float:
        return self.steps[-1].end_s

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))


def run_all(engine: Engine, jobs: Sequence[Job], concurrency: int) -> Finished:
    """Decodes every job, so many at a time."""
    loop = ClosedLoop(engine, jobs, concurrency)
    try:
        steps = tuple(iter(loop.step, None))
    finally:
        loop.close()
    return Finished(steps, tuple(loop.outputs[i] for i in range(len(jobs))))


class Decoder(Protocol):
    """What is measured; ``LLM`` is one."""

    def generate(
        self, prompts: list[Mapping[str, object]], sampling_params: SamplingParams, /
    ) -> Sequence[RequestOutput]: ...

    def stats(self) -> SpecCounts: ...


@dataclass(frozen=True, slots=True)
class TimedRun:
    """What one pass over the prompts gave and took."""

    seconds: float
    counts: SpecCounts
    outputs: tuple[RequestOutput, ...]

    @property
    def tokens(self) -> Tokens:
        return tuple(tuple(completion.token_ids) for output in self.outputs for completion in output.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def run_once(decoder: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams) -> TimedRun:
    """Decodes all prompts (token ids) and takes the wall time, prefill included.

    They share a cache salt with each other and with no other run, whose answers would be drafts that are always right.
    """
    salt = uuid4().hex
    given: list[Mapping[str, object]] = [{"prompt_token_ids": list(tokens), "cache_salt": salt} for tokens in prompts]
    before = decoder.stats()
    started = time.perf_counter()
    outputs = tuple(decoder.generate(given, params))
    seconds = time.perf_counter() - started
    return TimedRun(seconds, decoder.stats() - before, outputs)


def different(ours: Tokens, reference: Tokens) -> int:
    """How many outputs are not token for token those of the reference."""
    return sum(a != b for a, b in zip(ours, reference, strict=True))


class OpenDecoder(Decoder, Protocol):
    """A decoder that holds a model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_model_len(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DecodingHost:
    """An engine, and how policies are compared on it."""

    open: Callable[[PolicySpec], OpenDecoder]
    alternating: bool
    """All policies' engines are open at once and take turns; else one follows the other."""


def host_of(
    backend: str,
    model: str,
    specs: Sequence[PolicySpec],
    params: SamplingParams,
    engine: Mapping[str, Any],
    *,
    one_at_a_time: bool,
) -> DecodingHost:
    """
    Args:
        engine: options of ``LLM`` for every policy.

    Raises:
        ConfigError: an unknown backend, or options that it does not have.
    """
    check_backend(backend)
    if backend == "transformers":
        return DecodingHost(_on_transformers(model, specs, params, engine), alternating=True)
    if backend == "dynaspec":
        return DecodingHost(_embedded(model, engine), alternating=not one_at_a_time)

    def opened(spec: PolicySpec) -> OpenDecoder:
        return LLM(model, speculative_config=spec.config, **{"backend": backend, **engine})

    return DecodingHost(opened, alternating=not one_at_a_time)


def _embedded(model: str, engine: Mapping[str, Any]) -> Callable[[PolicySpec], OpenDecoder]:
    """Engines over the same weights."""
    load = SharedModels()

    def opened(spec: PolicySpec) -> OpenDecoder:
        return LLM.over(open_engine(model, spec, load=load, **engine))

    return opened


def _on_transformers(
    model: str, specs: Sequence[PolicySpec], params: SamplingParams, engine: Mapping[str, Any]
) -> Callable[[PolicySpec], OpenDecoder]:
    """One pair of models for all policies."""
    if engine.get("max_num_seqs", 1) != 1:
        raise ConfigError(
            f"--batch-size is {engine['max_num_seqs']}; expected 1, as Transformers assists one sequence at a time"
        )
    if not params.greedy:
        raise ConfigError(
            f"--temperature is {params.temperature}; expected 0 with --backend transformers, whose sampled output with "
            "and without drafts is not comparable"
        )
    for name in engine:
        if name not in _CARRIED:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {engine[name]!r}; expected no {flag} with --backend transformers")
    from .assisted import Assisted  # imports Transformers

    drafters = [spec.config.model for spec in specs if spec.config is not None and spec.config.model is not None]
    pair = Assisted(model, drafters[0] if drafters else None, dtype=engine.get("dtype"), device=engine.get("device"))

    def opened(spec: PolicySpec) -> OpenDecoder:
        config = spec.config
        return pair.decoder(None if config is None else config.model_dump(mode="json", exclude_none=True))

    return opened
