"""Greedy text of the demo target, against Transformers' own ``generate``."""

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
    from transformers import AutoModelForCausalLM

    prompts = held_out_prompts()
    assert len(prompts) == PROMPTS
    llm = LLM(str(TARGET), dtype="float32", device="cpu", max_model_len=512)
    ours = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True))
    llm.close()
    theirs = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # as with ignore_eos, the text goes on after it
    differing = 0
    for output in ours:
        prompt = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            generated = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        expected = generated[0, prompt.shape[1] :].tolist()
        got = output.outputs[0].token_ids
        if got != expected:
            differing += 1
            at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
            with torch.inference_mode():
                logits = theirs(generated[:, : prompt.shape[1] + at]).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            assert first - second < TIE, f"token {at} of {output.prompt!r} is {got[at]}, expected {expected[at]}"
    assert differing <= 1
