from __future__ import annotations

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.train.corpus import (
    Document,
    Holdout,
    choose_holdout,
    load_corpus,
    load_holdout,
    problem_index,
    read_code,
    read_maths,
    split,
    standard_library,
)


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


def test_choice_depends_on_names_alone():
    documents = [Document(f"p/{i}.py", "code", "x" * 5000) for i in range(100)]
    documents += [Document(f"gsm8k/{i}", "maths", "y") for i in range(100)]
    chosen = choose_holdout(documents)
    assert (len(chosen.code), len(chosen.maths)) == (3, 3)
    assert choose_holdout(documents[::-1]) == chosen
    corpus = split(documents, chosen)
    assert len(corpus.train) == 194
    assert len(corpus.held_out) == 6


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
