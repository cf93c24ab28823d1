"""Greedy text of the demo target, against Transformers' own model."""

from __future__ import annotations

import json
import sysconfig
from importlib.resources import files
from pathlib import Path

import torch

from dynaspec import LLM, SamplingParams

TARGET = Path(__file__).parents[1] / "models" / "target"
PROMPTS = 50
NEW_TOKENS = 24
TIE = 1e-4


def held_out_prompts() -> list[str]:
    """Openings and middles of standard-library files that training never saw."""
    names = json.loads(files("dynaspec.train").joinpath("holdout.json").read_text())["code"]
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text() for path in (library / name for name in names) if path.exists()]
    pieces = [text[start : start + 300] for start in (0, 1500, 3000, 4500, 6000, 8000) for text in texts]
    return [piece for piece in pieces if len(piece) == 300][:PROMPTS]


def test_greedy_text_is_that_of_transformers() -> None:
    """Each token is the one that Transformers' model finds likeliest behind those before it, or ties with it."""
    from transformers import AutoModelForCausalLM

    prompts = held_out_prompts()
    assert len(prompts) == PROMPTS
    llm = LLM(str(TARGET), dtype="float32", device="cpu", max_model_len=512)
    ours = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True))
    llm.close()
    theirs = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    differing = 0
    for output in ours:
        prompt, got = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert len(got) == NEW_TOKENS
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=1)
        differing += best.indices.tolist() != got
        for at, token in enumerate(got):
            short = float(best.values[at] - logits[at, token])
            assert short < TIE, f"token {at} of {output.prompt!r} is {token}, expected {best.indices[at]}"
    assert differing <= 1
