"""The keys of ``speculative_config``: which are known, under which other names, and which are refused.

vLLM's and Transformers' names are accepted as they are documented there, so that existing configurations
carry over. A key is honoured (a field of ``SpeculativeConfig``), or it is refused by name unless its value
asks for nothing, or for what this version does anyway.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from dynaspec.contract.errors import ConfigError

ALIASES: Mapping[str, str] = {
    # Transformers' GenerationConfig
    "num_assistant_tokens": "num_speculative_tokens",
    "assistant_confidence_threshold": "draft_confidence_threshold",
    # vLLM's engine arguments before they were gathered in speculative_config
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "speculative_max_model_len": "max_model_len",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_disable_mqa_scorer": "disable_mqa_scorer",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "spec_decoding_acceptance_method": "acceptance_method",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
    "disable_logprobs_during_spec_decoding": "disable_logprobs",
    # SGLang's server arguments
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_eagle_topk": "tree_width",
    "speculative_num_draft_tokens": "tree_nodes",
}
IMPLIED: Mapping[str, Mapping[str, str]] = {
    # Transformers looks at the drawn token's probability, and has one request at a time.
    "assistant_confidence_threshold": {"signal": "token_prob", "draft_confidence_scope": "request"},
}
"""What an alias says beyond its value; explicit keys win."""
_ONE_DEVICE = "the drafter runs on one device, without tensor parallelism"
_PLANNED = "it is not available in this version"
_INTERNAL = "vLLM fills it in itself"
_EXACT_ONLY = "acceptance is always exact here"
_SAME_ATTENTION = "the drafter shares the target's attention backend"
SPECULATION_OPTIONS: Mapping[str, str] = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""vLLM's engine options that stand for keys of ``speculative_config``."""
SUFFIX_DEPTH_KEY = "suffix_decoding_max_tree_depth"
SUFFIX_ONLY_HERE = ("suffix_decoding_max_cached_tokens",)
"""Keys that vLLM does not have."""
SYNTHETIC_RATES_KEY = "synthetic_acceptance_rates"
SYNTHETIC_LENGTH_KEY = "synthetic_acceptance_length"


def either(names: tuple[str, ...]) -> str:
    """The names in quotes, as a choice."""
    *head, last = map(repr, names)
    return f"{', '.join(head)} or {last}" if head else last


def plain(value: object) -> object:
    """As the user wrote it: lists, not the tuples that they became."""
    return [plain(entry) for entry in value] if isinstance(value, tuple) else value


class Refusal(NamedTuple):
    """A known key that this version has no use for."""

    harmless: tuple[object, ...]
    """Values that ask for nothing, or for what happens anyway."""
    why: str


REFUSED: Mapping[str, Refusal] = {
    "enforce_eager": Refusal((True, False), "expected a boolean"),
    "disable_padded_drafter_batch": Refusal((True, False), "expected a boolean"),
    "draft_tensor_parallel_size": Refusal((1,), _ONE_DEVICE),
    "tensor_parallel_size": Refusal((1,), _ONE_DEVICE),
    "moe_backend": Refusal(("auto",), "mixture-of-experts drafters are not available in this version"),
    "attention_backend": Refusal((), _SAME_ATTENTION),
    "kv_cache_dtype": Refusal(("auto",), "the drafter's KV cache is kept as the target's"),
    "code_revision": Refusal((), "code from checkpoints is never run"),
    "draft_load_config": Refusal((), "the drafter is loaded like the target"),
    "index_share_for_mtp_iteration": Refusal(
        (), "sparse attention, whose index that is, is not available in this version"
    ),
    "disable_eagle_block_drop": Refusal((True, False), "expected a boolean"),
    "dspark_draft_topk": Refusal((), "method 'dspark' is not available in this version"),
    "use_local_argmax_reduction": Refusal((False,), _ONE_DEVICE),
    "parallel_drafting": Refusal((False,), _PLANNED),
    "enable_adaptive_verification": Refusal((False,), _PLANNED),
    "acceptance_method": Refusal(("rejection_sampler",), _EXACT_ONLY + " ('rejection_sampler')"),
    "posterior_threshold": Refusal((), _EXACT_ONLY),
    "posterior_alpha": Refusal((), _EXACT_ONLY),
    "disable_mqa_scorer": Refusal((False,), "all rows of a request are verified in one pass"),
    "disable_logprobs": Refusal((False,), "log-probabilities are the same with and without speculation"),
    "target_model_config": Refusal((), _INTERNAL),
    "target_parallel_config": Refusal((), _INTERNAL),
    "draft_model_config": Refusal((), _INTERNAL),
    "draft_parallel_config": Refusal((), _INTERNAL),
}


