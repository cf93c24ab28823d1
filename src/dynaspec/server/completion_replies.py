"""Answers of ``/v1/completions``, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.engine.tokenizer import Tokenizer

from . import logprobs
from .choices import Choice, Choices, TokenTexts
from .generation import Job
from .params import reported_speculation
from .protocol.completions import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
)
from .protocol.reports import Usage
from .reports import Reports, UsageCounter, report


class CompletionReplies:
    """Builds the answer to one request. An output at the end is to it a delta that has everything.

    Args:
        model: name that the answer carries.
    """

    def __init__(self, body: CompletionRequest, job: Job, tokenizer: Tokenizer, model: str, reports: Reports) -> None:
        self._body = body
        self._reports = reports
        self._job = job
        self._tokenizer = tokenizer
        self._model = model
        self._created = int(time.time())
        self._level = reported_speculation(body)
        self._choices = Choices(tokenizer, n=job.params.n, skip_special_tokens=body.skip_special_tokens)
        self._prompt_alone = body.max_tokens == 0
        """The one token that the engine had to generate is left out."""
        self._usage = UsageCounter(outputs_count=not self._prompt_alone)

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._usage.total()

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionReply:
        """The answer, from the prompts' final outputs."""
        choices = [choice for i, output in enumerate(outputs) for choice in self._changed(i, output)]
        return CompletionReply(
            id=self._job.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._usage.total(),
            metrics=self._reports.metrics(),
            timings=self._reports.timings(),
        )

    def opening(self) -> Iterator[CompletionChunk]:
        """Nothing comes before the text."""
        return iter(())

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[CompletionChunk]:
        """One for each choice that has grown or ended."""
        options = self._body.stream_options
        for choice in self._changed(prompt, output):
            usage = self._usage.total() if options is not None and options.continuous_usage_stats else None
            chunk = self._chunk([choice], usage)
            chunk.timings = self._reports.timings()
            yield chunk

    def closing(self) -> Iterator[CompletionChunk]:
        """The usage, if it was asked for."""
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk = self._chunk([], self._usage.total())
            chunk.metrics, chunk.timings = self._reports.metrics(), self._reports.timings()
            yield chunk

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionChunk:
        return CompletionChunk(id=self._job.id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _changed(self, prompt: int, output: RequestOutput) -> list[CompletionChoice]:
        self._usage.add(prompt, output)
        self._reports.note(output)
        return [
            self._told(index, choice, prompt, output, delta)
            for index, choice, delta in self._choices.changed(prompt, output)
        ]

    def _told(
        self, index: int, choice: Choice, prompt: int, output: RequestOutput, delta: CompletionOutput
    ) -> CompletionChoice:
        body, first = self._body, not choice.begun
        if first and body.echo:
            choice.echoed = self._prompt_text(prompt, output)
        offset = len(choice.echoed) + choice.texts.length
        sources = body.stream and self._level == "detailed"
        texts = choice.texts.add(delta.token_ids) if sources or body.logprobs is not None else []
        ids = body.return_token_ids
        return CompletionChoice(
            index=index,
            text=(choice.echoed if first else "") + ("" if self._prompt_alone else delta.text),
            logprobs=self._logprobs(output, delta, texts, offset, first=first),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=(() if self._prompt_alone else delta.token_ids) if ids else None,
            prompt_token_ids=output.prompt_token_ids if ids and first else None,
            prompt_logprobs=logprobs.for_prompt(output, body.prompt_logprobs) if first else None,
            speculation=report(delta.metrics, self._level) if delta.finish_reason is not None else None,
            token_sources=choice.written(delta, texts) if sources else None,
        )

    def _prompt_text(self, prompt: int, output: RequestOutput) -> str:
        """The prompt as it was given; where that were not the whole truth, as it was read."""
        given = self._job.prompts[prompt]
        if given.text is not None and len(given.tokens) == len(output.prompt_token_ids):
            return given.text
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=self._body.skip_special_tokens)

    def _logprobs(
        self, output: RequestOutput, delta: CompletionOutput, texts: Sequence[str], offset: int, *, first: bool
    ) -> CompletionLogprobs | None:
        top = self._body.logprobs
        if top is None or delta.logprobs is None:
            return None
        told = logprobs.ForCompletion(self._tokenizer, top)
        if first and self._body.echo and output.prompt_logprobs is not None:
            tokens = output.prompt_token_ids
            grown = TokenTexts(self._tokenizer, (), skip_special_tokens=self._body.skip_special_tokens).add(tokens)
            told.add(tokens, output.prompt_logprobs, grown, offset=0)
        if not self._prompt_alone:
            told.add(delta.token_ids, delta.logprobs, texts, offset=offset)
        return told.told
