from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from dynaspec.contract.errors import CheckpointError, RequestError
from dynaspec.engine.tokenizer import Tokenizer
from unit.engine.texts import EOS, backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend(), eos_token=EOS)
    fast.chat_template = (
        "{% for t in tools or [] %}{{ t.name }};{% endfor %}{{ mood }}"
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


def test_what_a_template_is_told(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "user>hi\n"
    assert tokenizer.render_chat(messages, tools=[{"name": "add"}]).startswith("add;user")
    assert tokenizer.render_chat(messages, variables={"mood": "!"}).startswith("!user")
    assert tokenizer.render_chat(messages, template="{{ messages[0].content }}") == "hi"
    continued = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert continued == "user>hi"


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"template": "{{ raise_exception('no chats') }}"}, "no chats"),
        ({"template": "{% for"}, "refused"),
        ({"template": "{{ raise_exception('x' * 1000) }}"}, "x" * 300 + "…$"),
        ({"variables": {"tools": []}}, "'tools' has a meaning of its own"),
        ({"variables": {"messages": []}}, "'messages' has a meaning of its own"),
        ({"continue_final_message": True}, "not compatible"),
    ],
)
def test_what_a_template_refuses(tokenizer: Tokenizer, wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        tokenizer.render_chat([{"role": "user", "content": "hi"}], **wishes)


def test_the_bytes_of_tokens_make_up_the_text(tokenizer: Tokenizer) -> None:
    text = "é🙂 €a stop"
    spelled = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    assert b"".join(part for part in spelled if part is not None).decode() == text
    assert "".join(map(tokenizer.spell, tokenizer.encode("a é"))) == "aĠÃ©"
    assert tokenizer.spell(10**6) == ""


def test_the_longest_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token == len(EOS)


def test_where_tokens_begin(folder: Path, tokenizer: Tokenizer) -> None:
    """Tokens within a character begin with it; and a space belongs to its token, whatever the post-processor says."""
    assert tokenizer.encode_at("a stop€é") == (tokenizer.encode("a stop€é"), [0, 1, 2, 6, 6, 7])
    assert tokenizer.beginning == ()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend(), eos_token=EOS, bos_token=EOS)
    fast.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(f"{EOS} $A", special_tokens=[(EOS, fast.eos_token_id)]),
        ]
    )
    fast.save_pretrained(folder / "trimmed")
    trimmed = Tokenizer(str(folder / "trimmed"))
    assert trimmed.encode_at("a stop")[1] == [0, 1, 2]
    assert trimmed.beginning == (fast.eos_token_id,)


def test_what_tokens_stand_for(tokenizer: Tokenizer) -> None:
    spelled = tokenizer.spellings()
    assert len(spelled) == tokenizer.vocab_size
    for text in ("é🙂 €a stop", "\n\t"):
        assert b"".join(spelled[token][1] for token in tokenizer.encode(text)).decode() == text
    assert [what for what in spelled.values() if what[0]] == [(True, EOS.encode())]


def test_long_texts_are_nothing_to_warn_of(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    assert len(tokenizer.encode("q" * 5000)) == 5000
    assert not caplog.records


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


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=backend(), eos_token=EOS).save_pretrained(tmp_path)
    bare, chat = Tokenizer(str(tmp_path)), [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="the model has no chat template"):
        bare.render_chat(chat)
    assert bare.render_chat(chat, template="{{ messages[0].content }}!") == "hi!"
