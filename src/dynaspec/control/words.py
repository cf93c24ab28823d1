"""How messages spell things."""

from __future__ import annotations


def either(names: tuple[str, ...]) -> str:
    """The names in quotes, as a choice."""
    *head, last = map(repr, names)
    return f"{', '.join(head)} or {last}" if head else last


def plain(value: object) -> object:
    """As the user wrote it: lists, not the tuples that they became."""
    return [plain(entry) for entry in value] if isinstance(value, tuple) else value
