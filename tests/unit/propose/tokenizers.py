"""Tokenizers that can be read: bytes, and the longest words of a list."""

from __future__ import annotations

from collections.abc import Sequence


class Bytes:
    """A token a byte; satisfies ``own_vocabulary.TextTokenizer``."""

    def __init__(self, beginning: tuple[int, ...] = ()) -> None:
        self.beginning = beginning

    def encode_at(self, text: str) -> tuple[list[int], list[int]]:
        pieces = [(byte, at) for at, character in enumerate(text) for byte in character.encode()]
        return [byte for byte, _ in pieces], [at for _, at in pieces]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode(errors="replace")

    def spellings(self) -> dict[int, tuple[bool, bytes]]:
        return {byte: (False, bytes([byte])) for byte in range(256)}


class Words:
    """Some words or bytes; a text is cut into the longest ones. Satisfies it too."""

    def __init__(self, *words: str | bytes, beginning: tuple[int, ...] = ()) -> None:
        self.words = [word.encode() if isinstance(word, str) else word for word in words]
        self.beginning = beginning
        self.encoded: list[str] = []
        """All texts that were."""

    def encode_at(self, text: str) -> tuple[list[int], list[int]]:
        self.encoded.append(text)
        tokens, starts, left = [], [], text.encode()
        while left:
            word = max((word for word in self.words if left.startswith(word)), key=len)
            tokens.append(self.words.index(word))
            starts.append(len(text.encode()[: len(text.encode()) - len(left)].decode(errors="ignore")))
            left = left[len(word) :]
        return tokens, starts

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.words[token] for token in tokens).decode(errors="replace")

    def spellings(self) -> dict[int, tuple[bool, bytes]]:
        return {token: (False, word) for token, word in enumerate(self.words)}
