"""The target as an author: many prompts in, its own continuations out, by dynaspec's engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from dynaspec.api import LLM
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Tokenizer


class Writer(Protocol):
    """Continues prompts."""

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], new_tokens: int, stop: Sequence[int] = ()
    ) -> list[list[int]]:
        """Up to ``new_tokens`` ids for each prompt; the id that ended it included. ``stop`` ids end it as well."""
        ...


class EngineWriter:
    """dynaspec's engine, plainly decoding many requests at once."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._seed = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self._llm.tokenizer

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], new_tokens: int, stop: Sequence[int] = ()
    ) -> list[list[int]]:
        """See :class:`Writer`; prompts that leave no room are answered with nothing."""
        fit = [i for i, prompt in enumerate(prompts) if len(prompt) + new_tokens <= self._llm.max_model_len]
        params = [
            SamplingParams(
                temperature=temperatures[i], max_tokens=new_tokens, detokenize=False, stop_token_ids=list(stop) or None
            )
            for i in fit
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        outputs = self._llm.generate([{"prompt_token_ids": list(prompts[i])} for i in fit], params) if fit else []
        for i, output in zip(fit, outputs, strict=True):
            answers[i] = list(output.outputs[0].token_ids)
        return answers


@contextmanager
def open_writer(model: str, device: torch.device, longest: int, at_once: int, seed: int) -> Iterator[EngineWriter]:
    """An engine for texts of up to ``longest`` tokens, ``at_once`` together; closed afterwards.

    Raises:
        CheckpointError, ConfigError, CapacityError: what was given cannot work.
    """
    llm = LLM(model, device=device.type, max_model_len=longest, max_num_seqs=at_once, seed=seed)
    try:
        yield EngineWriter(llm)
    finally:
        llm.close()
