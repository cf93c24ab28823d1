"""The drafter's three phases: learn the text, watch the target write, learn to foresee it.

1. *Pretraining* on next tokens needs no target and is the cheapest way to a drafter that can read.
2. The target continues prompts from the training split, greedily.
3. *Distillation* on a mixture of corpus rows and those continuations: the drafter is judged on what
   the target writes, which is more regular than what people wrote. The rows are few enough to come
   again, since it is the target's answer that costs time, and it is remembered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dynaspec.contract.errors import ConfigError
from dynaspec.train.corpus import Document
from dynaspec.train.data import Tokens, TokenSet
from dynaspec.train.generate import generate_documents, open_engine, training_prompts
from dynaspec.train.report import Listener, time_left
from dynaspec.train.schedule import Budget


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
