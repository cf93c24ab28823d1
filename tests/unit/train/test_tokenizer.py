from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dynaspec.contract.errors import ConfigError
from dynaspec.train.tokenizer import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, path, max_length=128)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\t  x",
        "def f():\n        return 12345\n",
        "größe ☃ 𝔘 नमस्ते",
        "".join(map(chr, range(256))),
    ],
)
def test_transformers_reads_the_same(tokenizer, loaded, text):
    ids = loaded(text).input_ids
    assert ids == tokenizer.encode(text).ids
    assert loaded.decode(ids) == text


def test_end_of_text_has_id_zero(tokenizer, loaded):
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID == 0
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id) == (0, 0, 0)
    assert len(loaded) == tokenizer.get_vocab_size() <= 300


def test_digits_stand_alone(tokenizer):
    assert len(tokenizer.encode("2024").ids) == 4


def test_chat_looks_like_a_training_document(loaded):
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "Question: What is 1 + 1?\nAnswer:"
    messages = [
        {"role": "system", "content": "Be brief."},
        *messages,
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Why?"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("Be brief.\n\nQuestion: What is 1 + 1?\nAnswer: 2<|endoftext|>Question: Why?\nAnswer:")


def test_unknown_role_is_refused(loaded):
    with pytest.raises(Exception, match="role: got tool, expected system, user or assistant"):
        loaded.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_too_small_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size: got 256, expected at least 257"):
        train_tokenizer(["x"], 256)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json.* expected what the stage 'prepare' writes"):
        load_tokenizer(tmp_path)
