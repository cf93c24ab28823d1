"""Short names for speculation policies, as a command line gives them: ``constant:4``, ``ngram:heuristic``, ``auto``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import BY_PASSES, METHODS
from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.resolve import DEFAULT_LOOKUP_BESIDE
from dynaspec.control.suffix import DEFAULTS
from dynaspec.control.trees import NODES_KEY, WIDTH_KEY

PLAIN = "plain"
_HEADS = (*METHODS, "both", "all")
_LOOKUP: Mapping[str, Any] = dict(zip(("prompt_lookup_min", "prompt_lookup_max"), DEFAULT_LOOKUP_BESIDE, strict=True))
"""N-grams of a lookup that drafts beside a model, as by default."""
FORMS = (
    "plain, auto[:K], constant:K, heuristic[:K], heuristic_transient[:K], confidence[:T[:K]], goodput:FILE[:K], "
    "schedule:LO-HI=K;… or elastic[:A/B/C[:GATE]]. If need be after ngram: or suffix: (lookups), draft_model: or the "
    "method's name (no lookup beside the model), both: (n-grams beside it, as auto has by itself) or all: (suffix "
    "trees beside it), and before +stop:T (confidence stopping), +off:B (plain above B requests) or +tree:W[:N] (token "
    "trees of at most W choices behind a token and N tokens in all; +tree:1 = chains)"
)
"""What a command line may say."""

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
        raise ConfigError(f"policies is {text!r}; expected {FORMS}")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"the policy {twice[0]!r} is given twice; expected each once")
    return [parse_policy(name, draft_model) for name in (PLAIN, *(name for name in names if name != PLAIN))]


def parse_policy(name: str, draft_model: str | None) -> PolicySpec:
    """One policy; the errors of ``parse_policies``."""
    if name == PLAIN:
        return PolicySpec(name, None)
    return spec_of(name, policy_options(name, draft_model))


def spec_of(name: str, options: Mapping[str, Any]) -> PolicySpec:
    """A policy by the keys of its ``speculative_config``.

    Raises:
        ConfigError: they cannot work.
    """
    try:
        return PolicySpec(name, SpeculativeConfig.parse(options))
    except ConfigError as error:
        raise ConfigError(f"the policy {name!r}: {error}") from None


def policy_options(name: str, draft_model: str | None) -> Options:
    """What a user would write as ``speculative_config`` for a policy that drafts; the errors of ``parse_policies``."""
    whole, *suffixes = name.split("+")
    head, _, rest = whole.partition(":")
    method, form = (head, rest) if head in _HEADS else ("both", whole)
    policy, *arguments = form.split(":")
    if policy not in _READERS:
        raise ConfigError(f"the policy {name!r} is not known; expected {FORMS}")
    drafts = method not in METHODS or METHODS[method].checkpoint is not None
    if drafts and draft_model is None and not (method in METHODS and METHODS[method].in_target):
        raise ConfigError(f"the policy {name!r} needs a draft model; expected --draft-model, or ngram:{form}")
    options: Options = {"method": method, "policy": policy} | _READERS[policy](name, arguments)
    for suffix in suffixes:
        options |= _suffix(name, suffix)
    if drafts and draft_model is not None:
        options["model"] = draft_model
    if method in ("both", "all"):
        options["method"] = checkpoint_method(draft_model)
    if head == "both":
        options |= _LOOKUP
    elif head == "all":
        options |= DEFAULTS
    elif head in BY_PASSES:
        options["prompt_lookup_max"] = 0
    return options


def _constant(name: str, arguments: Sequence[str]) -> Options:
    if len(arguments) != 1:
        raise ConfigError(f"the policy {name!r} has {len(arguments)} values; expected constant:K")
    return {"num_speculative_tokens": _integer(name, arguments[0])}


def _at_most_a_length(name: str, arguments: Sequence[str]) -> Options:
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


def _goodput(name: str, arguments: Sequence[str]) -> Options:
    if not arguments or not arguments[0] or len(arguments) > 2:
        raise ConfigError(f"the policy {name!r} names no profile; expected goodput:FILE[:K]")
    options: Options = {"dynamic_config_path": arguments[0]}
    if len(arguments) == 2:
        options["num_speculative_tokens"] = _integer(name, arguments[1])
    return options


def _schedule(name: str, arguments: Sequence[str]) -> Options:
    if len(arguments) != 1:
        raise ConfigError(f"the policy {name!r} has {len(arguments)} values; expected schedule:LO-HI=K;LO-HI=K;…")
    return {"num_speculative_tokens_per_batch_size": [_range(name, part) for part in arguments[0].split(";") if part]}


def _range(name: str, text: str) -> list[int]:
    sizes, equals, k = text.partition("=")
    low, _, high = sizes.partition("-")
    if not equals:
        raise ConfigError(f"the policy {name!r} has the range {text!r}; expected LO-HI=K")
    return [_integer(name, part) for part in (low, high or low, k)]


def _elastic(name: str, arguments: Sequence[str]) -> Options:
    if len(arguments) > 2:
        raise ConfigError(f"the policy {name!r} has {len(arguments)} values; expected at most A/B/C:GATE")
    options: Options = {}
    if arguments and arguments[0]:
        options["draft_length_options"] = [_integer(name, part) for part in arguments[0].split("/")]
    if len(arguments) == 2:
        options["kv_write_gating_threshold"] = _number(name, arguments[1])
    return options


def _suffix(name: str, text: str) -> Options:
    word, _, value = text.partition(":")
    if word == "stop":
        return {"draft_confidence_threshold": _threshold(name, value)}
    if word == "off":
        return {"disable_by_batch_size": _integer(name, value)}
    if word == "tree":
        values = [_integer(name, part) for part in value.split(":")]
        if len(values) <= 2:
            return dict(zip((WIDTH_KEY, NODES_KEY), values, strict=False))
    raise ConfigError(f"the policy {name!r} has the addition {text!r}; expected stop:T, off:B or tree:W[:N]")


_READERS: Mapping[str, Callable[[str, Sequence[str]], Options]] = {
    "constant": _constant,
    "heuristic": _at_most_a_length,
    "heuristic_transient": _at_most_a_length,
    "confidence": _confidence,
    "auto": _at_most_a_length,
    "goodput": _goodput,
    "schedule": _schedule,
    "elastic": _elastic,
}


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected an integer") from None


def _threshold(name: str, text: str) -> float | str:
    return text if text == "auto" else _number(name, text, "a number or auto")


def _number(name: str, text: str, expected: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected {expected}") from None
