"""What drafting needs is loaded as an engine is built, not in its first steps."""

from __future__ import annotations

import json
import subprocess
import sys

from support.checkpoints import Pair
from support.state_heads import FittedHeads

SCRIPT = """
import json, sys
from numba.core.dispatcher import Dispatcher
from dynaspec import LLM, SamplingParams

target, prompt, checkpoints = sys.argv[1:]
names, original = [], Dispatcher.compile

def compile_(self, sig):
    names.append(self.py_func.__name__)
    return original(self, sig)

Dispatcher.compile = compile_
found = {}
for method, model in json.loads(checkpoints).items():
    speculation = {"method": method, "policy": "auto"} | ({"model": model} if model else {})
    llm = LLM(target, speculative_config=speculation)
    before = len(names)
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    found[method] = {"at once": before, "late": names[before:], "tokens": len(output[0].outputs[0].token_ids)}
    llm.close()
print(json.dumps(found))
"""


def test_the_first_draft_compiles_nothing(tiny: Pair, fitted_state_heads: dict[str, FittedHeads]) -> None:
    """In a process of its own, as in this one other tests have drafted."""
    checkpoints = {"ngram": None, "suffix": None, "draft_model": str(tiny.drafter)}
    checkpoints |= {method: heads.path for method, heads in fitted_state_heads.items()}
    prompt = "one two three one two three one two"
    command = [sys.executable, "-c", SCRIPT, str(tiny.target), prompt, json.dumps(checkpoints)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ngram"]["at once"] > 0  # whatever is compiled is seen
    for method in checkpoints:
        assert found[method]["late"] == []
        assert found[method]["tokens"] == 24
