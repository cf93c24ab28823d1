"""Who turns text into tokens for a load test: the server itself, or a tokenizer that the client has loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from dynaspec.bench.datasets import demo_prompts
from dynaspec.engine.tokenizer import Tokenizer

from .server import Server, ServerError

_QUESTIONS_AT_ONCE = 16


class Tokens(Protocol):
    """Text to tokens and back."""

    async def encode(self, text: str) -> list[int]: ...

    async def decode(self, ids: Sequence[int]) -> str: ...

    async def vocabulary(self) -> list[int]:
        """Tokens that random prompts may consist of, in ascending order."""
        ...


class LocalTokens:
    """A checkpoint's tokenizer."""

    def __init__(self, name_or_path: str) -> None:
        """
        Raises:
            CheckpointError: there is no such tokenizer.
        """
        self._tokenizer = Tokenizer(name_or_path)

    async def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def count(self, text: str) -> int:
        """Tokens of a text that was generated."""
        return len(self._tokenizer.encode(text, special_tokens=False))

    async def vocabulary(self) -> list[int]:
        """All tokens but those without text, such as special ones."""
        return [i for i in range(self._tokenizer.vocab_size) if self._tokenizer.decode([i])]


class ServerTokens:
    """The server's ``/tokenize`` and ``/detokenize``, as vLLM has them too."""

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self._places = asyncio.Semaphore(_QUESTIONS_AT_ONCE)

    async def works(self) -> bool:
        """Whether the server has them."""
        return isinstance(await self._ask("/tokenize", {"prompt": "a"}, "tokens"), list)

    async def encode(self, text: str) -> list[int]:
        """
        Raises:
            ServerError: the server refuses.
        """
        return await self._encode({"prompt": text})

    async def decode(self, ids: Sequence[int]) -> str:
        """
        Raises:
            ServerError: the server refuses.
        """
        return str(self._expected(await self._ask("/detokenize", {"tokens": list(ids)}, "prompt"), str, "/detokenize"))

    async def vocabulary(self) -> list[int]:
        """The tokens of the demonstration's prompts: a server does not say which of its others have text."""
        asked = [{"prompt": prompt.text, "add_special_tokens": False} for prompt in demo_prompts()]
        encoded = await asyncio.gather(*map(self._encode, asked))
        return sorted({token for tokens in encoded for token in tokens})

    async def _encode(self, body: dict[str, Any]) -> list[int]:
        return list(self._expected(await self._ask("/tokenize", body, "tokens"), list, "/tokenize"))

    async def _ask(self, path: str, body: dict[str, Any], key: str) -> Any:
        async with self._places:
            answer = await self._server.post(path, {"model": self._model, **body})
        return answer.get(key) if isinstance(answer, dict) else None

    def _expected(self, value: Any, kind: type, path: str) -> Any:
        if not isinstance(value, kind):
            raise ServerError(f"{self._server.target.root}{path} gave no answer of vLLM's form; expected --tokenizer")
        return value


async def find_tokens(server: Server, model: str, tokenizer: str | None) -> Tokens | None:
    """The tokenizer that was named; else the server's; None if it has none to ask."""
    if tokenizer is not None:
        return LocalTokens(tokenizer)
    ours = ServerTokens(server, model)
    return ours if await ours.works() else None
