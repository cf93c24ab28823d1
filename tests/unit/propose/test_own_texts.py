"""Texts in a drafter's own tokens, and what of its KV stays right."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dynaspec.contract.proposer import Drafts
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.propose.own_vocabulary import OwnTexts, SharedVocabulary, Translation
from dynaspec.propose.watermark import Watermarks
from unit.propose.batches import Batch
from unit.propose.tokenizers import Bytes, Words

LETTERS = [*"abcdefghijklmnopqrstuvwxyz .", "hel", "hello", "lo", " world", "the", "é", b"\xc3", b"\xa9"]


def words(*beginning: str) -> Words:
    return Words(*LETTERS, *beginning, beginning=tuple(len(LETTERS) + i for i in range(len(beginning))))


@dataclass
class Desk:
    """A text on lane 1 of two, and a drafter that reads all of it whenever it is told to."""

    own: Words = field(default_factory=words)
    target: Bytes = field(default_factory=Bytes)
    drafts_text: bool = False
    lookbehind: int = 2
    blocks: int = 8
    max_length: int = 64

    def __post_init__(self) -> None:
        spellings = self.own.spellings(), self.target.spellings()
        shared = None if self.drafts_text else SharedVocabulary.of(*spellings, len(self.own.words), 256)
        by = Translation(self.target, self.own, shared, self.lookbehind, 4)
        self.texts = OwnTexts(by, 2, self.blocks, 4, self.max_length, caching=True)
        self.marks = Watermarks(self.texts.tables, 2)

    def follow(self, text: bytes, wanted: int = 3) -> tuple[str, int, dict[str, str]]:
        """The text in own tokens, shown with bars between them; how many are known; why there is no draft."""
        batch = self.batch(text)
        found, reasons = self.texts.follow(batch, np.array([wanted]), self.marks)
        tokens = found.tokens[1, : found.lengths[0]].tolist()
        return (
            "|".join(self.own.words[token].decode(errors="backslashreplace") for token in tokens),
            int(self.marks.seen[1]),
            reasons,
        )

    def batch(self, text: bytes) -> Batch:
        tokens = np.zeros((2, 100), np.int32)
        tokens[1, : len(text)] = list(text)
        return Batch(("a",), np.array([1]), np.array([len(text)]), tokens, np.zeros((2, 1), np.int32))

    def read(self, *drafted: str) -> None:
        """The drafter reads the text, and drafts these tokens, of which it reads all but the last."""
        lane, length = np.array([1]), self.texts._lengths[[1]]
        self.marks.ingest(lane, length)
        if self.drafts_text:
            drafts = [self.own.words.index(token.encode()) for token in drafted]
        else:
            drafts = [token.encode()[0] for token in drafted]
        read = np.array([max(0, len(drafts) - 1)])
        self.marks.ingest_drafts(lane, read, read)
        self.texts.remember(lane, np.array([drafts], np.int64).reshape(1, -1), self.marks)


def test_a_border_that_moves_takes_the_watermark_along() -> None:
    desk = Desk()
    assert desk.follow(b"the hel") == ("the| |hel", 0, {})
    desk.read()
    assert desk.follow(b"the hello") == ("the| |hello", 2, {})
    desk.read()
    assert desk.follow(b"the hello world.") == ("the| |hello| world|.", 3, {})


def test_drafts_that_became_text_are_not_read_again() -> None:
    desk = Desk()
    desk.follow(b"ab")
    desk.read("c", "d", "e")
    assert desk.follow(b"abcdx") == ("a|b|c|d|x", 4, {})
    desk.read("y", "z")
    assert desk.follow(b"abcdxq") == ("a|b|c|d|x|q", 5, {})


def test_there_is_always_a_token_to_read() -> None:
    desk = Desk()
    desk.follow(b"ab")
    desk.read("c", "d")
    assert desk.follow(b"abc") == ("a|b|c", 2, {})


def test_only_the_end_is_encoded_again() -> None:
    desk = Desk()
    desk.follow(b"the lazy fox")
    desk.follow(b"the lazy fox jumps")
    assert desk.own.encoded == ["the lazy fox", "zy fox jumps"]


def test_a_part_of_a_character_is_mapped_by_itself() -> None:
    desk = Desk()
    assert desk.follow(b"caf\xc3") == ("c|a|f|\\xc3", 0, {})
    desk.read("\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert desk.follow(b"caf\xc3\xa9s") == ("c|a|f|é|s", 3, {})
    assert desk.follow(b"caf\xc3\xa9s\xe6")[2] == {"a": "between_characters"}
    assert desk.follow("cafés日a".encode()[:-1] + b"b", 0) == ("c|a|f|é|s", 3, {})  # nobody asks


def test_text_is_drafted_behind_whole_characters_only() -> None:
    desk = Desk(drafts_text=True)
    assert desk.follow(b"caf\xc3")[2] == {"a": "between_characters"}
    assert desk.follow(b"caf\xc3\xa9") == ("c|a|f|é", 0, {})


def test_each_text_begins_as_its_tokenizer_has_it() -> None:
    desk = Desk(own=words("<s>"), target=Bytes(beginning=(7,)))
    assert desk.follow(b"\x07ab") == ("<s>|a|b", 0, {})
    desk.read()
    assert desk.follow(b"\x07abc") == ("<s>|a|b|c", 3, {})


def test_texts_without_room_are_not_drafted_for() -> None:
    assert Desk(blocks=1).follow(b"ab")[2] == {"a": "no_blocks"}
    desk = Desk(blocks=2)
    assert not desk.follow(b"ab")[2]
    assert desk.follow(b"abcdef", wanted=4)[2] == {"a": "no_blocks"}
    assert not desk.follow(b"abcdef", wanted=2)[2]
    desk.texts.tables.verify_integrity()
    desk = Desk(max_length=8)
    assert desk.follow(b"abcdefgh")[2] == {"a": "drafter_length"}
    assert desk.follow(b"abcdefghi")[2] == {"a": "drafter_length"}
    assert len(desk.own.encoded) == 1


def test_there_may_be_nothing_to_read_yet() -> None:
    desk = Desk(target=Bytes(beginning=(7,)))
    assert desk.follow(b"\x07")[2] == {"a": "drafter_length"}
    assert desk.follow(b"\x07a") == ("a", 0, {})
    desk = Desk(own=words("<s>"), target=Bytes(beginning=(7,)))
    assert desk.follow(b"\x07") == ("<s>", 0, {})
    assert desk.follow(b"\x07a") == ("<s>|a", 0, {})


def test_beginnings_are_shared_where_they_are_settled() -> None:
    desk = Desk()
    text = b"abcdefghijklmn"
    desk.follow(text)
    desk.read()
    desk.texts.admit(1, "")
    desk.marks.admit(1, ())
    assert desk.follow(text) == ("|".join(text.decode()), 8, {})
    desk.texts.admit(1, "another")
    desk.marks.admit(1, ())
    assert desk.follow(text)[1] == 0
    desk.texts.admit(1, "")
    desk.texts.tables.verify_integrity()


def test_what_is_not_encoded_yet_lags() -> None:
    desk = Desk()
    assert desk.texts.lag(desk.batch(b"the fox"), desk.marks.seen[[1]]).tolist() == [6]
    desk.follow(b"the fox")
    assert desk.texts.lag(desk.batch(b"the fox"), desk.marks.seen[[1]]).tolist() == [4]
    desk.read()
    assert desk.texts.lag(desk.batch(b"the foxes"), desk.marks.seen[[1]]).tolist() == [1]


def byte_level(corpus: list[str]) -> Any:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return tokenizer


def with_dummy_prefix(corpus: list[str]) -> Any:
    """As Llama 2's, which puts a space before every text and takes it away again."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token=alphabet[0]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=330, special_tokens=alphabet))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def loaded(backend: Any, folder: Path) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return Tokenizer(str(folder))


