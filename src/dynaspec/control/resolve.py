"""Decides what a configuration left open: the method, the policy, trees, the defaults that depend on them; and what
environment variables say of a policy where the configuration says nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import BY_PASSES, METHODS, WITH_CONFIDENCE, WITH_MODEL, WITH_TREES
from dynaspec.contract.tree import TokenTree

from . import keys
from .checkpoint import checkpoint_length, checkpoint_method
from .keys import either, plain
from .planner import MAX_DRAFT_TOKENS
from .policies import lengths

SHAPE_KEY, WIDTH_KEY, NODES_KEY = "speculative_token_tree", "tree_width", "tree_nodes"
TREE_KEYS = (SHAPE_KEY, WIDTH_KEY, NODES_KEY)
DEFAULT_TREE_WIDTH = 4
"""Of ``auto``, which lets branches grow only where they pay."""
_TREE_POLICIES = ("constant", "auto")
_LENGTH = "num_speculative_tokens"
SCHEDULE_KEY = "num_assistant_tokens_schedule"
"""Transformers' name for the choice between constant and heuristic lengths; absorbed into ``policy``."""
_PROFILE_KEY = "dynamic_config_path"
DEFAULT_POLICY = "auto"
"""The policy of a configuration that names none."""
_DEFAULT_DRAFT_LENGTH = 5
_DEFAULT_LONGEST_DRAFT = 20
"""With a confidence threshold the draft length is a maximum, seldom reached."""
DEFAULT_CAP = 16
"""Of the policies that choose any length up to one."""
_DEFAULT_LOOKUP = 5
DEFAULT_HYBRID_LOOKUP = (4, 16)
"""Shortest and longest n-gram looked up beside a draft model, by ``auto``."""
PolicyName = Literal[
    "auto", "constant", "heuristic", "heuristic_transient", "confidence", "schedule", "goodput", "elastic"
]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
UPPER_BOUND_POLICIES = ("auto", "goodput", "confidence")
"""Policies that choose any length up to ``num_speculative_tokens``; others have it, or it and shorter ones, as lengths
that are to be drafted."""
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")
UNAVAILABLE_METHODS = ("dflash", "dspark", "ngram_gpu", "custom_class", "extract_hidden_states")
_DECIDING_KEYS: Mapping[str, tuple[str, ...]] = {
    _PROFILE_KEY: ("goodput", "auto"),
    lengths.LADDER_KEY: ("elastic",),
    lengths.RANGES_KEY: ("schedule",),
}
"""Keys that belong to policies; where none is named, the first key that is given chooses its first policy."""
_STOPPING_POLICIES = ("confidence", "schedule", "goodput", "elastic")
"""Beside which a confidence threshold may stand: the policy caps the draft, the threshold ends it earlier."""
_ALIASES = {alias: method.name for method in METHODS.values() for alias in (method.name, *method.aliases)}
_NGRAM_NAMES = ("ngram", *METHODS["ngram"].aliases)
_CHECKPOINT_ONLY = ("model", "revision", "dtype", "quantization")
_OWN_VOCABULARY = ("assistant_lookbehind", "target_lookbehind")
DEFAULT_LOOKBEHIND = 10
"""Tokens; Transformers' default."""
_PASSES_ONLY = ("max_model_len", "kv_write_gating_threshold")
_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
_HARMLESS = (("dtype", "auto"), ("kv_write_gating_threshold", 0), ("use_heterogeneous_vocab", False))
ADAPTIVE_DRAFT_LENGTH = "DYNASPEC_ADAPTIVE_DRAFT_LENGTH"
CONFIDENCE_THRESHOLD = "DYNASPEC_CONFIDENCE_THRESHOLD"
ELASTIC_DRAFT_LENGTH = "VLLM_SPEC_ADAPTIVE_DRAFT_LENGTH"
KV_GATING_THRESHOLD = "VLLM_SPEC_CONFIDENCE_THRESHOLD"
_ON = ("1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")

_logger = logging.getLogger(__name__)


