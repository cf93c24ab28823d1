"""Log-probabilities in the two forms that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynaspec.contract.outputs import Logprob, RequestOutput
from dynaspec.engine.tokenizer import Tokenizer

from .protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from .protocol.completions import CompletionLogprobs
from .protocol.generation import PromptLogprob, PromptLogprobs

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LOWEST = -9999.0
"""Stands for −∞, which JSON does not have."""

Positions = Sequence[Mapping[int, Logprob] | None]
"""Candidates by token at each position; None for a prompt's first."""


class ForCompletion:
    """OpenAI's older form, put together from runs of tokens.

    Args:
        top: most candidates at a position, beside the chosen one.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self.told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        self._tokenizer = tokenizer
        self._top = top

    def add(self, tokens: Sequence[int], positions: Positions, texts: Sequence[str], *, offset: int) -> None:
        """
        Args:
            texts: what each token adds to the text.
            offset: characters of the choice's text before them.
        """
        told = self.told
        for token, candidates, text in zip(tokens, positions, texts, strict=True):
            told.tokens.append(_name(self._tokenizer, token, None if candidates is None else candidates[token]))
            told.text_offset.append(offset)
            offset += len(text)
            if candidates is None:
                told.token_logprobs.append(None)
                told.top_logprobs.append(None)
            else:
                told.token_logprobs.append(_bounded(candidates[token]))
                told.top_logprobs.append(_by_name(self._tokenizer, _cut(candidates, token, self._top)))


def for_chat(
    tokenizer: Tokenizer, tokens: Sequence[int], positions: Sequence[Mapping[int, Logprob]], top: int
) -> ChatLogprobs:
    """
    Args:
        top: most candidates at a position, the most probable first.
    """
    content = []
    for token, candidates in zip(tokens, positions, strict=True):
        ranked = sorted(candidates.items(), key=lambda candidate: candidate[1].rank)[:top]
        chosen = _candidate(tokenizer, token, candidates[token])
        rivals = [_candidate(tokenizer, *one) for one in ranked]
        content.append(
            TokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=rivals)
        )
    return ChatLogprobs(content=content)


def for_prompt(output: RequestOutput, top: int | None) -> PromptLogprobs | None:
    """vLLM's form; ``top`` as for a completion, None if none were asked for."""
    if top is None or output.prompt_logprobs is None:
        return None
    return [
        None
        if candidates is None
        else {
            token: PromptLogprob(logprob=_bounded(one), rank=one.rank, decoded_token=one.decoded_token)
            for token, one in _cut(candidates, chosen, top).items()
        }
        for chosen, candidates in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]


def _cut(candidates: Mapping[int, Logprob], chosen: int, top: int) -> dict[int, Logprob]:
    return {token: one for token, one in candidates.items() if one.rank <= top or token == chosen}


def _candidate(tokenizer: Tokenizer, token: int, one: Logprob) -> TopLogprob:
    text = _text(tokenizer, token, one)
    spelled = _bytes(tokenizer, token, text)
    return TopLogprob(token=text, logprob=_bounded(one), bytes=None if spelled is None else list(spelled))


def _by_name(tokenizer: Tokenizer, candidates: Mapping[int, Logprob]) -> dict[str, float]:
    """Of tokens with the same name the most probable one's."""
    told: dict[str, float] = {}
    for token, one in sorted(candidates.items(), key=lambda candidate: candidate[1].rank):
        told.setdefault(_name(tokenizer, token, one), _bounded(one))
    return told


def _name(tokenizer: Tokenizer, token: int, one: Logprob | None) -> str:
    """A token's text, or its bytes if they are no text."""
    text = _text(tokenizer, token, one)
    if _REPLACEMENT not in text:
        return text
    spelled = tokenizer.token_bytes(token)
    return text if spelled is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _text(tokenizer: Tokenizer, token: int, one: Logprob | None) -> str:
    if one is not None and one.decoded_token is not None:
        return one.decoded_token
    return tokenizer.decode([token], skip_special_tokens=False)


def _bytes(tokenizer: Tokenizer, token: int, text: str) -> bytes | None:
    """Decoding it again takes long where there are thousands, and says nothing new unless bytes are no text."""
    return tokenizer.token_bytes(token) if _REPLACEMENT in text else text.encode()


def _bounded(one: Logprob) -> float:
    return max(one.logprob, _LOWEST)
