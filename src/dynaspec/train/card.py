"""Model cards, written from the fact files alone: nothing in them that was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynaspec.train import facts
from dynaspec.train.files import write_text_atomically

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


def write_cards(out: Path) -> None:
    """Write the ``README.md`` of the models from the fact files in ``out``.

    A target that was given has a card there if it lies there and its training is known.
    """
    training = facts.read(out, facts.TRAINING)
    if training is None:
        return
    measured = facts.read(out, facts.EVALUATION)
    cards = {"draft": _draft(training, measured)}
    if training["draft"].get(facts.GIVEN, "target") == "target" and "rates" in training["target"]:
        cards["target"] = _target(training, measured)
    for name, text in cards.items():
        if (out / name).is_dir():
            write_text_atomically(out / name / "README.md", text)


def _target(training: dict[str, Any], measured: dict[str, Any] | None) -> str:
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


def _draft(training: dict[str, Any], measured: dict[str, Any] | None) -> str:
    run = training["draft"]
    recipe, weight = run["distillation"], run["distillation"]["kl_weight"]
    written = run.get("continuations", {"documents": 0, "tokens": 0})
    given = run.get(facts.GIVEN)
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
    return _join(head, _held_out(measured, "draft"), _agreement(measured), training, again)


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


def _agreement(measured: dict[str, Any] | None) -> str:
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
    measured = facts.read(out, facts.EVALUATION)
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
