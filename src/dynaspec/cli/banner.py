"""What ``serve`` says when it listens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

import dynaspec
from dynaspec.cli.console import stderr_console
from dynaspec.engine.config import EngineConfig
from dynaspec.server.config import ServerConfig
from dynaspec.server.logs import FIELDS

if TYPE_CHECKING:
    from dynaspec.server.state import ServerState

logger = logging.getLogger(__name__)


def announce(engine: EngineConfig, state: ServerState, url: str) -> None:
    """What is served, where, and how to stop it: on stderr, or as a line of a JSON log."""
    if state.config.log_format == "json":
        fields = {"model": engine.model, "served_as": state.served_names, "url": url, "drafts": drafting(engine)}
        logger.info("listening", extra={FIELDS: fields})
        return
    console = stderr_console()
    console.print(Text.assemble("dynaspec ", dynaspec.__version__, " serves ", (engine.model, "bold"), *_alias(state)))
    for name, value in [("drafts", drafting(engine)), *addresses(state.config, url), ("stop", stopping(state.config))]:
        console.print(Text.assemble((f"  {name:<9}  ", "dim"), value))


def drafting(engine: EngineConfig, *, short: bool = False) -> str:
    """The drafter, and the policy that decides how much it drafts.

    Args:
        short: a checkpoint's name without the folders that it is in.
    """
    config = engine.speculative_config
    if config is None:
        return "none: plain decoding"
    drafter = config.model or config.method
    if short:
        drafter = Path(drafter).name
    lookup = " and lookup" if config.hybrid_lookup else ""
    return f"{drafter}{lookup}, policy {config.policy}"


def addresses(config: ServerConfig, url: str) -> list[tuple[str, str]]:
    """The pages that there are, with their names."""
    pages = [("API", f"{url}/v1")]
    if not config.disable_docs:
        pages.append(("docs", f"{url}/openapi.json"))
    if config.enable_dashboard:
        pages.append(("dashboard", f"{url}/dashboard"))
    return [*pages, ("metrics", f"{url}/metrics")]


def stopping(config: ServerConfig) -> str:
    """How to end it."""
    return f"Ctrl-C: running requests get {config.drain_timeout_s:g} s to finish; again: at once"


def _alias(state: ServerState) -> tuple[str, ...]:
    return (" as ", ", ".join(state.served_names)) if state.config.served_model_name else ()
