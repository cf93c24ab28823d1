"""Server-sent events, as they come off a socket."""

from __future__ import annotations


class EventStream:
    """Cuts a ``text/event-stream`` into the data of its events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Takes bytes, however they were split; gives the data of the events that are complete now."""
        *lines, self._line = (self._line + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def close(self) -> list[bytes]:
        """The event that a stream ended with, where its blank line is missing."""
        return self.feed(b"\n\n")
