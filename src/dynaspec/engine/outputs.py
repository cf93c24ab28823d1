"""From requests to what callers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind
from dynaspec.schedule.request import Request, TokenLogprobs

from .intake import Group
from .tokenizer import Tokenizer


class OutputBuilder:
    """Outputs of one group, cumulative or as deltas; remembers what it has shown."""

    def __init__(self, group: Group, tokenizer: Tokenizer) -> None:
        self.group = group
        self._tokenizer = tokenizer
        self._delta = group.params.output_kind is RequestOutputKind.DELTA
        self._shown = [(0, 0)] * len(group.requests)
        """Characters and tokens already handed out, for deltas."""
        self._of_prompt: tuple[Mapping[int, Logprob] | None, ...] = ()
        """Made once: a long prompt's take longer than a step."""

    def build(self) -> RequestOutput:
        group, first = self.group, self.group.requests[0]
        return RequestOutput(
            request_id=group.id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=[self._completion(i, request) for i, request in enumerate(group.requests)],
            finished=group.finished,
            prompt_logprobs=self._prompt_logprobs(first),
            num_cached_tokens=first.cached_tokens,
        )

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        text = self._text(request)
        chars, tokens = self._shown[index] if self._delta else (0, 0)
        self._shown[index] = (len(text), len(request.output))
        return CompletionOutput(
            index=index,
            text=text[chars:],
            token_ids=list(request.output[tokens:]),
            cumulative_logprob=sum(entry.logprob for entry in request.logprobs) if request.logprobs else None,
            logprobs=self._logprobs(request.logprobs[tokens:]) if request.params.logprobs is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            metrics=_metrics(request),
        )

    def _text(self, request: Request) -> str:
        if request.text is None:
            return ""
        return request.text.text if request.finished else request.text.text[: request.text.stable_length()]

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> tuple[Mapping[int, Logprob], ...]:
        return tuple(self._position(entry) for entry in entries)

    def _prompt_logprobs(self, request: Request) -> tuple[Mapping[int, Logprob] | None, ...] | None:
        if request.params.prompt_logprobs is None:
            return None
        if len(self._of_prompt) != 1 + len(request.prompt_logprobs):
            self._of_prompt = (None, *self._logprobs(request.prompt_logprobs))
        return self._of_prompt

    def _position(self, entry: TokenLogprobs) -> Mapping[int, Logprob]:
        ranked = {
            token: Logprob(logprob, rank, self._tokenizer.decode([token], skip_special_tokens=False))
            for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
        }
        chosen = Logprob(entry.logprob, entry.rank, self._tokenizer.decode([entry.chosen], skip_special_tokens=False))
        return {entry.chosen: chosen} | {t: p for t, p in ranked.items() if t != entry.chosen}


def _metrics(request: Request) -> RequestMetrics:
    metrics = RequestMetrics(
        arrival_s=request.arrival_s,
        scheduled_s=request.scheduled_s,
        first_token_s=request.first_token_s,
        finished_s=request.finished_s,
        steps=request.steps,
        preemptions=request.preemptions,
        cached_tokens=request.cached_tokens,
    )
    counts = request.draft_counts
    if counts is None:
        return metrics
    return replace(
        metrics,
        drafts=counts.drafts,
        drafted=counts.drafted,
        verified=counts.verified,
        accepted=counts.accepted,
        draft_emitted=counts.emitted,
        drafted_per_pos=tuple(counts.drafted_per_pos),
        accepted_per_pos=tuple(counts.accepted_per_pos),
        per_step=tuple(counts.per_step),
    )
