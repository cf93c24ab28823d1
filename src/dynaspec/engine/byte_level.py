"""Byte-level vocabularies, whose tokens are spelled with one symbol a byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

_SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")
_LOSSLESS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})
"""Pre-tokenizers that only cut."""


@cache
def _bytes_by_symbol() -> dict[str, int]:
    """Printable Latin-1 stands for itself, the others, in order, for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def bytes_of_token(spelling: str) -> bytes | None:
    """What a token stands for that is no text by itself; None if its spelling does not say.

    Args:
        spelling: one symbol a byte, or a single byte as ``<0xE6>``.
    """
    byte = _SINGLE_BYTE.fullmatch(spelling)
    if byte is not None:
        return bytes.fromhex(byte[1])
    known = _bytes_by_symbol()
    return bytes(known[symbol] for symbol in spelling) if known.keys() >= set(spelling) else None


def speller(tokenizer: Mapping[str, Any]) -> Callable[[str], bytes]:
    """How a vocabulary spells bytes: one symbol each, or as text with ▁ for spaces and bytes as ``<0xE6>``.

    Args:
        tokenizer: the contents of a ``tokenizer.json``.
    """
    if any(piece["type"] == "ByteLevel" for piece in _pieces(tokenizer["decoder"], "decoders")):
        known = _bytes_by_symbol()
        return lambda name: b"".join(bytes([known[c]]) if c in known else c.encode() for c in name)

    def spelled(name: str) -> bytes:
        byte = _SINGLE_BYTE.fullmatch(name)
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode() if byte is None else bytes.fromhex(byte[1])

    return spelled


def longest_token(tokenizer: Mapping[str, Any]) -> int | None:
    """Most characters of a text that one token can stand for.

    Args:
        tokenizer: the contents of a ``tokenizer.json``.

    Returns:
        None where nothing bounds it: only byte-level BPE without a normalizer is known to lose no character.
    """
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    pieces = list(_pieces(tokenizer["pre_tokenizer"], "pretokenizers"))
    lossless = (
        tokenizer["normalizer"] is None
        and any(piece["type"] == "ByteLevel" for piece in pieces)
        and all(piece["type"] in _LOSSLESS and piece.get("behavior") != "Removed" for piece in pieces)
        and not any(token["lstrip"] or token["rstrip"] for token in added)  # such take any number of spaces along
        and model["type"] == "BPE"
        and model["vocab"].keys() >= _bytes_by_symbol().keys()
    )
    return max(map(len, [*model["vocab"], *(token["content"] for token in added)])) if lossless else None


def _pieces(one: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """A pre-tokenizer or decoder, or those of a sequence, which has them as ``parts``."""
    if one is None:
        return
    if one["type"] == "Sequence":
        for part in one[parts]:
            yield from _pieces(part, parts)
    else:
        yield one
