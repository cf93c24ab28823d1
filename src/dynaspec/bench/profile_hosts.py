"""Measures a profile on another engine, by the decisions that dynaspec's controller logs there.

Everything runs under the policy ``constant``. Where requests may limit their drafts, one engine with the longest length
serves all lengths; else every length has a log of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

from dynaspec.api.llm import SteppedEngine, open_engine
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.contract.step import StepOutcome, StepView
from dynaspec.control.profile import Profile
from dynaspec.hosts.vllm.launch import BACKEND_KEY
from dynaspec.observe.decision_log import Record, read_log
from dynaspec.result_output import Tell

from .datasets import FittedPrompts
from .profiling import ACCEPTANCE_TOKENS, TIMED_STEPS, WARM_STEPS, Grid, as_profile, prompt_room

_CLOSING_STEPS = 1
"""Of a run of equal steps: the last one may already draft for others than it verifies for."""
LOG = "decisions.jsonl"
"""The log of an engine that served all lengths."""
_BESIDE = 2
"""Steps of a batch that are not timed besides the warm ones: in which prompts are completed, and the last."""
Fit = Callable[[Any, int], FittedPrompts]
"""From a tokenizer and the longest prompt that fits to the prompts' tokens."""


@dataclass(frozen=True, slots=True)
class LogMeasurements:
    """Step times and acceptance."""

    step_ms: Mapping[tuple[int, int], Sequence[float]]
    """(batch size, draft length) → milliseconds of steps in which every request decoded with such a draft, and none
    prefilled."""
    drafted: tuple[int, ...]
    """Drafts that have a token at each position."""
    accepted: tuple[int, ...]
    """Drafts whose token there was accepted."""

    def profile(self, grid: Grid) -> Profile:
        """See ``as_profile``."""
        return as_profile(grid, self.step_ms, self.drafted, self.accepted)


def measured_in(paths: Iterable[Path]) -> LogMeasurements:
    """Reads logs of one host, with whatever policies they were made.

    Raises:
        ConfigError: no readable decision log.
    """
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    told: list[Record] = []
    for path in paths:
        records = [record for record in read_log(path) if record.outcome is not None]
        for key, run in groupby(records, _steady):
            if key is not None:
                times[len(key[0]), key[1]].extend(_settled(list(run)))
        told.extend(records)
    return LogMeasurements(times, *_positions(told))


def _steady(record: Record) -> tuple[tuple[str, ...], int] | None:
    """(requests, draft length) where all of them decoded with drafts of one length; None elsewhere."""
    outcome = record.outcome
    if outcome is None or not outcome.ids or outcome.work.prefill_rows or not outcome.step_s > 0:
        return None
    k = outcome.verified[0]
    whole = all(drafted == verified == k for drafted, verified in zip(outcome.drafted, outcome.verified, strict=True))
    return (outcome.ids, k) if whole else None


def _settled(run: Sequence[Record]) -> list[float]:
    return [1e3 * record.outcome.step_s for record in run[WARM_STEPS:-_CLOSING_STEPS] if record.outcome is not None]


