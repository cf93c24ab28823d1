"""The dashboard in a browser: what a person sees and does there."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from browser.serving import MODEL, Served, serving
from dynaspec import AsyncLLM

OpenPage = Callable[..., Any]

PROMPT = "the quick brown fox"
TOKENS = 60
KEY = "the-key-of-the-test"
PATIENCE_S = 60.0
PHONE = {"width": 360, "height": 740}

COLOURED_PIXELS = """([selector, name]) => {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
  probe.remove();
  const canvas = document.querySelector(selector);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    found += data[i] === red && data[i + 1] === green && data[i + 2] === blue && data[i + 3] === 255;
  }
  return found;
}"""


@pytest.fixture(scope="module")
def plain_text(served: Served) -> str:
    """What any client gets for the prompt."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}).encode()
    request = urllib.request.Request(f"{served.url}v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def until(page: Any, expression: str, argument: object = None) -> None:
    """Waits for what a script finds; Playwright's own way to wait for it is what the page's policy forbids."""
    deadline = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression, argument):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_S} s for {expression}")
        page.wait_for_timeout(50)


def connected(page: Any) -> Any:
    """The same page, once it has heard from the engine."""
    page.wait_for_selector("#model:not(:empty)")
    return page


def generate(page: Any, *, endpoint: str = "completions", speculate: bool = True) -> None:
    """Sends the page's first prompt and waits for the end of the answer."""
    page.fill("#try-prompt", PROMPT)
    page.fill("#try-tokens", str(TOKENS))
    page.select_option("#try-endpoint", endpoint)
    page.set_checked("#try-speculate", speculate)
    page.press("#try-prompt", "Control+Enter")
    page.wait_for_selector("#answer-facts dt:text('Ended by')")
    page.wait_for_selector("#try-send:enabled")


def facts(page: Any) -> dict[str, str]:
    """What is said about the answer."""
    names, values = (page.locator(f"#answer-facts {tag}").all_text_contents() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def sideways(page: Any) -> int:
    """Pixels that the page is wider than the window."""
    found: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found


def test_the_page_says_what_is_served_and_how(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url))
    assert page.text_content("#model") == MODEL
    assert page.text_content("#policy") == "constant"
    assert page.text_content("#drafters td") == "draft_model"
    assert page.locator(".tile").count() == 6
    assert page.locator(".chart").count() == 7
    assert "Nothing was decoded" in page.inner_text("#charts")


def test_an_answer_is_coloured_by_who_wrote_it_and_complete(
    open_page: OpenPage, served: Served, plain_text: str
) -> None:
    page = connected(open_page(served.url))
    generate(page)
    assert page.text_content("#answer") == plain_text
    sources = page.locator("#answer .run").evaluate_all("runs => runs.map(run => run.dataset.source)")
    assert set(sources) == {"draft", "target"}
    assert all(one != other for one, other in pairwise(sources))
    looks = [
        page.locator(f"#answer .run[data-source={source}]").first.evaluate(
            "run => [getComputedStyle(run).backgroundColor, getComputedStyle(run).textDecorationStyle]"
        )
        for source in ("draft", "target")
    ]
    assert looks[0][0] != looks[1][0]
    assert looks[0][1] != looks[1][1]  # not by colour alone
    said = facts(page)
    assert said["Tokens"] == str(TOKENS)
    assert float(said["Acceptance length"]) > 1
    assert said["Ended by"] == "length"


def test_without_speculation_the_target_writes_the_same_alone(
    open_page: OpenPage, served: Served, plain_text: str
) -> None:
    page = connected(open_page(served.url))
    generate(page, speculate=False)
    assert page.text_content("#answer") == plain_text
    assert page.locator("#answer .run").count() == page.locator("#answer .run[data-source=target]").count() == 1
    assert facts(page)["By the drafter"] == "0 %"


def test_a_chat_is_answered_too(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url))
    generate(page, endpoint="chat")
    assert page.locator("#answer .run").count() > 0


def test_what_the_server_refuses_is_said(open_page: OpenPage, served: Served, complaints: list[str]) -> None:
    page = connected(open_page(served.url))
    page.fill("#try-tokens", "100000")
    page.click("#try-send")
    page.wait_for_selector("#answer .failed")
    assert "expected" in page.text_content("#answer")
    assert [said for said in complaints if "400" not in said] == []
    complaints.clear()  # browsers report every refused request


