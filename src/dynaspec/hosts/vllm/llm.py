"""``LLM`` on vLLM: parameters, requests and outputs, translated.

vLLM's engine with the interface of dynaspec's: requests in, outputs out, a step at a time. Needs vLLM.

One request's parameters as vLLM's.

vLLM's outputs as dynaspec's.

One request that vLLM runs: its outputs so far, as dynaspec's.

Counts of a vLLM engine that runs in scripts. Needs vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import index
from typing import Any

from pydantic import ValidationError
from vllm import EngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind as VllmOutputKind
from vllm.sampling_params import StructuredOutputsParams as VllmStructuredOutputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from dynaspec.contract.errors import ConfigError, IntegrityError, RequestError
from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, SpeculationMetrics
from dynaspec.observe.counts import SpecCounts

from .report import take
from .settings import KEY

SAME = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "max_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "seed", "logprobs", "prompt_logprobs", "detokenize"),
    "skip_special_tokens",
)
"""Parameters with vLLM's names and meaning."""
OURS = ("truncate_prompt_tokens", "speculation_metrics")
"""Parameters that are carried out here, before and after vLLM."""
TRANSLATED = ("structured_outputs", "output_kind", "max_draft_tokens")
REFUSED: Mapping[str, str] = {
    "expected_acceptance": "vLLM's requests have no place for it",
}
"""Parameters that do not hold under vLLM, and why."""

_NO_SEED = -1
"""vLLM's word for None."""
_NOT_WHILE_SPECULATING = {"min_p": 0.0, "logit_bias": None}
"""Parameters that vLLM does not have together with speculation, and values that ask for nothing."""
_COUNTS = "per_request_spec_decode_metrics"
"""vLLM's option to count each request's drafts."""
_PATIENCE_S = 60.0
"""How long vLLM's process may take to end: what it has buffered of a decision log is lost if it is killed."""


