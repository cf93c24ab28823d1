"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from dynaspec.server.chat_input import render
from dynaspec.server.errors import bad_request
from dynaspec.server.prompts import in_thread
from dynaspec.server.protocol.errors import REQUEST_ERRORS
from dynaspec.server.protocol.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from dynaspec.server.respond import check_request
from dynaspec.server.state import ServerState, State

router = APIRouter(tags=["tokenizer"])


@router.post("/tokenize", response_model=TokenizeReply, responses=REQUEST_ERRORS)
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> TokenizeReply:
    """The tokens of a text or of a conversation."""
    check_request(body, request, state)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("the request has both prompt and messages, or neither; expected one of them", param="prompt")
    tokens = await in_thread(lambda: _tokens(body, state), param="prompt" if body.messages is None else "messages")
    spell = state.llm.tokenizer.spell
    return TokenizeReply(
        count=len(tokens),
        max_model_len=state.llm.max_model_len,
        tokens=tokens,
        token_strs=[spell(token) for token in tokens] if body.return_token_strs else None,
    )


@router.post("/detokenize", response_model=DetokenizeReply, responses=REQUEST_ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request, state: State) -> DetokenizeReply:
    """The text of tokens, special ones included."""
    check_request(body, request, state)
    tokenizer = state.llm.tokenizer
    outside = next((token for token in body.tokens if token >= tokenizer.vocab_size), None)
    if outside is not None:
        raise bad_request(f"tokens holds {outside}; expected ids from 0 to {tokenizer.vocab_size - 1}", param="tokens")
    text = await in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), param="tokens")
    return DetokenizeReply(prompt=text)


def _tokens(body: TokenizeRequest, state: ServerState) -> list[int]:
    tokenizer = state.llm.tokenizer
    if body.messages is None:
        special = body.add_special_tokens is not False
        return tokenizer.encode(body.prompt or "", special_tokens=special)
    template = state.config.chat_template
    text = render(
        tokenizer, body.messages, body, tools=body.tools or (), tool_format=state.tool_format, template=template
    )
    return tokenizer.encode(text, special_tokens=bool(body.add_special_tokens))
