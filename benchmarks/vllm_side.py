"""One side of a measurement on vLLM: an engine in a process of its own, as vLLM holds threads and caches for a process.

Started with vLLM's engine arguments as JSON. Says ``{"ready": …}`` on standard output, and then answers every line of
standard input, a ``Load`` as JSON, with ``{"seconds": …, "tokens": …}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from typing import Any, TypedDict


class Load(TypedDict):
    """Requests, so many of them at a time: as soon as one has ended, the next one comes."""

    concurrency: int
    prompts: list[list[int]]
    """Token ids of each."""
    max_tokens: int
    """Of each, whatever it generates."""
    temperature: float


def main() -> None:
    arguments = json.loads(sys.argv[1])
    told, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    _tell(told, {"ready": vllm.__version__})
    for number, line in enumerate(sys.stdin):
        _tell(told, _decode(vllm, engine, json.loads(line), number))


def _decode(vllm: Any, engine: Any, load: Load, number: int) -> dict[str, float]:
    waiting = deque(enumerate(load["prompts"]))

    def admit() -> None:
        i, tokens = waiting.popleft()
        params = vllm.SamplingParams(
            max_tokens=load["max_tokens"], ignore_eos=True, temperature=load["temperature"], seed=i
        )
        engine.add_request(f"{number}-{i}", {"prompt_token_ids": tokens}, params)

    started, decoded = time.perf_counter(), 0
    for _ in range(min(load["concurrency"], len(waiting))):
        admit()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                decoded += len(output.outputs[0].token_ids)
                if waiting:
                    admit()
    return {"seconds": time.perf_counter() - started, "tokens": decoded}


def _tell(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
