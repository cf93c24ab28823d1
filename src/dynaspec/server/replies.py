"""Answers of ``/v1/completions`` and ``/v1/chat/completions``, whole or in chunks, log-probabilities included.

While deltas go out, the text of each token and its source are kept for each continuation (``Choice``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Detokenizer, Tokenizer

from .generation import Job
from .inputs import reported_speculation
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
    TokenLogprob,
    TopLogprob,
)
from .protocol.completions import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
)
from .protocol.generation import FinishReason, PromptLogprob, PromptLogprobs, TokenSource, Usage, WrittenToken
from .reports import Reports, UsageCounter, report
from .tools import Parsed, ToolParser, ToolUse


class TokenSources:
    """Follows one continuation through its deltas, whose metrics must be ``detailed``.

    A step with ``a`` accepted tokens has them from the drafter and one more from the target, unless the last accepted
    one has ended the request. A prompt's completion gives a token of the target's that belongs to no step; so does
    reading it again after a preemption. Where a delta holds such a token and steps besides, it is taken to come first.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._started = False

    def add(self, count: int, metrics: RequestMetrics) -> list[TokenSource]:
        """Sources of the next ``count`` tokens; ``metrics`` cover the continuation up to and with them."""
        new, self._steps = metrics.per_step[self._steps :], len(metrics.per_step)
        sources: list[TokenSource] = ["target"] if count and not self._started else []
        self._started |= count > 0
        for _, accepted in new:
            sources += ["draft"] * accepted
            sources.append("target")
        unknown: list[TokenSource] = ["target"] * (count - len(sources))
        return unknown + sources[:count]


