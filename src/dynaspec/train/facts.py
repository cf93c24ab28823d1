"""What is known about a pair, as JSON, and model cards from it: nothing in them that was not measured."""

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

from .data import TokenSet, load_corpus
from .evaluate import CONTEXT_LINES, Agreement, Behaviour, Loss
from .model import Shape, build, parameters
from .run import Checkpoints, write_text_atomically
from .settings import LmSettings

TRAINING = "training.json"
EVALUATION = "evaluation.json"
GIVEN = "given_target"  # among the drafter's facts: where its target was, seen from the output folder
OF_A_RUN = ("provenance", "note", "data", "seed", "seq_len", "batch_rows")
_DATA = """## Data and licences

* The sources of the Python standard library of the interpreter that trained the model, without tests and
  generated tables ({code} files): Python Software Foundation License.
* GSM8K's training problems, as `Question: …\\nAnswer: …` ({maths} problems): MIT licence.

{tokens} training tokens ({size:.1f} MB); {held_code} files and {held_maths} problems are held out and
named in `holdout.json` of the training code. The weights carry no rights of their own.
"""
_LIMITS = """## What it is for

A model of this size demonstrates and tests speculative decoding on a CPU. It writes text that looks like
Python and like solved problems, and greedy text soon repeats itself; what it says is not to be relied on.
Training saw rows of {seq_len} tokens: positions beyond that are untrained. A line break and the indentation
after it are one token, so end a prompt before the break (`def area(radius):`), not after it.
"""
_AGAIN = """## Again

```console
$ dynaspec train lm {given}--gsm8k gsm8k_train.jsonl --out models
```

trains, exports and measures {trained}; `docs/training.md` explains the stages.
"""


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


def write_cards(out: Path) -> None:
    """Write the ``README.md`` of the models from the fact files in ``out``.

    A target that was given has a card there if it lies there and its training is known.
    """
    training = read(out, TRAINING)
    if training is None:
        return
    measured = read(out, EVALUATION)
    cards = {"draft": _draft_card(training, measured)}
    if training["draft"].get(GIVEN, "target") == "target" and "rates" in training["target"]:
        cards["target"] = _target_card(training, measured)
    for name, text in cards.items():
        if (out / name).is_dir():
            write_text_atomically(out / name / "README.md", text)


def _target_card(training: dict[str, Any], measured: dict[str, Any] | None) -> str:
    run = training["target"]
    training = {**training, **run}  # a given target brings the facts of its own run
    head = f"""# dynaspec demo target

{_architecture(run)}

## Training

{_steps(run)}.
Batches of {training["batch_rows"]} × {training["seq_len"]} tokens; {_rates(run["rates"])}; warm-up, stable,
linear decay to 0. {_note(training)}
"""
    again = _AGAIN.format(given="", trained="both models")
    return _join(head, _held_out(measured, "target"), _completions(measured), training, again)


def _draft_card(training: dict[str, Any], measured: dict[str, Any] | None) -> str:
    run = training["draft"]
    recipe, weight = run["distillation"], run["distillation"]["kl_weight"]
    written = run.get("continuations", {"documents": 0, "tokens": 0})
    given = run.get(GIVEN)
    place = (
        "the demo target beside it"
        if given in (None, "target")
        else f"the target in `{given}` (from this folder's parent)"
    )
    head = f"""# dynaspec demo drafter

{_architecture(run)}

Drafts for {place} and shares its tokenizer.

## Training

1. Next tokens of the corpus: {_steps(run["pretraining"])}.
2. The target continued {written["documents"]} prompts of the training split greedily
   ({written["tokens"]} tokens, prompts included).
3. Distillation, {weight:g} KL(target ‖ drafter) + {1 - weight:g} cross-entropy,
   {recipe["generated_share"]:.0%} of the rows from those continuations: {_steps(run["distilled"])}.

Batches of {training["batch_rows"]} × {training["seq_len"]} tokens; {_rates(run["rates"])}.
{_note(training)}
"""
    again = _AGAIN.format(given="--target TARGET " if given else "", trained="the drafter" if given else "both models")
    return _join(head, _held_out(measured, "draft"), _acceptance_section(measured), training, again)