def vllm_params(params: SamplingParams, *, speculates: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``SamplingParams``; those of enumerations and of structured outputs by their values.

    Args:
        speculates: whether vLLM drafts at all.

    Raises:
        RequestError: a parameter that vLLM cannot honour.
    """
    for name, why in REFUSED.items():
        if getattr(params, name) is not None:
            raise RequestError(f"{name} is {getattr(params, name)!r}; expected None, as {why}")
    if params.seed == _NO_SEED:
        raise RequestError("seed is -1, which means none to vLLM; expected another number")
    for name, nothing in _NOT_WHILE_SPECULATING.items() if speculates else ():
        if getattr(params, name) not in (nothing, {}):
            raise RequestError(
                f"{name} is {getattr(params, name)!r}; expected {nothing!r}, as vLLM does not have it together with "
                "speculation"
            )
    values = {name: _plain(getattr(params, name)) for name in SAME}
    values["output_kind"] = params.output_kind.name
    if params.structured_outputs is not None:
        form = asdict(params.structured_outputs)
        values["structured_outputs"] = {name: _plain(value) for name, value in form.items() if value is not None}
    if params.max_draft_tokens is not None:
        values["extra_args"] = {KEY: {"num_speculative_tokens": params.max_draft_tokens}}
    return values


def _plain(value: Any) -> Any:
    """Lists and dictionaries, as vLLM sends parameters to another process."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def completion(given: Any, metrics: RequestMetrics) -> CompletionOutput:
    """
    Args:
        given: vLLM's ``CompletionOutput``.
    """
    return CompletionOutput(
        index=given.index,
        text=given.text,
        token_ids=tuple(given.token_ids),
        cumulative_logprob=given.cumulative_logprob,
        logprobs=None if given.logprobs is None else tuple(_position(entry) for entry in given.logprobs),
        finish_reason=given.finish_reason,
        stop_reason=given.stop_reason,
        metrics=metrics,
    )


def prompt_logprobs(
    given: Iterable[Mapping[int, Any] | None] | None,
) -> tuple[Mapping[int, Logprob] | None, ...] | None:
    if given is None:
        return None
    return tuple(None if entry is None else _position(entry) for entry in given)


def _position(entry: Mapping[int, Any]) -> Mapping[int, Logprob]:
    return {token: Logprob(one.logprob, one.rank, one.decoded_token) for token, one in entry.items()}


def with_drafts(timing: RequestMetrics, counted: Any, tokens: int, level: SpeculationMetrics) -> RequestMetrics:
    """``timing`` and what vLLM has counted of a request's drafts. What it drafted and did not verify is not known.

    Args:
        counted: vLLM's ``RequestSpecDecodeMetrics``; None = nothing, as while a request runs.
        tokens: output tokens so far.
    """
    if counted is None or level == "off":
        return timing
    drafts = sum(counted.histogram)
    accepted = sum(length * times for length, times in enumerate(counted.histogram))
    totals = replace(
        timing,
        steps=max(drafts, tokens - 1 - accepted),
        drafts=drafts,
        drafted=counted.num_draft_tokens,
        verified=counted.num_draft_tokens,
        accepted=accepted,
        draft_emitted=accepted + drafts,
    )
    if level == "summary":
        return totals
    steps = tuple(zip(counted.per_step_drafted, counted.per_step_accepted, strict=True))
    drafted = _per_position([length for length, _ in steps])
    reached = _per_position([length for _, length in steps])
    return replace(
        totals,
        drafted_per_pos=drafted,
        accepted_per_pos=reached + (0,) * (len(drafted) - len(reached)),
        per_step=steps,
    )


def _per_position(lengths: Sequence[int]) -> tuple[int, ...]:
    """How many of them have a token at each position."""
    return tuple(sum(length > position for length in lengths) for position in range(max(lengths, default=0)))


class LiveRequest:
    """Puts together what vLLM hands out piece by piece: every output has all continuations."""

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self._id = request_id
        self._params = params
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._arrival_s = time.monotonic()
        self._outputs = {i: CompletionOutput(i, "", ()) for i in range(params.n)}
        self._tokens = dict.fromkeys(self._outputs, 0)
        self._of_prompt: tuple[Mapping[int, Logprob] | None, ...] | None = None
        self._latest: RequestOutput | None = None

    def take(self, given: Any) -> RequestOutput:
        """
        Args:
            given: vLLM's ``RequestOutput``.
        """
        timing = self._timing(given)
        for one in given.outputs:
            self._tokens[one.index] = len(one.token_ids) + (self._tokens[one.index] if self._delta else 0)
            drafts = one.spec_decode_metrics
            metrics = with_drafts(timing, drafts, self._tokens[one.index], self._params.speculation_metrics)
            self._outputs[one.index] = completion(one, metrics)
        if given.prompt_logprobs:  # of deltas, the first alone has them
            self._of_prompt = prompt_logprobs(given.prompt_logprobs)
        self._latest = RequestOutput(
            request_id=self._id,
            prompt=given.prompt,
            prompt_token_ids=tuple(given.prompt_token_ids or ()),
            outputs=tuple(self._outputs.values()),
            finished=given.finished,
            prompt_logprobs=self._of_prompt,
            num_cached_tokens=given.num_cached_tokens or 0,
        )
        if self._delta:
            self._outputs = {i: _nothing_new(output) for i, output in self._outputs.items()}
        return self._latest

    def aborted(self) -> RequestOutput:
        """The last output of a request that has been given up."""
        ended = tuple(
            output if output.finish_reason is not None else replace(output, finish_reason="abort")
            for output in self._outputs.values()
        )
        latest = self._latest or RequestOutput(self._id, None, (), ended, finished=True)
        return replace(latest, outputs=ended, finished=True)

    def _timing(self, given: Any) -> RequestMetrics:
        told = given.metrics
        timing = RequestMetrics(arrival_s=self._arrival_s, cached_tokens=given.num_cached_tokens or 0)
        if told is None:  # vLLM was told to keep none
            return timing
        return replace(
            timing,
            scheduled_s=told.scheduled_ts,
            first_token_s=told.first_token_ts,
            finished_s=told.last_token_ts if given.finished else 0.0,
            preemptions=told.num_preemptions,
        )


def _nothing_new(output: CompletionOutput) -> CompletionOutput:
    return replace(output, text="", token_ids=(), logprobs=None if output.logprobs is None else ())


class CountingStatLogger(StatLoggerBase):  # type: ignore[misc]  # not known where vLLM is not installed
    """Keeps the latest of what dynaspec's scheduler reports; without it, counts tokens."""

    def __init__(self) -> None:
        self.counts = SpecCounts()

    def of_engine(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """For vLLM, which asks for a logger by calling something with its configuration."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        report = None if scheduler_stats is None else take(scheduler_stats)
        if report is not None:
            self.counts = report.counts
        elif iteration_stats is not None and not self.counts.steps:
            self.counts += SpecCounts(emitted=iteration_stats.num_generation_tokens)

    def log_engine_initialized(self) -> None:
        """vLLM's own loggers say what there is to say."""


class VllmEngine:
    """Not thread-safe.

    Args:
        arguments: of vLLM's ``EngineArgs``; see ``launch.engine_arguments``.

    Raises:
        ConfigError: vLLM refuses them.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = dict(arguments)
        self._speculates = arguments.get("speculative_config") is not None
        counted = {_COUNTS: "detailed"} if self._speculates else {}
        self._counter = CountingStatLogger()
        try:
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(**{**counted, **arguments}), stat_loggers=[self._counter.of_engine]
            )
        except (VLLMError, ValueError, TypeError, OSError, NotImplementedError) as error:
            raise ConfigError(f"vLLM refuses the configuration: {_reason(error)}") from error
        self._live: dict[str, LiveRequest] = {}

    @property
    def unfinished(self) -> bool:
        return bool(self._live)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt included."""
        return int(self._engine.model_config.max_model_len)

    def add(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        """Queues a prompt: text, token ids, or one of vLLM's mappings.

        Raises:
            RequestError: it cannot be served; nothing has changed.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is a {type(params).__name__}; expected SamplingParams")
        if request_id in self._live:
            raise RequestError(f"the request id {request_id!r} is already running; expected a new one")
        live = LiveRequest(request_id, params)
        try:
            told = _sampling_params(params, speculates=self._speculates)
            self._engine.add_request(request_id, self._prompt(prompt, params.truncate_prompt_tokens), told)
        except RequestError:
            raise
        except (VLLMError, ValueError, TypeError) as error:
            raise RequestError(f"vLLM refuses the request: {_reason(error)}") from error
        self._live[request_id] = live

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its output so far, or None if it is not running."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self._engine.abort_request([request_id])
        return live.aborted()

    def step(self) -> list[RequestOutput]:
        """Waits for one step's outputs; final ones only, for FINAL_ONLY."""
        outputs = []
        for given in self._engine.step():
            live = self._live.get(given.request_id)
            if live is None:  # aborted while the step ran
                continue
            outputs.append(live.take(given))
            if given.finished:
                del self._live[given.request_id]
        return outputs

    def stats(self) -> SpecCounts:
        """Totals since the engine was built, as the scheduler counts them; of plain decoding the tokens alone."""
        return self._counter.counts

    def verify_integrity(self) -> None:
        """
        Raises:
            IntegrityError: the engine still holds requests that have ended.
        """
        held = self._engine.get_num_unfinished_requests()
        if not self._live and held:
            raise IntegrityError(f"vLLM holds {held} requests that have ended; expected none")

    def close(self) -> None:
        """Aborts what is running and ends vLLM's processes."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._engine.engine_core.shutdown(timeout=_PATIENCE_S)

    def _prompt(self, prompt: Any, kept: int | None) -> dict[str, Any]:
        """
        Args:
            kept: tokens at its end; None = all.
        """
        given = _mapping(prompt)
        if kept is None:
            return given
        tokens = given.get("prompt_token_ids")
        if tokens is None:
            tokens = self._engine.get_tokenizer().encode(given["prompt"])
        return {**given, "prompt_token_ids": tokens[-kept:]}


def _mapping(prompt: Any) -> dict[str, Any]:
    """A prompt in the form that vLLM has for it."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in ("prompt", "prompt_token_ids")):
        return {key: value for key, value in prompt.items() if value is not None}
    if (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, bytes)
        and all(hasattr(one, "__index__") for one in prompt)
    ):
        return {"prompt_token_ids": [index(token) for token in prompt]}
    raise RequestError(
        f"the prompt is a {type(prompt).__name__}; expected text, token ids, or a mapping with one of them"
    )


def _sampling_params(params: SamplingParams, *, speculates: bool) -> VllmSamplingParams:
    values = vllm_params(params, speculates=speculates)
    form = values.get("structured_outputs")
    return VllmSamplingParams(
        **values
        | {"output_kind": VllmOutputKind[values["output_kind"]]}
        | ({} if form is None else {"structured_outputs": VllmStructuredOutputs(**form)})
    )


def _reason(error: Exception) -> str:
    """What an error says, on one line; of pydantic's the first."""
    told = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(told.split()) or type(error).__name__
