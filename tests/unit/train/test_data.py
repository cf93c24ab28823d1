"""Documents, their held-out part, the tokenizer, and rows of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dynaspec.contract.errors import ConfigError
from dynaspec.train.data import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    Document,
    Holdout,
    Mixture,
    Pool,
    RowSampler,
    TokenSet,
    load_corpus,
    load_holdout,
    load_tokenizer,
    problem_index,
    read_code,
    read_maths,
    save_tokenizer,
    split,
    standard_library,
    token_set,
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


@settings(max_examples=200)
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


def test_committed_list_holds_out_about_three_percent():
    holdout = load_holdout()
    assert len(holdout.maths) == 224
    assert all(0 <= i < 7473 for i in holdout.maths)
    assert len(holdout.code) == 18
    library = standard_library()
    present = [name for name in holdout.code if (library / name).is_file()]
    assert present, "the list names files of the standard library"


def test_held_out_documents_are_never_in_the_training_split(library, gsm8k):
    holdout = load_holdout()
    corpus = load_corpus(library, gsm8k)
    train_names = {d.name for d in corpus.train}
    assert train_names.isdisjoint(holdout.code)
    assert not [d for d in corpus.train if d.kind == "maths" and problem_index(d) in holdout.maths]
    assert {d.name for d in corpus.held_out if d.kind == "code"} == {"sched.py", "chunk.py"}
    assert {problem_index(d) for d in corpus.held_out if d.kind == "maths"} == {i for i in holdout.maths if i < 120}
    assert train_names.isdisjoint(d.name for d in corpus.held_out)


def test_tests_and_tables_are_left_out(library):
    (library / "encodings").mkdir()
    (library / "encodings" / "table.py").write_text("x = 1\n")
    (library / "html").mkdir()
    (library / "html" / "entities.py").write_text("x = 1\n")
    (library / "_sysconfigdata_x.py").write_text("x = 1\n")
    (library / "latin.py").write_bytes("é = 1\n".encode("latin-1"))
    names = {d.name for d in read_code(library)}
    assert names == {f"m{i}.py" for i in range(12)} | {"sched.py", "chunk.py"}


def test_what_is_held_out_is_named():
    documents = [Document(f"p/{i}.py", "code", "x") for i in range(100)]
    documents += [Document(f"gsm8k/{i}", "maths", "y") for i in range(100)]
    corpus = split(documents, Holdout(frozenset({"p/1.py", "p/30.py"}), frozenset({7})))
    assert len(corpus.train) == 197
    assert [document.name for document in corpus.held_out] == ["p/1.py", "p/30.py", "gsm8k/7"]


def test_nothing_held_out_without_names(library):
    assert load_corpus(library, None, Holdout(frozenset(), frozenset())).held_out == ()


def test_missing_input_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"corpus: got .*nowhere.*, expected a folder"):
        read_code(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no usable \.py file"):
        read_code(tmp_path)
    with pytest.raises(ConfigError, match=r"gsm8k: got .*none\.jsonl"):
        read_maths(tmp_path / "none.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "q", "answer": "a"}\n{"question": "q"}\n')
    with pytest.raises(ConfigError, match=r"gsm8k: line 2 .* expected an object with"):
        read_maths(bad)


def test_every_document_ends_with_end_of_text(tokens, documents, tokenizer):
    assert tokens.documents == len(documents)
    for i, document in enumerate(documents):
        ids = tokens.document(i)
        assert ids[-1] == END_OF_TEXT_ID
        assert tokenizer.decode(ids[:-1].tolist()) == document.text


def test_stored_tokens_come_back(tokens, tmp_path):
    tokens.save(tmp_path / "t.npz")
    again = TokenSet.load(tmp_path / "t.npz")
    assert np.array_equal(again.tokens, tokens.tokens)
    assert np.array_equal(again.starts, tokens.starts)
    with pytest.raises(ConfigError, match=r"tokens: .*none\.npz.* does not exist"):
        TokenSet.load(tmp_path / "none.npz")


def test_an_epoch_shows_every_token_once():
    numbers = token_set([np.arange(i * 7, i * 7 + 7, dtype=np.uint16) for i in range(10)])
    sampler = RowSampler(numbers, seq_len=5, seed=3)
    rows = sampler.batch(0, sampler.rows_per_epoch)
    seen = rows[:, :-1].flatten().tolist()
    assert len(set(seen)) == len(seen) == sampler.rows_per_epoch * 5


def test_rows_depend_on_seed_and_number_alone(tokens):
    a, b = RowSampler(tokens, 16, seed=1), RowSampler(tokens, 16, seed=1)
    late = b.batch(a.rows_per_epoch + 2, 3)
    first = a.batch(0, a.rows_per_epoch + 5)
    assert torch.equal(first[-3:], late)
    assert torch.equal(b.batch(0, 4), first[:4])
    assert not torch.equal(RowSampler(tokens, 16, seed=2).batch(0, 4), first[:4])
    assert not torch.equal(first[:4], first[a.rows_per_epoch : a.rows_per_epoch + 4])


def test_too_long_rows_are_refused(tokens):
    with pytest.raises(ConfigError, match="seq_len: got 100000, expected fewer than"):
        RowSampler(tokens, 100_000, seed=0)


def test_mixture_draws_both_in_order(tokens):
    main, other = RowSampler(tokens, 16, seed=1), RowSampler(tokens, 16, seed=2)
    mixed = Mixture(main, other, 0.25)
    batch = mixed.batch(8, 4)
    assert torch.equal(batch[:3], main.batch(6, 3))
    assert torch.equal(batch[3:], other.batch(2, 1))
    assert torch.equal(Mixture(main, other, 0.0).batch(4, 4), main.batch(4, 4))
    with pytest.raises(ConfigError, match="share: got 2, expected 0 to 1"):
        Mixture(main, other, 2)


def test_a_pool_repeats_its_rows_in_new_orders(tokens):
    sampler = RowSampler(tokens, 16, seed=1)
    pool = Pool(sampler, 5, seed=2)
    expected = sorted(sampler.batch(0, 5).tolist())
    epochs = [pool.batch(first, 5).tolist() for first in (0, 5, 10)]
    assert [sorted(rows) for rows in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    across = pool.batch(3, 7).tolist()
    assert across == [*epochs[0][3:], *epochs[1]]
    with pytest.raises(ConfigError, match="rows: got 0, expected at least 1"):
        Pool(sampler, 0, seed=0)