def _resolve_trees(values: dict[str, Any]) -> None:
    """Parses the shape, and fills in what follows from it and from the width.

    Args:
        values: canonical keys, the method among them; changed in place.

    Raises:
        ConfigError: no such tree, keys that contradict each other, or a method that drafts chains only.
    """
    if SHAPE_KEY in values:
        _resolve_shape(values)
    given = tree_key(values)
    if given is not None and values["method"] in METHODS and values["method"] not in WITH_TREES:
        expected = f"no {given}, or method {either(WITH_TREES)}"
        raise _at_odds(values, given, "method", expected, ", which drafts chains")
    if given is not None and values["method"] == "suffix":
        if given == SHAPE_KEY:
            raise ConfigError(
                f"{SHAPE_KEY} is {plain(values[given])!r} but method is 'suffix', whose nodes are those of the largest "
                f"counts; expected {WIDTH_KEY} and {NODES_KEY} instead"
            )
        values.setdefault("policy", "constant")
    if given is not None and values.get("use_heterogeneous_vocab"):
        raise ConfigError(
            f"{given} is {plain(values[given])!r} beside use_heterogeneous_vocab, whose drafts are chains; expected "
            "one of the two"
        )
    if NODES_KEY in values and values.get(WIDTH_KEY, 1) == 1:
        raise ConfigError(f"{NODES_KEY} is {values[NODES_KEY]!r} but there is no {WIDTH_KEY} above 1; expected one")


def _resolve_shape(values: dict[str, Any]) -> None:
    for key in (WIDTH_KEY, NODES_KEY):
        if key in values:
            raise ConfigError(f"{key} is {values[key]!r} beside a {SHAPE_KEY}; expected one of the two")
    tree = TokenTree.parse(values[SHAPE_KEY])
    length = values.get(_LENGTH, tree.depth)
    if length not in (tree.depth, len(tree.parents)):
        raise ConfigError(
            f"{_LENGTH} is {length!r} but {SHAPE_KEY} has {len(tree.parents)} nodes and depth {tree.depth}; expected "
            f"either of these, or no {_LENGTH}"
        )
    values[SHAPE_KEY], values[_LENGTH] = tree.paths, tree.depth
    values.setdefault("policy", "constant")


def tree_key(values: Mapping[str, Any]) -> str | None:
    """The first of canonical keys that asks for trees; None = drafts are chains, as with a width of 1."""
    asked = (key for key in TREE_KEYS if values.get(key) is not None and (key, values[key]) != (WIDTH_KEY, 1))
    return next(asked, None)


