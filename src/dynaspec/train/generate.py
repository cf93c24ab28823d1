"""Greedy continuations by the target: what the drafter will be asked to foresee."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from dynaspec.api import LLM
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.train.corpus import Document
from dynaspec.train.data import Tokens, TokenSet, token_set

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


@contextmanager
def open_engine(target: Path, longest: int, device: torch.device, at_once: int = 64) -> Iterator[LLM]:
    """dynaspec's engine with the checkpoint ``target``, for texts of up to ``longest`` tokens, ``at_once`` together.

    Raises:
        CheckpointError, ConfigError, CapacityError: what was given cannot work.
    """
    llm = LLM(
        str(target),
        device=device.type,
        dtype="float32",
        max_model_len=longest,
        max_num_seqs=at_once,
        enable_prefix_caching=False,
    )
    try:
        yield llm
    finally:
        llm.close()


def continue_greedily(llm: LLM, prompts: Sequence[Tokens], new_tokens: int) -> list[Tokens]:
    """The target's greedy continuation of each prompt; end of text included where it was reached."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt.tolist()} for prompt in prompts], params)
    return [np.array(output.outputs[0].token_ids, dtype=np.uint16) for output in outputs]


def generate_documents(
    llm: LLM,
    prompts: Sequence[Tokens],
    new_tokens: int,
    batch: int,
    go_on: Callable[[Sequence[Tokens]], bool],
) -> TokenSet:
    """Prompts with the target's continuations, as documents to train on.

    ``go_on(documents so far)`` hears of every batch and says whether there may be another, so that a caller can stop
    at a time of day.
    """
    pieces: list[Tokens] = []
    while go_on(pieces) and len(pieces) < len(prompts):
        some = prompts[len(pieces) : len(pieces) + batch]
        tails = continue_greedily(llm, some, new_tokens)
        pieces += [np.concatenate([p, t]) for p, t in zip(some, tails, strict=True)]
    return token_set(pieces)
