"""Greedy continuations by the target: what the drafter will be asked to foresee."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from dynaspec.train.corpus import Document
from dynaspec.train.data import Tokens, TokenSet, token_set
from dynaspec.train.tokenizer import END_OF_TEXT_ID

ANSWER = "\nAnswer:"


def maths_prompt(document: Document) -> str:
    """A problem without its answer; the text ends with ``Answer:``."""
    return document.text[: document.text.index(ANSWER) + len(ANSWER)]


def function_headers(source: str) -> list[tuple[int, int]]:
    """Character spans [start, end) of ``def f(...):`` at top level, end before the line break.

    Decorators are left out; functions written on one line are passed over. A line break and the
    indentation after it are one token: a prompt that ends after the break has decided against any.
    """
    lines = source.splitlines(keepends=True)
    offsets = np.concatenate([[0], np.cumsum([len(line) for line in lines])])
    spans = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        start, end = node.lineno - 1, node.body[0].lineno - 1
        # Comments and blank lines between header and body belong to the completion.
        header = re.match(r"(?:.*\n)*?.*:[ \t]*(?:#.*)?(?=\n)", "".join(lines[start:end]))
        if end > start and header is not None and _opens_a_block(header.group()):
            spans.append((int(offsets[start]), int(offsets[start]) + header.end()))
    return spans


def _opens_a_block(header: str) -> bool:
    try:
        ast.parse(header + "\n    pass\n")
    except SyntaxError:
        return False
    return True


def context_before(source: str, start: int, lines: int) -> str:
    """The last ``lines`` whole lines of ``source`` before character ``start``."""
    return "".join(source[:start].splitlines(keepends=True)[-lines:]) if lines else ""


def training_prompts(
    documents: Sequence[Document], tokenizer: Tokenizer, count: int, longest: int, seed: int
) -> list[Tokens]:
    """``count`` prompts of at most ``longest`` tokens, half code and half maths where both exist.

    Code is cut at the end of a random line, before its line break (see :func:`function_headers`),
    and maths after ``Answer:``.
    """
    rng = np.random.default_rng((seed, 1))
    kinds = [pool for kind in ("code", "maths") if (pool := [d for d in documents if d.kind == kind])]
    prompts = []
    for i in range(count):
        pool = kinds[i % len(kinds)]
        document = pool[int(rng.integers(len(pool)))]
        if document.kind == "maths":
            text = maths_prompt(document)
        else:
            ends = [m.start() for m in re.finditer("(?<=.)\n", document.text)] or [len(document.text)]
            end = ends[int(rng.integers(len(ends)))]
            text = document.text[max(0, end - 8 * longest) : end]
        ids = tokenizer.encode(text, add_special_tokens=False).ids[-longest:]
        prompts.append(np.array(ids, dtype=np.uint16))
    return prompts


@torch.no_grad()
def continue_greedily(
    model: LlamaForCausalLM, prompts: Sequence[Tokens], new_tokens: int, device: torch.device
) -> list[Tokens]:
    """The target's greedy continuation of each prompt; end of text included where it was reached."""
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), END_OF_TEXT_ID, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all continue at one column
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    tails = out[:, width:].cpu().numpy()
    return [_until_end(tail) for tail in tails]


def _until_end(tail: np.ndarray) -> Tokens:
    ends = np.flatnonzero(tail == END_OF_TEXT_ID)
    return tail[: ends[0] + 1 if len(ends) else len(tail)].astype(np.uint16)


def generate_documents(
    model: LlamaForCausalLM,
    prompts: Sequence[Tokens],
    new_tokens: int,
    batch: int,
    device: torch.device,
    go_on: Callable[[int], bool],
) -> TokenSet:
    """Prompts with the target's continuations, as documents to train on.

    ``go_on(done)`` is asked before each batch, so that a caller can stop at a time of day.
    """
    pieces: list[Tokens] = []
    for first in range(0, len(prompts), batch):
        if not go_on(len(pieces)):
            break
        some = prompts[first : first + batch]
        tails = continue_greedily(model, some, new_tokens, device)
        pieces += [np.concatenate([p, t]) for p, t in zip(some, tails, strict=True)]
    return token_set(pieces)