@pytest.mark.parametrize("kinds", [(byte_level, with_dummy_prefix), (with_dummy_prefix, byte_level)])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_text_that_grows_has_the_tokens_of_the_whole(kinds: Any, step: int, tmp_path: Path) -> None:
    corpus = ["the quick brown fox jumps over the lazy dog and then the dog chases it", "1 2 3 one two three naïve"]
    text = "the foxes jump  over 12 lazy dogs,\n\tand ¿quién? 日本 chases the naïve one twothree"
    own = loaded(kinds[0](corpus), tmp_path / "own")
    target = loaded(kinds[1]([*corpus[::-1], "over 12 dogs jump quién"]), tmp_path / "target")
    texts = OwnTexts(Translation(target, own, None, 6, 6), 1, 40, 4, 200, caching=True)
    marks, tokens = Watermarks(texts.tables, 1), target.encode(text)
    known = 0
    for end in [*range(3, len(tokens), step), len(tokens)]:
        row = np.array([tokens[:end]], np.int32)
        batch = Batch(("a",), np.array([0]), np.array([end]), row, np.zeros((1, 1), np.int32))
        found, reasons = texts.follow(batch, np.array([1]), marks)
        if not reasons:
            whole = target.decode(tokens[:end], skip_special_tokens=False)
            assert found.tokens[0, : found.lengths[0]].tolist() == own.encode(whole)
            known = max(known, int(marks.seen[0]))
            marks.ingest(np.array([0]), found.lengths)
    assert known > 0.8 * len(own.encode(text))


