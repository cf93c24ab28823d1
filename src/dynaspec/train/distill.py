"""The drafter's three phases: learn the text, watch the target write, learn to foresee it.

1. *Pretraining* on next tokens needs no target and is the cheapest way to a drafter that can read.
2. The target continues prompts from the training split, greedily.
3. *Distillation* on a mixture of corpus rows and those continuations: the drafter is judged on what
   the target writes, which is more regular than what people wrote. The rows are few enough to come
   again, since it is the target's answer that costs time, and it is remembered.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from dynaspec.api import LLM
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams

from .data import Document, Tokens, TokenSet, token_set
from .model import logits
from .optimizer import Budget
from .run import Listener, time_left

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


def open_engine(target: Path, longest: int, device: torch.device, at_once: int = 64) -> LLM:
    """dynaspec's engine with the checkpoint ``target``, for texts of up to ``longest`` tokens, ``at_once`` together.

    Raises:
        CheckpointError, ConfigError, CapacityError: what was given cannot work.
    """
    return LLM(
        str(target),
        device=device.type,
        dtype="float32",
        max_model_len=longest,
        max_num_seqs=at_once,
        enable_prefix_caching=False,
    )


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


@dataclass(frozen=True, slots=True)
class SoftLabels:
    """The target's most likely next tokens at each position, most likely first.

    ``ids`` [rows, seq_len, k] (int64) and ``log_probs`` [rows, seq_len, k] (float32).
    """

    ids: Tensor
    log_probs: Tensor


class Teacher:
    """Scores rows with the target and keeps its ``k`` best tokens of each position.

    The target is many times dearer than the drafter, so a row that comes again must not be scored
    again. A row is known by its tokens: 4 bytes · k a token are kept, in main memory.
    """

    def __init__(self, target: LlamaForCausalLM, k: int = 32, temperature: float = 1.0) -> None:
        """
        Args:
            temperature: below 1 the labels are sharper than the target: a drafter of greedy requests is asked for the
                target's first choice, and is as sure of a token as it is often right.

        Raises:
            ConfigError: it is not above 0.
        """
        if not temperature > 0.0:
            raise ConfigError(f"teacher_temperature: got {temperature}, expected a number above 0")
        self._temperature = temperature
        self._target = target.eval().requires_grad_(False)
        self._k = min(k, target.config.vocab_size)
        self._known: dict[bytes, tuple[Tensor, Tensor]] = {}

    @property
    def rows(self) -> int:
        """How many rows were scored so far."""
        return len(self._known)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> SoftLabels:
        """Soft labels of ``inputs`` [rows, seq_len], on the device of ``inputs``."""
        keys = [row.tobytes() for row in inputs.cpu().numpy()]
        fresh = list({key: i for i, key in enumerate(keys) if key not in self._known}.values())
        if fresh:
            scores = logits(self._target, inputs[fresh]).view(*inputs[fresh].shape, -1)
            best = (scores / self._temperature).log_softmax(-1).topk(self._k, dim=-1)
            for row, ids, log_probs in zip(fresh, best.indices.cpu(), best.values.cpu(), strict=True):
                self._known[keys[row]] = (ids.to(torch.uint16), log_probs.half())
        known = [self._known[key] for key in keys]
        return SoftLabels(
            torch.stack([ids for ids, _ in known]).to(inputs.device, torch.int64),
            torch.stack([log_probs for _, log_probs in known]).to(inputs.device, torch.float32),
        )


class Distillation:
    """``weight`` · KL(target ‖ drafter) + (1 − ``weight``) · cross-entropy of the next token, nats.

    Forward KL keeps the drafter's mass where the target has its own, which is what exact acceptance
    rewards; the cross-entropy anchors it to the text (Hinton et al., 2015). The divergence is that
    of the target's best tokens and of "any other token" as one more.
    """

    def __init__(self, teacher: Teacher, drafter: LlamaForCausalLM, weight: float = 0.8) -> None:
        if not 0.0 <= weight <= 1.0:
            raise ConfigError(f"kl_weight: got {weight}, expected 0 to 1")
        self._teacher = teacher
        self._drafter = drafter
        self._weight = weight

    def __call__(self, batch: Tensor) -> Tensor:
        """Scalar loss of a batch [rows, seq_len + 1]."""
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        wanted = self._teacher(inputs)
        given = F.log_softmax(logits(self._drafter, inputs), dim=-1)
        divergence = coarse_divergence(wanted.log_probs.flatten(0, 1), given.gather(-1, wanted.ids.flatten(0, 1)))
        loss: Tensor = self._weight * divergence + (1.0 - self._weight) * F.nll_loss(given, labels)
        return loss


def coarse_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Mean KL(p ‖ q) over positions, from the log probabilities [positions, k] of the same k tokens.

    What the k tokens leave to one counts as one further outcome.
    """
    p_rest, q_rest = _log_rest(p), _log_rest(q)
    per_position = (p.exp() * (p - q)).sum(-1) + p_rest.exp() * (p_rest - q_rest)
    return per_position.mean()


