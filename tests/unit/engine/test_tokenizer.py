from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dynaspec.contract.errors import CheckpointError, RequestError
from dynaspec.engine.tokenizer import Tokenizer
from unit.engine.texts import EOS, backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend(), eos_token=EOS)
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant>{% endif %}"
    )
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(str(folder))


def test_there_and_back(tokenizer: Tokenizer) -> None:
    for text in ("stop here", "é🙂 ", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == backend().get_vocab_size()


def test_special_tokens_are_decoded_where_wanted(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"a{EOS}")
    assert tokenizer.decode(tokens) == "a"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"a{EOS}"


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2"):
        tokenizer.encode("ab\udc00")


def test_a_chat_is_rendered_for_an_answer(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "user>hi\nassistant>"


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}]])
def test_chats_without_sense(tokenizer: Tokenizer, messages: list[object]) -> None:
    with pytest.raises(RequestError, match="chat"):
        tokenizer.render_chat(messages)  # type: ignore[arg-type]


def test_bad_words_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    words = tokenizer.bad_words(["stop", " q"])
    assert {tokenizer.decode(word) for word in words} == {"stop", " stop", "q", " q"}


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer could be loaded from the folder"):
        Tokenizer(str(tmp_path))
