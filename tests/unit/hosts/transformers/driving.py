"""Calls of ``generate`` beside Transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaspec.contract.step import Controller, Limits
from dynaspec.hosts.transformers import Session, generate
from dynaspec.observe.counts import SpecCounts
from unit.hosts.transformers.pairs import Models

GREEDY = {"max_new_tokens": 40, "do_sample": False, "no_repeat_ngram_size": 2}


def plain(models: Models, **options: Any) -> torch.Tensor:
    """The target alone."""
    return models.target.generate(models.inputs, **{**GREEDY, **options})


def ours(models: Models, config: Any = None, **options: Any) -> tuple[torch.Tensor, SpecCounts]:
    """What ``generate`` returns, in a session of its own, and its counts."""
    session = options.pop("session", None) or Session()
    before = session.stats.snapshot()
    output = generate(
        models.target,
        models.inputs,
        assistant_model=options.pop("assistant_model", models.assistant),
        speculative_config=config,
        session=session,
        **{**GREEDY, **options},
    )
    return output, session.stats.snapshot() - before


def decide_with(monkeypatch: pytest.MonkeyPatch, build: Callable[[Limits], Controller]) -> None:
    """Sessions that start from now on have this controller, whatever is configured."""
    monkeypatch.setattr(
        "dynaspec.hosts.transformers.session.build_controller", lambda config, limits, **_: build(limits)
    )
