"""Divides dynaspec's ``speculative_config`` between vLLM, which drafts, and the scheduler, which says how much."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS, OF_TOKENS
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.environment import fill_in
from dynaspec.control.keys import ALIASES, canonical
from dynaspec.control.keys import SUFFIX_KEYS as SUFFIX_KEYS
from dynaspec.control.keys import SUFFIX_ONLY_HERE as SUFFIX_ONLY_HERE
from dynaspec.control.resolve import DEFAULT_CAP, DEFAULT_HYBRID_LOOKUP, SCHEDULE_KEY, infer_method, infer_policy

POLICY_KEYS = frozenset(
    {
        "policy",
        "num_speculative_tokens_per_batch_size",
        "dynamic_config_path",
        "draft_length_options",
        "kv_write_gating_threshold",
        "disable_by_batch_size",
        "draft_confidence_threshold",
        "draft_confidence_scope",
        "signal",
        SCHEDULE_KEY,
    }
)
"""Keys that say how much to draft."""

VLLM_KEYS = frozenset(
    {
        "attention_backend",
        "code_revision",
        "disable_eagle_block_drop",
        "disable_padded_drafter_batch",
        "draft_load_config",
        "draft_tensor_parallel_size",
        "dspark_draft_topk",
        "enable_adaptive_verification",
        "enforce_eager",
        "index_share_for_mtp_iteration",
        "kv_cache_dtype",
        "moe_backend",
        "parallel_drafting",
        "use_local_argmax_reduction",
    }
)
"""Keys that only vLLM honours. Where it is installed, whatever else it knows passes too."""

KEYS = frozenset({*SpeculativeConfig.model_fields, SCHEDULE_KEY})
_OWN_VOCABULARY = ("use_heterogeneous_vocab", "assistant_lookbehind", "target_lookbehind")
_LOOKUP = frozenset(("prompt_lookup_max", "prompt_lookup_min"))


@dataclass(frozen=True, slots=True)
class Speculation:
    """One ``speculative_config``, divided."""

    drafting: Mapping[str, Any]
    """vLLM's ``speculative_config``: who drafts, and the longest draft."""
    policy: Mapping[str, Any]
    """What dynaspec's scheduler is told, the policy's name always among it."""

    @property
    def lengths(self) -> frozenset[int]:
        """Draft lengths that the policy names."""
        ranges = self.policy.get("num_speculative_tokens_per_batch_size") or ()
        return frozenset((*(k for _, _, k in ranges), *(self.policy.get("draft_length_options") or ())))


def divide(value: Any, environ: Mapping[str, str], vllms: Collection[str] = ()) -> Speculation | None:
    """
    Args:
        value: mapping, JSON text or ``SpeculativeConfig``; None = no speculation. A mapping leaves what it does not
            name to vLLM, but for the length; an object says everything.
        environ: environment variables, which decide what the value leaves open.
        vllms: the keys of vLLM's own ``speculative_config``, where it is installed.

    Raises:
        ConfigError: an unknown key, a value out of range, or keys that contradict each other.
    """
    if value is None:
        return None
    given, passed = split(as_mapping(value), vllms)
    named = fill_in(canonical(given, KEYS), environ)
    if named.get("quantization") is not None:
        raise ConfigError(
            f"quantization is {named['quantization']!r}, which vLLM's drafters do not have; expected one of vLLM's "
            "own, or drafter_backend 'dynaspec' on a CPU"
        )
    method = infer_method(named)
    check_method(method, named)
    if method in OF_TOKENS:
        return _own_method(named, passed)
    return _divided(named, passed, policy=infer_policy(named))


def check_method(method: Any, named: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a method, or a way of it, that drafts inside of dynaspec's own engine only.
    """
    for name in _OWN_VOCABULARY:
        if named.get(name, False) is not False:
            raise ConfigError(
                f"{name} is {named[name]!r}, which vLLM does not have; expected use_heterogeneous_vocab true, or "
                "dynaspec's own engine"
            )
    known = METHODS.get(method) if isinstance(method, str) else None
    if known is not None and known.in_target and not known.reads_target:
        raise ConfigError(f"method is {method!r}, which vLLM does not have; expected dynaspec's own engine, or another")


def as_mapping(value: Any) -> Mapping[str, Any]:
    """What a ``speculative_config`` says, as keys.

    Args:
        value: mapping, JSON text or ``SpeculativeConfig``.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, SpeculativeConfig):
        by_itself = _LOOKUP if value.hybrid_lookup and value.lookup == DEFAULT_HYBRID_LOOKUP else frozenset()
        return {name: getattr(value, name) for name in value.model_fields_set - by_itself}
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ConfigError(f"speculative_config is {value!r}, which is not JSON ({error.msg})") from None
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config is {value!r}; expected a mapping, or a JSON object")
    return given


def split(given: Mapping[str, Any], vllms: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What dynaspec reads, as it is spelled; what only vLLM does, under vLLM's names.

    Args:
        vllms: see ``divide``.
    """
    only_vllms = VLLM_KEYS.union(vllms)
    read: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    for spelling, value in given.items():
        alias = str(spelling).lstrip("-").replace("-", "_")
        name = ALIASES.get(alias, alias)
        if (name in only_vllms and name not in KEYS) or _is_vllms(name, value):
            passed[name] = value
        else:
            read[spelling] = value
    return read, {name: value for name, value in passed.items() if value is not None}


def _is_vllms(name: str, value: Any) -> bool:
    """Whether only vLLM has this value of a key that dynaspec has too."""
    if name == "use_heterogeneous_vocab":
        return value is True
    return name == "quantization" and value != "int8"


def _own_method(named: Mapping[str, Any], passed: Mapping[str, Any]) -> Speculation:
    """A method that the embedded engine has too: its keys are checked, and lengths decided, as there."""
    config = SpeculativeConfig(**named)
    if config.hybrid_lookup and (asked := [name for name in (*sorted(_LOOKUP), *SUFFIX_KEYS) if name in named]):
        raise ConfigError(
            f"{asked[0]} is {named[asked[0]]} but method is 'draft_model'; expected one or the other, as vLLM has one "
            "drafter"
        )
    if config.dtype != "auto":
        raise ConfigError(f"dtype is {config.dtype!r}; expected 'auto', as vLLM's drafter has the target's dtype")
    here = ("dtype", *_OWN_VOCABULARY, *SUFFIX_ONLY_HERE)
    told = {name: value for name, value in named.items() if name not in here}
    if config.method == "draft_model":
        told.pop("prompt_lookup_max", None)  # 0: no lookup
    if config.method == "ngram":  # which may be named in a model's place, or not at all
        told.pop("model", None)
        told["method"] = config.method
    longest = longest_of(config)
    start = (
        {} if longest == config.num_speculative_tokens else {"num_speculative_tokens": config.num_speculative_tokens}
    )
    return _divided(told | {"num_speculative_tokens": longest}, passed, policy=config.policy, **start)


def longest_of(config: SpeculativeConfig) -> int:
    """The longest draft that vLLM has to make room for; heuristics would grow far beyond where they start."""
    if config.policy in ("heuristic", "heuristic_transient"):
        return max(DEFAULT_CAP, config.num_speculative_tokens)
    return max(config.longest_draft, config.num_speculative_tokens)


def _divided(named: Mapping[str, Any], passed: Mapping[str, Any], **decided: Any) -> Speculation:
    drafting = {name: value for name, value in named.items() if name not in POLICY_KEYS} | dict(passed)
    told = {name: value for name, value in named.items() if name in POLICY_KEYS - {SCHEDULE_KEY}}
    return Speculation(drafting, told | decided)
