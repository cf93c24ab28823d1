"""What a comparison decodes with, on every host: one decoder a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dynaspec.api import LLM
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Tokenizer

from .engines import SharedModels, open_engine
from .measure import Decoder
from .policies import PolicySpec

BACKENDS = ("dynaspec", "vllm", "transformers")
_CARRIED = ("dtype", "device", "max_num_seqs", "enable_prefix_caching")
"""Engine options that mean something to Transformers; the last two need not be given to it."""


class OpenDecoder(Decoder, Protocol):
    """A decoder that holds a model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_model_len(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """An engine, and how policies are compared on it."""

    backend: str
    open: Callable[[PolicySpec], OpenDecoder]
    alternating: bool
    """All policies' engines are open at once and take turns; else one follows the other."""


def host_of(
    backend: str,
    model: str,
    specs: Sequence[PolicySpec],
    params: SamplingParams,
    engine: Mapping[str, Any],
    *,
    one_at_a_time: bool,
) -> Host:
    """
    Args:
        engine: options of ``LLM`` for every policy.

    Raises:
        ConfigError: an unknown backend, or options that it does not have.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--backend is {backend!r}; expected dynaspec, vllm or transformers")
    if backend == "transformers":
        return Host(backend, _on_transformers(model, specs, params, engine), alternating=True)
    if backend == "dynaspec":
        return Host(backend, _embedded(model, engine), alternating=not one_at_a_time)

    def opened(spec: PolicySpec) -> OpenDecoder:
        return LLM(model, speculative_config=spec.config, **{"backend": backend, **engine})

    return Host(backend, opened, alternating=not one_at_a_time)


def _embedded(model: str, engine: Mapping[str, Any]) -> Callable[[PolicySpec], OpenDecoder]:
    """Engines over the same weights."""
    load = SharedModels()

    def opened(spec: PolicySpec) -> OpenDecoder:
        return LLM.over(open_engine(model, spec, load=load, **engine))

    return opened


def _on_transformers(
    model: str, specs: Sequence[PolicySpec], params: SamplingParams, engine: Mapping[str, Any]
) -> Callable[[PolicySpec], OpenDecoder]:
    """One pair of models for all policies."""
    if engine.get("max_num_seqs", 1) != 1:
        raise ConfigError(
            f"--batch-size is {engine['max_num_seqs']}; expected 1, as Transformers assists one sequence at a time"
        )
    if not params.greedy:
        raise ConfigError(
            f"--temperature is {params.temperature}; expected 0 with --backend transformers, whose sampled output with "
            "and without drafts is not comparable"
        )
    for name in engine:
        if name not in _CARRIED:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {engine[name]!r}; expected no {flag} with --backend transformers")
    from .assisted import Assisted  # imports Transformers

    drafters = [spec.config.model for spec in specs if spec.config is not None and spec.config.model is not None]
    pair = Assisted(model, drafters[0] if drafters else None, dtype=engine.get("dtype"), device=engine.get("device"))

    def opened(spec: PolicySpec) -> OpenDecoder:
        config = spec.config
        return pair.decoder(None if config is None else config.model_dump(mode="json", exclude_none=True))

    return opened
