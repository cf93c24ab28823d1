"""What is known about a pair, as JSON: how it was trained, and what was measured."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from dynaspec.train.checkpoints import Checkpoints
from dynaspec.train.corpus import load_corpus
from dynaspec.train.data import TokenSet
from dynaspec.train.evaluate import CONTEXT_LINES, Agreement, Behaviour, Loss
from dynaspec.train.files import write_text_atomically
from dynaspec.train.model import Shape, build, parameters
from dynaspec.train.settings import LmSettings

TRAINING = "training.json"
EVALUATION = "evaluation.json"
GIVEN = "given_target"  # among the drafter's facts: where its target was, seen from the output folder
OF_A_RUN = ("provenance", "note", "data", "seed", "seq_len", "batch_rows")


def provenance(device: torch.device) -> dict[str, Any]:
    """Software and kind of device behind a figure."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def write_training(settings: LmSettings, device: torch.device) -> None:
    """Gather the facts of every stage that has run into ``training.json``."""
    places = settings.places
    corpus = load_corpus(settings.library, settings.gsm8k)
    train = TokenSet.load(places.train)
    facts: dict[str, Any] = {
        "provenance": provenance(device),
        "note": settings.note,
        "data": {
            "train_documents": dict(Counter(d.kind for d in corpus.train)),
            "held_out_documents": dict(Counter(d.kind for d in corpus.held_out)),
            "train_tokens": len(train.tokens),
            "train_bytes": sum(len(d.text.encode()) for d in corpus.train),
        },
        "seed": settings.seed,
        "seq_len": settings.seq_len,
        "batch_rows": settings.batch_rows,
        "target": _target(settings),
        "draft": {
            **_model(settings.draft),
            "rates": asdict(settings.draft_rates),
            "distillation": asdict(settings.distill),
            "pretraining": _run(places.pretrained),
            "distilled": _run(places.draft),
        },
    }
    if places.generated.is_file():
        written = TokenSet.load(places.generated)
        facts["draft"]["continuations"] = {"documents": written.documents, "tokens": len(written.tokens)}
    if places.given is not None:
        facts["draft"][GIVEN] = Path(os.path.relpath(places.given.resolve(), places.out.resolve())).as_posix()
    _write(places.out / TRAINING, facts)


def _target(settings: LmSettings) -> dict[str, Any]:
    places = settings.places
    if places.given is None:
        return {**_model(settings.target), "rates": asdict(settings.target_rates), **_run(places.target)}
    with torch.device("meta"):
        count = parameters(LlamaForCausalLM(LlamaConfig.from_pretrained(places.given)))
    return _told(places.given, count) or {"shape": asdict(settings.target), "parameters": count}


def _told(given: Path, count: int) -> dict[str, Any] | None:
    """What the ``training.json`` beside ``given`` says of that target, if it speaks of it."""
    folder = given.absolute().parent
    before = read(folder, TRAINING) or {}
    if before.get("target", {}).get("parameters") != count:
        return None
    meant = before["draft"].get(GIVEN, "target")
    if (folder / meant).resolve() != given.resolve():
        return None
    if GIVEN in before["draft"]:
        return dict(before["target"])
    # The run was the target's; the facts of the run that now joins it are the drafter's.
    return {**{name: before[name] for name in OF_A_RUN}, **before["target"]}


def _model(shape: Shape) -> dict[str, Any]:
    with torch.device("meta"):
        count = parameters(build(shape, seed=0))
    return {"shape": asdict(shape), "parameters": count}


def _run(checkpoints: Checkpoints) -> dict[str, Any]:
    if not checkpoints.latest.is_file():
        return {}
    state = torch.load(checkpoints.latest, map_location="cpu", weights_only=True, mmap=True)
    done: dict[str, Any] = state["progress"]
    return {
        "steps": done["step"],
        "tokens": done["tokens"],
        "minutes": round(done["seconds"] / 60, 1),
        "last_training_loss": round(done["loss"], 4),
    }


def write_evaluation(
    settings: LmSettings, losses: dict[str, dict[str, Loss]], shown: Behaviour, device: torch.device
) -> None:
    """Counts and the ratios made of them, with what was done to get them, to ``evaluation.json``."""
    total = sum(shown.agreement.values(), start=Agreement.nothing(shown.draft_len))
    completions = shown.completions
    facts: dict[str, Any] = {
        "provenance": provenance(device),
        "method": _method(settings.seq_len, shown),
        "held_out_loss": {name: _losses(by_kind) for name, by_kind in losses.items()},
        "agreement": {
            **{kind: _agreement(counts) for kind, counts in shown.agreement.items()},
            "all": _agreement(total),
        },
        "completions": {
            **asdict(completions),
            "parsed_share": _ratio(completions.parsed, completions.prompts),
            "closed_parsed_share": _ratio(completions.closed_parsed, completions.closed),
        },
        "prompts": dict(shown.prompts),
    }
    _write(settings.places.out / EVALUATION, facts)


def _method(seq_len: int, shown: Behaviour) -> dict[str, str]:
    return {
        "weights": "The values in the checkpoints, computed in float32.",
        "held_out_loss": (f"Every token of the held-out documents once, in rows of {seq_len} of the joined documents."),
        "agreement": (
            f"The target continues held-out prompts greedily, up to {shown.new_tokens} tokens. At each "
            "position of that text the drafter's argmax is compared with the target's token. survival[j]: "
            "share of the positions from which j + 1 drafted tokens in a row are right, over positions that "
            f"have {shown.draft_len} tokens left. tokens_per_step: tokens a verification step emits when "
            f"each step drafts {shown.draft_len}."
        ),
        "completions": (
            "Prompts are held-out files cut after the colon of a top-level function's header, with the "
            f"{CONTEXT_LINES} lines before it, at most {shown.longest_prompt} tokens. The body ends before "
            "the first line that starts in column 0 with anything but a comment; where none comes within "
            f"{shown.new_tokens} tokens, it is cut at its last line end, and an unfinished statement counts "
            "as a failure. Accepted: ast.parse takes header and body."
        ),
    }


def _losses(by_kind: dict[str, Loss]) -> dict[str, Any]:
    total = Loss(
        sum(x.nats for x in by_kind.values()),
        sum(x.tokens for x in by_kind.values()),
        sum(x.utf8_bytes for x in by_kind.values()),
    )
    return {
        kind: {
            "nats_per_token": round(loss.nats_per_token, 4),
            "bits_per_byte": round(loss.bits_per_byte, 4),
            "tokens": loss.tokens,
        }
        for kind, loss in {**by_kind, "all": total}.items()
    }


def _agreement(counts: Agreement) -> dict[str, Any]:
    return {
        "first_token": _ratio(counts.first_equal, counts.first_positions),
        "positions": counts.first_positions,
        "survival": [_ratio(s, counts.positions) for s in counts.survived],
        "tokens_per_step": _ratio(counts.emitted, counts.steps),
        "steps": counts.steps,
    }


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """One of the two fact files of ``folder``, if it is there."""
    path = folder / name
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _write(path: Path, facts: dict[str, Any]) -> None:
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    write_text_atomically(path, text)
