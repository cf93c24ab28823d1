from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from dynaspec.engine.tokenizer import bytes_of_token, longest_token, speller
from unit.engine.texts import backend, byte_symbols


def contents(change: Callable[[Tokenizer], object] = lambda tokenizer: None) -> dict[str, Any]:
    """A byte-level ``tokenizer.json``, changed."""
    copy = Tokenizer.from_str(backend().to_str())
    change(copy)
    loaded: dict[str, Any] = json.loads(copy.to_str())
    return loaded


def split(behavior: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def test_symbols_stand_for_bytes() -> None:
    for byte, symbol in enumerate(byte_symbols()):
        assert bytes_of_token(symbol) == bytes([byte])
    assert bytes_of_token("<0xE6>") == b"\xe6"
    assert bytes_of_token("日") is None


def test_spellings_of_other_vocabularies() -> None:
    """With ▁ for a space, and bytes by number."""
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    spelled = speller({"decoder": decoder})
    assert [spelled(name) for name in ("▁the", "é", "<0xE6>")] == [b" the", "é".encode(), b"\xe6"]
    assert speller(contents())("Ġ" + byte_symbols()[0xE6]) == b" \xe6"


def test_the_longest_token() -> None:
    assert longest_token(contents()) == len("<eos>")
    assert longest_token(contents(lambda t: t.add_tokens(["0123456789"]))) == 10
    assert longest_token(contents(lambda t: setattr(t, "pre_tokenizer", split("isolated")))) == len("<eos>")


CHANGES: dict[str, Callable[[Tokenizer], object]] = {
    "a normalizer": lambda t: setattr(t, "normalizer", normalizers.NFKC()),
    "removed spaces": lambda t: setattr(t, "pre_tokenizer", split("removed")),
    "words alone": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
    "no pre-tokenizer": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Sequence([])),
    "a token that takes spaces along": lambda t: t.add_tokens([AddedToken("<x>", lstrip=True)]),
    "missing bytes": lambda t: setattr(t, "model", models.BPE(vocab={"a": 0}, merges=[])),
    "another model": lambda t: setattr(t, "model", models.Unigram([("a", 0.0), ("b", -1.0)], unk_id=0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_bounds_a_token(change: Callable[[Tokenizer], object]) -> None:
    assert longest_token(contents(change)) is None
