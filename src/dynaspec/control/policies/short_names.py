"""Short names of policies, as command lines give them: ``constant:4``, ``ngram:heuristic``, ``auto+off:8``.

A name is ``[METHOD:]POLICY[:VALUE…][+ADDITION…]``. Values are separated by ``:``, lists within a value by ``/``, and
names by commas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import BY_PASSES, METHODS
from dynaspec.control.keys import SUFFIX_DEFAULTS
from dynaspec.control.resolve import DEFAULT_HYBRID_LOOKUP, NODES_KEY, WIDTH_KEY

from ..checkpoint import checkpoint_method
from ..config import SpeculativeConfig

PLAIN = "plain"
Options = dict[str, Any]
"""Keys of a ``speculative_config``."""

_HEADS = (*METHODS, "both", "all")
_LOOKUP: Mapping[str, Any] = dict(zip(("prompt_lookup_min", "prompt_lookup_max"), DEFAULT_HYBRID_LOOKUP, strict=True))
"""N-grams of a lookup that drafts beside a model, as by default."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a policy is written."""

    text: str
    values: tuple[tuple[str, Callable[[str, str], Any]], ...]
    """Key and reader of each value, in order."""
    least: int = 0
    """So many of them must be given."""
    usual: Mapping[str, Any] | None = None
    """Keys of values that are left out."""


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected an integer") from None


