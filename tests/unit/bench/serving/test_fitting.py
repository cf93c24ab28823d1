from __future__ import annotations

import pytest

from dynaspec.bench.serving.fitting import fit_requests
from dynaspec.bench.serving.requests import Asked
from dynaspec.contract.errors import ConfigError
from unit.bench.serving.test_requests import Words

LONG = "a bb ccc dddd eeeee"


async def test_long_prompts_lose_their_beginning():
    asked = [Asked(LONG, 5), Asked("a bb", 5), Asked((1, 2, 3, 4, 5, 6), 5)]
    fitted = await fit_requests(asked, Words(), 8, is_chat=False)
    assert [one.prompt for one in fitted.requests] == [(3, 4, 5), "a bb", (4, 5, 6)]
    assert fitted.cut == 2
    assert not fitted.unchecked


async def test_chats_are_text():
    fitted = await fit_requests([Asked(LONG, 5), Asked((1, 2), 5)], Words(), 64 + 5 + 2, is_chat=True)
    assert [one.prompt for one in fitted.requests] == ["xxxx xxxxx", "x xx"]
    assert fitted.cut == 1


@pytest.mark.parametrize(("tokens", "length"), [(None, 8), (Words(), None)])
async def test_what_cannot_be_checked_is_left_alone(tokens, length):
    fitted = await fit_requests([Asked(LONG, 5)], tokens, length, is_chat=False)
    assert fitted.requests == (Asked(LONG, 5),)
    assert fitted.unchecked


async def test_no_room():
    with pytest.raises(ConfigError, match="answers of 8 tokens leave no room for a prompt in the model's 8"):
        await fit_requests([Asked(LONG, 8)], Words(), 8, is_chat=False)