def _join(head: str, losses: str, behaviour: str, training: dict[str, Any], again: str) -> str:
    data = training["data"]
    about = _DATA.format(
        code=data["train_documents"].get("code", 0),
        maths=data["train_documents"].get("maths", 0),
        tokens=data["train_tokens"],
        size=data["train_bytes"] / 1e6,
        held_code=data["held_out_documents"].get("code", 0),
        held_maths=data["held_out_documents"].get("maths", 0),
    )
    sections = [head, losses, behaviour, about, _LIMITS.format(seq_len=training["seq_len"]), again]
    return "\n".join(section for section in sections if section)


def _architecture(run: dict[str, Any]) -> str:
    shape = run["shape"]
    return (
        f"Llama layout, {run['parameters'] / 1e6:.2f} M parameters: {shape['layers']} layers, hidden size "
        f"{shape['hidden']}, {shape['heads']} heads of {shape['head_dim']}, {shape['kv_heads']} KV head(s), "
        f"intermediate size {shape['intermediate']}, vocabulary {shape['vocab']}, tied embeddings, bfloat16."
    )


def _steps(run: dict[str, Any]) -> str:
    if not run:
        return "not run"
    return (
        f"{run['steps']} steps, {run['tokens'] / 1e6:.2f} M tokens, {run['minutes']:.0f} minutes, "
        f"last training loss {run['last_training_loss']:.3f}"
    )


def _rates(rates: dict[str, float]) -> str:
    return (
        f"Muon (peak rate {rates['matrix_lr']:g}) for the inner matrices, "
        f"AdamW ({rates['other_lr']:g}) for embeddings and norms"
    )


def _note(training: dict[str, Any]) -> str:
    device = training["provenance"]["device"]
    return f"Computed on {device}, {training['provenance']['threads']} threads. {training['note']}".rstrip()


def _held_out(measured: dict[str, Any] | None, name: str) -> str:
    if measured is None:
        return ""
    rows = [
        f"| {kind} | {loss['nats_per_token']:.3f} | {loss['bits_per_byte']:.3f} | {loss['tokens']} |"
        for kind, loss in measured["held_out_loss"][name].items()
    ]
    return "\n".join(
        ["## Held-out loss", "", "| | nats a token | bits a byte | tokens |", "|---|---|---|---|", *rows, ""]
    )


def _acceptance_section(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return ""
    depth = len(measured["agreement"]["all"]["survival"])
    rows = [
        f"| {kind} | {_share(a['first_token'])} | {' '.join(_share(s) for s in a['survival'])} "
        f"| {a['tokens_per_step'] or 0:.2f} |"
        for kind, a in measured["agreement"].items()
    ]
    return "\n".join(
        [
            "## Agreement with the target's greedy text",
            "",
            f"| | first token | survival of drafts 1 … {depth} | tokens a step |",
            "|---|---|---|---|",
            *rows,
            "",
            measured["method"]["agreement"],
            "",
        ]
    )


def _completions(measured: dict[str, Any] | None) -> str:
    if measured is None or not measured["completions"]["prompts"]:
        return ""
    got = measured["completions"]
    return (
        f"## Python that parses\n\n{got['parsed']} of {got['prompts']} greedy completions of held-out "
        f"functions are accepted by `ast.parse`; of the {got['closed']} whose end was reached, "
        f"{got['closed_parsed']}.\n\n"
        f"{measured['method']['completions']}\n"
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def summary(out: Path) -> list[str]:
    """The main figures of ``evaluation.json``, a line each."""
    measured = read(out, EVALUATION)
    if measured is None:
        return []
    got = measured["completions"]
    lines = [
        f"{kind}: first token {_share(a['first_token'])}, "
        f"survival {' '.join(_share(s) for s in a['survival'])}, "
        f"{a['tokens_per_step'] or 0:.2f} tokens a step"
        for kind, a in measured["agreement"].items()
    ]
    return [*lines, f"completions that parse: {got['parsed']} of {got['prompts']}"]
