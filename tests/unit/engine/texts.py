"""A byte-level tokenizer built on the spot, with tokens that begin or end in the middle of a character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dynaspec.engine.tokenizer import Message, Tokenizer

EOS = "<eos>"


def byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (256 + i for i in range(68))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@cache
def backend() -> tokenizers.Tokenizer:
    symbols = byte_symbols()
    vocab = {symbol: byte for byte, symbol in enumerate(symbols)}
    pairs = [b"st", b"op", b" t", b"\xf0\x9f", b"\xc3\xa9", b"\xe2\x82", b"\xa9a"]
    merges = [(symbols[first], symbols[second]) for first, second in pairs]
    merges.append((symbols[ord("s")] + symbols[ord("t")], symbols[ord("o")] + symbols[ord("p")]))
    for first, second in merges:
        vocab[first + second] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


class _Fast:
    """The part of Transformers' tokenizers that the engine uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(backend().encode(text, add_special_tokens=add_special_tokens).ids)

    chat_template = "{{ of this class }}"

    def apply_chat_template(self, messages: Sequence[Message], **_: object) -> str:
        return "".join(f"{message['role']}: {message['content']}; " for message in messages)


class ByteTokenizer(Tokenizer):
    """The engine's tokenizer over ``backend``, without a checkpoint."""

    def __init__(self) -> None:
        self._tokenizer = _Fast()
        self._backend = backend()
        self.vocab_size = backend().get_vocab_size()
        self.eos = int(backend().token_to_id(EOS) or 0)

    def bytes_of(self, text: str) -> list[int]:
        """One token a byte, without any merge."""
        return list(text.encode())
