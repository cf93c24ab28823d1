"""The model card, from the facts alone: nothing in it that was not measured."""

from __future__ import annotations

import textwrap
from typing import Any


def card(facts: dict[str, Any]) -> str:
    """``README.md`` of a head from its ``training.json``."""
    sections = [
        _head(facts),
        _use(facts),
        _data(facts),
        _training(facts),
        _held_out(facts),
        _measured(facts),
        _limits(facts),
    ]
    return "\n".join(section for section in sections if section)


def _head(facts: dict[str, Any]) -> str:
    shape = facts["shape"]
    residual = "normalised" if shape["norm_before_residual"] else "fused"
    text = _flow(
        f"""Drafts for `{facts["verifier"]}` from its hidden states (inputs of layers {_listed(shape["aux_layers"])}):
        one Llama layer of hidden size {shape["hidden"]}, {shape["heads"]} heads of {shape["head_dim"]},
        {shape["kv_heads"]} KV head(s), intermediate size {shape["intermediate"]}; {facts["parameters"] / 1e6:.2f} M
        parameters in bfloat16, and the target's embedding, which is not in the file. The residual stream starts
        from the {residual} state. {shape["draft_vocab"]} of the target's {shape["vocab"]} tokens can be drafted;
        they cover {facts["data"]["held_out_coverage"]:.1%} of held-out answers. Format: `speculators` (`eagle3`)."""
    )
    return f"# EAGLE-3 head for {facts['verifier']}\n\n{text}\n"


def _use(facts: dict[str, Any]) -> str:
    drafts = facts["training"]["loss"]["depths"]
    return f"""## Use

```console
$ dynaspec generate --model {facts["verifier"]} \\
    --speculative-config '{{"method": "eagle3", "model": "FOLDER"}}' "What is speculative decoding?"
```

It was trained to draft {drafts} tokens in a row.
"""


def _data(facts: dict[str, Any]) -> str:
    data = facts["data"]
    sources = ", ".join(f"{name or 'unnamed'} {n}" for name, n in sorted(data["by_source"].items()))
    temperatures = ", ".join(f"{t} for {n}" for t, n in data["by_temperature"].items())
    text = _flow(
        f"""{data["conversations"]} conversations with {data["answer_tokens"] / 1e6:.2f} M answer tokens, all answers
        written by the target; by source of the prompt: {sources}. Temperatures: {temperatures}.
        {data["held_out_conversations"]} conversations ({data["held_out_greedy"]} of them greedy) are held out."""
    )
    return f"## Data\n\n{text}\n"


def _training(facts: dict[str, Any]) -> str:
    run, done = facts["training"], facts["progress"]
    loss, rates = run["loss"], run["rates"]
    losses = ", ".join(f"{value:.3f}" for value in done["losses"])
    begun = f"Trained on from `{run['start_from']}`. " if run.get("start_from") else ""
    text = _flow(
        f"""{begun}{done["step"]} steps, {done["tokens"] / 1e6:.2f} M answer tokens with repetitions,
        {done["seconds"] / 60:.0f} minutes on {facts["provenance"]["device"]}. {loss["depths"]} unrolled drafts, the
        j-th weighing {loss["depth_decay"]:g}^j and made from {loss["chain_share"]:.0%} of the positions beyond the
        first; cross-entropy against the target's distribution at temperature {loss["temperature"]:g}, renormalised
        over the draft vocabulary; noise of {loss["noise"]:.0%} on the hidden states. Steps of {run["batch_tokens"]}
        tokens; Muon ({rates["matrix_lr"]:g}, weight decay {rates["weight_decay"]:g}) for the matrices, AdamW
        ({rates["other_lr"]:g}) for head and norms; warm-up, stable, linear decay over the last
        {run["decay_share"]:.0%}. Last losses by draft, in nats: {losses}. {facts["note"]}"""
    )
    return f"## Training\n\n{text}\n"


def _held_out(facts: dict[str, Any]) -> str:
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


def _measured(facts: dict[str, Any]) -> str:
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


def _limits(facts: dict[str, Any]) -> str:
    text = _flow(
        f"""A head changes how fast its target answers, never what it answers. On texts unlike the data above fewer
        drafts are accepted; other versions of `{facts["verifier"]}` need heads of their own."""
    )
    return f"## Limits\n\n{text}\n"


def _flow(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