def _check_tree_policy(values: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: trees with a policy that plans lengths only, or with pretended acceptance, which has chains only.
    """
    policy = values["policy"]
    # ``auto`` prices what is looked up as chains.
    allowed = ("constant",) if SHAPE_KEY in values or values["method"] not in BY_PASSES else _TREE_POLICIES
    given = tree_key(values)
    if given is not None and policy not in allowed:
        raise _at_odds(values, given, "policy", f"no {given}, or policy {either(allowed)}")
    if given is not None and values.get("rejection_sample_method") == "synthetic":
        raise ConfigError(
            f"{given} is {plain(values[given])!r} beside rejection_sample_method 'synthetic', which accepts chains; "
            "expected one of the two"
        )
    for other in ("draft_confidence_threshold", "kv_write_gating_threshold"):
        if given is not None and values.get(other):
            raise ConfigError(f"{given} is {plain(values[given])!r} beside a {other}; expected one of the two")


def resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in method, policy and defaults. Types and ranges of single values are not looked at here.

    Args:
        given: canonical keys (see ``keys.canonical``), none of them None.

    Raises:
        ConfigError: keys that contradict each other, a method that is not available, a malformed schedule or ladder.
    """
    values = dict(given)
    values["method"] = infer_method(values)
    if values.get("model") in _NGRAM_NAMES and values["method"] == "ngram":
        del values["model"]
    if isinstance(values.get(_PROFILE_KEY), os.PathLike):
        values[_PROFILE_KEY] = os.fspath(values[_PROFILE_KEY])
    if lengths.RANGES_KEY in values:
        values[lengths.RANGES_KEY] = lengths.parse_schedule(values[lengths.RANGES_KEY])
    if lengths.LADDER_KEY in values:
        values[lengths.LADDER_KEY] = lengths.parse_ladder(values[lengths.LADDER_KEY])
    _check_method(values)
    _resolve_trees(values)
    values["policy"] = infer_policy(values)
    _check_policy(values)
    _check_tree_policy(values)
    values.pop(SCHEDULE_KEY, None)
    _check_signal(values)
    return _with_defaults(values)


def infer_method(given: Mapping[str, Any]) -> Any:
    """The method named or implied; ``ngram`` may also stand in the place of a model."""
    method, model = given.get("method"), given.get("model")
    if method is not None:
        return _ALIASES.get(method, method) if isinstance(method, str) else method
    if model in _NGRAM_NAMES:
        return "ngram"
    if model is not None:
        return checkpoint_method(model)
    own = next((name for name, one in METHODS.items() if one.key in given), None)
    if own is not None:
        return own
    if any(name in given for name in _LOOKUP):
        return "ngram"
    if any(name in given for name in keys.SUFFIX_KEYS):
        return "suffix"
    raise ConfigError(
        "speculative_config names neither a method nor a model; expected a draft model's checkpoint as "
        "model, or method 'ngram' or 'suffix'"
    )


def infer_policy(given: Mapping[str, Any]) -> Any:
    """The policy named, or implied by the keys that are given."""
    if given.get("policy") is not None:
        return given["policy"]
    for key, (policy, *_) in _DECIDING_KEYS.items():
        if key in given:
            return policy
    if _stops(given):
        return "confidence"
    return given.get(SCHEDULE_KEY, DEFAULT_POLICY)


def _stops(values: Mapping[str, Any]) -> bool:
    return values.get("draft_confidence_threshold") not in (None, 0)


def _check_method(values: Mapping[str, Any]) -> None:
    method, model = values["method"], values.get("model")
    if method in UNAVAILABLE_METHODS:
        raise ConfigError(
            f"method is {method!r}, which is not available in this version; expected {either(tuple(METHODS))}"
        )
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}; expected {either(tuple(METHODS))}")
    for owner in METHODS.values():
        if owner.key is not None and owner.key in values and owner.name != method:
            raise _at_odds(values, owner.key, "method", f"no {owner.key}, or method {owner.name!r}")
    _check_vocabulary(values)
    key, checkpoint = METHODS[method].key, METHODS[method].checkpoint
    if key is not None and key not in values:
        raise ConfigError(f"method is {method!r} but there is no {key}; expected one")
    if checkpoint is not None:
        if model in _NGRAM_NAMES or (model is None and not METHODS[method].in_target):
            raise ConfigError(f"method is {method!r} but model is {model!r}; expected {checkpoint}")
        if model is None and "revision" in values:
            raise ConfigError(f"revision is {values['revision']!r} but no model is given; expected both or neither")
        return
    _refuse_keys_of(_CHECKPOINT_ONLY, WITH_MODEL, values)
    if method in BY_PASSES:
        return
    _refuse_keys_of(_PASSES_ONLY, BY_PASSES, values)
    if method == "ngram" and values.get("prompt_lookup_max") == 0:
        raise ConfigError(f"prompt_lookup_max is 0; expected an integer of at least 1 with method {method!r}")
    for other, names in (("ngram", _LOOKUP), ("suffix", keys.SUFFIX_KEYS)):
        found = next((name for name in names if values.get(name, 0) != 0), None)
        if method != other and found is not None:
            raise _at_odds(values, found, "method", f"no {found}, or method {other!r}")
    if values.get("draft_sample_method") == "probabilistic":
        raise _at_odds(values, "draft_sample_method", "method", "'greedy', as a looked-up draft is certain")


def _check_vocabulary(values: Mapping[str, Any]) -> None:
    _refuse_keys_of(("use_heterogeneous_vocab", *_OWN_VOCABULARY), ("draft_model",), values)
    how = values.get("use_heterogeneous_vocab", False)
    for name in _OWN_VOCABULARY:
        if name in values and (how is False or (name == "target_lookbehind" and how != "slem")):
            expected = "'slem'" if name == "target_lookbehind" else "true"
            raise ConfigError(
                f"{name} is {values[name]!r} but use_heterogeneous_vocab is {how!r}; expected no {name}, or "
                f"use_heterogeneous_vocab {expected}"
            )


