"""Arguments of vLLM's ``generate`` and ``chat`` that ask for what there is not here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynaspec.contract.errors import RequestError

logger = logging.getLogger(__name__)


def check_adapters(lora_request: object) -> None:
    """
    Raises:
        RequestError: an adapter is asked for.
    """
    given = lora_request if isinstance(lora_request, Sequence) else [lora_request]
    if any(one is not None for one in given):
        raise RequestError("lora_request is given; expected None, as adapters are not available in this version")


def check_empty(name: str, value: object, why: str) -> None:
    """
    Raises:
        RequestError: something is asked for.
    """
    if value:
        raise RequestError(f"{name} is {value!r}; expected None: {why}")


def note_priority(priority: int | Sequence[int] | None) -> None:
    """Warns where requests are to be served in another order than that of their arrival: no answer depends on it."""
    given = priority if isinstance(priority, Sequence) else [priority]
    if any(one for one in given):
        logger.warning("priority is ignored: requests are served in order of arrival")