class TokenTexts:
    """What each token adds to a text that grows; put together, it is that text.

    A token that ends within a character adds nothing; the one that completes it adds all of it.

    Args:
        before: tokens that stand in front, which may change how the first one is spaced.
        skip_special_tokens: special tokens add nothing.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._grown = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens), before)

    @property
    def length(self) -> int:
        """Characters so far."""
        return len(self._grown.text)

    def add(self, tokens: Iterable[int]) -> list[str]:
        """Texts of the next tokens."""
        texts = []
        for token in tokens:
            start = self.length
            self._grown.push(token)
            texts.append(self._grown.text[start:])
        return texts


class Choice:
    """One continuation of a stream.

    Args:
        prompt: tokens in front of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.texts = TokenTexts(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self.echoed = ""
        """The prompt, where the text begins with it."""
        self.begun = False
        """A chunk of it has gone out."""
        self.finished = False
        self._sources = TokenSources()

    def written(self, delta: CompletionOutput, texts: Sequence[str]) -> list[WrittenToken]:
        """The sources of the tokens of a delta, whose metrics must be ``detailed``."""
        sources = self._sources.add(len(delta.token_ids), delta.metrics)
        return [WrittenToken(text=text, source=source) for text, source in zip(texts, sources, strict=True)]


class Choices:
    """All continuations of a request, by their number."""

    def __init__(self, tokenizer: Tokenizer, *, n: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._n = n
        self._skip_special_tokens = skip_special_tokens
        self._known: dict[int, Choice] = {}

    def changed(self, prompt: int, output: RequestOutput) -> Iterator[tuple[int, Choice, CompletionOutput]]:
        """(number, choice, delta) of those that have grown or ended since the output before."""
        for delta in output.outputs:
            index = prompt * self._n + delta.index
            choice = self._known.get(index)
            if choice is None:
                choice = Choice(self._tokenizer, output.prompt_token_ids, skip_special_tokens=self._skip_special_tokens)
                self._known[index] = choice
            if delta.token_ids or (delta.finish_reason is not None and not choice.finished):
                yield index, choice, delta
                choice.begun = True
                choice.finished = delta.finish_reason is not None


class Replies(ABC):
    """Builds the answer to one request, in either of its forms.

    Args:
        model: name that the answer carries.
        outputs_count: whether output tokens are counted; not if none was asked for.
    """

    def __init__(
        self,
        body: CompletionRequest | ChatRequest,
        job: Job,
        tokenizer: Tokenizer,
        model: str,
        reports: Reports,
        *,
        outputs_count: bool = True,
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._reports = reports
        self._level = reported_speculation(body)
        self._choices = Choices(tokenizer, n=job.params.n, skip_special_tokens=body.skip_special_tokens)
        self._usage = UsageCounter(outputs_count=outputs_count)
        self._head: dict[str, Any] = {"id": job.id, "created": int(time.time()), "model": model}
        """What whole answers and chunks begin with."""
        options = body.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._usage.total()

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """The answer, from each prompt's final output."""

    def opening(self) -> Iterator[BaseModel]:
        """What a stream begins with."""
        return iter(())

    @abstractmethod
    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[BaseModel]:
        """What an output of a prompt adds: one for each choice that has grown or ended."""

    def closing(self) -> Iterator[BaseModel]:
        """What comes after the last output: the usage, if it was asked for."""
        if self._usage_last:
            yield self._chunk([], usage=self.usage(), metrics=self._reports.metrics())

    @abstractmethod
    def _chunk(self, choices: list[Any], **more: Any) -> BaseModel:
        """An event of the stream."""

    def _grown(self, choice: BaseModel, **more: Any) -> BaseModel:
        """The event in which a choice has grown."""
        return self._chunk([choice], usage=self.usage() if self._usage_always else None, **more)

    def _take(self, prompt: int, output: RequestOutput) -> None:
        self._usage.add(prompt, output)
        self._reports.note(output)

    def _totals(self) -> dict[str, Any]:
        """What a whole answer ends with."""
        reports = self._reports
        return {"usage": self.usage(), "metrics": reports.metrics(), "timings": reports.timings()}


class CompletionReplies(Replies):
    """Of ``/v1/completions``. An output at the end is to it a delta that has everything."""

    def __init__(self, body: CompletionRequest, job: Job, tokenizer: Tokenizer, model: str, reports: Reports) -> None:
        self._prompt_alone = body.max_tokens == 0
        """The one token that the engine had to generate is left out."""
        super().__init__(body, job, tokenizer, model, reports, outputs_count=not self._prompt_alone)
        self._body = body

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionReply:
        choices = [choice for i, output in enumerate(outputs) for choice in self._changed(i, output)]
        return CompletionReply(**self._head, choices=choices, **self._totals())

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[BaseModel]:
        for choice in self._changed(prompt, output):
            yield self._grown(choice)

    def _chunk(self, choices: list[Any], **more: Any) -> CompletionChunk:
        return CompletionChunk(**self._head, choices=choices, timings=self._reports.timings(), **more)

    def _changed(self, prompt: int, output: RequestOutput) -> list[CompletionChoice]:
        self._take(prompt, output)
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
            prompt_logprobs=_prompt_logprobs(output, body.prompt_logprobs) if first else None,
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
        told = _CompletionLogprobs(self._tokenizer, top)
        if first and self._body.echo and output.prompt_logprobs is not None:
            tokens = output.prompt_token_ids
            grown = TokenTexts(self._tokenizer, (), skip_special_tokens=self._body.skip_special_tokens).add(tokens)
            told.add(tokens, output.prompt_logprobs, grown, offset=0)
        if not self._prompt_alone:
            told.add(delta.token_ids, delta.logprobs, texts, offset=offset)
        return told.told


class ChatReplies(Replies):
    """Of ``/v1/chat/completions``."""

    def __init__(
        self, body: ChatRequest, job: Job, tokenizer: Tokenizer, model: str, use: ToolUse, reports: Reports
    ) -> None:
        super().__init__(body, job, tokenizer, model, reports)
        self._body = body
        self._parsers = [ToolParser(use) for _ in range(job.params.n)]

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatReply:
        [output] = outputs
        self._take(0, output)
        choices = [self._choice(completion) for completion in output.outputs]
        return ChatReply(**self._head, choices=choices, **self._totals(), **self._of_prompt(output))

    def opening(self) -> Iterator[ChatChunk]:
        """Each choice begins with its role."""
        for index in range(self._job.params.n):
            delta = Delta(role="assistant", content="")
            choice = ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
            yield ChatChunk(**self._head, choices=[choice])

    def chunks(self, prompt: int, output: RequestOutput) -> Iterator[BaseModel]:
        self._take(prompt, output)
        for index, choice, delta in self._choices.changed(prompt, output):
            first = index == 0 and not choice.begun
            yield self._grown(self._chunk_choice(index, choice, delta), **(self._of_prompt(output) if first else {}))

    def _chunk(self, choices: list[Any], **more: Any) -> ChatChunk:
        return ChatChunk(**self._head, choices=choices, timings=self._reports.timings(), **more)

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "prompt_token_ids": output.prompt_token_ids if self._body.return_token_ids else None,
            "prompt_logprobs": _prompt_logprobs(output, self._body.prompt_logprobs),
        }

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
        return _chat_logprobs(self._tokenizer, completion.token_ids, completion.logprobs, top)


def _finish_reason(completion: CompletionOutput, parser: ToolParser) -> FinishReason | None:
    return "tool_calls" if completion.finish_reason == "stop" and parser.calls else completion.finish_reason


def _unnumbered(call: CalledTool) -> CalledTool:
    """As it stands in a whole answer, where its place says its number."""
    return call.model_copy(update={"index": None})


# --- log-probabilities, in the two forms that OpenAI has for them, and vLLM's for a prompt ---

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LOWEST = -9999.0
"""Stands for −∞, which JSON does not have."""

_Positions = Sequence[Mapping[int, Logprob] | None]
"""Candidates by token at each position; None for a prompt's first."""


class _CompletionLogprobs:
    """OpenAI's older form, put together from runs of tokens.

    Args:
        top: most candidates at a position, beside the chosen one.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self.told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        self._tokenizer = tokenizer
        self._top = top

    def add(self, tokens: Sequence[int], positions: _Positions, texts: Sequence[str], *, offset: int) -> None:
        """
        Args:
            texts: what each token adds to the text.
            offset: characters of the choice's text before them.
        """
        told = self.told
        for token, candidates, text in zip(tokens, positions, texts, strict=True):
            told.tokens.append(_token_name(self._tokenizer, token, None if candidates is None else candidates[token]))
            told.text_offset.append(offset)
            offset += len(text)
            if candidates is None:
                told.token_logprobs.append(None)
                told.top_logprobs.append(None)
            else:
                told.token_logprobs.append(_bounded(candidates[token]))
                told.top_logprobs.append(_by_name(self._tokenizer, _cut(candidates, token, self._top)))


def _chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], positions: Sequence[Mapping[int, Logprob]], top: int
) -> ChatLogprobs:
    """
    Args:
        top: most candidates at a position, the most probable first.
    """
    content = []
    for token, candidates in zip(tokens, positions, strict=True):
        ranked = sorted(candidates.items(), key=lambda candidate: candidate[1].rank)[:top]
        chosen = _candidate(tokenizer, token, candidates[token])
        rivals = [_candidate(tokenizer, *one) for one in ranked]
        content.append(
            TokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=rivals)
        )
    return ChatLogprobs(content=content)


def _prompt_logprobs(output: RequestOutput, top: int | None) -> PromptLogprobs | None:
    """vLLM's form; ``top`` as for a completion, None if none were asked for."""
    if top is None or output.prompt_logprobs is None:
        return None
    return [
        None
        if candidates is None
        else {
            token: PromptLogprob(logprob=_bounded(one), rank=one.rank, decoded_token=one.decoded_token)
            for token, one in _cut(candidates, chosen, top).items()
        }
        for chosen, candidates in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]


def _cut(candidates: Mapping[int, Logprob], chosen: int, top: int) -> dict[int, Logprob]:
    return {token: one for token, one in candidates.items() if one.rank <= top or token == chosen}


def _candidate(tokenizer: Tokenizer, token: int, one: Logprob) -> TopLogprob:
    text = _token_text(tokenizer, token, one)
    spelled = _token_bytes(tokenizer, token, text)
    return TopLogprob(token=text, logprob=_bounded(one), bytes=None if spelled is None else list(spelled))


def _by_name(tokenizer: Tokenizer, candidates: Mapping[int, Logprob]) -> dict[str, float]:
    """Of tokens with the same name the most probable one's."""
    told: dict[str, float] = {}
    for token, one in sorted(candidates.items(), key=lambda candidate: candidate[1].rank):
        told.setdefault(_token_name(tokenizer, token, one), _bounded(one))
    return told


def _token_name(tokenizer: Tokenizer, token: int, one: Logprob | None) -> str:
    """A token's text, or its bytes if they are no text."""
    text = _token_text(tokenizer, token, one)
    if _REPLACEMENT not in text:
        return text
    spelled = tokenizer.token_bytes(token)
    return text if spelled is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _token_text(tokenizer: Tokenizer, token: int, one: Logprob | None) -> str:
    if one is not None and one.decoded_token is not None:
        return one.decoded_token
    return tokenizer.decode([token], skip_special_tokens=False)


def _token_bytes(tokenizer: Tokenizer, token: int, text: str) -> bytes | None:
    """Decoding it again takes long where there are thousands, and says nothing new unless bytes are no text."""
    return tokenizer.token_bytes(token) if _REPLACEMENT in text else text.encode()


def _bounded(one: Logprob) -> float:
    return max(one.logprob, _LOWEST)
