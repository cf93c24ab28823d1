"""The model card, from the facts alone: nothing in it that was not measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any


def card(title: str, method: str, described: str, facts: Mapping[str, Any]) -> str:
    """``README.md`` of a head from its ``training.json``; ``described`` says what it reads and looks like."""
    verifier = facts["verifier"]
    sections = [
        f"# {title} for {verifier}\n\n{_flow(f'Drafts for `{verifier}` from its {described}')}\n",
        _use(method, facts),
        _data(facts),
        _training(facts),
        _held_out(facts),
        _measured(facts),
        _limits(facts),
    ]
    return "\n".join(section for section in sections if section)


def decoder_sizes(facts: Mapping[str, Any]) -> str:
    """A sentence on a head's decoder layer."""
    shape = facts["shape"]
    return f"""one Llama layer of hidden size {shape["hidden"]}, {shape["heads"]} heads of {shape["head_dim"]},
        {shape["kv_heads"]} KV head(s), intermediate size {shape["intermediate"]}; {facts["parameters"] / 1e6:.2f} M
        parameters in bfloat16, and the target's embedding, which is not in the file."""


def drafted_tokens(facts: Mapping[str, Any]) -> str:
    """A sentence on the draft vocabulary."""
    shape = facts["shape"]
    return f"""{shape["draft_vocab"]} of the target's {shape["vocab"]} tokens can be drafted; they cover
        {facts["data"]["held_out_coverage"]:.1%} of held-out answers."""


def listed(numbers: Sequence[int]) -> str:
    """1, 2 and 3."""
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _use(method: str, facts: Mapping[str, Any]) -> str:
    drafts = facts["training"]["loss"]["depths"]
    return f"""## Use

```console
$ dynaspec generate --model {facts["verifier"]} \\
    --speculative-config '{{"method": "{method}", "model": "FOLDER"}}' "What is speculative decoding?"
```

It was trained to draft {drafts} tokens in a row.
"""


def _data(facts: Mapping[str, Any]) -> str:
    data = facts["data"]
    sources = ", ".join(f"{name or 'unnamed'} {n}" for name, n in sorted(data["by_source"].items()))
    temperatures = ", ".join(f"{t} for {n}" for t, n in data["by_temperature"].items())
    text = _flow(
        f"""{data["conversations"]} conversations with {data["answer_tokens"] / 1e6:.2f} M answer tokens, all answers
        written by the target; by source of the prompt: {sources}. Temperatures: {temperatures}.
        {data["held_out_conversations"]} conversations ({data["held_out_greedy"]} of them greedy) are held out."""
    )
    return f"## Data\n\n{text}\n"


def _training(facts: Mapping[str, Any]) -> str:
    run, done = facts["training"], facts["progress"]
    loss, rates = run["loss"], run["rates"]
    losses = ", ".join(f"{value:.3f}" for value in done["losses"])
    begun = f"Trained on from `{run['start_from']}`. " if run.get("start_from") else ""
    text = _flow(
        f"""{begun}{done["step"]} steps, {done["tokens"] / 1e6:.2f} M answer tokens with repetitions,
        {done["seconds"] / 60:.0f} minutes on {facts["provenance"]["device"]}. {loss["depths"]} unrolled drafts, the
        j-th weighing {loss["depth_decay"]:g}^j and made from {loss["chain_share"]:.0%} of the positions beyond the
        first; cross-entropy against the target's distribution at temperature {loss["temperature"]:g} over what can be
        drafted; noise of {loss["noise"]:.0%} on the hidden states. Steps of {run["batch_tokens"]}
        tokens; Muon ({rates["matrix_lr"]:g}, weight decay {rates["weight_decay"]:g}) for the matrices, AdamW
        ({rates["other_lr"]:g}) for the rest; warm-up, stable, linear decay over the last
        {run["decay_share"]:.0%}. Last losses by draft, in nats: {losses}. {facts["note"]}"""
    )
    return f"## Training\n\n{text}\n"


def _held_out(facts: Mapping[str, Any]) -> str:
    history = facts["progress"]["history"]
    if not history:
        return ""
    last = history[-1]
    rates = ", ".join(f"{rate:.3f}" for rate in last["rates"])
    shown = history[:: max(1, len(history) // 10)]
    shown += [last] if shown[-1] is not last else []
    rows = "\n".join(f"| {h['tokens'] / 1e6:.2f} | {h['acceptance_length']:.3f} |" for h in shown)
    text = _flow(
        f"""Greedy verification of chains of {len(last["rates"])} drafts along the held-out answers emits
        {last["acceptance_length"]:.3f} tokens a step. Share of the drafts accepted once those before them were:
        {rates}."""
    )
    return f"""## Held-out acceptance

{text}

| million tokens trained | tokens a step |
|---|---|
{rows}
"""


def _measured(facts: Mapping[str, Any]) -> str:
    measured = facts.get("measured")
    if measured is None:
        return ""
    rows = {**measured["categories"], "all": measured["all"]}
    table = "\n".join(f"| {n} | {r['conversations']} | {r['acceptance_length']:.2f} |" for n, r in rows.items())
    text = _flow(
        f"""The same on the prompts of `{measured["prompts"]}`: tokens a step of greedy verification emits, chains of
        {measured["drafts"]} drafts along the target's own greedy answers of up to {measured["new_tokens"]} tokens."""
    )
    return f"""## Acceptance by category

{text}

| category | prompts | tokens a step |
|---|---|---|
{table}
"""


def _limits(facts: Mapping[str, Any]) -> str:
    text = _flow(
        f"""A head changes how fast its target answers, never what it answers. On texts unlike the data above fewer
        drafts are accepted; other versions of `{facts["verifier"]}` need heads of their own."""
    )
    return f"## Limits\n\n{text}\n"


def _flow(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False)
