"""Draft models with a vocabulary of their own: another one's weights, with the rows of its tokens in other places."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

WORDS = "the return number function that value print string index result question answer apples fox lazy quick dog"


def save_other_vocabulary(folder: Path, source: str, *, merges: int, foreign: int = 8, seed: int = 0) -> str:
    """A checkpoint whose byte-level BPE has the first ``merges`` of those of ``source``, and a few more of its own.

    Its ids are in another order. A token of its own has the mean of its parts' rows, and the special token is spelled
    in another way.

    Returns:
        The folder.
    """
    tokenizer = json.loads((Path(source) / "tokenizer.json").read_text("utf-8"))
    old: dict[str, int] = tokenizer["model"]["vocab"]
    special = [token["content"] for token in tokenizer["added_tokens"]]
    kept = tokenizer["model"]["merges"][:merges]
    joined = {"".join(pair) for pair in kept}
    alphabet = [name for name in old if len(name) == 1]
    rows: dict[str, list[int]] = {name: [old[name]] for name in [*alphabet, *sorted(joined)]}
    own = _own_merges(rows, {*old}, kept)[:foreign]
    for left, right in own:
        rows[left + right] = [*rows[left], *rows[right]]
    names = [*rows, *(f"<|own {name.strip('<|>')}|>" for name in special)]
    rows |= {name: [old[of]] for name, of in zip(names[len(rows) :], special, strict=True)}
    order = np.random.default_rng(seed).permutation(len(names))
    ids = {names[place]: token for token, place in enumerate(order.tolist())}
    tokenizer["model"] |= {"vocab": ids, "merges": [*kept, *own]}
    for token in tokenizer["added_tokens"]:
        token["content"] = f"<|own {token['content'].strip('<|>')}|>"
        token["id"] = ids[token["content"]]
    _save(folder, source, tokenizer, [rows[names[place]] for place in order.tolist()])
    return str(folder)


def _own_merges(rows: dict[str, list[int]], known: set[str], kept: list[Any]) -> list[list[str]]:
    """Merges that make words' beginnings into tokens that the source does not have."""
    ranks = {tuple(pair): rank for rank, pair in enumerate(kept)}
    found: list[list[str]] = []
    for word in WORDS.split():
        parts = list("Ġ" + word)
        while len(parts) > 1:
            rank, place = min((ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts)))
            if rank == len(ranks):
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) > 1 and "".join(parts[:2]) not in known | {*rows}:
            found.append(parts[:2])
    return [pair for i, pair in enumerate(found) if pair not in found[:i]]


def _save(folder: Path, source: str, tokenizer: dict[str, Any], rows: list[list[int]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    with torch.no_grad():
        weights = [torch.stack([table.weight[row].mean(0) for row in rows]) for table in tables]
        model.resize_token_embeddings(len(rows), mean_resizing=False)
        for table, weight in zip((model.get_input_embeddings(), model.get_output_embeddings()), weights, strict=True):
            table.weight.copy_(weight)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    settings = json.loads((Path(source) / "tokenizer_config.json").read_text("utf-8"))
    name = tokenizer["added_tokens"][0]["content"]
    settings = {key: name if key.endswith("_token") and value else value for key, value in settings.items()}
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
