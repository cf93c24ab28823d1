"""A vocabulary of single letters for llguidance, and grammars over it."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from dynaspec.contract.sampling_params import StructuredOutputsParams
from dynaspec.sampling.grammar import Grammar, grammar_text


class Letters:
    """Tokens 0 … n − 1 are letters, token n ends the text; what llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, letters: str) -> None:
        self._letters = letters
        self.tokens = [*(letter.encode() for letter in letters), b"<end>"]
        self.eos_token_id = len(letters)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        spelled = text.decode() if isinstance(text, bytes) else text
        return [self._letters.index(letter) for letter in spelled if letter in self._letters]


def letters_grammar(form: StructuredOutputsParams, letters: str = "abcde") -> Grammar:
    """A form over the letters."""
    return Grammar(grammar_text(form), LLTokenizer(TokenizerWrapper(Letters(letters))))
