"""What callers do to a server: most ask for something sensible, and not all wait for the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Fate = Literal["read", "dawdle", "leave", "cancel"]
"""The answer is read; read slowly; the connection is closed after some events; or after some time."""

_FATES: tuple[Fate, ...] = ("read", "read", "read", "dawdle", "leave", "cancel")


@dataclass(frozen=True, slots=True)
class Visit:
    """A wish, and how its caller behaves."""

    wish: int
    stream: bool
    fate: Fate
    patience_s: float
    """Of who cancels; and the pause of who dawdles."""
    events: int
    """After which who leaves has seen enough, or who dawdles pauses."""


@dataclass(frozen=True, slots=True)
class Blunder:
    """A request that must be refused."""

    name: str
    status: int
    """Of the answer."""
    body: bytes
    method: str = "POST"
    path: str = "/v1/completions"


BLUNDERS = (
    Blunder("no JSON", 400, b'{"prompt": '),
    Blunder("no object", 400, b"[1, 2]"),
    Blunder("no prompt", 400, b"{}"),
    Blunder("empty prompt", 400, b'{"prompt": ""}'),
    Blunder("token outside the vocabulary", 400, b'{"prompt": [999999999]}'),
    Blunder("text as a number", 400, b'{"prompt": "a", "temperature": "hot"}'),
    Blunder("number out of range", 400, b'{"prompt": "a", "top_p": 7}'),
    Blunder("longer than the model", 400, b'{"prompt": [' + b"5, " * 20_000 + b"5]}"),
    Blunder("unknown model", 404, b'{"model": "nobody", "prompt": "a"}'),
    Blunder("unknown path", 404, b"{}", path="/v1/nothing"),
    Blunder("wrong method", 405, b"", method="GET"),
    Blunder("chat without messages", 400, b'{"messages": []}', path="/v1/chat/completions"),
)

Call = Visit | Blunder


def draw_calls(wishes: int, *, patience_s: float, seed: int, blunders: float = 0.03) -> Iterator[Call]:
    """Calls without end.

    Args:
        wishes: how many there are to choose from.
        patience_s: the longest that somebody has.
        blunders: share of the calls.
    """
    dice = random.Random(seed)
    while True:
        if dice.random() < blunders:
            yield dice.choice(BLUNDERS)
            continue
        yield Visit(
            wish=dice.randrange(wishes),
            stream=dice.random() < 0.7,
            fate=dice.choice(_FATES),
            patience_s=dice.random() ** 2 * patience_s,
            events=dice.randrange(1, 8),
        )
