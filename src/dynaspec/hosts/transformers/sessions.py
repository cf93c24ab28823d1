"""Sessions that calls share: what was learnt about a pair of models lives as long as the models do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .session import Session
from .setup import Setup

_MOST_IDLE = 16
"""Sessions kept for a model: each configuration has one, and each call at the same time."""


class Sessions:
    """Idle sessions by target model. Calls at the same time get sessions of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: weakref.WeakKeyDictionary[Any, list[_Kept]] = weakref.WeakKeyDictionary()

    @contextmanager
    def lend(self, model: Any, assistant: Any, setup: Setup) -> Iterator[Session]:
        """The session for these models and this configuration that was used last, or a new one."""
        kept = self._take(model, assistant, setup) or _Kept(assistant, setup)
        try:
            yield kept.session
        finally:
            with self._lock:
                idle = self._idle.setdefault(model, [])
                idle.append(kept)
                del idle[:-_MOST_IDLE]

    def _take(self, model: Any, assistant: Any, setup: Setup) -> _Kept | None:
        with self._lock:
            idle = self._idle.get(model, [])
            found = next((kept for kept in reversed(idle) if kept.fits(assistant, setup)), None)
            if found is not None:
                idle.remove(found)
            return found


class _Kept:
    """A session, and what it is for."""

    def __init__(self, assistant: Any, setup: Setup) -> None:
        self.session = Session()
        self._assistant = None if assistant is None else weakref.ref(assistant)
        self._setup = setup

    def fits(self, assistant: Any, setup: Setup) -> bool:
        mine = None if self._assistant is None else self._assistant()
        return mine is assistant and self._setup == setup


SESSIONS = Sessions()
"""The one state that outlives calls: a function that is called for prompt after prompt has nowhere else to learn."""
