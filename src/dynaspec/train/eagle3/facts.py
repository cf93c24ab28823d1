"""What is known about a head, as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from dynaspec.train.eagle3.basis import Basis
from dynaspec.train.eagle3.conversations import read_conversations
from dynaspec.train.eagle3.head import Head
from dynaspec.train.eagle3.settings import Eagle3Settings
from dynaspec.train.eagle3.states import StatesPlace
from dynaspec.train.eagle3.trainer import Progress
from dynaspec.train.eagle3.vocabulary import coverage
from dynaspec.train.facts import provenance


def training_facts(
    settings: Eagle3Settings, basis: Basis, head: Head, progress: Progress, place: StatesPlace, device: torch.device
) -> dict[str, Any]:
    """Data, settings, and how training went."""
    conversations = list(read_conversations(place.conversations))
    held_out = list(read_conversations(place.folder / "held-out.jsonl"))
    train = settings.train
    return {
        "provenance": provenance(device),
        "note": settings.note,
        "verifier": settings.verifier,
        "shape": basis.shape.as_facts(),
        "parameters": sum(p.numel() for p in head.parameters()),
        "data": {
            "conversations": len(conversations),
            "by_source": dict(Counter(c.source for c in conversations)),
            "by_temperature": {str(t): n for t, n in sorted(Counter(c.temperature for c in conversations).items())},
            "answer_tokens": sum(len(c.answer) for c in conversations),
            "held_out_conversations": len(held_out),
            "held_out_greedy": sum(c.temperature == 0.0 for c in held_out),
            "held_out_coverage": round(coverage((torch.tensor(c.answer) for c in held_out), basis.vocabulary), 4),
        },
        "training": {
            "seed": train.seed,
            "start_from": settings.start_from,
            "batch_tokens": train.batch_tokens,
            "warmup_steps": train.schedule.warmup_steps,
            "decay_share": train.schedule.decay_share,
            "loss": asdict(settings.loss),
            "rates": asdict(settings.rates),
            "workers": settings.workers,
        },
        "progress": asdict(progress),
    }