CHANCES = np.array([[0.5, 0.25, 0.5, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("drafted", "depth", "expected", "confidence"),
    [
        (("hello", " world"), 20, "hello world", [0.5, 1, 1, 1, 1, 0.25, 1, 1, 1, 1, 1]),
        (("hello", " world"), 3, "hel", [0.5, 1, 1]),
        (("a", "b"), 8, "ab", [0.5, 0.25]),
    ],
)
def test_drafted_text_in_the_targets_tokens(drafted: Any, depth: int, expected: str, confidence: list[float]) -> None:
    desk = Desk(drafts_text=True)
    desk.follow(b"the ")
    assert given(desk, Bytes(), b"the ", drafted, depth) == (list(expected.encode()), confidence)


def test_the_target_s_tokens_may_be_longer() -> None:
    target = words()
    desk = Desk(drafts_text=True, target=target)
    text = bytes([target.words.index(b"the"), target.words.index(b" ")])
    desk.follow(text)
    tokens, confidence = given(desk, target, text, ("h", "e", "l", "lo"), 8)
    assert [target.words[token] for token in tokens] == [b"hello"]
    assert confidence == [0.0]
    text += bytes([target.words.index(b"hel")])  # which goes into another token with what is drafted
    desk.follow(text)
    tokens, confidence = given(desk, target, text, ("l", "o", " ", "w"), 8)
    assert [target.words[token] for token in tokens] == [b"lo", b" ", b"w"]
    assert confidence == [0.125, 0.5, 0.0]


def test_parts_of_characters_are_not_drafted() -> None:
    desk = Desk(drafts_text=True)
    desk.follow(b"caf")
    drafted = [desk.own.words.index(word) for word in (b"e", b"\xc3")]
    drafts = Drafts(np.array([drafted]), np.array([2]), CHANCES[:, :2])
    found = desk.texts.to_target(desk.batch(b"caf"), drafts, np.array([4]))
    assert (found.lens.tolist(), found.tokens[0, :1].tolist()) == ([1], [ord("e")])


def given(desk: Desk, target: Any, text: bytes, drafted: tuple[str, ...], depth: int) -> tuple[list[int], list[float]]:
    """A draft as target tokens, with their confidences."""
    own = np.array([[desk.own.words.index(word.encode()) for word in drafted]])
    drafts = Drafts(own, np.array([len(drafted)]), CHANCES[:, : len(drafted)])
    found = desk.texts.to_target(desk.batch(text), drafts, np.array([depth]))
    assert found.confidence is not None
    n = int(found.lens[0])
    return found.tokens[0, :n].tolist(), found.confidence[0, :n].tolist()
