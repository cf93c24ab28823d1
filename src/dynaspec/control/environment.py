"""Environment variables that choose a dynamic policy, for configurations that leave it open."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS, WITH_CONFIDENCE

from .resolve import DECIDING_KEYS, SCHEDULE_KEY, infer_method

ADAPTIVE_DRAFT_LENGTH = "DYNASPEC_ADAPTIVE_DRAFT_LENGTH"
CONFIDENCE_THRESHOLD = "DYNASPEC_CONFIDENCE_THRESHOLD"
ELASTIC_DRAFT_LENGTH = "VLLM_SPEC_ADAPTIVE_DRAFT_LENGTH"
KV_GATING_THRESHOLD = "VLLM_SPEC_CONFIDENCE_THRESHOLD"

_ON = ("1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")

logger = logging.getLogger(__name__)


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
        logger.warning("%s: no effect on method %r, which has no confidence", " and ".join(variables), method)
        return
    values[key] = value


def _open(values: Mapping[str, Any]) -> bool:
    """Nothing says which policy, except perhaps its name."""
    if values.get("draft_confidence_threshold", 0) != 0 or SCHEDULE_KEY in values:
        return False
    return not any(key in values for key in DECIDING_KEYS)


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
