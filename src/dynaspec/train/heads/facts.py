"""What is known about a head, as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from dynaspec.train.facts import provenance
from dynaspec.train.heads.basis import Basis
from dynaspec.train.heads.conversations import read_conversations
from dynaspec.train.heads.head import TrainedHead
from dynaspec.train.heads.settings import HeadSettings
from dynaspec.train.heads.states import StatesPlace
from dynaspec.train.heads.trainer import Progress
from dynaspec.train.heads.vocabulary import coverage


def training_facts(
    settings: HeadSettings,
    basis: Basis,
    head: TrainedHead,
    progress: Progress,
    place: StatesPlace,
    device: torch.device,
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
        "options": settings.kind.options,
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
            "start_from": settings.kind.start_from,
            "batch_tokens": train.batch_tokens,
            "warmup_steps": train.schedule.warmup_steps,
            "decay_share": train.schedule.decay_share,
            "loss": asdict(settings.loss),
            "rates": asdict(settings.rates),
            "workers": settings.workers,
        },
        "progress": asdict(progress),
    }
