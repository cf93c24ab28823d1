"""vLLM's engine as ``LLM`` needs it. Needs vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Any, SupportsIndex

from pydantic import ValidationError
from vllm import EngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind as VllmOutputKind
from vllm.sampling_params import StructuredOutputsParams as VllmStructuredOutputs
from vllm.v1.engine.llm_engine import LLMEngine

from dynaspec.contract.errors import ConfigError, IntegrityError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.sampling_defaults import SamplingDefaults
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.hosts.vllm.llm_request import LiveRequest, vllm_params
from dynaspec.hosts.vllm.stat_logger import CountingStatLogger
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.families import Counter, Gauge, Histogram, Metric, Vector

_KINDS = {kind.__name__: kind for kind in (Counter, Gauge, Histogram, Vector)}
_COUNTS = "per_request_spec_decode_metrics"
"""vLLM's option to count each request's drafts."""
_PATIENCE_S = 60.0
"""How long vLLM's process may take to end: what it has buffered of a decision log is lost if it is killed."""


class EngineOnVllm:
    """Not thread-safe. Its tokenizer is dynaspec's, for chats; vLLM has its own for prompts.

    Args:
        arguments: of vLLM's ``EngineArgs``; see ``launch.engine_arguments``.

    Raises:
        ConfigError: vLLM refuses them.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.config: Mapping[str, Any] = dict(arguments)
        """The arguments of vLLM's ``EngineArgs``."""
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

    @cached_property
    def tokenizer(self) -> Tokenizer:
        given = self.config
        own = given.get("tokenizer")
        return Tokenizer(
            own or given["model"],
            revision=given.get("tokenizer_revision") if own else given.get("revision"),
            trust_remote_code=given.get("trust_remote_code", False),
        )

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """Those that vLLM makes of its ``generation_config`` and ``override_generation_config``."""
        return SamplingDefaults(self._engine.model_config.get_diff_sampling_param())

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

    def metrics(self) -> list[Metric]:
        """vLLM's own; none where it keeps none."""
        if not self._engine.log_stats:
            return []
        return [_KINDS[type(one).__name__](**vars(one)) for one in self._engine.get_metrics()]

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
        and all(isinstance(one, SupportsIndex) for one in prompt)
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
