"""Who drafts under vLLM: a drafter of vLLM's, or dynaspec's own in vLLM's worker (``drafting``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import OF_TOKENS, WITH_MODEL
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.environment import fill_in
from dynaspec.control.keys import canonical
from dynaspec.control.resolve import infer_method

from .drafting.settings import DRAFTER, DrafterSettings
from .launch_speculation import KEYS, as_mapping, check_method, longest_of, split

BACKEND_KEY = "drafter_backend"
"""Of ``speculative_config``, for this host alone."""
BACKENDS = ("auto", "dynaspec", "vllm")
_TESTING = ("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length")
"""Keys that say how drafts are tested, which is vLLM's whoever drafts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where vLLM runs."""

    on_cpu: bool
    workers: int
    """Of all its engines."""


@dataclass(frozen=True, slots=True)
class OwnDrafting:
    """What vLLM is told where dynaspec's drafter drafts."""

    drafting: Mapping[str, Any]
    """vLLM's ``speculative_config``."""
    told: Mapping[str, Any]
    """dynaspec's part of ``additional_config``."""


def take_backend(value: Any) -> tuple[Any, str]:
    """A ``speculative_config`` without ``drafter_backend``, and what that says.

    Raises:
        ConfigError: it is none of ``BACKENDS``.
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value, "auto"
    given = dict(as_mapping(value))
    spelled = next((key for key in given if str(key).lstrip("-").replace("-", "_") == BACKEND_KEY), None)
    asked = "auto" if spelled is None else given.pop(spelled)
    if asked not in BACKENDS:
        raise ConfigError(f"{BACKEND_KEY} is {asked!r}; expected one of {', '.join(map(repr, BACKENDS))}")
    return given, asked


def own_drafting(
    value: Any, backend: str, environ: Mapping[str, str], place: Place, vllms: Collection[str] = ()
) -> OwnDrafting | None:
    """None = vLLM's drafter drafts: it is asked for, or dynaspec's cannot or need not.

    dynaspec's is for one worker. On a CPU its passes take a fraction of what vLLM's take, none in plain decoding; on
    a GPU, where vLLM's run in graphs and ahead of the host, it only drafts if it is asked for.

    Args:
        value: see ``launch_speculation.divide``.
        backend: one of ``BACKENDS``.
        vllms: the keys of vLLM's own ``speculative_config``, where it is installed.

    Raises:
        ConfigError: dynaspec's drafter is asked for and cannot do what the configuration says.
    """
    if value is None or backend == "vllm":
        return None
    given, passed = split(as_mapping(value), vllms)
    named = fill_in(canonical(given, KEYS), environ)
    testing = {name: passed.pop(name) for name in _TESTING if name in passed}
    method = infer_method(named)
    check_method(method, named)
    # An object has a default there, which is not asked for.
    drawn = named.get("draft_sample_method") == "probabilistic" and not isinstance(value, SpeculativeConfig)
    can = place.workers == 1 and method in OF_TOKENS and not passed and not drawn
    if backend == "auto" and not (place.on_cpu and can):
        return None
    if method not in OF_TOKENS or passed:
        found = f"method is {method!r}" if method not in OF_TOKENS else f"{next(iter(passed))} is given"
        raise ConfigError(f"{found} and {BACKEND_KEY} is 'dynaspec'; expected 'vllm', whose drafters alone have that")
    config = SpeculativeConfig(**named)
    whole = config.model_dump(mode="json", exclude_none=True)
    testing |= {name: whole.pop(name) for name in _TESTING if name in whole and name in named}
    told = {name: what for name, what in whole.items() if name not in _TESTING}
    told["draft_sample_method"] = "probabilistic" if drawn else "greedy"
    if config.rejection_sample_method == "synthetic" and config.method in WITH_MODEL:
        told.setdefault("prompt_lookup_max", 0)  # rates are one drafter's
    longest = longest_of(config)
    DrafterSettings.read(told, longest, environ, workers=place.workers)
    drafting = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": longest, **testing}
    return OwnDrafting(drafting, told)
