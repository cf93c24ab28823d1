"""Drafting with a tiny Llama, and the same model asked for one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynaspec.contract.proposer import Proposer
from dynaspec.contract.step import Controller, DraftView, SpecPlan, StepOutcome, StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm.drafting import Drafting, limits_of
from dynaspec.hosts.vllm.texts import Texts
from dynaspec.kv.blocks import Arena, BlockPool, BlockTables
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.drafter import DraftModel
from dynaspec.propose.guard import FaultBarrier, TargetPassTimer
from dynaspec.propose.ngram import NgramProposer
from dynaspec.propose.router import Router
from dynaspec.propose.suffix import SuffixProposer
from dynaspec.sampling.state import SamplerState
from unit.hosts.vllm.pretended import Clock
from unit.model import tiny

VOCAB = tiny.CONFIG["vocab_size"]
MAX_MODEL_LEN = 96
MAX_NUM_SEQS = 4
LONGEST = 5


def write_model(folder: Path) -> Path:
    """A checkpoint that is sure now and then, and whose positions go further than vLLM's texts."""
    weights = tiny.tensors()
    weights["lm_head.weight"] *= 8.0
    return tiny.write(folder, {"max_position_embeddings": 256}, weights)


class Oracle:
    """The model's greedy continuation of a text, every time from the text's beginning and with nothing kept."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(str(path), dtype="float32")
        self._arena = arena(self._model, 256 // BLOCK_SIZE)
        self._known: dict[tuple[int, ...], int] = {}

    def next_token(self, text: Sequence[int]) -> int:
        key = tuple(text)
        if key not in self._known:
            self._known[key] = self._read(key)
        return self._known[key]

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        tokens = list(text)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(text) :]

    def _read(self, text: tuple[int, ...]) -> int:
        size = len(text)
        batch = ForwardBatch(
            tokens=torch.tensor(text),
            positions=np.arange(size),
            slots=np.arange(size),
            query_start=np.array([0, size], dtype=np.int32),
            context_lens=np.zeros(1, dtype=np.int32),
            block_tables=np.arange(256 // BLOCK_SIZE, dtype=np.int32)[None],
        )
        hidden = self._model.forward(batch, self._arena.layers)
        return int(self._model.logits(hidden[-1:]).argmax())


def arena(model: Model, blocks: int) -> Arena:
    return Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), model.dtype, model.device)


@dataclass
class Recorded:
    """A controller, and all that it was asked and told."""

    inner: Controller
    views: list[StepView] = field(default_factory=list)
    plans: list[SpecPlan] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def plan(self, view: StepView) -> SpecPlan:
        self.views.append(view)
        self.plans.append(self.inner.plan(view))
        return self.plans[-1]

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self.inner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.inner.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self.forgotten += ids
        self.inner.forget(ids)


class Desk:
    """What ``build_drafting`` builds, with its parts at hand."""

    def __init__(
        self,
        path: Path,
        *,
        blocks: int = MAX_NUM_SEQS * -(-(MAX_MODEL_LEN + 1) // BLOCK_SIZE),
        controller: Controller | None = None,
        drafter_length: int = 256,
        **keys: Any,
    ) -> None:
        """
        Args:
            blocks: of the drafter's KV.
            controller: in place of the one that ``keys`` ask for.
            drafter_length: tokens that the drafter can read.
            keys: of ``speculative_config``.
        """
        config = SpeculativeConfig(**{"model": str(path), "num_speculative_tokens": LONGEST} | keys)
        self.clock = Clock()
        self.tables = BlockTables(BlockPool(blocks), MAX_NUM_SEQS, MAX_MODEL_LEN + 1, BLOCK_SIZE, caching=False)
        self.faults: list[str] = []
        self.proposers: list[Proposer] = []
        if config.method == "draft_model":
            self.model = load_model(str(path), dtype="float32")
            sampler, kv = SamplerState(MAX_NUM_SEQS, VOCAB), arena(self.model, blocks)
            self.proposers.append(
                AutoregressiveProposer(
                    DraftModel(self.model, kv), self.tables, sampler, max_length=drafter_length, probabilistic=False
                )
            )
        if config.lookup is not None:
            self.proposers.append(NgramProposer(*config.lookup))
        if config.suffix is not None:
            self.proposers.append(SuffixProposer(config.suffix, config.longest_draft))
        limits = limits_of(*(proposer.traits for proposer in self.proposers), longest=2 * LONGEST)
        self.recorded = Recorded(build_controller(config, limits) if controller is None else controller)
        self.pace = TargetPassTimer()
        guards = [FaultBarrier(one, VOCAB, self.faults.append, self.pace, self.clock) for one in self.proposers]
        self.drafting = Drafting(
            Texts(MAX_NUM_SEQS, MAX_MODEL_LEN),
            self.tables,
            Router(guards),
            self.recorded,
            limits,
            self.pace,
            max_model_len=MAX_MODEL_LEN,
            clock=self.clock,
        )