def _refuse_keys_of(names: tuple[str, ...], methods: tuple[str, ...], values: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a key that only these methods have.
    """
    for name in names if values["method"] not in methods else ():
        if name in values and (name, values[name]) not in _HARMLESS:
            raise _at_odds(values, name, "method", f"no {name}, or method {either(methods)}")


def _check_policy(values: Mapping[str, Any]) -> None:
    _check_schedule_word(values)
    _check_stopping(values)
    policy = values["policy"]
    if policy not in POLICIES:
        return  # refused with the types
    for key, owners in _DECIDING_KEYS.items():
        if key in values and policy not in owners:
            raise _at_odds(values, key, "policy", f"no {key}, or policy {either(owners)}")
        if policy == owners[0] and policy != "elastic" and key not in values:
            raise ConfigError(f"policy is {policy!r} but there is no {key}; expected one")
    if values["method"] in BY_PASSES and policy != "auto":
        for name in (*_LOOKUP, *keys.SUFFIX_KEYS):
            if values.get(name, 0) != 0:
                lookup = "ngram" if name in _LOOKUP else "suffix"
                raise ConfigError(
                    f"{name} is {values[name]!r} but method is {values['method']!r} and policy is {policy!r}; "
                    f"expected no {name}, method {lookup!r}, or policy 'auto', which looks up beside the model"
                )


def _check_schedule_word(values: Mapping[str, Any]) -> None:
    word, policy = values.get(SCHEDULE_KEY), values["policy"]
    if word is None:
        return
    if word not in _SCHEDULES:
        raise ConfigError(f"{SCHEDULE_KEY} is {word!r}; expected {either(_SCHEDULES)}")
    # Transformers' default is 'constant' beside a threshold: the maximum stays, the threshold decides.
    if word != policy and (word, policy) != ("constant", "confidence"):
        raise _at_odds(values, SCHEDULE_KEY, "policy", "one of the two")


def _check_stopping(values: Mapping[str, Any]) -> None:
    policy, threshold = values["policy"], values.get("draft_confidence_threshold")
    if _stops(values) and policy in POLICIES and policy not in _STOPPING_POLICIES:
        why = ", which decides by itself when to stop" if policy == "auto" else ""
        expected = f"no threshold, or policy {either(_STOPPING_POLICIES)}"
        raise _at_odds(values, "draft_confidence_threshold", "policy", expected, why)
    if values["method"] not in WITH_CONFIDENCE and (_stops(values) or policy == "confidence"):
        given = "policy is 'confidence'" if policy == "confidence" else f"draft_confidence_threshold is {threshold!r}"
        raise ConfigError(
            f"{given} but method is {values['method']!r}, which has no confidence; expected another policy, "
            f"no threshold, or method {either(WITH_CONFIDENCE)}"
        )


def _check_signal(values: Mapping[str, Any]) -> None:
    if values["policy"] == "confidence" or "draft_confidence_threshold" in values:
        return
    for name, default in (("draft_confidence_scope", "batch_mean"), ("signal", "confidence")):
        if values.get(name, default) != default:
            raise _at_odds(values, name, "policy", f"a draft_confidence_threshold, or no {name}")


def _at_odds(values: Mapping[str, Any], key: str, other: str, expected: str, why: str = "") -> ConfigError:
    """Of a key that cannot stand beside what another one says."""
    return ConfigError(f"{key} is {plain(values[key])!r} but {other} is {values[other]!r}{why}; expected {expected}")


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    if values["policy"] == "confidence":
        values.setdefault("draft_confidence_threshold", "auto")
    if values["method"] == "suffix" or any(name in values for name in keys.SUFFIX_KEYS):
        values = {**keys.SUFFIX_DEFAULTS, **values}
    values.setdefault("num_speculative_tokens", _default_length(values))
    longest = values["num_speculative_tokens"]
    if values["policy"] == "elastic" and isinstance(longest, int):
        values.setdefault(lengths.LADDER_KEY, lengths.ladder_up_to(longest))
    if _looks_up_beside(values):
        values["prompt_lookup_min"], values["prompt_lookup_max"] = DEFAULT_HYBRID_LOOKUP
    elif values.get("prompt_lookup_max") != 0 and (
        any(name in values for name in _LOOKUP) or values["method"] == "ngram"
    ):
        # A single bound stands for both, as in vLLM.
        values.setdefault("prompt_lookup_max", values.get("prompt_lookup_min", _DEFAULT_LOOKUP))
        values.setdefault("prompt_lookup_min", values["prompt_lookup_max"])
    drawn = METHODS[values["method"]].traits.has_confidence
    values.setdefault("draft_sample_method", "probabilistic" if drawn else "greedy")
    return values


def _looks_up_beside(values: Mapping[str, Any]) -> bool:
    """Whether an n-gram lookup joins the draft model without being asked for; synthetic rates are one drafter's."""
    asked = any(name in values for name in (*_LOOKUP, *keys.SUFFIX_KEYS))
    alone = values["method"] not in BY_PASSES or values["policy"] != "auto" or asked
    return not alone and values.get("rejection_sample_method") != "synthetic"


def _default_length(values: Mapping[str, Any]) -> int:
    rates = values.get("synthetic_acceptance_rates")
    if isinstance(rates, list | tuple) and rates:
        return len(rates)
    policy = values["policy"]
    depth = values.get(keys.SUFFIX_DEPTH_KEY)
    if values["method"] == "suffix" and isinstance(depth, int) and policy in ("constant", "auto", "goodput"):
        return min(MAX_DRAFT_TOKENS, max(1, depth))  # as in vLLM: what the tree holds is the bound
    if policy == "confidence":
        return _DEFAULT_LONGEST_DRAFT
    if policy in ("auto", "goodput"):
        return DEFAULT_CAP
    if policy == "schedule":
        ranges: tuple[lengths.Range, ...] = values[lengths.RANGES_KEY]
        return min(MAX_DRAFT_TOKENS, max(1, *(k for _, _, k in ranges)))
    if policy == "elastic" and lengths.LADDER_KEY in values:
        return int(values[lengths.LADDER_KEY][-1])
    model = values.get("model")
    own = checkpoint_length(model) if model is not None and METHODS[values["method"]].reads_target else None
    if own is not None:
        return min(own, MAX_DRAFT_TOKENS)
    return lengths.DEFAULT_LONGEST if policy == "elastic" else _DEFAULT_DRAFT_LENGTH


def fill_in(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """``given``, with what the environment says where nothing in it decides.

    * ``DYNASPEC_CONFIDENCE_THRESHOLD`` is a ``draft_confidence_threshold``; ``DYNASPEC_ADAPTIVE_DRAFT_LENGTH`` on
      without one means ``auto``, and off ignores it.
    * Then ``VLLM_SPEC_ADAPTIVE_DRAFT_LENGTH`` on chooses policy ``elastic``; ``VLLM_SPEC_CONFIDENCE_THRESHOLD`` is a
      ``kv_write_gating_threshold``, as in the proposal that they come from (vllm-project/vllm pull request 28693).

    An empty variable counts as unset.

    Args:
        given: canonical keys (see ``keys.canonical``).

    Raises:
        ConfigError: a variable that holds neither.
    """
    values = dict(given)
    threshold = _environment_threshold(environ)
    if threshold is not None and _open_to_threshold(values):
        _set_for_models(values, "draft_confidence_threshold", threshold, (CONFIDENCE_THRESHOLD, ADAPTIVE_DRAFT_LENGTH))
    if _flag(environ, ELASTIC_DRAFT_LENGTH) and _open(values) and "policy" not in values:
        values["policy"] = "elastic"
    gate = _probability(environ, KV_GATING_THRESHOLD)
    if gate is not None and "kv_write_gating_threshold" not in values:
        _set_for_models(values, "kv_write_gating_threshold", gate, (KV_GATING_THRESHOLD,))
    return values


def _set_for_models(values: dict[str, Any], key: str, value: object, variables: Sequence[str]) -> None:
    """Both thresholds compare a drafter's confidence, which looked-up drafts do not have."""
    method = infer_method(values)
    if value != 0 and method in METHODS and method not in WITH_CONFIDENCE:
        _logger.warning("%s: no effect on method %r, which has no confidence", " and ".join(variables), method)
        return
    values[key] = value


def _open(values: Mapping[str, Any]) -> bool:
    """Nothing says which policy, except perhaps its name."""
    if values.get("draft_confidence_threshold", 0) != 0 or SCHEDULE_KEY in values:
        return False
    return not any(key in values for key in _DECIDING_KEYS)


def _open_to_threshold(values: Mapping[str, Any]) -> bool:
    named = values.get("policy", "confidence")
    return named == "confidence" and _open(values) and "draft_confidence_threshold" not in values


def _environment_threshold(environ: Mapping[str, str]) -> float | Literal["auto"] | None:
    adaptive = _flag(environ, ADAPTIVE_DRAFT_LENGTH)
    threshold = _threshold(environ)
    if adaptive is False:
        return None
    return "auto" if adaptive and threshold is None else threshold


def _flag(environ: Mapping[str, str], name: str) -> bool | None:
    word = environ.get(name, "").strip().lower()
    if not word:
        return None
    if word not in (*_ON, *_OFF):
        raise ConfigError(f"{name} is {environ[name]!r}; expected 1 or 0")
    return word in _ON


def _threshold(environ: Mapping[str, str]) -> float | Literal["auto"] | None:
    if environ.get(CONFIDENCE_THRESHOLD, "").strip().lower() == "auto":
        return "auto"
    return _probability(environ, CONFIDENCE_THRESHOLD, ", or 'auto'")


def _probability(environ: Mapping[str, str], name: str, alternative: str = "") -> float | None:
    text = environ.get(name, "")
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} is {text!r}; expected a number from 0 to 1{alternative}")
    return value