def test_charts_draw_what_was_decoded(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url))
    page.get_by_label("1 min").check()
    for _ in range(3):  # an area needs some seconds: one answer is a point or a slope
        generate(page)
        page.wait_for_timeout(1000)
    until(page, "document.querySelectorAll('#charts .canvas > .empty:not([hidden])').length === 0")
    page.wait_for_selector(".bar")
    throughput = "#charts .chart:nth-child(1) canvas"
    for name in ("draft-fill", "target-fill"):
        until(page, COLOURED_PIXELS, [throughput, name])
    assert page.locator(".bar").count() == 3
    assert page.locator(".bar .share").first.inner_text() != "0"
    assert "tokens a step instead of one" in page.inner_text("#headline")


def test_a_shorter_time_can_be_chosen_by_keyboard(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url))
    page.focus("#spans input:checked")
    page.keyboard.press("ArrowRight")
    assert page.locator("#spans input:checked").get_attribute("value") == "600"


def test_nothing_sticks_out_on_a_phone(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url, **PHONE, device_scale_factor=2))
    assert sideways(page) == 0
    generate(page)
    page.wait_for_selector(".bar")
    assert sideways(page) == 0
    page.click("#how summary")
    edges = page.locator("main > .card, .tile, button:visible, .decision .canvas, .drafters, #charts").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().right)"
    )
    assert max(edges) <= PHONE["width"]


def test_a_phone_shows_all_of_it_on_three_screens(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url, width=390, height=844, device_scale_factor=2))
    generate(page)
    page.wait_for_selector(".bar", state="attached")
    headline = page.locator("#headline").bounding_box()
    assert headline["y"] + headline["height"] < 844 / 2
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 844
    page.locator("#charts .chart").last.scroll_into_view_if_needed()
    assert page.locator("#charts .chart").last.bounding_box()["x"] >= 0
    assert sideways(page) == 0


def test_how_it_is_decided_is_open_where_there_is_room(open_page: OpenPage, served: Served) -> None:
    wide, narrow = open_page(served.url), open_page(served.url, **PHONE)
    assert connected(wide).locator("#drafters").is_visible()
    assert not connected(narrow).locator("#drafters").is_visible()


def test_dark_and_light_follow_the_system_until_one_is_chosen(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url, color_scheme="dark"))
    dark = background(page)
    page.emulate_media(color_scheme="light")
    light = background(page)
    assert lightness(dark) < 60 < 200 < lightness(light)
    for word, expected in (("Light", light), ("Dark", dark)):
        page.click("#theme")
        assert page.inner_text(".theme-word") == word
        assert background(page) == expected
    page.reload()
    assert background(page) == dark
    connected(page).click("#theme")
    assert background(page) == light


def background(page: Any) -> list[int]:
    found: list[int] = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    return found


def lightness(colour: list[int]) -> float:
    return sum(colour) / len(colour)


def test_motion_is_left_out_where_it_is_not_wanted(open_page: OpenPage, served: Served) -> None:
    page = connected(open_page(served.url, reduced_motion="reduce"))
    page.evaluate("document.querySelector('#state').dataset.state = 'serving'")
    animation = "getComputedStyle(document.querySelector('#state'), '::before').animationName"
    assert page.evaluate(animation) == "none"


def test_a_key_is_asked_for_and_kept_in_the_tab(open_page: OpenPage, llm: AsyncLLM, complaints: list[str]) -> None:
    with serving(llm, api_key=KEY) as server:
        page = open_page(server.url)
        page.fill("#key-dialog[open] #key-input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-wrong:not([hidden])")
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        assert connected(page).text_content("#model") == MODEL
        generate(page)
        assert page.locator("#answer .run").count() > 0
        assert page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]") == [
            [KEY],
            [],
            "",
        ]
        connected(page).context.close()
    assert [said for said in complaints if "401" not in said] == []
    complaints.clear()


def test_a_server_that_has_gone_is_said_to_be_gone(open_page: OpenPage, llm: AsyncLLM, complaints: list[str]) -> None:
    with serving(llm) as server:
        page = connected(open_page(server.url))
    page.wait_for_selector("#notice:not([hidden])")
    assert "No connection to the server" in page.inner_text("#notice")
    assert page.inner_text("#state") == "no connection"
    page.wait_for_selector("#notice-text:text('in 2 s')")
    assert all("ERR_" in said for said in complaints)
    complaints.clear()
