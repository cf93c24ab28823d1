"""What the pair can do, measured on documents that training never saw."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .data import END_OF_TEXT_ID, Document, Tokens, TokenSet
from .distill import context_before, continue_greedily, function_headers, maths_prompt, open_engine
from .model import logits

CONTEXT_LINES = 20


@dataclass(frozen=True, slots=True)
class Loss:
    """Summed cross-entropy over a set of documents; the ratios are computed when shown."""

    nats: float
    tokens: int
    utf8_bytes: int

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy of a token, end of text included."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """The same, independent of the tokenizer."""
        return self.nats / math.log(2) / self.utf8_bytes


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM,
    tokens: TokenSet,
    utf8_bytes: int,
    seq_len: int,
    device: torch.device,
    rows: int = 8,
) -> Loss:
    """Score every token once, in rows of ``seq_len`` of the joined documents (context: its row)."""
    stream = np.concatenate([[END_OF_TEXT_ID], tokens.tokens]).astype(np.int64)
    nats, count = 0.0, len(stream) - 1
    whole = count // seq_len
    starts = [np.arange(i, min(i + rows, whole)) * seq_len for i in range(0, whole, rows)]
    batches = [np.stack([stream[s : s + seq_len + 1] for s in some]) for some in starts]
    if count % seq_len:
        batches.append(stream[None, whole * seq_len :])
    for batch in batches:
        ids = torch.from_numpy(batch).to(device)
        scores = logits(model, ids[:, :-1])
        nats += float(F.cross_entropy(scores, ids[:, 1:].flatten(), reduction="sum"))
    return Loss(nats, count, utf8_bytes)


@dataclass(frozen=True, slots=True)
class CodePrompt:
    """A held-out file, cut after the header of a top-level function."""

    context: str
    header: str

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.context + self.header


def code_prompts(documents: Sequence[Document], count: int) -> list[CodePrompt]:
    """Up to ``count`` prompts, taken from the files in turn so that no file dominates."""
    queues = []
    for document in documents:
        if document.kind == "code":
            queues.append(
                [
                    CodePrompt(context_before(document.text, start, CONTEXT_LINES), document.text[start:end])
                    for start, end in function_headers(document.text)
                ]
            )
    prompts: list[CodePrompt] = []
    for turn in range(max((len(q) for q in queues), default=0)):
        prompts += [q[turn] for q in queues if turn < len(q)]
    return prompts[:count]


def held_out_prompts(held_out: Sequence[Document], per_kind: int) -> dict[str, list[str]]:
    """What the models are asked to continue, up to ``per_kind`` texts of each kind that there is."""
    texts = {
        "code": [prompt.text for prompt in code_prompts(held_out, per_kind)],
        "maths": [maths_prompt(d) for d in held_out if d.kind == "maths"][:per_kind],
    }
    return {kind: of_kind for kind, of_kind in texts.items() if of_kind}


def first_block(completion: str) -> tuple[str, bool]:
    """The body of a function in ``completion``, and whether its end was seen.

    The body ends before the first line that starts in column 0 with anything but a comment. Where
    no such line comes, the last line is dropped unless it is whole.
    """
    lines = completion.splitlines(keepends=True)
    for i, line in enumerate(lines):
        # The last line may be unfinished, but its first character is there.
        if line[0] not in " \t\n\r\f#":
            return "".join(lines[:i]), True
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return "".join(lines), False


def parses(header: str, completion: str, ended: bool) -> tuple[bool, bool]:
    """Whether ``ast.parse`` accepts header and body, and whether the body's end was seen.

    ``ended`` says that the model ended the text, in which case everything counts.
    """
    body, closed = (completion, True) if ended else first_block(completion)
    if ended and (block := first_block(completion))[1]:
        body = block[0]
    try:
        ast.parse(header + body)
    except (SyntaxError, ValueError):
        return False, closed
    return True, closed


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the drafter's argmax follows the target's greedy text, as counts over positions.

    ``survived[j]``: positions from which the first j + 1 drafted tokens all equal the target's, out
    of ``positions`` that have as many tokens left as the longest draft.
    ``steps`` and ``emitted``: verification steps, and tokens they emit, when every step drafts that many.
    """

    first_equal: int
    first_positions: int
    survived: tuple[int, ...]
    positions: int
    steps: int
    emitted: int

    @classmethod
    def nothing(cls, draft_len: int) -> Agreement:
        """No positions at all."""
        return cls(0, 0, (0,) * draft_len, 0, 0, 0)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.first_equal + other.first_equal,
            self.first_positions + other.first_positions,
            tuple(a + b for a, b in zip(self.survived, other.survived, strict=True)),
            self.positions + other.positions,
            self.steps + other.steps,
            self.emitted + other.emitted,
        )