def _positions(records: Sequence[Record]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(drafted, accepted) by position, of requests that let the policy choose; of all where there are none.

    A request that names a length of its own is one whose steps were to be timed: what it continues does not count.
    """
    drafts = [draft for record in records for draft in _drafts(record.view, record.outcome)]
    free = [(drafted, accepted) for drafted, accepted, requested_max in drafts if requested_max is None]
    counted = free or [(drafted, accepted) for drafted, accepted, _ in drafts]
    longest = max((drafted for drafted, _ in counted), default=0)
    return (
        tuple(sum(drafted > at for drafted, _ in counted) for at in range(longest)),
        tuple(sum(accepted > at for _, accepted in counted) for at in range(longest)),
    )


def _drafts(view: StepView, outcome: StepOutcome | None) -> Iterable[tuple[int, int, int | None]]:
    """(tokens tested, tokens accepted, the request's own limit) of every draft."""
    if outcome is None:
        return ()
    requested = dict(zip(view.ids, view.max_draft, strict=True))
    columns = zip(outcome.ids, outcome.verified, outcome.accepted, strict=True)
    return [(tested, accepted, requested.get(request)) for request, tested, accepted in columns if tested]


def on_vllm(
    model: str,
    speculation: Mapping[str, Any],
    grid: Grid,
    params: SamplingParams,
    options: Mapping[str, Any],
    folder: Path,
    fit: Fit,
    progress: Tell,
) -> LogMeasurements:
    """
    Args:
        speculation: the drafter, as ``speculative_config`` has it.
        options: further ones of ``LLM(backend="vllm")``.
        folder: gets the decision log.

    Raises:
        ConfigError: vLLM is not installed, or refuses the options; or a batch never decoded all at once.
    """
    path = folder / LOG
    # Requests ask for the lengths, which vLLM's scheduler hears of and dynaspec's drafter, in a worker, does not.
    config = {**speculation, "policy": "constant", "num_speculative_tokens": grid.longest, BACKEND_KEY: "vllm"}
    progress("loading", 0, 1)
    engine = open_engine(model, "vllm", config, {**options, "decision_log": str(path)})
    try:
        progress("loading", 1, 1)
        prompts = fit(engine.tokenizer, prompt_room(engine.max_model_len, grid))
        record(engine, grid, prompts.token_ids, params, progress)
    finally:
        engine.close()  # and with it the log
    return measured_in([path])


def record(
    engine: SteppedEngine,
    grid: Grid,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    progress: Tell,
) -> None:
    """Decodes what a profile of the grid is to be read from.

    Rounds go through all batch sizes and lengths, so that a machine that is slower for a while slows all of them; then
    come continuations without a limit of their own, for the acceptance.

    Args:
        engine: drafts ``grid.longest`` tokens, unless a request asks for fewer, and keeps a decision log.
        prompts: token ids, none longer than ``prompt_room``.
    """
    names = map(str, count())
    wanted = [(turn, size, k) for turn in range(grid.batches) for size in grid.batch_sizes for k in grid.lengths]
    for done, (turn, size, k) in enumerate(wanted):
        progress("step times", done, len(wanted))
        batch = [prompts[(turn * size + i) % len(prompts)] for i in range(size)]
        endless = replace(params, max_tokens=None, ignore_eos=True, max_draft_tokens=k)
        _decode_some(engine, {next(names): prompt for prompt in batch}, endless)
    progress("step times", len(wanted), len(wanted))
    progress("acceptance", 0, 1)
    some = replace(params, max_tokens=ACCEPTANCE_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY)
    for start in range(0, len(prompts), grid.batch_sizes[-1]):
        for prompt in prompts[start : start + grid.batch_sizes[-1]]:
            engine.add(next(names), prompt, some)
        while engine.unfinished:
            engine.step()
    progress("acceptance", 1, 1)


def _decode_some(engine: SteppedEngine, batch: Mapping[str, tuple[int, ...]], params: SamplingParams) -> None:
    """As many steps of a batch as are timed; then its requests are given up."""
    for name, prompt in batch.items():
        engine.add(name, prompt, replace(params, output_kind=RequestOutputKind.DELTA))
    decoding: set[str] = set()
    steps = 0
    try:
        while engine.unfinished and steps < WARM_STEPS + TIMED_STEPS + _BESIDE:
            outputs = engine.step()
            decoding.update(output.request_id for output in outputs)
            steps += bool(outputs) and len(decoding) == len(batch)
    finally:
        for name in batch:
            engine.abort(name)


def on_transformers(
    model: str,
    drafter: str | None,
    grid: Grid,
    params: SamplingParams,
    folder: Path,
    fit: Fit,
    progress: Tell,
) -> LogMeasurements:
    """One sequence at a time, and a log for every length.

    Args:
        drafter: the assistant's checkpoint; None = drafts are looked up in the text.
        folder: gets the decision logs.

    Raises:
        ConfigError: the models cannot be loaded; batches of several requests; or nothing was drafted.
    """
    if grid.batch_sizes != (1,):
        raise ConfigError(
            f"batch sizes are {list(grid.batch_sizes)}; expected --batch-size-list 1, as Transformers assists one "
            "sequence at a time"
        )
    from .assisted import Assisted  # imports Transformers

    progress("loading", 0, 1)
    pair = Assisted(model, drafter)
    progress("loading", 1, 1)
    prompts = fit(pair.tokenizer, prompt_room(pair.max_model_len, grid)).token_ids
    some = replace(params, max_tokens=ACCEPTANCE_TOKENS)
    paths = {k: folder / f"decisions-{k}.jsonl" for k in grid.lengths}
    with ExitStack() as stack:
        decoders = {k: stack.enter_context(pair.decoder(_of_length(k, drafter), decision_log=paths[k])) for k in paths}
        for done, tokens in enumerate(prompts):
            progress("prompts", done, len(prompts))
            for k, decoder in decoders.items():
                if k == grid.longest or done < grid.batches:
                    decoder.generate([{"prompt_token_ids": list(tokens)}], some)
        progress("prompts", len(prompts), len(prompts))
    return measured_in(paths.values())


def _of_length(k: int, drafter: str | None) -> dict[str, Any]:
    """A policy that always drafts so many tokens, 0 too."""
    method = {"method": "ngram"} if drafter is None else {}
    if k:
        return {**method, "policy": "constant", "num_speculative_tokens": k}
    return {**method, "policy": "schedule", "num_speculative_tokens_per_batch_size": [[1, 1, 0]]}
