"""Environment variables that switch dynamic speculation lengths on, for configurations that leave it open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from dynaspec.contract.errors import ConfigError

from .resolve import SCHEDULE_KEY, infer_method

ADAPTIVE_DRAFT_LENGTH = "DYNASPEC_ADAPTIVE_DRAFT_LENGTH"
CONFIDENCE_THRESHOLD = "DYNASPEC_CONFIDENCE_THRESHOLD"

_ON = ("1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")

logger = logging.getLogger(__name__)


def fill_in(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """``given``, with the environment's confidence threshold where nothing in it decides about one.

    ``DYNASPEC_CONFIDENCE_THRESHOLD`` is a threshold; ``DYNASPEC_ADAPTIVE_DRAFT_LENGTH`` on without one means
    ``auto``, and off ignores it. An empty variable counts as unset.

    Args:
        given: canonical keys (see ``keys.canonical``).

    Raises:
        ConfigError: a variable that holds neither.
    """
    values = dict(given)
    threshold = _environment_threshold(environ)
    if threshold is None or not _open(values):
        return values
    if threshold != 0 and infer_method(values) == "ngram":
        logger.warning(
            "%s and %s do not apply to method 'ngram', which has no confidence",
            CONFIDENCE_THRESHOLD,
            ADAPTIVE_DRAFT_LENGTH,
        )
        return values
    values["draft_confidence_threshold"] = threshold
    return values


def _open(values: Mapping[str, Any]) -> bool:
    decided = "draft_confidence_threshold" in values or SCHEDULE_KEY in values
    return not decided and values.get("policy", "confidence") == "confidence"


def _environment_threshold(environ: Mapping[str, str]) -> float | Literal["auto"] | None:
    adaptive = _flag(environ.get(ADAPTIVE_DRAFT_LENGTH, ""))
    threshold = _threshold(environ.get(CONFIDENCE_THRESHOLD, ""))
    if adaptive is False:
        return None
    return "auto" if adaptive and threshold is None else threshold


def _flag(text: str) -> bool | None:
    word = text.strip().lower()
    if not word:
        return None
    if word not in (*_ON, *_OFF):
        raise ConfigError(f"{ADAPTIVE_DRAFT_LENGTH} is {text!r}; expected 1 or 0")
    return word in _ON


def _threshold(text: str) -> float | Literal["auto"] | None:
    if not text.strip():
        return None
    if text.strip().lower() == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{CONFIDENCE_THRESHOLD} is {text!r}; expected a number from 0 to 1, or 'auto'")
    return value
