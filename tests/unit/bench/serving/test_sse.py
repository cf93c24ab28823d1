from __future__ import annotations

import pytest

from dynaspec.bench.serving.sse import EventStream

STREAM = b': hello\r\n\r\ndata: {"a": 1}\n\nevent: x\ndata:two\ndata: lines\n\n\n\ndata: [DONE]\r\n\r\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_do_not_depend_on_how_bytes_arrive(size):
    stream = EventStream()
    found = [event for i in range(0, len(STREAM), size) for event in stream.feed(STREAM[i : i + size])]
    assert found == EVENTS
    assert stream.close() == []


def test_the_last_blank_line_may_be_missing():
    stream = EventStream()
    assert stream.feed(b"data: last") == []
    assert stream.close() == [b"last"]
