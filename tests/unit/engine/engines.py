"""Whole engines over fake models and a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from dynaspec.engine.intake import Intake
from unit.engine.fakes import Rig
from unit.engine.texts import ByteTokenizer

TOKENIZER = ByteTokenizer()


def engine_of(rig: Rig) -> Engine:
    """The engine around a rig, which must have the tokenizer's vocabulary."""
    return Engine(
        config=EngineConfig.build(model="fake"),
        tokenizer=TOKENIZER,
        intake=Intake(TOKENIZER, rig.vocab, (TOKENIZER.eos,), rig.max_tokens, 0),
        scheduler=rig.scheduler,
        controller=rig.controller,
        proposers=rig.router,
        loop=rig.loop,
        stats=rig.stats,
        max_model_len=rig.max_tokens,
    )


def make(**options: Any) -> tuple[Engine, Rig]:
    """An engine that drafts a little, serially."""
    rig = Rig(**{"lengths": (3,), "drafter": "draft_model", "vocab": TOKENIZER.vocab_size} | options)
    return engine_of(rig), rig
