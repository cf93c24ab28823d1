"""``LLM``: prompts in, answers out, in batches, with dynaspec's own engine in this process or with vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Unpack, cast, overload

import numpy as np
from tqdm import tqdm

from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.build import build_engine
from dynaspec.engine.chat_prompt import render
from dynaspec.engine.config import EngineConfig, parse_bytes
from dynaspec.engine.engine import Engine
from dynaspec.engine.intake import Prompt
from dynaspec.engine.tokenizer import Message, Tokenizer
from dynaspec.engine.vllm_options import translated
from dynaspec.hosts.vllm.launch import engine_arguments, require_vllm
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.families import Metric

from .options import EngineOptions, Speculation, check_adapters, check_empty, note_priority

if TYPE_CHECKING:
    from .on_vllm import EngineOnVllm

SteppedEngine: TypeAlias = "Engine | EngineOnVllm"
"""What ``LLM`` decodes with."""
Progress = bool | Callable[..., Any]
"""Whether a bar is shown, or what makes it of (iterable, total=…, desc=…), such as ``partial(tqdm, leave=False)``."""


class LLM:
    """Decodes prompts in batches. As a context manager it is closed at the end.

    Args:
        model: checkpoint folder, GGUF file or hub id.
        speculative_config: mapping, JSON text or ``SpeculativeConfig``; None = plain decoding.
        chat_template: Jinja, or a file of it, for ``chat``; None = the checkpoint's.
        backend: ``dynaspec``, the engine in this process; ``vllm``, vLLM's, with dynaspec deciding how much is drafted.
        options: fields of ``engine.config.EngineConfig``; vLLM's others are ignored with a warning, or refused where
            answers would depend on them (``engine.vllm_options``). Under vLLM those of its ``EngineArgs``.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """

    @overload
    def __init__(
        self,
        model: str,
        *,
        speculative_config: Speculation | None = None,
        chat_template: str | Path | None = None,
        backend: Literal["dynaspec"] = "dynaspec",
        **options: Unpack[EngineOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: str,
        *,
        speculative_config: Speculation | None = None,
        chat_template: str | Path | None = None,
        backend: Literal["vllm"],
        **options: Any,
    ) -> None: ...

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Speculation | None = None,
        chat_template: str | Path | None = None,
        backend: str = "dynaspec",
        **options: Any,
    ) -> None:
        self._set_up(open_engine(model, backend, speculative_config, options), _template(chat_template))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """From vLLM's ``EngineArgs`` (``dynaspec.EngineArgs``)."""
        return cls(**engine_args.options())

    @classmethod
    def over(cls, engine: SteppedEngine) -> LLM:
        """One that decodes with an engine built elsewhere, such as one of several that share their weights."""
        llm = cls.__new__(cls)
        llm._set_up(engine, None)
        return llm

    def _set_up(self, engine: SteppedEngine, chat_template: str | None) -> None:
        self._engine = engine
        self._chat_template = chat_template
        self._ids = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def get_tokenizer(self) -> Any:
        """Transformers' tokenizer of the model."""
        return self.tokenizer.of_transformers

    @property
    def config(self) -> EngineConfig | Mapping[str, Any]:
        """The engine's configuration; under vLLM the arguments that it was given."""
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt included."""
        return self._engine.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` and ``chat`` use without any: see the option ``generation_config``."""
        return self._engine.sampling_defaults.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = False,
        lora_request: Sequence[None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; outputs in the order of the prompts.

        Args:
            prompts: one prompt or several; each is text, token ids or a mapping with one of them.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar over the prompts.
            lora_request: as vLLM has it; only None.
            priority: as vLLM has it, of no effect.
            tokenization_kwargs: as vLLM has it; only None.
            on_output: called with (prompt's index, output so far) whenever a prompt has got tokens.

        Raises:
            RequestError: a prompt or parameters that cannot be served; nothing has been started.
        """
        check_adapters(lora_request)
        check_empty("tokenization_kwargs", tokenization_kwargs, "prompts are encoded in one way")
        note_priority(priority)
        many = _as_list(prompts)
        params = _params_for(many, self.get_default_sampling_params() if sampling_params is None else sampling_params)
        return self._run(many, params, use_tqdm, on_output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = False,
        lora_request: Sequence[None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through a chat template. Arguments and their order are vLLM's.

        Args:
            chat_template: Jinja; None = the one ``LLM`` was given, or the checkpoint's.
            chat_template_content_format: of no effect: templates get text.
            add_generation_prompt: end the prompt with what begins an answer.
            continue_final_message: go on with the last message instead of answering it.
            tools: functions that the model may call, as OpenAI's objects; where the template has no place for them, a
                system message describes them. Calls are part of the text.
            chat_template_kwargs: more variables for the template.

        Raises:
            RequestError: what ``generate`` raises, or the template refuses the messages.
        """
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise RequestError(
                f"chat_template_content_format is {chat_template_content_format!r}; expected 'auto', 'string' or "
                "'openai'"
            )
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(f"messages is a {type(messages).__name__}; expected a list of messages or of chats")
        one = bool(messages) and isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if one or not messages else messages
        texts = [
            render(
                self.tokenizer,
                chat,
                tools=tools or (),
                template=chat_template or self._chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for chat in chats
        ]
        # Templates write the special tokens that a prompt begins with.
        prompts = [self.tokenizer.encode(text, special_tokens=False) for text in texts]
        listen = None if on_output is None else _with_texts(on_output, texts)
        outputs = self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            on_output=listen,
        )
        return [replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms, under vLLM's names where vLLM has the metric (``dynaspec.metrics``)."""
        return self._engine.metrics()

    def stats(self) -> SpecCounts:
        """Totals since the engine was built; subtract two of them for a span."""
        return self._engine.stats()

    def verify_integrity(self) -> None:
        """Checks the KV cache's books.

        Raises:
            IntegrityError: they contradict each other.
        """
        self._engine.verify_integrity()

    def close(self) -> None:
        """Frees the engine's threads."""
        self._engine.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        use_tqdm: Progress,
        on_output: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        index_of: dict[str, int] = {}
        try:
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(next(self._ids))
                if on_output is None:
                    one = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
                self._engine.add(request_id, prompt, one)
                index_of[request_id] = i
            outputs: Iterable[tuple[int, RequestOutput]] = self._drain(index_of, on_output)
            if use_tqdm:
                bar = use_tqdm if callable(use_tqdm) else tqdm
                outputs = bar(outputs, total=len(prompts), desc="prompts")
            final = dict(outputs)
        finally:
            for request_id in index_of:
                self._engine.abort(request_id)
        return [final[i] for i in range(len(prompts))]

    def _drain(
        self, index_of: Mapping[str, int], on_output: Callable[[int, RequestOutput], None] | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        while self._engine.unfinished:
            for output in self._engine.step():
                i = index_of[output.request_id]
                if on_output is not None:
                    on_output(i, output)
                if output.finished:
                    yield i, output


def _template(given: str | Path | None) -> str | None:
    """Jinja, of a file if one is named."""
    if given is None or (isinstance(given, str) and ("{" in given or "\n" in given)):
        return given
    try:
        return Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {str(given)!r}, neither a template nor a file of one: {error}") from None


def _with_texts(
    on_output: Callable[[int, RequestOutput], None], texts: Sequence[str]
) -> Callable[[int, RequestOutput], None]:
    """Tells ``on_output`` the prompts' texts, which an engine that was given tokens does not know."""
    return lambda i, output: on_output(i, replace(output, prompt=texts[i]))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is a {type(prompts).__name__}; expected a prompt or a list of prompts")
    found = list(prompts)
    return cast(list[Prompt], [found] if found and isinstance(found[0], int | np.integer) else found)


def _params_for(prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise RequestError(f"sampling_params is a {type(params).__name__}; expected SamplingParams or a list of them")
    for one in params:
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params holds a {type(one).__name__}; expected SamplingParams")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling_params were given for {len(prompts)} prompts; expected one for each"
        )
    return list(params)


def open_engine(model: str, backend: str, speculative_config: Any, options: Mapping[str, Any]) -> SteppedEngine:
    """
    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    if backend == "dynaspec":
        return open_embedded(model, speculative_config, options)
    if backend != "vllm":
        raise ConfigError(f"backend is {backend!r}; expected 'dynaspec' or 'vllm'")
    require_vllm()
    arguments = engine_arguments(model, speculative_config, _in_bytes(options), os.environ)
    from .on_vllm import EngineOnVllm  # imports vLLM

    return EngineOnVllm(arguments)


def open_embedded(model: str, speculative_config: Any, options: Mapping[str, Any]) -> Engine:
    """
    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    given = options if speculative_config is None else {**options, "speculative_config": speculative_config}
    return build_engine(EngineConfig.build(os.environ, model=model, **translated(given)))


def _in_bytes(options: Mapping[str, Any]) -> dict[str, Any]:
    memory = options.get("kv_cache_memory")
    if not isinstance(memory, str):
        return dict(options)
    try:
        return {**options, "kv_cache_memory": parse_bytes(memory)}
    except ValueError as error:
        raise ConfigError(f"kv_cache_memory: {error}") from None
