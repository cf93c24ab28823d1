"""What drafting needs is loaded as an engine is built, not in its first steps."""

from __future__ import annotations

import json
import subprocess
import sys

from support.checkpoints import Pair

SCRIPT = """
import json, sys
from numba.core.dispatcher import Dispatcher
from dynaspec import LLM, SamplingParams

target, drafter, prompt = sys.argv[1:]
names, original = [], Dispatcher.compile

def compile_(self, sig):
    names.append(self.py_func.__name__)
    return original(self, sig)

Dispatcher.compile = compile_
found = {}
for method in ("ngram", "draft_model"):
    speculation = {"method": method, "policy": "auto"} | ({"model": drafter} if method == "draft_model" else {})
    llm = LLM(target, speculative_config=speculation)
    # The target's own kernels are known after this.
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, max_draft_tokens=0))
    before = len(names)
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    found[method] = {"at once": before, "late": names[before:], "tokens": len(output[0].outputs[0].token_ids)}
    llm.close()
print(json.dumps(found))
"""


def test_the_first_draft_compiles_nothing(tiny: Pair) -> None:
    """In a process of its own, as in this one other tests have drafted."""
    command = [sys.executable, "-c", SCRIPT, str(tiny.target), str(tiny.drafter), "one two three one two three one two"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ngram"]["at once"] > 0  # whatever is compiled is seen
    for method in ("ngram", "draft_model"):
        assert found[method]["late"] == []
        assert found[method]["tokens"] == 24