def agreement(equal: np.ndarray, draft_len: int) -> Agreement:
    """Counts of one continuation; ``equal`` [tokens] says where the drafter's argmax was right.

    While all drafts before it were accepted, a drafted token has the target's own text before it:
    so the drafter's argmaxes along that text give every draft's survival exactly.
    """
    positions = max(0, len(equal) - draft_len + 1)
    alive = np.ones(positions, dtype=bool)
    survived = []
    for j in range(draft_len):
        alive &= equal[j : j + positions]
        survived.append(int(alive.sum()))
    at = steps = 0
    while at < len(equal):
        run = equal[at : at + draft_len]
        accepted = len(run) if run.all() else int(run.argmin())
        at += accepted + 1
        steps += 1
    return Agreement(int(equal.sum()), len(equal), tuple(survived), positions, steps, len(equal))


@torch.no_grad()
def drafter_agreement(
    drafter: LlamaForCausalLM,
    prompts: Sequence[Tokens],
    continuations: Sequence[Tokens],
    draft_len: int,
    device: torch.device,
) -> Agreement:
    """Sum of :func:`agreement` over the target's continuations, one drafter pass each."""
    total = Agreement.nothing(draft_len)
    for prompt, tail in zip(prompts, continuations, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, tail]).astype(np.int64))[None].to(device)
        guesses = logits(drafter, ids[:, :-1]).argmax(-1).cpu().numpy()
        total += agreement(guesses[len(prompt) - 1 :] == tail, draft_len)
    return total


@dataclass(frozen=True, slots=True)
class Completions:
    """Counts over code prompts: bodies ``ast.parse`` accepts, and bodies whose end was seen."""

    prompts: int
    parsed: int
    closed: int
    closed_parsed: int


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What greedy decoding of held-out prompts showed, by kind."""

    agreement: dict[str, Agreement]
    completions: Completions
    prompts: dict[str, int]
    new_tokens: int
    draft_len: int
    longest_prompt: int


def behaviour(
    target: Path,
    drafter: LlamaForCausalLM,
    tokenizer: Tokenizer,
    held_out: Sequence[Document],
    device: torch.device,
    per_kind: int,
    longest_prompt: int,
    new_tokens: int,
    draft_len: int = 5,
) -> Behaviour:
    """Let the checkpoint ``target`` continue ``per_kind`` prompts of each kind; see what drafter and parser say."""

    def encode(text: str) -> Tokens:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids[-longest_prompt:], dtype=np.uint16)

    code = code_prompts(held_out, per_kind)
    asked = {kind: [encode(text) for text in texts] for kind, texts in held_out_prompts(held_out, per_kind).items()}
    with open_engine(target, longest_prompt + new_tokens, device) as llm:
        written = {kind: continue_greedily(llm, prompts, new_tokens) for kind, prompts in asked.items()}
    by_kind = {
        kind: drafter_agreement(drafter, prompts, written[kind], draft_len, device) for kind, prompts in asked.items()
    }
    parsed = closed = both = 0
    for prompt, tail in zip(code, written.get("code", []), strict=True):
        ended = bool(tail[-1] == END_OF_TEXT_ID)
        text = tokenizer.decode(tail.tolist(), skip_special_tokens=True)
        good, whole = parses(prompt.header, text, ended)
        parsed, closed, both = parsed + good, closed + whole, both + (good and whole)
    completions = Completions(len(code), parsed, closed, both)
    counts = {kind: len(prompts) for kind, prompts in asked.items()}
    return Behaviour(by_kind, completions, counts, new_tokens, draft_len, longest_prompt)
