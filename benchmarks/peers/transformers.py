"""Transformers' ``generate``. Options: ``dtype``, and ``generate``, which go to every call of it.

Requests that run at once are a batch padded to its longest prompt, prompts of like length together.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM

from peers.common import Setting, Side, UnsupportedError, Workload


class Transformers(Side):
    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting["threads"])
        dtype = getattr(torch, setting["options"]["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(setting["checkpoint"], dtype=dtype).eval()
        self._arguments = dict(setting["options"].get("generate", {}))
        self.versions = {name: version(name) for name in ("transformers", "torch")}

    def prepare(self, at_once: int) -> None:
        if at_once > 1 and "prompt_lookup_num_tokens" in self._arguments:
            raise UnsupportedError("prompt lookup takes one request at a time")

    def decode(self, workload: Workload) -> list[list[int]]:
        prompts, at_once = workload["prompts"], workload["at_once"]
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        answers: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(order), at_once):
            numbers = order[first : first + at_once]
            for number, tokens in zip(numbers, self._batch([prompts[n] for n in numbers], workload), strict=True):
                end = next((i for i, token in enumerate(tokens) if token in workload["eos"]), len(tokens))
                answers[number] = tokens[: end + 1]
        return answers

    def _batch(self, prompts: list[list[int]], workload: Workload) -> list[list[int]]:
        longest = max(map(len, prompts))
        pad = workload["eos"][0]
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=workload["max_tokens"],
                do_sample=False,
                eos_token_id=workload["eos"],
                pad_token_id=pad,
                **self._arguments,
            )
        tokens: list[list[int]] = output[:, longest:].tolist()
        return tokens


load = Transformers
