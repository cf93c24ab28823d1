from __future__ import annotations

import asyncio

import pytest

from dynaspec.api.engine_thread import Alarm, Stream, join, wake
from dynaspec.contract.errors import DynaspecError
from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def output(*parts: tuple[str, tuple[int, ...]], finished: bool = False, steps: int = 0) -> RequestOutput:
    """One with a continuation for each part."""
    outputs = tuple(
        CompletionOutput(
            index=i,
            text=text,
            token_ids=ids,
            cumulative_logprob=-1.0 * steps,
            logprobs=tuple({token: Logprob(-1.0, 1)} for token in ids),
            finish_reason="length" if finished else None,
            metrics=RequestMetrics(steps=steps),
        )
        for i, (text, ids) in enumerate(parts)
    )
    return RequestOutput("a", "p", (1,), outputs, finished)


def text(found: RequestOutput) -> str:
    return found.outputs[0].text


async def taken(stream: Stream) -> RequestOutput:
    async with asyncio.timeout(30):
        return await stream.take()


def test_joined_deltas_have_the_text_of_both_and_the_state_of_the_later() -> None:
    first = output(("ab", (1, 2)), ("", ()), steps=1)
    second = output(("c", (3,)), ("x", (9,)), finished=True, steps=2)
    joined = join(first, second)
    assert joined.finished
    assert [(c.text, c.token_ids) for c in joined.outputs] == [("abc", [1, 2, 3]), ("x", [9])]
    assert [tuple(map(tuple, c.logprobs or ())) for c in joined.outputs] == [((1,), (2,), (3,)), ((9,),)]
    for completion in joined.outputs:
        assert (completion.finish_reason, completion.metrics.steps, completion.cumulative_logprob) == (
            "length",
            2,
            -2.0,
        )


def test_a_join_without_log_probabilities_has_none() -> None:
    bare = RequestOutput("a", None, (1,), (CompletionOutput(0, "x", (1,)),), False)
    assert join(bare, bare).outputs[0].logprobs is None


async def test_outputs_that_wait_become_one() -> None:
    stream = Stream(asyncio.get_running_loop())
    stream.delta = True
    assert [stream.put(output((letter, (i,)))) for i, letter in enumerate("abc")] == [True, False, False]
    wake([stream])
    found = await taken(stream)
    assert (text(found), found.outputs[0].token_ids) == ("abc", [0, 1, 2])
    assert stream.put(output(("d", (3,)), finished=True))
    wake([stream])
    assert text(await taken(stream)) == "d"
    assert stream.ended


async def test_of_outputs_that_hold_everything_the_newest_stays() -> None:
    stream = Stream(asyncio.get_running_loop())
    assert stream.put(output(("a", (1,))))
    assert not stream.put(output(("ab", (1, 2))))
    wake([stream])
    assert text(await taken(stream)) == "ab"


async def test_an_error_comes_behind_what_was_there() -> None:
    stream = Stream(asyncio.get_running_loop())
    assert stream.put(output(("a", (1,))))
    assert not stream.fail(DynaspecError("gone"))
    wake([stream])
    assert text(await taken(stream)) == "a"
    assert not stream.ended
    with pytest.raises(DynaspecError, match="gone"):
        await taken(stream)
    assert stream.ended


async def test_an_error_wakes_a_reader() -> None:
    stream = Stream(asyncio.get_running_loop())
    reader = asyncio.create_task(taken(stream))
    await asyncio.sleep(0)
    assert stream.fail(DynaspecError("gone"))
    wake([stream])
    with pytest.raises(DynaspecError, match="gone"):
        await reader


async def test_a_reader_waits_for_what_comes_from_another_thread() -> None:
    streams = [Stream(asyncio.get_running_loop()) for _ in range(3)]
    readers = [asyncio.create_task(taken(stream)) for stream in streams]

    def deliver() -> None:
        wake([stream for stream in streams if stream.put(output(("a", (1,))))])

    await asyncio.to_thread(deliver)
    assert [text(await reader) for reader in readers] == ["a"] * 3


def test_a_wake_up_is_one_call_for_each_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [asyncio.new_event_loop() for _ in range(3)]
    loops[2].close()
    streams = [Stream(loop) for loop in loops for _ in range(4)]
    calls: list[asyncio.AbstractEventLoop] = []
    for loop in loops[:2]:
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args, at=loop: calls.append(at))
    wake(streams)
    assert calls == loops[:2]
    assert [stream.deserted for stream in streams[::4]] == [False, False, True]
    for loop in loops[:2]:
        loop.close()


async def test_who_has_left_is_gone() -> None:
    stream = Stream(asyncio.get_running_loop())
    assert not stream.deserted
    stream.leave()
    assert stream.deserted


class Bell:
    """An alarm, its clock, and who has been woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interval_s: float) -> None:
        self.now_s = 0.0
        self.woken: list[set[Stream]] = []
        monkeypatch.setattr("dynaspec.api.engine_thread.wake", lambda streams: self.woken.append(set(streams)))
        self.alarm = Alarm(interval_s, lambda: self.now_s)

    def ring(self, at_s: float, filled: list[Stream], urgent: list[Stream]) -> set[Stream]:
        """Who is woken."""
        self.now_s, self.woken = at_s, []
        self.alarm.ring(filled, urgent)
        return set().union(*self.woken)


def test_readers_are_woken_together_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    a, b, c = (Stream(loop) for _ in range(3))
    bell = Bell(monkeypatch, interval_s=0.02)
    assert bell.ring(0.0, [a, b], []) == {a, b}
    assert bell.ring(0.01, [a], []) == set()
    assert bell.ring(0.015, [b, c], [c]) == {c}, "the first output of c does not wait"
    assert bell.ring(0.018, [], [a]) == {a}, "neither does the last of a, which comes to what was waiting"
    assert bell.ring(0.021, [], []) == {b}
    assert bell.ring(0.045, [a, c], [c]) == {a, c}
    loop.close()


def test_without_an_interval_every_step_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    stream = Stream(loop)
    bell = Bell(monkeypatch, interval_s=0.0)
    assert bell.ring(1.0, [stream], []) == bell.ring(1.0, [stream], []) == {stream}
    loop.close()
