"""What requests need is compiled as an engine is built, not when the first of them waits for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.checkpoints import Pair

SCRIPT = """
import json, sys
from numba.core.dispatcher import Dispatcher
from dynaspec import LLM, SamplingParams
from dynaspec.sampling_params import StructuredOutputsParams

target, options = sys.argv[1:]
names, original = [], Dispatcher.compile

def compile_(self, sig):
    names.append(self.py_func.__name__)
    return original(self, sig)

Dispatcher.compile = compile_
llm = LLM(target, **json.loads(options))
at_once = len(names)
tokens = []
for sampling in (
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=5, min_p=0.01, seed=1, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.8, presence_penalty=0.5, logprobs=2, max_tokens=8, ignore_eos=True),
    SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["one", "two"])),
):
    for prompts in (["one two three one two"], ["one two", "three", "two one"]):
        tokens += [len(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)]
print(json.dumps({"at once": at_once, "late": names[at_once:], "tokens": tokens}))
"""


@pytest.mark.parametrize("method", [None, "ngram"])
def test_the_first_requests_compile_nothing(tiny: Pair, method: str | None) -> None:
    """In a process of its own, as in this one other tests have had requests."""
    options = {} if method is None else {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    command = [sys.executable, "-c", SCRIPT, str(tiny.target), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["at once"] > 0  # whatever is compiled is seen
    assert found["late"] == []
    assert found["tokens"][:12] == [8] * 12
    assert all(found["tokens"])
