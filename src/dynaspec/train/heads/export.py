"""A head's checkpoint and its model card, which says nothing that was not measured."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dynaspec.contract.errors import ConfigError
from dynaspec.train.run import write_text_atomically

from .head import TrainedHead
from .shape import HeadShape


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


def decoder_config(shape: HeadShape) -> dict[str, Any]:
    """A head's decoder layer as Transformers' configuration of a Llama has it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocab,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def export_head(out: Path, head: TrainedHead, config: dict[str, Any], facts: dict[str, Any], card: str) -> None:
    """Write the folder ``out``: config.json, model.safetensors, training.json, README.md.

    Each file is replaced whole; the weights last but one, so that a reader never sees a config without them.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(head.checkpoint(), partial / "model.safetensors", {"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        (partial / "training.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        (partial / "README.md").write_text(card, "utf-8")
        out.mkdir(parents=True, exist_ok=True)
        for name in ("model.safetensors", "config.json", "training.json", "README.md"):
            (partial / name).chmod(0o644)  # safetensors lets nobody else read its files
            os.replace(partial / name, out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """``model.safetensors`` of an exported head.

    Raises:
        ConfigError: there is none.
    """
    try:
        weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
        return weights
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"head: got {str(folder)!r}, expected one with model.safetensors ({error})") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """``training.json`` of an exported head.

    Raises:
        ConfigError: there is none.
    """
    path = folder / "training.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return facts
    except (OSError, ValueError) as error:
        raise ConfigError(f"head: got {str(folder)!r}, expected one with training.json ({error})") from error


def write_facts(folder: Path, facts: dict[str, Any], card: str) -> None:
    """Replace what is said of an exported head."""
    write_text_atomically(folder / "training.json", json.dumps(facts, indent=1) + "\n")
    write_text_atomically(folder / "README.md", card)
