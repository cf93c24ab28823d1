"""Sides of a measurement on Transformers, in a process of their own: one for its own, one for dynaspec's.

Started by its path, with ``Arguments`` as JSON. Says ``{"ready": version}`` on standard output, and then answers every
line of standard input: ``{"side": …, "prompt": […]}`` with ``{"seconds": …, "tokens": […]}``, ``{"counts": null}`` with
dynaspec's counts since the last time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypedDict

PLAIN, ASSISTED, OURS = "generate", "assisted generate", "dynaspec"


class Arguments(TypedDict):
    """Of the process."""

    target: str
    """Checkpoint folder."""
    assistant: str
    dynaspec: bool
    """dynaspec's side. Else dynaspec is not even imported."""
    max_tokens: int
    inference_mode: bool
    """PyTorch's; else without gradients, as ``generate`` runs by itself."""
    speculative_config: dict[str, Any] | None


Generate = Callable[..., Any]
"""Takes the prompt [1, L] and options, returns text and output [1, L + n]."""


def main() -> None:
    arguments: Arguments = json.loads(sys.argv[1])
    told, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    counts: Callable[[], dict[str, Any]] = dict
    if arguments["dynaspec"]:
        import dynaspec.hosts.transformers  # noqa: F401  first, as in a script that begins with it
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    target, assistant = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (arguments["target"], arguments["assistant"])
    )
    if arguments["dynaspec"]:
        ours, counts = _ours(target, assistant, arguments["speculative_config"])
        sides: dict[str, Generate] = {OURS: ours}
    else:
        sides = {
            PLAIN: target.generate,
            ASSISTED: lambda text, **options: target.generate(text, assistant_model=assistant, **options),
        }
    _tell(told, {"ready": transformers.__version__})
    with torch.inference_mode(arguments["inference_mode"]):
        for line in sys.stdin:
            asked = json.loads(line)
            if "counts" in asked:
                _tell(told, counts())
            else:
                _tell(told, _decode(torch, sides[asked["side"]], asked["prompt"], arguments["max_tokens"]))


def _ours(
    target: Any, assistant: Any, speculative_config: dict[str, Any] | None
) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    from dynaspec.hosts.transformers import generate
    from dynaspec.observe.stats import SpecStats

    stats = SpecStats()
    before = [stats.snapshot()]

    def ours(text: Any, **options: Any) -> Any:
        return generate(
            target, text, assistant_model=assistant, speculative_config=speculative_config, stats=stats, **options
        )

    def counts() -> dict[str, Any]:
        before.append(stats.snapshot())
        return (before[-1] - before.pop(0)).as_dict()

    return ours, counts


def _decode(torch: Any, generate: Generate, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    text = torch.tensor([prompt])
    started = time.perf_counter()
    output = generate(text, attention_mask=torch.ones_like(text), max_new_tokens=max_tokens, do_sample=False)
    return {"seconds": time.perf_counter() - started, "tokens": output[0, len(prompt) :].tolist()}


def _tell(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
