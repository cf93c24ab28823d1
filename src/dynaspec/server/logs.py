"""The server's log: lines on stderr, as text or as JSON. Prompts are in it only if ``log_requests`` asks for them."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .config import ServerConfig

if TYPE_CHECKING:
    from starlette.types import Scope

FIELDS = "dynaspec_fields"
"""Attribute of a log record: a mapping of values that JSON shows one by one."""

_requests = logging.getLogger("dynaspec.server.requests")
_STATS = "dynaspec.observe.format"


def configure_logging(config: ServerConfig) -> None:
    """Sends the process's log to stderr in the configured form; to be called once, by the process's owner."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("dynaspec").setLevel(logging.INFO)
    logging.getLogger(_STATS).setLevel(logging.INFO if config.log_stats else logging.WARNING)


class TextFormatter(logging.Formatter):
    """Time, level, what happened, and the fields as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_plain(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.getMessage()}{fields}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One object a line, with ``time``, ``level``, ``logger``, ``message`` and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def request_log(config: ServerConfig) -> Callable[[Scope, bytes], None] | None:
    """What logs requests' bodies; None unless that is asked for."""
    if not config.log_requests:
        return None

    def log(scope: Scope, body: bytes) -> None:
        text = body.decode("utf-8", "replace")
        cut = text[: config.max_log_len] + ("…" if len(text) > config.max_log_len else "")
        _requests.info("request", extra={FIELDS: {"request_id": scope["state"]["request_id"], "body": cut}})

    return log


def describe(error: BaseException, *, message: bool) -> str:
    """A traceback.

    Args:
        message: whether it may show errors' messages, which can quote what a caller has sent.
    """
    if message:
        return "".join(traceback.format_exception(error)).rstrip()
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    return "\n".join(_frames(one) for one in reversed(chain))


def _frames(error: BaseException) -> str:
    lines = [*traceback.format_tb(error.__traceback__), f"{type(error).__module__}.{type(error).__qualname__}"]
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return "\n".join(["".join(lines), *(describe(one, message=False) for one in inner)])


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    return fields


def _plain(value: object) -> str:
    """On one line, in quotes where it would not be one word."""
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