def _log_rest(log_probs: Tensor) -> Tensor:
    # Rounding may leave less than nothing; 1e-6 is below what half-precision labels resolve.
    return (1.0 - log_probs.exp().sum(-1)).clamp_min(1e-6).log()


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """How the drafter's time is divided, and what it learns from."""

    pretrain_share: float = 0.25
    generate_share: float = 0.35  # of the time that is left after pretraining
    prompts: int = 2048
    prompt_tokens: int = 128
    new_tokens: int = 192
    batch: int = 64  # continuations that the target writes at once
    kl_weight: float = 0.8
    generated_share: float = 0.5  # of the rows of a distillation batch
    corpus_rows: int = 512  # rows of the corpus that the target is asked about
    teacher_tokens: int = 32  # of which the target's probability is kept at each position
    teacher_temperature: float = 1.0  # of the target's distribution; below 1 it is sharper
    decay_share: float = 0.6  # of the distillation

    def __post_init__(self) -> None:
        for name in ("pretrain_share", "generate_share", "kl_weight", "generated_share", "decay_share"):
            if not 0.0 <= (value := getattr(self, name)) <= 1.0:
                raise ConfigError(f"{name}: got {value}, expected 0 to 1")
        for name in ("prompts", "prompt_tokens", "new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}: got {value}, expected at least 1")


@dataclass(frozen=True, slots=True)
class WritingReport:
    """How far the target has come with its continuations."""

    share: float
    documents: int
    prompts: int
    tokens: int  # those of the prompts included
    seconds_left: float

    @property
    def figures(self) -> str:
        """Continuations, tokens and time left, on one line."""
        return (
            f"{self.documents} of {self.prompts} · {self.tokens / 1e6:.2f} M tokens with prompts · "
            f"{time_left(self.seconds_left)}"
        )


def write_continuations(
    target: Path,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    settings: DistillSettings,
    budget: Budget,
    seed: int,
    device: torch.device,
    path: Path,
    listener: Listener,
) -> TokenSet:
    """Let the checkpoint ``target`` write until the prompts or ``budget`` run out; store the result at ``path``.

    ``budget`` counts seconds or a time of day here; at least one batch is always written. What is
    stored already is not made again.
    """
    if path.is_file():
        return TokenSet.load(path)
    prompts = training_prompts(documents, tokenizer, settings.prompts, settings.prompt_tokens, seed)
    began = time.monotonic()

    def go_on(done: Sequence[Tokens]) -> bool:
        if not done:
            return True
        # Steps say nothing about writing: step 0 leaves the clock alone to decide.
        spent = time.monotonic() - began
        share = budget.progress(0, spent)
        left = min(budget.seconds_left(0, spent), spent * (len(prompts) / len(done) - 1))
        tokens = sum(len(document) for document in done)
        listener(WritingReport(max(share, len(done) / len(prompts)), len(done), len(prompts), tokens, left))
        return share < 1.0

    with open_engine(target, settings.prompt_tokens + settings.new_tokens, device, settings.batch) as llm:
        made = generate_documents(llm, prompts, settings.new_tokens, settings.batch, go_on)
    made.save(path)
    return made