def spelled_out(key: object) -> str:
    """A key as configurations have it, which may come as a flag: ``--max-model-len``."""
    return str(key).lstrip("-").replace("-", "_")


def canonical(given: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """The keys of ``given`` under their own names, without those that are None or ask for nothing.

    Args:
        given: keys with dashes or underscores, any alias.
        fields: the keys that are honoured.

    Raises:
        ConfigError: an unknown or refused key, or one value given twice under different names.
    """
    known = frozenset(fields)
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    implied: dict[str, str] = {}
    for spelling, value in given.items():
        alias = spelled_out(spelling)
        name = ALIASES.get(alias, alias)
        if name not in known and name not in REFUSED:
            raise ConfigError(_unknown(str(spelling), known))
        if value is None:
            continue
        if name in result and result[name] != value:
            raise ConfigError(
                f"{spelled[name]} is {result[name]!r} but {spelling} is {value!r}; expected one of the two, "
                "as they name the same thing"
            )
        result[name], spelled[name] = value, str(spelling)
        implied.update(IMPLIED.get(alias, {}))
    for name in [name for name in result if name in REFUSED]:
        _refuse(name, result.pop(name))
    return implied | result


def _refuse(name: str, value: object) -> None:
    refusal = REFUSED[name]
    # By type too: True == 1 would pass for a tensor-parallel size.
    if any(type(value) is type(harmless) and value == harmless for harmless in refusal.harmless):
        return
    allowed = " or ".join(repr(harmless) for harmless in refusal.harmless)
    expected = f"{allowed}, or no {name}" if allowed else f"no {name}"
    raise ConfigError(f"{name} is {value!r}; expected {expected}: {refusal.why}")


def _unknown(spelling: str, fields: frozenset[str]) -> str:
    candidates = sorted(fields | REFUSED.keys() | ALIASES.keys())
    near = difflib.get_close_matches(spelling.replace("-", "_"), candidates, n=2, cutoff=0.6)
    if near:
        hint = "did you mean " + " or ".join(near) + "?"
    else:
        hint = "expected keys among " + ", ".join(sorted(fields))
    return f"speculative_config has no key {spelling!r}; {hint}"


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """See ``SpeculativeConfig``'s keys of these names, with ``suffix_decoding_`` before them."""

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_cached_tokens: int = 4_000_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


_SUFFIX_DEFAULTS = SuffixSettings()
SUFFIX_DEFAULTS: Mapping[str, Any] = {
    f"suffix_decoding_{name}": getattr(_SUFFIX_DEFAULTS, name) for name in SuffixSettings.__slots__
}
SUFFIX_KEYS = tuple(SUFFIX_DEFAULTS)


def synthetic_rates(rates: Sequence[float] | None, length: float | None, k: int) -> tuple[float, ...]:
    """Unconditional acceptance per position, [k], non-increasing.

    Args:
        rates: the same, as configured; entry j − 1 is the chance that the first j tokens are all accepted.
        length: else the mean acceptance length to reach, 1 … k + 1; spread with the least variance: as many positions
            as fit are always accepted, one is accepted with the rest as its chance, none after it.
        k: ``num_speculative_tokens``.

    Raises:
        ConfigError: both or neither given, or values that cannot be.
    """
    if (rates is None) == (length is None):
        raise ConfigError(
            f"rejection_sample_method is 'synthetic' with {'neither' if rates is None else 'both'} of "
            f"{SYNTHETIC_RATES_KEY} and {SYNTHETIC_LENGTH_KEY}; expected one of the two"
        )
    if length is not None:
        if not 1.0 <= length <= k + 1:
            raise ConfigError(
                f"{SYNTHETIC_LENGTH_KEY} is {length} with num_speculative_tokens {k}; expected a number from 1 to "
                f"{k + 1}"
            )
        return tuple(min(1.0, max(0.0, length - 1 - position)) for position in range(k))
    given = tuple(rates or ())
    if len(given) != k:
        raise ConfigError(
            f"{SYNTHETIC_RATES_KEY} has {len(given)} entries but num_speculative_tokens is {k}; expected as many"
        )
    if any(after > before for before, after in pairwise(given)):
        raise ConfigError(f"{SYNTHETIC_RATES_KEY} is {list(given)}; expected rates that do not increase")
    return given
