"""A checkpoint's tokenizer: prompts and chats in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import CheckpointError, RequestError

Message = Mapping[str, Any]


class Tokenizer:
    """Transformers' tokenizer, decoded through its Rust backend."""

    def __init__(self, name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer  # takes seconds to import, and not every run needs it

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                name_or_path, revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            kind = "folder" if Path(name_or_path).is_dir() else "name"
            raise CheckpointError(f"no tokenizer could be loaded from the {kind} {name_or_path!r}: {error}") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(f"the tokenizer of {name_or_path!r} has no tokenizer.json; expected a fast tokenizer")
        self._backend = backend
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """
        Raises:
            RequestError: the text is not valid Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode at character {error.start}; expected text") from None
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The chat template's prompt for an answer to ``messages``.

        Raises:
            RequestError: no template, or messages that it refuses.
        """
        if not messages:
            raise RequestError("the chat has no messages; expected at least one")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise RequestError(f"a chat message is {message!r}; expected a mapping with 'role' and 'content'")
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise whatever they like
            raise RequestError(f"the chat template refused the messages: {error}") from error

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell each word, with and without a space before it."""
        spelled = {
            tuple(self.encode(prefix + word.lstrip(), special_tokens=False)) for word in words for prefix in ("", " ")
        }
        return tuple(sorted(tokens for tokens in spelled if tokens))
