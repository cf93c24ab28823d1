"""``LLM``: prompts in, answers out, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from dynaspec.contract.errors import RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.intake import Prompt
from dynaspec.engine.tokenizer import Message, Tokenizer
from dynaspec.observe.counts import SpecCounts

from .backend import Backend, SteppedEngine, open_engine


class LLM:
    """Decodes prompts in batches.

    Args:
        model: checkpoint folder, GGUF file or hub id.
        speculative_config: mapping, JSON text or ``SpeculativeConfig``; None = plain decoding.
        backend: ``dynaspec``, the engine in this process; ``vllm``, vLLM's, with dynaspec deciding how much is drafted.
        options: fields of ``engine.config.EngineConfig``; under vLLM also those of its ``EngineArgs``.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Any = None,
        backend: Backend = "dynaspec",
        **options: Any,
    ) -> None:
        self._set_up(open_engine(model, backend, speculative_config, options))

    @classmethod
    def over(cls, engine: SteppedEngine) -> LLM:
        """One that decodes with an engine built elsewhere, such as one of several that share their weights."""
        llm = cls.__new__(cls)
        llm._set_up(engine)
        return llm

    def _set_up(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._ids = count()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def config(self) -> EngineConfig | Mapping[str, Any]:
        """The engine's configuration; under vLLM the arguments that it was given."""
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt included."""
        return self._engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; outputs in the order of the prompts.

        Args:
            prompts: one prompt or several; each is text, token ids or a mapping with one of them.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar over the prompts.
            on_output: called with (prompt's index, output so far) whenever a prompt has got tokens.

        Raises:
            RequestError: a prompt or parameters that cannot be served; nothing has been started.
        """
        many = _as_list(prompts)
        params = _params_for(many, sampling_params)
        return self._run(many, params, use_tqdm, on_output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if one or not messages else messages
        texts = [self.tokenizer.render_chat(chat) for chat in chats]
        # Templates write the special tokens that a prompt begins with.
        prompts = [self.tokenizer.encode(text, special_tokens=False) for text in texts]
        listen = None if on_output is None else _with_texts(on_output, texts)
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_output=listen)
        return [replace(output, prompt=text) for output, text in zip(outputs, texts, strict=True)]

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
        use_tqdm: bool,
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
            outputs = self._drain(index_of, on_output)
            final = dict(tqdm(outputs, total=len(prompts), desc="prompts", disable=not use_tqdm))
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


def _with_texts(
    on_output: Callable[[int, RequestOutput], None], texts: Sequence[str]
) -> Callable[[int, RequestOutput], None]:
    """Tells ``on_output`` the prompts' texts, which an engine that was given tokens does not know."""
    return lambda i, output: on_output(i, replace(output, prompt=texts[i]))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int | np.integer))
    return cast(list[Prompt], [prompts] if one else list(prompts))


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    wrong = next((one for one in params if not isinstance(one, SamplingParams)), None)
    if wrong is not None:
        raise RequestError(f"sampling_params holds a {type(wrong).__name__}; expected SamplingParams")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling_params were given for {len(prompts)} prompts; expected one for each"
        )
    return list(params)
