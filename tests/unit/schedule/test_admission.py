from __future__ import annotations

import pytest

from dynaspec.contract.errors import RequestError
from unit.engine.fakes import prompt, request
from unit.schedule.driver import Driver, chunks, ids


def test_requests_are_admitted_in_order_of_arrival_as_far_as_lanes_go() -> None:
    driver = Driver(lanes=2)
    driver.add(*(request(name, prompt(5, i), most=2) for i, name in enumerate("abc")))
    batch = driver.step()
    assert chunks(batch) == [("a", 0, 5, True), ("b", 0, 5, True)]
    assert [(a.request.id, a.lane, a.cached_blocks) for a in batch.admitted] == [("a", 0, ()), ("b", 1, ())]
    assert (batch.waiting, driver.scheduler.waiting, driver.scheduler.running) == (1, 1, 2)
    assert ids(driver.step()) == ["a", "b"]  # both end here
    assert chunks(driver.step()) == [("c", 0, 5, True)]


def test_nobody_overtakes_a_request_that_does_not_fit_yet() -> None:
    driver = Driver(blocks=6, lanes=3, caching=False)
    driver.add(request("a", prompt(12), most=8), request("large", prompt(13, 1)), request("small", prompt(2, 2)))
    batch = driver.step()
    assert [c[0] for c in chunks(batch)] == ["a"]
    assert driver.scheduler.waiting == 2


def test_an_admission_leaves_a_block_for_everyone_who_runs() -> None:
    driver = Driver(blocks=4, caching=False)
    driver.add(request("a", prompt(8)), request("b", prompt(8, 1)))
    driver.step()
    assert (driver.scheduler.running, driver.tables.pool.free_count) == (1, 2)


def test_cached_blocks_that_nobody_holds_count_as_taken() -> None:
    driver = Driver(blocks=6)
    driver.add(request("old", prompt(9), most=1))
    driver.finish()
    driver.add(request("a", prompt(6, 1), most=10))
    driver.step()
    driver.add(request("b", prompt(9), most=10))  # two blocks from the cache, which are among the four free ones
    driver.step()
    assert (driver.scheduler.running, driver.tables.pool.free_count) == (2, 1)
    driver.scheduler.abort(driver.scheduler._running[1])
    driver.add(request("c", prompt(5, 2), most=3), request("d", prompt(9), most=10))
    driver.step()
    assert (driver.scheduler.running, driver.scheduler.waiting) == (2, 1)
    assert driver.tables.pool.free_count == 2  # enough for d's one fresh block, but not for its cached ones too


def test_long_prompts_are_computed_in_chunks_within_the_row_budget() -> None:
    driver = Driver(rows=8)
    driver.add(request("a", prompt(20), most=4), request("b", prompt(3, 1), most=4))
    assert chunks(driver.step()) == [("a", 0, 8, False)]
    assert chunks(driver.step()) == [("a", 8, 8, False)]
    assert chunks(driver.step()) == [("a", 16, 4, True), ("b", 0, 3, True)]
    batch = driver.step()
    assert (ids(batch), chunks(batch)) == (["a", "b"], [])


def test_a_last_prompt_token_left_alone_is_decoded() -> None:
    driver = Driver(rows=8)
    driver.add(request("a", prompt(9), most=4))
    assert chunks(driver.step()) == [("a", 0, 8, False)]
    batch = driver.step(depth=2)
    assert (ids(batch), chunks(batch), batch.granted.tolist()) == (["a"], [], [2])
    assert batch.lengths.tolist() == [9]


def test_a_prompt_of_one_token_is_decoded_at_once() -> None:
    driver = Driver()
    driver.add(request("a", [5], most=4))
    batch = driver.plan(3)
    assert (ids(batch), [a.request.id for a in batch.admitted], batch.granted.tolist()) == (["a"], ["a"], [3])


@pytest.mark.parametrize("rows", [4, 5, 8])
@pytest.mark.parametrize("depth", [0, 3])
def test_every_decoder_runs_prefills_go_on_and_a_pass_keeps_within_its_rows(rows: int, depth: int) -> None:
    driver = Driver(rows=rows, lanes=4)
    driver.add(*(request(name, prompt(2, i), most=90) for i, name in enumerate("ab")))
    driver.add(request("long", prompt(30, 5), most=2))
    computed = []
    while len(computed) < 30:
        batch = driver.step(depth)
        assert len(batch.requests) + int(batch.granted.sum()) + batch.prefill_tokens <= rows
        assert len(computed) == 0 or set("ab") <= set(batch.ids)
        computed.append(sum(chunk.count for chunk in batch.chunks if chunk.request.id == "long"))
        if "long" in batch.ids:
            break
    assert "long" in batch.ids
    assert sum(computed) in (29, 30)


def test_drafts_that_fill_the_pass_do_not_keep_others_out() -> None:
    driver = Driver(rows=8, lanes=2)
    driver.add(request("a", prompt(2), most=80))
    driver.step()
    assert driver.step(depth=20).granted.tolist() == [7]
    driver.add(request("b", prompt(12, 1), most=2))
    assert chunks(driver.step(depth=20)) == [("b", 0, 4, False)]


def test_a_request_larger_than_the_cache_is_refused() -> None:
    driver = Driver(blocks=4)
    driver.scheduler.ensure_fits(request("a", prompt(10), most=6))
    with pytest.raises(RequestError, match="17 tokens but the KV cache holds 16"):
        driver.scheduler.ensure_fits(request("b", prompt(10), most=7))


def test_a_prefix_hit_computes_only_the_rest() -> None:
    driver = Driver()
    text = prompt(11)
    driver.add(request("a", text, most=2))
    driver.finish()
    driver.add(request("b", [*text[:8], 1, 2, 3], most=2))
    batch = driver.step()
    assert chunks(batch) == [("b", 8, 3, True)]
    assert batch.admitted[0].cached_blocks == (0, 1)
    assert batch.admitted[0].request.cached_tokens == 8


def test_a_prompt_that_is_cached_but_for_one_token_decodes_at_once() -> None:
    driver = Driver()
    text = prompt(9)
    driver.add(request("a", text, most=2))
    driver.finish()
    driver.add(request("b", text, most=2))
    batch = driver.plan(1)
    assert (ids(batch), chunks(batch), batch.lengths.tolist()) == (["b"], [], [9])


def test_prompt_logprobs_read_no_cache() -> None:
    driver = Driver()
    text = prompt(11)
    driver.add(request("a", text, most=2))
    driver.finish()
    driver.add(request("b", text, most=2, prompt_logprobs=0))
    batch = driver.step()
    assert chunks(batch) == [("b", 0, 11, True)]
    assert batch.admitted[0].cached_blocks == ()


def test_concurrent_requests_share_a_prefix() -> None:
    driver = Driver()
    text = prompt(12)
    driver.add(request("a", text, most=10))
    driver.step()
    driver.add(request("b", text, most=10))
    driver.step()
    assert driver.tables.blocks(0)[:2] == driver.tables.blocks(1)[:2]
    driver.finish()
    assert driver.tables.pool.free_count == 64
