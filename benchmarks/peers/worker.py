"""The process of one peer in one variant.

Started with the peer's name and a ``Setting`` as JSON. Says ``{"ready": versions}`` or ``{"error": reason}`` on
standard output when the engine is built, then answers every line of standard input, a ``Workload`` as JSON, with
``{"seconds": …, "answers": …}`` or ``{"error": reason}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints, in C too, is no answer
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    try:
        side = importlib.import_module(f"peers.{sys.argv[1]}").load(json.loads(sys.argv[2]))
    except Exception as error:
        tell(told, {"error": reason(error)})
        return
    tell(told, {"ready": dict(side.versions)})
    for line in sys.stdin:
        tell(told, run(side, json.loads(line)))


def run(side: Any, workload: Any) -> dict[str, Any]:
    """The answer to one workload."""
    try:
        side.prepare(workload["at_once"])
        started = time.perf_counter()
        answers = side.decode(workload)
        seconds = time.perf_counter() - started
        side.rest()
        return {"seconds": seconds, "answers": answers}
    except Exception as error:
        return {"error": reason(error)}


def reason(error: Exception) -> str:
    """One line; the whole story goes to the log."""
    traceback.print_exc(file=sys.stderr)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def tell(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
