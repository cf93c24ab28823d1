"""Hundreds of requests at random that come, leave, are aborted and cancelled while memory runs short."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import reduce
from typing import Any

import pytest

from dynaspec import AsyncLLM
from dynaspec.api.engine_thread import join
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind
from soak_callers import RequestSpec, draw_requests
from support.checkpoints import VOCAB, Pair
from support.decoder_heads import FittedHead
from support.engines import PlainDecoding, assert_same, kv_bytes, open_async_llm
from support.seen_drafts import check_drafts, watch_drafts
from support.storm import Visit, draw_visits, single_runs, with_kind

REQUESTS = 300
PATIENCE_S = 300.0
SPECS = draw_requests(40, vocab_size=VOCAB, longest_prompt=50, most_tokens=70, seed=5)


@pytest.fixture(scope="module")
def expected(plain: PlainDecoding) -> list[RequestOutput]:
    return single_runs(plain, SPECS)


async def read(llm: AsyncLLM, spec: RequestSpec, visit: Visit, request_id: str, seen: list[RequestOutput]) -> None:
    """Reads a stream to where its fate wants; ``seen`` gets the outputs, the caller's cancellation or not."""
    stream = llm.generate(spec.prompt, with_kind(spec.params, visit.kind), request_id=request_id)
    async for output in stream:
        seen.append(output)
        if visit.fate == "leave" and len(seen) > 100 * visit.leave_after_s:
            break
    await stream.aclose()


async def call(llm: AsyncLLM, visit: Visit, request_id: str) -> tuple[str, list[RequestOutput]]:
    """One caller, from coming to going; what became of it, and what it got."""
    await asyncio.sleep(visit.delay_s)
    seen: list[RequestOutput] = []
    reading = asyncio.create_task(read(llm, SPECS[visit.request], visit, request_id, seen))
    if visit.fate in ("abort", "cancel"):
        await asyncio.wait([reading], timeout=visit.leave_after_s)
        if visit.fate == "abort":
            await llm.abort(request_id)
        else:
            reading.cancel()
    try:
        await reading
    except asyncio.CancelledError:
        return "cancelled", seen
    if not seen or not seen[-1].finished:
        return "left", seen
    ends = {completion.finish_reason for completion in seen[-1].outputs}
    return ("aborted" if "abort" in ends else "finished"), seen


@pytest.mark.parametrize(
    ("who", "async_scheduling"),
    [("draft model", False), ("draft model", True), ("head", False), ("head", True)],
    ids=["serial", "async", "head, serial", "head, async"],
)
async def test_every_request_gets_what_it_asked_for_or_is_gone(
    who: str, async_scheduling: bool, tiny: Pair, fitted_head: FittedHead, expected: list[RequestOutput]
) -> None:
    drafter = fitted_head.path if who == "head" else tiny.drafter
    options: dict[str, Any] = {
        "speculative_config": {"model": drafter, "policy": "constant", "num_speculative_tokens": 4},
        "async_scheduling": async_scheduling,
        "max_num_seqs": 8,
        "kv_cache_memory": kv_bytes(12, tiny.target, drafter),
    }
    visits = draw_visits(REQUESTS, len(SPECS), within_s=2.0, seed=6)
    with watch_drafts() as seen_drafts, open_async_llm(tiny.target, **options) as llm:
        async with asyncio.timeout(PATIENCE_S):
            calls = (call(llm, visit, str(i)) for i, visit in enumerate(visits))
            results = await asyncio.gather(*calls)
            while (seen := await llm.snapshot()).running or seen.waiting:
                await asyncio.sleep(0.01)
        assert seen.kv_blocks_used == 0
        await llm.verify_integrity()
        assert not llm._thread._streams
        stats = llm.stats()
    for visit, (end, outputs) in zip(visits, results, strict=True):
        check(visit, end, outputs, expected[visit.request])
    ends = Counter(end for end, _ in results)
    assert min(ends[end] for end in ("finished", "aborted", "left", "cancelled")) > 10, ends
    assert stats.preemptions > 0
    assert stats.proposer_faults == 0
    if who == "head":
        check_drafts(seen_drafts[:: 1 + len(seen_drafts) // 150], fitted_head)


def check(visit: Visit, end: str, outputs: list[RequestOutput], wanted: RequestOutput) -> None:
    """One last output at most; a whole answer is that of a single run, and a part of one its beginning."""
    assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
    may_end = {"finish": ("finished",), "leave": ("finished", "left"), "abort": ("finished", "aborted")}
    assert end in may_end.get(visit.fate, ("finished", "cancelled"))
    if not outputs:
        return
    whole = reduce(join, outputs) if visit.kind is RequestOutputKind.DELTA else outputs[-1]
    if end == "finished":
        assert_same([whole], [wanted])
    else:
        for found, complete in zip(whole.outputs, wanted.outputs, strict=True):
            assert complete.token_ids[: len(found.token_ids)] == found.token_ids
