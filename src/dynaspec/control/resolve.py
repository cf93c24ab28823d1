"""Decides what a configuration left open: the method, the policy, the defaults that depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaspec.contract.errors import ConfigError

SCHEDULE_KEY = "num_assistant_tokens_schedule"
"""Transformers' name for the choice between constant and heuristic lengths; absorbed into ``policy``."""

DEFAULT_POLICY = "constant"
"""The policy of a configuration that names none."""
DEFAULT_DRAFT_LENGTH = 5
DEFAULT_LONGEST_DRAFT = 20
"""With a confidence threshold the draft length is a maximum, seldom reached."""
DEFAULT_LOOKUP = 5

METHODS = ("draft_model", "ngram")
POLICIES = ("constant", "heuristic", "heuristic_transient", "confidence")
SCHEDULES = ("constant", "heuristic", "heuristic_transient")
UNAVAILABLE_METHODS = (
    *("medusa", "mlp_speculator", "eagle", "eagle3", "suffix", "mtp", "dflash", "dspark"),
    *("ngram_gpu", "custom_class", "extract_hidden_states"),
)
UNAVAILABLE_POLICIES = ("auto", "schedule", "goodput", "elastic")

_NGRAM_NAMES = ("ngram", "[ngram]")
_MODEL_ONLY = ("model", "revision", "max_model_len", "dtype")
_NGRAM_ONLY = ("prompt_lookup_max", "prompt_lookup_min")


def resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in method, policy and defaults. Types and ranges are not looked at here.

    Args:
        given: canonical keys (see ``keys.canonical``), none of them None.

    Raises:
        ConfigError: keys that contradict each other, or a method or policy that is not available.
    """
    values = dict(given)
    values["method"] = infer_method(values)
    if values.get("model") in _NGRAM_NAMES and values["method"] == "ngram":
        del values["model"]
    _check_method(values)
    values["policy"] = _policy(values)
    values.pop(SCHEDULE_KEY, None)
    _check_signal(values)
    return _with_defaults(values)


def infer_method(given: Mapping[str, Any]) -> Any:
    """The method named or implied; ``ngram`` may also stand in the place of a model."""
    method, model = given.get("method"), given.get("model")
    if method is not None:
        return "ngram" if method in _NGRAM_NAMES else method
    if model in _NGRAM_NAMES:
        return "ngram"
    if model is not None:
        return "draft_model"
    if "prompt_lookup_max" in given or "prompt_lookup_min" in given:
        return "ngram"
    raise ConfigError(
        "speculative_config names neither a method nor a model; expected a draft model's checkpoint as "
        "model, or method 'ngram'"
    )


def _check_method(values: Mapping[str, Any]) -> None:
    method, model = values["method"], values.get("model")
    if method in UNAVAILABLE_METHODS:
        raise ConfigError(_unavailable("method", method, METHODS))
    if method == "draft_model" and (model is None or model in _NGRAM_NAMES):
        raise ConfigError(f"method is 'draft_model' but model is {model!r}; expected a model's checkpoint")
    for owner, names in (("draft_model", _MODEL_ONLY), ("ngram", _NGRAM_ONLY)):
        foreign = [name for name in names if name in values and (name, values[name]) != ("dtype", "auto")]
        if method in METHODS and method != owner and foreign:
            name = foreign[0]
            raise ConfigError(
                f"{name} is {values[name]!r} but method is {method!r}; expected no {name}, or method {owner!r}"
            )
    if method == "ngram" and values.get("draft_sample_method") == "probabilistic":
        raise ConfigError(
            "draft_sample_method is 'probabilistic' but method is 'ngram'; expected 'greedy', as a looked-up "
            "draft is certain"
        )


def _policy(values: Mapping[str, Any]) -> Any:
    named, schedule = values.get("policy"), values.get(SCHEDULE_KEY)
    threshold = values.get("draft_confidence_threshold")
    if named in UNAVAILABLE_POLICIES:
        raise ConfigError(_unavailable("policy", named, POLICIES))
    if schedule is not None and schedule not in SCHEDULES:
        raise ConfigError(f"{SCHEDULE_KEY} is {schedule!r}; expected {_either(SCHEDULES)}")
    stops = threshold not in (None, 0)
    policy = named
    if policy is None:
        policy = "confidence" if stops else schedule or DEFAULT_POLICY
    if stops and policy != "confidence":
        raise ConfigError(
            f"draft_confidence_threshold is {threshold!r} but policy is {policy!r}; expected no threshold, "
            "or policy 'confidence'"
        )
    # Transformers' default is 'constant' beside a threshold: the maximum stays, the threshold decides.
    if schedule not in (None, policy) and (schedule, policy) != ("constant", "confidence"):
        raise ConfigError(f"{SCHEDULE_KEY} is {schedule!r} but policy is {policy!r}; expected one of the two")
    if policy == "confidence" and values["method"] == "ngram":
        raise ConfigError(
            "policy is 'confidence' but method is 'ngram', which has no confidence; expected another policy, "
            "no threshold, or method 'draft_model'"
        )
    return policy


def _check_signal(values: Mapping[str, Any]) -> None:
    if values["policy"] == "confidence" or "draft_confidence_threshold" in values:
        return
    for name, default in (("draft_confidence_scope", "batch_mean"), ("signal", "confidence")):
        if values.get(name, default) != default:
            raise ConfigError(
                f"{name} is {values[name]!r} but policy is {values['policy']!r}; expected a "
                f"draft_confidence_threshold, or no {name}"
            )


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    confident = values["policy"] == "confidence"
    if confident:
        values.setdefault("draft_confidence_threshold", "auto")
    values.setdefault("num_speculative_tokens", DEFAULT_LONGEST_DRAFT if confident else DEFAULT_DRAFT_LENGTH)
    if values["method"] == "ngram":
        # A single bound stands for both, as in vLLM.
        values.setdefault("prompt_lookup_max", values.get("prompt_lookup_min", DEFAULT_LOOKUP))
        values.setdefault("prompt_lookup_min", values["prompt_lookup_max"])
        values.setdefault("draft_sample_method", "greedy")
    values.setdefault("draft_sample_method", "probabilistic")
    return values


def _unavailable(what: str, name: str, available: tuple[str, ...]) -> str:
    return f"{what} is {name!r}, which is not available in this version; expected {_either(available)}"


def _either(names: tuple[str, ...]) -> str:
    *head, last = map(repr, names)
    return f"{', '.join(head)} or {last}"