def _number(name: str, text: str, expected: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected {expected}") from None


def _threshold(name: str, text: str) -> float | str:
    return text if text == "auto" else _number(name, text, "a number or auto")


def _word(_name: str, text: str) -> str:
    return text


def _integers(name: str, text: str) -> list[int]:
    return [_integer(name, part) for part in text.split("/")]


def _ranges(name: str, text: str) -> list[list[int]]:
    return [_range(name, part) for part in text.split("/")]


def _range(name: str, text: str) -> list[int]:
    sizes, equals, k = text.partition("=")
    low, _, high = sizes.partition("-")
    if not equals:
        raise ConfigError(f"the policy {name!r} has the range {text!r}; expected LO-HI=K")
    return [_integer(name, part) for part in (low, high or low, k)]


_LENGTH = ("num_speculative_tokens", _integer)
_FORMS: Mapping[str, _Form] = {
    "auto": _Form("auto[:K]", (_LENGTH,)),
    "constant": _Form("constant:K", (_LENGTH,), least=1),
    "heuristic": _Form("heuristic[:K]", (_LENGTH,)),
    "heuristic_transient": _Form("heuristic_transient[:K]", (_LENGTH,)),
    "confidence": _Form(
        "confidence[:T[:K[:SCOPE]]]",
        (("draft_confidence_threshold", _threshold), _LENGTH, ("draft_confidence_scope", _word)),
        usual={"draft_confidence_threshold": "auto"},
    ),
    "goodput": _Form("goodput:FILE[:K]", (("dynamic_config_path", _word), _LENGTH)),
    "schedule": _Form("schedule:LO-HI=K[/LO-HI=K…]", (("num_speculative_tokens_per_batch_size", _ranges),), least=1),
    "elastic": _Form(
        "elastic[:A/B/C[:GATE]]", (("draft_length_options", _integers), ("kv_write_gating_threshold", _number))
    ),
}
POLICY_FORMS = ", ".join((PLAIN, *(form.text for form in _FORMS.values())))
FORMS = (
    f"{POLICY_FORMS}. If need be after ngram: or suffix: (lookups), draft_model: or the method's name (no lookup "
    "beside the model), both: (n-grams beside it, as auto has by itself) or all: (suffix trees beside it), and before "
    "+stop:T (confidence stopping), +off:B (plain above B requests) or +tree:W[:N] (token trees of at most W choices "
    "behind a token and N tokens in all; +tree:1 = chains)"
)
"""What a command line may say."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One policy to measure."""

    name: str
    """As it was given."""
    config: SpeculativeConfig | None
    """None = plain decoding."""


def split_names(text: str, forms: str = FORMS) -> list[str]:
    """Names separated by commas; plain decoding comes first, given or not.

    Args:
        forms: what may be said, for the message.

    Raises:
        ConfigError: no name, or one given twice.
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise ConfigError(f"policies is {text!r}; expected {forms}")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"the policy {twice[0]!r} is given twice; expected each once")
    return [PLAIN, *(name for name in names if name != PLAIN)]


def parse_policies(text: str, draft_model: str | None) -> list[PolicySpec]:
    """Policies separated by commas; plain decoding comes first, given or not.

    Args:
        draft_model: checkpoint for policies that draft with a model.

    Raises:
        ConfigError: an unknown form, a value out of range, a name given twice, or no draft model for a policy.
    """
    return [parse_policy(name, draft_model) for name in split_names(text)]


def parse_policy(name: str, draft_model: str | None) -> PolicySpec:
    """One policy; the errors of ``parse_policies``."""
    return PolicySpec(name, None) if name == PLAIN else spec_of(name, policy_options(name, draft_model))


def spec_of(name: str, options: Mapping[str, Any]) -> PolicySpec:
    """A policy by the keys of its ``speculative_config``.

    Raises:
        ConfigError: they cannot work.
    """
    return PolicySpec(name, config_of(name, options))


def config_of(name: str, options: Mapping[str, Any]) -> SpeculativeConfig | None:
    """The configuration, with the policy's name in what is said of an error.

    Raises:
        ConfigError: the options cannot work.
    """
    try:
        return SpeculativeConfig.parse(options)
    except ConfigError as error:
        raise ConfigError(f"the policy {name!r}: {error}") from None


def policy_options(name: str, draft_model: str | None) -> Options:
    """What a user would write as ``speculative_config`` for a policy that drafts; the errors of ``parse_policies``."""
    head, _, rest = name.partition(":")
    method, form = (head, rest) if head in _HEADS else ("both", name)
    options: Options = {"method": method} | options_of_form(name, form)
    if options["policy"] == "goodput" and not options.get("dynamic_config_path"):
        raise ConfigError(f"the policy {name!r} names no profile; expected {_FORMS['goodput'].text}")
    drafts = method not in METHODS or METHODS[method].checkpoint is not None
    if drafts and draft_model is None and not (method in METHODS and METHODS[method].in_target):
        raise ConfigError(f"the policy {name!r} needs a draft model; expected --draft-model, or ngram:{form}")
    if drafts and draft_model is not None:
        options["model"] = draft_model
    if method in ("both", "all"):
        options["method"] = checkpoint_method(draft_model)
    if head == "both":
        options |= _LOOKUP
    elif head == "all":
        options |= SUFFIX_DEFAULTS
    elif head in BY_PASSES:
        options["prompt_lookup_max"] = 0
    return options


def options_of_form(name: str, form: str, forms: str = FORMS) -> Options:
    """The keys that a policy without its method stands for.

    Args:
        name: the whole name, for messages.
        form: ``POLICY[:VALUE…][+ADDITION…]``.
        forms: what may be said, for the message.

    Raises:
        ConfigError: an unknown form, or a value that is none of its kind.
    """
    whole, *additions = form.split("+")
    policy, *values = whole.split(":")
    known = _FORMS.get(policy)
    if known is None:
        raise ConfigError(f"the policy {name!r} is not known; expected {forms}")
    if not known.least <= len(values) <= len(known.values):
        raise ConfigError(f"the policy {name!r} has {len(values)} values; expected {known.text}")
    options: Options = {"policy": policy} | dict(known.usual or {})
    options |= {
        key: read(name, value) for (key, read), value in zip(known.values, values, strict=False) if value or known.least
    }
    for addition in additions:
        options |= _addition(name, addition)
    return options


def _addition(name: str, text: str) -> Options:
    word, _, value = text.partition(":")
    if word == "stop":
        return {"draft_confidence_threshold": _threshold(name, value)}
    if word == "off":
        return {"disable_by_batch_size": _integer(name, value)}
    if word == "tree":
        values: Sequence[int] = [_integer(name, part) for part in value.split(":")]
        if len(values) <= 2:
            return dict(zip((WIDTH_KEY, NODES_KEY), values, strict=False))
    raise ConfigError(f"the policy {name!r} has the addition {text!r}; expected stop:T, off:B or tree:W[:N]")
