"""Short names for speculation policies, as a command line gives them: ``constant:4``, ``ngram:heuristic``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig

PLAIN = "plain"
_METHODS = ("draft_model", "ngram")
_FORMS = "plain, constant:K, heuristic[:K], heuristic_transient[:K] or confidence[:T[:K]], after ngram: if need be"

Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One policy to measure."""

    name: str
    """As it was given."""
    config: SpeculativeConfig | None
    """None = plain decoding."""


def parse_policies(text: str, draft_model: str | None) -> list[PolicySpec]:
    """Policies separated by commas; plain decoding comes first, given or not.

    Args:
        draft_model: checkpoint for policies that draft with a model.

    Raises:
        ConfigError: an unknown form, a value out of range, a name given twice, or no draft model for a policy.
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise ConfigError(f"policies is {text!r}; expected {_FORMS}")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"the policy {twice[0]!r} is given twice; expected each once")
    return [parse_policy(name, draft_model) for name in (PLAIN, *(name for name in names if name != PLAIN))]


def parse_policy(name: str, draft_model: str | None) -> PolicySpec:
    """One policy; the errors of ``parse_policies``."""
    if name == PLAIN:
        return PolicySpec(name, None)
    head, _, rest = name.partition(":")
    method, form = (head, rest) if head in _METHODS else ("draft_model", name)
    policy, *arguments = form.split(":")
    if policy not in _READERS:
        raise ConfigError(f"the policy {name!r} is not known; expected {_FORMS}")
    if method == "draft_model" and draft_model is None:
        raise ConfigError(f"the policy {name!r} needs a draft model; expected --draft-model, or ngram:{form}")
    options: Options = {"method": method, "policy": policy} | _READERS[policy](name, arguments)
    if method == "draft_model":
        options["model"] = draft_model
    try:
        return PolicySpec(name, SpeculativeConfig.parse(options))
    except ConfigError as error:
        raise ConfigError(f"the policy {name!r}: {error}") from None


def _constant(name: str, arguments: Sequence[str]) -> Options:
    if len(arguments) != 1:
        raise ConfigError(f"the policy {name!r} has {len(arguments)} values; expected constant:K")
    return {"num_speculative_tokens": _integer(name, arguments[0])}


def _heuristic(name: str, arguments: Sequence[str]) -> Options:
    if len(arguments) > 1:
        raise ConfigError(f"the policy {name!r} has {len(arguments)} values; expected at most K")
    return {"num_speculative_tokens": _integer(name, arguments[0])} if arguments else {}


def _confidence(name: str, arguments: Sequence[str]) -> Options:
    if len(arguments) > 2:
        raise ConfigError(f"the policy {name!r} has {len(arguments)} values; expected at most T:K")
    options: Options = {"draft_confidence_threshold": "auto"}
    if arguments:
        options["draft_confidence_threshold"] = _threshold(name, arguments[0])
    if len(arguments) == 2:
        options["num_speculative_tokens"] = _integer(name, arguments[1])
    return options


_READERS: Mapping[str, Callable[[str, Sequence[str]], Options]] = {
    "constant": _constant,
    "heuristic": _heuristic,
    "heuristic_transient": _heuristic,
    "confidence": _confidence,
}


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected an integer") from None


def _threshold(name: str, text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected a number or auto") from None
