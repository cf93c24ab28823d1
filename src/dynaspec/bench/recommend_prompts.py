"""A recommendation from a user's own prompts, decoded in every way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN
from dynaspec.explain.sentences import CLEARLY

from .datasets import BenchPrompt, fit
from .decoders import DecodingHost, run_once
from .methods import Ways
from .offline import PolicyResult, best_on_odd_rounds, even_rounds, lower_bound, ratios

LEAST_PROMPTS = 2
"""Measured in any case."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to configure."""

    way: str
    speculative_config: Mapping[str, Any] | None
    """None = no speculation."""
    reasons: tuple[str, ...]
    """Sentences."""


def affordable(
    host: DecodingHost,
    found: Ways,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    rounds: int,
    seconds: float,
    at_once: int,
    *,
    chat: bool,
) -> int:
    """How many of the prompts all ways can decode in all rounds within so much time, if they are as fast as plain
    decoding, which is timed on a few of them.

    Args:
        at_once: requests that run at once.

    Raises:
        ConfigError, CheckpointError, CapacityError, RequestError: see ``run_comparison``.
    """
    with closing(host.open(found.ways[0].spec)) as decoder:
        few = prompts[: max(LEAST_PROMPTS, at_once)]
        fitted = fit(few, decoder.tokenizer, decoder.max_model_len - (params.max_tokens or 0), chat=chat)
        run_once(decoder, fitted.token_ids[:1], params)  # loads what is compiled
        each = run_once(decoder, fitted.token_ids, params).seconds / len(few)
    return max(min(LEAST_PROMPTS, len(prompts)), min(len(prompts), int(seconds / (each * rounds * len(found.ways)))))


def decide(results: Sequence[PolicyResult], given: Mapping[str, Mapping[str, Any] | None]) -> Advice:
    """The fastest way; but ``auto`` where nothing is clearly faster than that, and no speculation where nothing is
    clearly faster than plain decoding. Ways are picked on the odd rounds and compared on the even ones; *clearly* is
    by more than 2 %, at the lower 95 % bound of the median.

    Args:
        results: plain decoding's among them, of two rounds at least.
        given: way → its ``speculative_config``.
    """
    wrong = tuple(
        f"{result.name} is out of the question: {result.different} of its outputs were not plain decoding's."
        for result in results
        if not result.identical
    )
    drafting = [result for result in results if result.identical and result.name != PLAIN]
    auto = _best([result for result in drafting if _is_auto(given[result.name])])
    fixed = _best([result for result in drafting if not _is_auto(given[result.name])])
    if auto is not None and _faster(auto) and (fixed is None or not _faster(fixed, auto)):
        return Advice(auto.name, given[auto.name], (_speed(auto), *_beside(fixed, auto), *wrong))
    if fixed is not None and _faster(fixed):
        return Advice(fixed.name, given[fixed.name], (_speed(fixed), *_behind(auto, fixed), *wrong))
    tried = [result for result in (auto, fixed) if result is not None]
    return Advice(PLAIN, None, (*map(_speed, tried), *_not_clear(tried), *wrong))


def _is_auto(given: Mapping[str, Any] | None) -> bool:
    return given is not None and given.get("policy") == "auto"


def _best(results: Sequence[PolicyResult]) -> PolicyResult | None:
    by_name = {result.name: result for result in results}
    return by_name[best_on_odd_rounds({name: one.speedups for name, one in by_name.items()})] if by_name else None


def _faster(one: PolicyResult, other: PolicyResult | None = None) -> bool:
    """Clearly so, than another way or than plain decoding."""
    times = one.speedups if other is None else ratios(one.speedups, other.speedups)
    return lower_bound(even_rounds(times)) > 1.0 + CLEARLY


def _beside(fixed: PolicyResult | None, auto: PolicyResult) -> tuple[str, ...]:
    """Why ``auto`` and not the best other way."""
    if fixed is None:
        return ()
    times = ratios(fixed.speedups, auto.speedups)
    if median(times) <= 1.0:
        return (f"The best other way, {fixed.name}, has {fixed.speedup:.2f} ({_span(fixed.speedups)}).",)
    return (
        f"{fixed.name} was {median(times):.2f} times as fast as {auto.name} ({_span(times)}), which is within the "
        "noise: auto is preferred, as it follows text and load.",
    )


def _not_clear(tried: Sequence[PolicyResult]) -> list[str]:
    """Why nothing is recommended."""
    if not tried:
        return []
    reasons = ["So nothing is clearly faster than plain decoding."]
    if any(result.speedup > 1.0 + CLEARLY for result in tried):
        reasons.append("The rounds differ too much: more of them, or a machine without other work, may tell.")
    return reasons


def _behind(auto: PolicyResult | None, fixed: PolicyResult) -> tuple[str, ...]:
    if auto is None:
        return ()
    times = ratios(fixed.speedups, auto.speedups)
    return (f"It was {median(times):.2f} times as fast as {auto.name} ({_span(times)}).",)


def _speed(result: PolicyResult) -> str:
    rounds = f"{_span(result.speedups)} in {len(result.speedups)} rounds"
    return f"{result.name} is {result.speedup:.2f} times as fast as plain decoding ({rounds})."


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
