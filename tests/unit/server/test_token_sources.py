from __future__ import annotations

from dataclasses import replace

import pytest

from dynaspec import AsyncLLM
from dynaspec.contract.outputs import RequestMetrics
from dynaspec.server.replies import TokenSources, TokenTexts
from unit.server.serving import Client

D, T = "draft", "target"


def follow(*deltas: tuple[int, tuple[tuple[int, int], ...]]) -> list[list[str]]:
    """Sources of deltas: tokens in each, and the steps that it adds."""
    sources, metrics, found = TokenSources(), RequestMetrics(), []
    for count, steps in deltas:
        metrics = replace(metrics, per_step=metrics.per_step + steps)
        found.append(list(sources.add(count, metrics)))
    return found


def test_a_step_has_accepted_tokens_and_one_of_the_targets() -> None:
    assert follow((1, ()), (3, ((4, 2),)), (1, ((4, 0),)), (1, ((0, 0),))) == [[T], [D, D, T], [T], [T]]


def test_a_request_may_end_with_an_accepted_token() -> None:
    assert follow((1, ()), (2, ((4, 2),))) == [[T], [D, D]]


def test_steps_that_come_together() -> None:
    assert follow((7, ((3, 1), (3, 3)))) == [[T, D, T, D, D, D, T]]
    assert follow((4, ((3, 1), (3, 1)))) == [[T, D, T, D]]


def test_a_prompt_that_is_read_again_gives_a_token_of_the_targets() -> None:
    assert follow((1, ()), (2, ((1, 1),)), (1, ()), (3, ((2, 2),))) == [[T], [D, T], [T], [D, D, T]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_says_who_wrote_its_tokens(client: Client, path: str) -> None:
    asked = {"prompt": "1 2 3 4"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "1 2"}]}
    wishes = {"metrics": "detailed"}
    chunks = await client.stream(
        path, temperature=0, max_tokens=40, ignore_eos=True, speculation=wishes, return_token_ids=True, **asked
    )
    choices = [choice for chunk in chunks for choice in chunk["choices"] if "token_sources" in choice]
    report = choices[-1]["speculation"]
    written = [token for choice in choices for token in choice["token_sources"]]
    assert [len(choice["token_sources"]) for choice in choices] == [len(choice["token_ids"]) for choice in choices]
    assert sum(token["source"] == D for token in written) == report["accepted"] > 0
    told = "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)
    assert told.startswith("".join(token["text"] for token in written))


async def test_reports_add_up(client: Client) -> None:
    answer = await client.ask(
        "/v1/completions", prompt="1 2 3 4", temperature=0, max_tokens=30, ignore_eos=True,
        speculation={"metrics": "detailed"},
    )  # fmt: skip
    report = answer["choices"][0]["speculation"]
    assert report["steps"] == len(report["per_step"])
    assert report["drafted"] == sum(drafted for drafted, _ in report["per_step"]) == sum(report["drafted_per_pos"])
    assert report["accepted"] == sum(accepted for _, accepted in report["per_step"]) == sum(report["accepted_per_pos"])
    assert report["draft_acceptance_rate"] == report["accepted"] / report["drafted"]
    assert 1 <= report["mean_acceptance_length"] <= 4


@pytest.mark.parametrize(
    ("wishes", "told"), [(None, False), ({"metrics": "off"}, False), ({"metrics": "summary"}, True)]
)
async def test_answers_speak_of_drafts_when_asked(client: Client, wishes: dict[str, str] | None, told: bool) -> None:
    body = {"prompt": "1 2 3 4", "temperature": 0, "speculation": wishes}
    [choice] = (await client.ask("/v1/completions", **body))["choices"]
    assert ("speculation" in choice) == told
    assert "per_step" not in choice.get("speculation", {})
    chunks = await client.stream("/v1/completions", **body)
    assert ["speculation" in chunk["choices"][0] for chunk in chunks] == [False] * (len(chunks) - 1) + [told]
    assert not any("token_sources" in chunk["choices"][0] for chunk in chunks)


async def test_a_request_may_go_without_drafts(client: Client) -> None:
    for limit in ({"max_draft_tokens": 0}, {"speculation": {"max_draft_tokens": 0, "metrics": "summary"}}):
        body = {"prompt": "1 2 3 4", "temperature": 0, "speculation": {"metrics": "summary"}, **limit}
        [choice] = (await client.ask("/v1/completions", **body))["choices"]
        report = choice["speculation"]
        assert (report["drafts"], report["mean_acceptance_length"], report["draft_acceptance_rate"]) == (0, None, None)


def test_token_texts_make_up_the_text(llm: AsyncLLM) -> None:
    text = "naïve 日本 🙂 the fox"
    grown = TokenTexts(llm.tokenizer, (), skip_special_tokens=True)
    texts = grown.add(llm.tokenizer.encode(text))
    assert "".join(texts) == text
    assert grown.length == len(text)
    assert "日" in texts
    assert "" in texts
