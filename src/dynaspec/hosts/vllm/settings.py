"""What the scheduler is told: its part of vLLM's ``additional_config``, beside vLLM's own ``speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import ProposerTraits
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.keys import ALIASES
from dynaspec.control.planner import MAX_DRAFT_TOKENS

from .drafting.settings import DRAFTER, DrafterSettings
from .menu import menu_of
from .methods import Drafter, drafter_of
from .told import as_keys, take_log_path

_VLLMS = frozenset(
    {
        *("method", "model", "revision", "max_model_len", "dtype", "quantization", "draft_sample_method"),
        *("prompt_lookup_max", "prompt_lookup_min"),
        *("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
    }
)
"""Keys that say who drafts, or how drafts are tested: vLLM's own ``speculative_config`` has them."""


@dataclass(frozen=True, slots=True)
class VllmSpeculation:
    """What is read of vLLM's configuration."""

    method: str
    longest: int
    """``num_speculative_tokens``: the longest draft that vLLM makes room for."""
    model: str | None = None
    """The drafter's checkpoint."""
    target: str = ""
    """The target's."""
    lookup: tuple[int, int] | None = None
    """``prompt_lookup_min``, ``prompt_lookup_max``."""
    table: tuple[tuple[int, int, int], ...] = ()
    """``num_speculative_tokens_per_batch_size``: the lengths that vLLM has graphs for, see ``menu``."""
    parallel: bool = False
    """All tokens of a draft come from one pass."""
    runner_v2: bool = False
    on_cpu: bool = False
    asynchronous: bool = False
    ranks: int = 1
    """Data-parallel engines."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """A complete, consistent configuration of the scheduler."""

    config: SpeculativeConfig
    """The policy. Its method is the one that ``control`` knows for drafters of this kind (``Drafter.kind``)."""
    drafter: Drafter
    host: VllmSpeculation
    menu: tuple[int, ...]
    """Draft lengths that a request may have, ascending from 0."""
    fixed: str | None
    """Why every step drafts the longest length; None = steps have lengths of their own."""
    alike: bool
    """All requests of a step verify as many tokens, see ``driver``."""
    decision_log: Path | None
    policy: str
    """The name of what decides how much is drafted, here or in dynaspec's drafter."""

    @classmethod
    def read(cls, given: Any, host: VllmSpeculation, environ: Mapping[str, str]) -> Settings:
        """
        Args:
            given: ``additional_config["dynaspec"]``; None = nothing, which means policy ``auto``.
            environ: environment variables, which decide what is left open.

        Raises:
            ConfigError: an unknown key, a value out of range, keys that contradict each other or vLLM's.
        """
        if host.model == DRAFTER:
            return cls._beside_own(given, host, environ)
        told = as_keys(given)
        log = _log_path(take_log_path(told), host)
        _check_keys(told)
        if not 1 <= host.longest <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"vLLM's num_speculative_tokens is {host.longest}; expected an integer from 1 to {MAX_DRAFT_TOKENS}"
            )
        drafter = drafter_of(host.method, parallel=host.parallel, runner_v2=host.runner_v2, alike=host.ranks > 1)
        config = SpeculativeConfig.parse({**told, **_drafting(told, drafter, host)}, environ)
        if config is None or config.num_speculative_tokens > host.longest:
            found = None if config is None else config.num_speculative_tokens
            raise ConfigError(
                f"num_speculative_tokens is {found} but vLLM's speculative_config says {host.longest}; expected no "
                "more than that, as vLLM makes room for no more"
            )
        fixed = _why_fixed(drafter, host)
        menu = menu_of(None if fixed else host.table, host.longest)
        alike = host.on_cpu and drafter.runs_model and fixed is None
        return cls(config, drafter, host, menu, fixed, alike, log, config.policy)

    @classmethod
    def _beside_own(cls, given: Any, host: VllmSpeculation, environ: Mapping[str, str]) -> Settings:
        """dynaspec's drafter decides how much it drafts, and keeps the log: here drafts are cut where a request wants
        less, or where the model ends.

        Raises:
            ConfigError: see ``DrafterSettings.read``.
        """
        own = DrafterSettings.read(given, host.longest, environ, ranks=host.ranks)
        whole = SpeculativeConfig(method="ngram", policy="constant", num_speculative_tokens=host.longest)
        drafter = Drafter(ProposerTraits("dynaspec", passes_per_draft="none", has_confidence=False), varies=False)
        return cls(whole, drafter, host, menu_of(None, host.longest), None, False, None, own.config.policy)

    @property
    def header(self) -> dict[str, Any]:
        """For the decision log: what a replay builds the same controller from."""
        return {
            "model": self.host.target,
            "speculative_config": self.config.model_dump(mode="json", exclude_none=True),
            "seed": 0,
            "host": "vllm",
            "method": self.host.method,
        }


def _check_keys(told: Mapping[str, Any]) -> None:
    for key in told:
        if ALIASES.get(key, key) in _VLLMS:
            raise ConfigError(
                f"{key} is among dynaspec's settings; expected it in vLLM's speculative_config, which says who drafts"
            )


def _drafting(told: Mapping[str, Any], drafter: Drafter, host: VllmSpeculation) -> dict[str, Any]:
    """The keys that vLLM holds, as ``control`` has them."""
    values: dict[str, Any] = {"method": drafter.kind}
    if drafter.runs_model:
        values["model"] = host.model or host.target
        values["prompt_lookup_max"] = 0  # vLLM has one drafter
    elif host.lookup is not None:
        values["prompt_lookup_min"], values["prompt_lookup_max"] = host.lookup
    if not any(ALIASES.get(key, key) == "num_speculative_tokens" for key in told):
        values["num_speculative_tokens"] = host.longest
    return values


def _why_fixed(drafter: Drafter, host: VllmSpeculation) -> str | None:
    if host.ranks > 1:
        return f"data_parallel_size is {host.ranks} and its ranks must draft alike"
    return None if drafter.varies else f"vLLM's method {host.method!r} always drafts the longest length"


def _log_path(value: str | None, host: VllmSpeculation) -> Path | None:
    if value is None:
        return None
    path = Path(value)
    return path if host.ranks == 1 else path.with_name(f"{path.stem}.{host.rank}{path.suffix}")
