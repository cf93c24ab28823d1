from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaspec.contract.outputs import Logprob, RequestMetrics
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.intake import Group, Intake
from dynaspec.engine.outputs import OutputBuilder
from dynaspec.schedule.request import TokenLogprobs
from unit.engine.texts import ByteTokenizer

TOKENIZER = ByteTokenizer()


def group(**params: Any) -> Group:
    intake = Intake(TOKENIZER, TOKENIZER.vocab_size, (TOKENIZER.eos,), 64, 0)
    return intake.make("r", "prompt", SamplingParams(**params))


def take(one: Group, text: str, index: int = 0) -> None:
    one.requests[index].commit(TOKENIZER.bytes_of(text), 1.0)


def test_outputs_grow_until_the_request_has_ended() -> None:
    one = group(max_tokens=5)
    builder = OutputBuilder(one, TOKENIZER)
    take(one, "abc")
    first = builder.build()
    assert (first.request_id, first.prompt, first.finished) == ("r", "prompt", False)
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("abc", [97, 98, 99])
    assert (first.outputs[0].finish_reason, first.outputs[0].logprobs) == (None, None)
    take(one, "de")
    last = builder.build()
    assert (last.outputs[0].text, last.finished, last.outputs[0].finish_reason) == ("abcde", True, "length")


def test_deltas_add_up_to_the_whole() -> None:
    one = group(max_tokens=20, output_kind=RequestOutputKind.DELTA, stop="stop")
    builder = OutputBuilder(one, TOKENIZER)
    texts: list[str] = []
    tokens: list[int] = []
    for piece in ("one ", "s", "t", "🙂", "st", "op"):
        take(one, piece)
        output = builder.build().outputs[0]
        texts.append(output.text)
        tokens += output.token_ids
    assert "".join(texts) == "one st🙂"
    assert tokens == TOKENIZER.bytes_of("one st🙂stop")
    assert texts[0] == "o"  # the last three characters might begin the stop string
    assert (output.finish_reason, output.stop_reason) == ("stop", "stop")


def test_every_continuation_has_its_own_delta() -> None:
    one = group(max_tokens=5, n=2, output_kind=RequestOutputKind.DELTA)
    builder = OutputBuilder(one, TOKENIZER)
    take(one, "ab", 0)
    builder.build()
    take(one, "xy", 1)
    output = builder.build()
    assert [c.text for c in output.outputs] == ["", "xy"]
    assert [c.index for c in output.outputs] == [0, 1]


def test_without_text_there_are_tokens_only() -> None:
    one = group(max_tokens=5, detokenize=False)
    take(one, "ab")
    output = OutputBuilder(one, TOKENIZER).build().outputs[0]
    assert (output.text, output.token_ids) == ("", [97, 98])


def entry(chosen: int, *top: int, rank: int = 1) -> TokenLogprobs:
    return TokenLogprobs(chosen, -0.5 * rank, rank, top, tuple(-0.5 * (i + 1) for i in range(len(top))))


def test_logprobs_hold_the_top_tokens_and_the_chosen_one() -> None:
    one = group(max_tokens=5, logprobs=2)
    take(one, "ab")
    one.requests[0].logprobs = [entry(97, 97, 98), entry(98, 99, 100, rank=7)]
    output = OutputBuilder(one, TOKENIZER).build().outputs[0]
    assert output.cumulative_logprob == pytest.approx(-4.0)
    assert output.logprobs is not None
    assert output.logprobs[0] == {97: Logprob(-0.5, 1, "a"), 98: Logprob(-1.0, 2, "b")}
    assert output.logprobs[1] == {98: Logprob(-3.5, 7, "b"), 99: Logprob(-0.5, 1, "c"), 100: Logprob(-1.0, 2, "d")}


def test_deltas_carry_their_own_logprobs_only() -> None:
    one = group(max_tokens=5, logprobs=0, output_kind=RequestOutputKind.DELTA)
    builder = OutputBuilder(one, TOKENIZER)
    sizes = []
    for piece in ("ab", "c"):
        take(one, piece)
        one.requests[0].logprobs += [entry(ord(letter)) for letter in piece]
        logprobs = builder.build().outputs[0].logprobs
        assert logprobs is not None
        sizes.append(len(logprobs))
    assert sizes == [2, 1]


def test_prompt_logprobs_begin_with_none() -> None:
    one = group(max_tokens=5, prompt_logprobs=1)
    one.requests[0].prompt_logprobs = [entry(97, 97)]
    assert OutputBuilder(one, TOKENIZER).build().prompt_logprobs == (None, {97: Logprob(-0.5, 1, "a")})
    assert OutputBuilder(group(), TOKENIZER).build().prompt_logprobs is None


def test_metrics_are_the_requests_counts() -> None:
    one = group(max_tokens=5)
    one.requests[0].steps, one.requests[0].cached_tokens, one.requests[0].preemptions = 2, 16, 1
    output = OutputBuilder(one, TOKENIZER).build()
    metrics = output.outputs[0].metrics
    assert (metrics.steps, metrics.cached_tokens, metrics.preemptions) == (2, 16, 1)
    assert output.num_cached_tokens == 16


def drafted_metrics(level: str) -> RequestMetrics:
    """After a step that accepted 2 of 4 drafts, a plain one, and one that ended inside its 3 accepted drafts."""
    one = group(max_tokens=20, speculation_metrics=level)
    counts = one.requests[0].draft_counts
    if counts is not None:
        counts.add(drafted=4, verified=3, accepted=2, emitted=3)
        counts.add(drafted=0, verified=0, accepted=0, emitted=1)
        counts.add(drafted=3, verified=3, accepted=2, emitted=2)
    return OutputBuilder(one, TOKENIZER).build().outputs[0].metrics


def test_a_summary_has_the_totals_of_drafts() -> None:
    metrics = drafted_metrics("summary")
    assert (metrics.drafts, metrics.drafted, metrics.verified, metrics.accepted) == (2, 7, 6, 4)
    assert metrics.mean_acceptance_length == pytest.approx(5 / 2)
    assert metrics.draft_acceptance_rate == pytest.approx(4 / 7)
    assert (metrics.drafted_per_pos, metrics.accepted_per_pos, metrics.per_step) == ((), (), ())


def test_details_add_positions_and_steps() -> None:
    metrics, summary = drafted_metrics("detailed"), drafted_metrics("summary")
    assert metrics.drafted_per_pos == (2, 2, 2, 1)
    assert metrics.accepted_per_pos == (2, 2, 0, 0)
    assert metrics.per_step == ((4, 2), (0, 0), (3, 2))
    assert (
        replace(metrics, arrival_s=summary.arrival_s, drafted_per_pos=(), accepted_per_pos=(), per_step=()) == summary
    )


def test_off_counts_no_drafts() -> None:
    metrics = drafted_metrics("off")
    assert metrics == RequestMetrics(arrival_s=metrics.arrival_s)
    assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate) == (None, None)
