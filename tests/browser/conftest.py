"""The system's Chromium, and a server over a tiny model for it to look at."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browser.serving import Served, serving
from dynaspec import AsyncLLM
from support.checkpoints import Pair

_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_PATIENCE_MS = 60_000
"""Nothing is timed here; a busy machine only takes longer."""

OpenPage = Callable[..., Any]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where the browser is."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed (chromium, chromium-browser or google-chrome)")
    return found


@pytest.fixture(scope="module")
def llm(chromium: str, tiny: Pair) -> Iterator[AsyncLLM]:
    """Drafts three tokens in every step; ``auto`` would not, as the drafter is as large as the target."""
    speculation = {"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3}
    made = AsyncLLM(tiny.target, speculative_config=speculation)
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(llm: AsyncLLM) -> Iterator[Served]:
    with serving(llm) as running:
        yield running


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Of the module: Playwright's event loop would be in the way of other modules' asynchronous tests."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS), timeout=_PATIENCE_MS)
        yield running
        running.close()


@pytest.fixture
def complaints() -> list[str]:
    """What pages have said in their consoles, errors and warnings; a test may take out what it expects."""
    return []


@pytest.fixture
def open_page(browser: Any, complaints: list[str]) -> Iterator[OpenPage]:
    """Opens a page that shares nothing with others. What is left of its complaints in the end fails the test."""
    opened: list[Any] = []

    def open_(url: str, *, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        opened.append(context)
        context.set_default_timeout(_PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(url)
        return page

    yield open_
    for context in opened:
        context.close()
    assert complaints == []
