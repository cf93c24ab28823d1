"""One side of a measurement on vLLM: an engine in a process of its own, as vLLM holds threads and caches for a process.

Started with vLLM's engine arguments as JSON. Says ``{"ready": …}`` on standard output, and then answers every line of
standard input, a ``Wave`` as JSON, with ``{"seconds": …, "tokens": …}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TypedDict


class Wave(TypedDict):
    """Requests that are decoded at once."""

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

    llm = vllm.LLM(**arguments)
    _tell(told, {"ready": vllm.__version__})
    for line in sys.stdin:
        _tell(told, _decode(vllm, llm, json.loads(line)))


def _decode(vllm: Any, llm: Any, wave: Wave) -> dict[str, float]:
    params = [
        vllm.SamplingParams(max_tokens=wave["max_tokens"], ignore_eos=True, temperature=wave["temperature"], seed=i)
        for i in range(len(wave["prompts"]))
    ]
    prompts = [{"prompt_token_ids": tokens} for tokens in wave["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


def _tell(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
