"""A checkpoint's tokenizer: prompts and chats in, text out, also token by token."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import CheckpointError, RequestError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.model.weights import is_gguf

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


Message = Mapping[str, Any]
_NO_LIMIT = 10**30
"""Transformers' word for it. Prompts are measured by the engine, which knows how much it can take."""
_LONGEST_REASON = 300
"""Characters of a template's complaint that an error repeats."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""Prompt tokens decoded along, since the first token's text may depend on what stands before it."""


class Tokenizer:
    """Transformers' tokenizer, decoded through its Rust backend. Safe to use from several threads."""

    def __init__(self, name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
        """
        Args:
            name_or_path: a folder, a hub id or a GGUF file.
        """
        self._tokenizer = _load(name_or_path, revision, trust_remote_code)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(f"the tokenizer of {name_or_path!r} has no tokenizer.json; expected a fast tokenizer")
        self._backend = backend
        self.vocab_size = len(self._tokenizer)

    @property
    def of_transformers(self) -> Any:
        """Transformers' own object."""
        return self._tokenizer

    @property
    def chat_template(self) -> str:
        """The checkpoint's chat template; of several, all. Empty if there is none."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @cached_property
    def longest_token(self) -> int | None:
        """Most characters of a prompt that one token can stand for; None if nothing bounds it."""
        return longest_token(json.loads(self._backend.to_str()))

    def to_json(self) -> str:
        """The text of ``tokenizer.json``, with the tokens that were added since; it cuts and pads nothing."""
        return json.dumps(json.loads(self._backend.to_str()) | {"truncation": None, "padding": None})

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

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """Tokens that are put before every text."""
        found = self._backend.encode("a", add_special_tokens=True)
        return tuple(found.ids[: next(i for i, special in enumerate(found.special_tokens_mask) if not special)])

    def encode_at(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a piece of text, without any before or behind it, and the character at which each begins."""
        found = self._bare.encode(text, add_special_tokens=False)
        return found.ids, [start for start, _ in found.offsets]

    def spellings(self) -> dict[int, tuple[bool, bytes]]:
        """What each token stands for: whether it is special, and the bytes that it adds to a text."""
        added = self._tokenizer.added_tokens_decoder
        plain = speller(json.loads(self._backend.to_str()))
        return {
            token: (added[token].special, added[token].content.encode()) if token in added else (False, plain(name))
            for name, token in self._tokenizer.get_vocab().items()
        }

    @cached_property
    def _bare(self) -> Any:
        """The backend, cutting and padding nothing, and leaving spaces to the tokens that have them."""
        from tokenizers import Tokenizer as Backend

        return Backend.from_str(json.dumps(json.loads(self.to_json()) | {"post_processor": None}))

    def spell(self, token: int) -> str:
        """The vocabulary's own name of a token; empty if it has none."""
        return str(self._backend.id_to_token(token) or "")

    def token_bytes(self, token: int) -> bytes | None:
        """What a token adds to the text, which may be a part of a character; None if that depends on others."""
        text = self.decode([token], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text.encode()
        return bytes_of_token(self.spell(token))

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template's prompt.

        Args:
            messages: mappings with ``role`` and ``content``; content may be left out beside tool calls.
            template: Jinja; None = the checkpoint's.
            tools: functions that the model may call, as OpenAI's objects.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end within the last message instead, so that the model goes on with it.
            variables: more variables for the template.

        Raises:
            RequestError: no template, or something that it refuses.
        """
        check_messages(messages)
        if template is None and not self.chat_template:
            raise RequestError(
                "the model has no chat template; expected chat_template (--chat-template) or a plain prompt"
            )
        render = self._tokenizer.apply_chat_template
        taken = sorted(({"messages", *inspect.signature(render).parameters} - {"kwargs"}) & set(variables or ()))
        if taken:
            raise RequestError(f"the template variable {taken[0]!r} has a meaning of its own; expected another name")
        try:
            rendered = render(
                list(messages),
                tools=None if tools is None else list(tools),
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(variables or {}),
            )
        except Exception as error:  # templates raise whatever they like
            reason = str(error)
            cut = "…" if len(reason) > _LONGEST_REASON else ""
            raise RequestError(
                f"the chat template refused the messages; expected others: {reason[:_LONGEST_REASON]}{cut}"
            ) from error
        return str(rendered)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell each word, with and without a space before it."""
        spelled = {
            tuple(self.encode(prefix + word.lstrip(), special_tokens=False)) for word in words for prefix in ("", " ")
        }
        return tuple(sorted(tokens for tokens in spelled if tokens))


def _load(name_or_path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Transformers' tokenizer."""
    path = Path(name_or_path).expanduser()
    if is_gguf(name_or_path) and not path.is_dir():
        from .gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(path, model_max_length=_NO_LIMIT)
    from transformers import AutoTokenizer  # takes seconds to import, and not every run needs it

    try:
        return AutoTokenizer.from_pretrained(
            name_or_path,
            revision=revision,
            trust_remote_code=trust_remote_code,
            model_max_length=_NO_LIMIT,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = "folder" if path.is_dir() else "name"
        raise CheckpointError(f"no tokenizer could be loaded from the {kind} {name_or_path!r}: {error}") from error


def check_messages(messages: Sequence[Message]) -> None:
    """
    Raises:
        RequestError: none, or one that is no message.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"a chat is a {type(messages).__name__}; expected a list of messages")
    if not messages:
        raise RequestError("the chat has no messages; expected at least one")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            raise RequestError(f"a chat message is {message!r}; expected a mapping with 'role' and 'content'")


class Detokenizer:
    """Text of one request, grown token by token, and the stop strings in it.

    It decodes a sliding window, so that the cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._params = params
        self._window: list[int] = list(prompt[-_CONTEXT:])
        self._shown = self._decode(self._window).rstrip(_REPLACEMENT)
        """Text of the window that has been emitted, or belongs to the prompt; half a character does not."""
        self._longest_stop = max(map(len, params.stop_strings), default=0)

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Adds a token; cuts the text at a stop string that it completes, if it may, and returns the string."""
        self._window.append(token)
        decoded = self._decode(self._window)
        if decoded.endswith(_REPLACEMENT):  # in the middle of a character
            return None
        added = decoded[len(self._shown) :]
        self._slide(decoded)
        self.text += added
        return self._cut(len(added)) if may_stop and self._longest_stop else None

    def finish(self) -> None:
        """Emits what was held back because a character was incomplete."""
        decoded = self._decode(self._window)
        self.text += decoded[len(self._shown) :]
        self._shown = decoded

    def stable_length(self) -> int:
        """Characters that no later stop string can take back."""
        hold = self._longest_stop - 1 if self._longest_stop and not self._params.include_stop_str_in_output else 0
        return max(0, len(self.text) - hold)

    def _slide(self, decoded: str) -> None:
        self._shown = decoded
        if len(self._window) > 4 * _CONTEXT:
            shorter = self._window[-_CONTEXT:]
            text = self._decode(shorter)
            if decoded.endswith(text) and _REPLACEMENT not in text:
                self._window, self._shown = shorter, text

    def _cut(self, added: int) -> str | None:
        before = len(self.text) - added
        hits = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._params.stop_strings]
        at, stop = min(((at, stop) for at, stop in hits if at >= 0), default=(-1, ""))
        if at < 0:
            return None
        end = at + len(stop) if self._params.include_stop_str_in_output else at
        self.text = self.text[:end]
        self._window, self._shown = [], ""
        return stop

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._params.skip_special_tokens)
