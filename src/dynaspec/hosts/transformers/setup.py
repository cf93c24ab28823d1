"""From a call's arguments to what decides: the policy's configuration, and what the host can carry out with it.

Names and defaults are those of Transformers where it has any: what ``speculative_config`` leaves open is read from the
call's arguments, its ``generation_config``, the assistant's, and then from Transformers' own defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import WITH_MODEL
from dynaspec.contract.step import Limits, ProposerTraits
from dynaspec.control.config import SpeculativeConfig, as_mapping
from dynaspec.control.keys import SUFFIX_KEYS, canonical
from dynaspec.control.resolve import SCHEDULE_KEY, fill_in, infer_policy

ASSISTANT, EARLY_EXIT = "assistant", "early_exit"
EXIT_KEY = "assistant_early_exit"
"""As Transformers and ``speculative_config`` have it."""
PROMPT_LOOKUP, TEXT_LOOKUP = "prompt_lookup", "text_lookup"
"""Transformers' own lookup, and dynaspec's: ``ngram`` or ``suffix``."""

_LENGTH_POLICIES = ("auto", "constant", "heuristic", "heuristic_transient", "confidence")
"""Policies whose k is Transformers' ``num_assistant_tokens``; others have lengths of their own."""
_DEFAULT_LENGTH = 20
_DEFAULT_THRESHOLD = 0.4
_ASSISTANT_GIVEN = "the assistant is the model given as assistant_model"
_TOKENIZERS_GIVEN = "another tokenizer, and what goes with it, is among the arguments of generate"
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "revision": ((), _ASSISTANT_GIVEN),
    "dtype": (("auto",), _ASSISTANT_GIVEN),
    "quantization": ((), _ASSISTANT_GIVEN),
    "max_model_len": ((), _ASSISTANT_GIVEN),
    "use_heterogeneous_vocab": ((False,), _TOKENIZERS_GIVEN),
    "assistant_lookbehind": ((), _TOKENIZERS_GIVEN),
    "target_lookbehind": ((), _TOKENIZERS_GIVEN),
    "rejection_sample_method": (("standard",), "Transformers verifies drafts itself"),
    "kv_write_gating_threshold": ((0, 0.0), "Transformers' caches keep every token"),
}
"""Keys that this host cannot honour: the values that ask for nothing, and why."""
_LOOKUP_KEYS = ("prompt_lookup_max", "prompt_lookup_min")
_HYBRID_LOOKUP = (3, 8)
"""Tokens that must agree where ``auto`` looks a draft up beside an assistant, if not told otherwise."""
_UNSUPPORTED_DRAFTING = {
    "use_mtp": "a model's own multi-token prediction",
    "speculation_type": "drafts of other kinds",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a session decides for."""

    source: str
    """What drafts: one of the constants above. Lookups beside an assistant are the later proposers of ``limits``."""
    config: SpeculativeConfig
    limits: Limits
    target: str
    """Names of the models, for people."""
    assistant: str


def resolve_setup(
    speculative_config: Mapping[str, Any] | str | SpeculativeConfig | None,
    model: Any,
    assistant: Any,
    generation: Mapping[str, Any],
) -> Setup:
    """
    Args:
        assistant: the assistant model, or None.
        generation: what else ``generate`` was given.

    Raises:
        ConfigError: nothing that could draft, or a configuration that this host cannot carry out.
    """
    settings = _Settings(model, assistant, generation)
    beams = _Settings(model, None, generation).get("num_beams")
    if beams not in (None, 1):
        raise ConfigError(f"num_beams is {beams}; expected 1, as Transformers assists greedy decoding and sampling")
    values = _decoded(speculative_config)
    source = _source(assistant, settings, values)
    one_vocabulary = generation.get("assistant_tokenizer") is None
    config = _config(values, source, assistant, settings, one_vocabulary)
    if not one_vocabulary and config.draft_confidence_threshold == "auto":
        raise ConfigError(
            "draft_confidence_threshold is 'auto' but the assistant has another tokenizer, whose tokens' fate is not "
            "known; expected a number"
        )
    alone = source in (PROMPT_LOOKUP, TEXT_LOOKUP)
    found = {"ngram": config.lookup, "suffix": config.suffix}
    lookups = [PROMPT_LOOKUP] if source == PROMPT_LOOKUP else [name for name, what in found.items() if what is not None]
    # An assistant's confidence is in its own tokens: with another vocabulary it can end drafts, but not explain them.
    confident = one_vocabulary or bool(config.draft_confidence_threshold)
    proposers = [] if alone else [ProposerTraits(source, passes_per_draft="per_token", has_confidence=confident)]
    proposers += [ProposerTraits(name, passes_per_draft="none", has_confidence=False) for name in lookups]
    lengths = tuple(range(config.longest_draft + 1))
    limits = Limits(draft_lens=lengths, proposers=tuple(proposers), can_stop=not alone, can_gate=False)
    drafter = " and ".join(lookups) if alone else source
    return Setup(source, config, limits, _name(model), drafter if assistant is None else _name(assistant))


class _Settings:
    """Transformers' settings by name: the call's, then those of its configurations."""

    def __init__(self, model: Any, assistant: Any, generation: Mapping[str, Any]) -> None:
        given = generation.get("generation_config")
        if given is not None and not isinstance(given, GenerationConfig):
            raise ConfigError(f"generation_config is {given!r}; expected a transformers.GenerationConfig")
        self._given = generation
        owner = model if assistant is None else assistant  # it is the assistant's that Transformers reads
        self._configs = [config for config in (given, owner.generation_config) if config is not None]

    def get(self, name: str) -> Any:
        """None where nobody has said anything."""
        values = [self._given.get(name), *(getattr(config, name, None) for config in self._configs)]
        return next((value for value in values if value is not None), None)


def _source(assistant: Any, settings: _Settings, values: Mapping[str, Any]) -> str:
    for name, what in _UNSUPPORTED_DRAFTING.items():
        if settings.get(name):
            raise ConfigError(
                f"{name} is {settings.get(name)!r}, but draft lengths of {what} cannot be chosen; expected "
                "assistant_model, assistant_early_exit or prompt_lookup_num_tokens"
            )
    if _layers(settings, values) is not None:
        return EARLY_EXIT
    if settings.get("prompt_lookup_num_tokens") is not None:
        return PROMPT_LOOKUP
    if assistant is not None:
        return ASSISTANT
    if not values:
        raise ConfigError(
            "neither assistant_model nor prompt_lookup_num_tokens is given; expected one of them, as something has "
            "to draft"
        )
    return TEXT_LOOKUP


def _layers(settings: _Settings, values: Mapping[str, Any]) -> Any:
    """Of an early exit, whoever names them.

    Raises:
        ConfigError: they are named twice, and not alike.
    """
    named, asked = settings.get(EXIT_KEY), values.get(EXIT_KEY)
    if named is not None and asked not in (None, named):
        raise ConfigError(f"{EXIT_KEY} is {named!r}, but {asked!r} in speculative_config; expected it once")
    return asked if named is None else named


def _config(
    values: dict[str, Any], source: str, assistant: Any, settings: _Settings, one_vocabulary: bool
) -> SpeculativeConfig:
    """
    Raises:
        ConfigError: see ``resolve_setup``.
    """
    _check_keys(values)
    _check_drafter(values, source, assistant)
    if source == PROMPT_LOOKUP:
        values = {"num_speculative_tokens": settings.get("prompt_lookup_num_tokens")} | values | {"method": "ngram"}
    if source in (PROMPT_LOOKUP, TEXT_LOOKUP):
        return SpeculativeConfig(**fill_in(values, os.environ))
    if source == EARLY_EXIT:
        values |= {"method": source, EXIT_KEY: _layers(settings, values)}
    else:
        values["model"] = _name(assistant)
    values = fill_in(values, os.environ)
    policy = infer_policy(values)
    if policy == "auto" and not any(name in values for name in (*_LOOKUP_KEYS, *SUFFIX_KEYS)):
        # An assistant with another vocabulary reads the whole text again after each step that it has not drafted for.
        low, high = _HYBRID_LOOKUP
        values |= {"prompt_lookup_min": low, "prompt_lookup_max": high} if one_vocabulary else {"prompt_lookup_max": 0}
    if policy in _LENGTH_POLICIES:
        values.setdefault("num_speculative_tokens", settings.get("num_assistant_tokens") or _DEFAULT_LENGTH)
    if policy == "confidence" and "draft_confidence_threshold" not in values:
        threshold = settings.get("assistant_confidence_threshold")
        values["draft_confidence_threshold"] = _DEFAULT_THRESHOLD if threshold is None else threshold
        values = {"signal": "token_prob", "draft_confidence_scope": "request"} | values
    return SpeculativeConfig(**values)


def _decoded(given: Any) -> dict[str, Any]:
    """Canonical keys, however the configuration was given.

    Raises:
        ConfigError: neither a mapping nor JSON, or an unknown key.
    """
    if isinstance(given, SpeculativeConfig):
        return given.model_dump(exclude_none=True)
    return canonical({} if given is None else as_mapping(given), (*SpeculativeConfig.model_fields, SCHEDULE_KEY))


def _check_keys(values: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a key that means something elsewhere, but cannot here.
    """
    for name, (harmless, why) in _REFUSED.items():
        if name in values and values[name] not in harmless:
            raise ConfigError(f"{name} is {values[name]!r}; expected no {name} with Transformers: {why}")


def _check_drafter(values: Mapping[str, Any], source: str, assistant: Any) -> None:
    """
    Raises:
        ConfigError: the configuration names another drafter than the call.
    """
    method, model = values.get("method"), values.get("model")
    if source in (PROMPT_LOOKUP, TEXT_LOOKUP):
        if method in WITH_MODEL or model not in (None, "ngram", "[ngram]"):
            raise ConfigError(
                f"speculative_config has method {method!r} and model {model!r} but no assistant_model is given; "
                "expected the loaded model as assistant_model"
            )
        if source == PROMPT_LOOKUP and (given := [name for name in _LOOKUP_KEYS if name in values]):
            raise ConfigError(
                f"{given[0]} and prompt_lookup_num_tokens are both given; expected one of them, as Transformers' "
                "lookup has a rule of its own (max_matching_ngram_size)"
            )
        return
    if source == EARLY_EXIT:
        if assistant is not None or model is not None or method not in (None, source):
            raise ConfigError(
                f"{EXIT_KEY} is given, so that the model itself drafts, and method is {method!r}, model {model!r} and "
                f"assistant_model {assistant if assistant is None else _name(assistant)!r}; expected one or the other"
            )
    elif method not in (None, "draft_model"):
        raise ConfigError(f"method is {method!r} but an assistant is given; expected 'draft_model', or no assistant")
    elif model is not None and model != _name(assistant):
        raise ConfigError(
            f"model is {model!r} but the assistant is {_name(assistant)!r}; expected no model, or that one"
        )
    if values.get("draft_sample_method") == "greedy":
        raise ConfigError(
            "draft_sample_method is 'greedy'; expected 'probabilistic', as Transformers draws drafts as it draws output"
        )


def _name(model: Any) -> str:
    return getattr(model, "name_or_path", "") or type(model).__name__
