"""What is compiled is loaded before the first step."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from numba.core.dispatcher import Dispatcher
from dynaspec.control.auto import AutoController, load_kernels
from support.closed_loop import COSTS, LIMITS, LONGEST, Loop

def versions():
    modules = [m for name, m in sys.modules.items() if name.startswith("dynaspec.control")]
    return {f"{d.__module__}.{d.__name__}": len(d.signatures)
            for m in modules for d in vars(m).values() if isinstance(d, Dispatcher)}

load_kernels()
before = versions()
assert before
controller = AutoController(LIMITS, longest=LONGEST, costs=COSTS)
modes = {controller.estimates()["mode"]}
for requests, quality in ((1, 1.0), (4, 0.7), (16, 0.1), (2, 0.9)):
    Loop(requests, 1, lambda step, r: quality).run(controller, 300)
    modes.add(controller.estimates()["mode"])
assert len(modes) > 1
added = {name: count for name, count in versions().items() if count != before.get(name)}
assert not added, added
"""


def test_steps_load_nothing_that_is_compiled() -> None:
    """It takes milliseconds: as long as some steps."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
