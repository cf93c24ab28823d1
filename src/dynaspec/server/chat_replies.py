"""Answers of ``/v1/chat/completions``, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.engine.tokenizer import Tokenizer

from . import logprobs
from .choices import Choice, Choices
from .generation import Job
from .params import reported_speculation
from .protocol.chat import (
    AnswerMessage,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatReply,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from .protocol.generation import FinishReason
from .protocol.reports import Usage
from .reports import Reports, UsageCounter, report
from .tools import Parsed, ToolParser, ToolUse


class ChatReplies:
    """Builds the answer to one request.

    Args:
        model: name that the answer carries.
    """

    def __init__(
        self, body: ChatRequest, job: Job, tokenizer: Tokenizer, model: str, use: ToolUse, reports: Reports
    ) -> None:
        self._body = body
        self._reports = reports
        self._job = job
        self._tokenizer = tokenizer
        self._model = model
        self._created = int(time.time())
        self._level = reported_speculation(body)
        self._choices = Choices(tokenizer, n=job.params.n, skip_special_tokens=body.skip_special_tokens)
        self._parsers = [ToolParser(use) for _ in range(job.params.n)]
        self._usage = UsageCounter()

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._usage.total()

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatReply:
        """The answer, from the final output."""
        [output] = outputs
        self._usage.add(0, output)
        self._reports.note(output)
        return ChatReply(
            id=self._job.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=self._usage.total(),
            metrics=self._reports.metrics(),
            timings=self._reports.timings(),
            prompt_token_ids=output.prompt_token_ids if self._body.return_token_ids else None,
            prompt_logprobs=logprobs.for_prompt(output, self._body.prompt_logprobs),
        )

    def opening(self) -> Iterator[ChatChunk]:
        """Each choice begins with its role."""
        for index in range(self._job.params.n):
            delta = Delta(role="assistant", content="")
            yield self._chunk([ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[ChatChunk]:
        """One for each choice that has grown or ended."""
        self._usage.add(prompt, output)
        self._reports.note(output)
        options = self._body.stream_options
        for index, choice, delta in self._choices.changed(prompt, output):
            chunk = self._chunk([self._chunk_choice(index, choice, delta)])
            if index == 0 and not choice.begun:
                chunk.prompt_token_ids = output.prompt_token_ids if self._body.return_token_ids else None
                chunk.prompt_logprobs = logprobs.for_prompt(output, self._body.prompt_logprobs)
            if options is not None and options.continuous_usage_stats:
                chunk.usage = self._usage.total()
            chunk.timings = self._reports.timings()
            yield chunk

    def closing(self) -> Iterator[ChatChunk]:
        """The usage, if it was asked for."""
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk = self._chunk([])
            chunk.usage = self._usage.total()
            chunk.metrics = self._reports.metrics()
            chunk.timings = self._reports.timings()
            yield chunk

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self._job.id, created=self._created, model=self._model, choices=choices)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        parser = self._parsers[completion.index]
        said, rest = parser.feed(completion.text), parser.finish()
        content, calls = said.content + rest.content, said.calls + rest.calls
        return ChatChoice(
            index=completion.index,
            message=AnswerMessage(
                content=content if content or not calls else None,
                tool_calls=[_unnumbered(call) for call in calls] or None,
            ),
            logprobs=self._logprobs(completion),
            finish_reason=_finish_reason(completion, parser),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
            speculation=report(completion.metrics, self._level),
        )

    def _chunk_choice(self, index: int, choice: Choice, delta: CompletionOutput) -> ChunkChoice:
        parser, ended = self._parsers[index], delta.finish_reason is not None
        said = parser.feed(delta.text)
        rest = parser.finish() if ended else Parsed()
        content, calls = said.content + rest.content, said.calls + rest.calls
        detailed = self._level == "detailed"
        return ChunkChoice(
            index=index,
            delta=Delta(content=content if content or not calls else None, tool_calls=list(calls) or None),
            logprobs=self._logprobs(delta),
            finish_reason=_finish_reason(delta, parser),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else None,
            speculation=report(delta.metrics, self._level) if ended else None,
            token_sources=choice.written(delta, choice.texts.add(delta.token_ids)) if detailed else None,
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        top = self._body.top_logprobs or 0
        return logprobs.for_chat(self._tokenizer, completion.token_ids, completion.logprobs, top)


def _finish_reason(completion: CompletionOutput, parser: ToolParser) -> FinishReason | None:
    return "tool_calls" if completion.finish_reason == "stop" and parser.calls else completion.finish_reason


def _unnumbered(call: CalledTool) -> CalledTool:
    """As it stands in a whole answer, where its place says its number."""
    return call.model_copy(update={"index": None})
