"""What the way through an event loop costs: ``AsyncLLM`` against the same engine without one.

1  tokens/s of requests decoded at once, streamed as deltas, over ``LLM.generate`` of the same prompts
2  time to the first token of one request on an idle engine, less that of ``Engine.add`` and ``Engine.step``

The two sides alternate and take turns at being first; a figure is the median over the rounds. With ``--work-us`` the
event loop computes for every output, as a server does that formats and sends it: the Python threads of a process share
one lock, so this is where an engine's thread can lose time.

Each side gives its OpenMP team up before the other's turn: together they have more threads than there are cores, and
then none of them spins.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import dynaspec.engine  # first: it says how PyTorch's threads wait

# isort: split
from dynaspec.bench.datasets import demo_prompts
from dynaspec.bench.offline import ratios
from dynaspec.bench.provenance import provenance
from dynaspec.contract.sampling_params import RequestOutputKind
from dynaspec.control.policies.short_names import parse_policy
from dynaspec.result_output import make_folder, write_json
from study import errors_told, pair_parser

LEAST_RATIO = 0.95
MOST_EXTRA_MS = 1.0
FIRST_TOKENS = 20
"""Requests whose first token is waited for in a round, on each side."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What both sides decode."""

    prompts: Sequence[Sequence[int]]
    params: dynaspec.SamplingParams
    work_s: float
    """Seconds that the event loop computes for each output."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy; each tuple has an entry a round."""

    policy: str
    offline_tokens_per_s: tuple[float, ...]
    async_tokens_per_s: tuple[float, ...]
    outputs_per_s: tuple[float, ...]
    """Of the asynchronous side."""
    engine_first_token_ms: tuple[float, ...]
    async_first_token_ms: tuple[float, ...]

    @property
    def rate_ratios(self) -> list[float]:
        return ratios(self.async_tokens_per_s, self.offline_tokens_per_s)

    @property
    def extra_ms(self) -> list[float]:
        """Of the first token."""
        return [a - b for a, b in zip(self.async_first_token_ms, self.engine_first_token_ms, strict=True)]

    def show(self) -> None:
        rate, extra = self.rate_ratios, self.extra_ms
        print(
            f"{self.policy:<14} {median(self.offline_tokens_per_s):8.1f} {median(self.async_tokens_per_s):8.1f} "
            f"{median(rate):6.3f} [{min(rate):.2f} … {max(rate):.2f}]   {median(self.engine_first_token_ms):7.2f} "
            f"{median(extra):+7.2f} [{min(extra):+.2f} … {max(extra):+.2f}]",
            flush=True,
        )


def measure(args: argparse.Namespace, policy: str) -> Measured:
    """Loads the two engines and lets them take turns."""
    spec = parse_policy(policy, args.draft_model)
    with ExitStack() as stack:
        options: dict[str, Any] = {"speculative_config": spec.config, "max_num_seqs": args.requests}
        offline = dynaspec.LLM(args.model, **options)
        stack.callback(offline.close)
        online = dynaspec.AsyncLLM(args.model, **options)
        stack.callback(online.close)
        texts = [prompt.text for prompt in demo_prompts()]
        prompts = [offline.tokenizer.encode(texts[i % len(texts)]) for i in range(args.requests)]
        params = dynaspec.SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
        work = Workload(prompts, params, 1e-6 * args.work_us)
        rounds = asyncio.run(take_turns(offline, online, work, args.rounds))
    return Measured(policy, *zip(*rounds, strict=True))


async def take_turns(
    offline: dynaspec.LLM, online: dynaspec.AsyncLLM, work: Workload, rounds: int
) -> list[tuple[float, ...]]:
    """The figures of ``Measured``, round by round; the first round warms both sides up and does not count."""
    found: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        if number % 2:
            alone = offline_turn(offline, work)
            streamed = await online_turn(online, work)
        else:
            streamed = await online_turn(online, work)
            alone = offline_turn(offline, work)
        found.append((alone[0], streamed[0], streamed[1], alone[1], streamed[2]))
        print(f"round {number} of {rounds} is done", file=sys.stderr, flush=True)
    return found[1:]


def offline_turn(llm: dynaspec.LLM, work: Workload) -> tuple[float, float]:
    """Tokens per second, and milliseconds to a first token."""
    return offline_rate(llm, work), engine_first_token_ms(llm, work)


async def online_turn(llm: dynaspec.AsyncLLM, work: Workload) -> tuple[float, float, float]:
    """Tokens and outputs per second, and milliseconds to a first token."""
    return *await online_rate(llm, work), await async_first_token_ms(llm, work)


def offline_rate(llm: dynaspec.LLM, work: Workload) -> float:
    started = time.perf_counter()
    outputs = llm.generate(work.prompts, work.params)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)


async def online_rate(llm: dynaspec.AsyncLLM, work: Workload) -> tuple[float, float]:
    """Tokens and outputs per second."""
    params = replace(work.params, output_kind=RequestOutputKind.DELTA)

    async def client(number: int, prompt: Sequence[int]) -> tuple[int, int]:
        tokens = outputs = 0
        async for output in llm.generate(prompt, params, request_id=f"rate-{number}"):
            tokens, outputs = tokens + len(output.outputs[0].token_ids), outputs + 1
            compute(work.work_s)
        return tokens, outputs

    started = time.perf_counter()
    counts = await asyncio.gather(*(client(i, prompt) for i, prompt in enumerate(work.prompts)))
    seconds = time.perf_counter() - started
    return sum(tokens for tokens, _ in counts) / seconds, sum(outputs for _, outputs in counts) / seconds


def compute(seconds: float) -> None:
    """Keeps the interpreter busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def engine_first_token_ms(llm: dynaspec.LLM, work: Workload) -> float:
    engine, found = llm._engine, []
    for i in range(FIRST_TOKENS):
        started = time.perf_counter()
        engine.add(f"first-{i}", first_prompt(work, i), replace(work.params, max_tokens=1))
        while not engine.step():
            pass
        found.append(1e3 * (time.perf_counter() - started))
    return median(found)


async def async_first_token_ms(llm: dynaspec.AsyncLLM, work: Workload) -> float:
    params, found = replace(work.params, max_tokens=1, output_kind=RequestOutputKind.DELTA), []
    for i in range(FIRST_TOKENS):
        started = time.perf_counter()
        async for _ in llm.generate(first_prompt(work, i), params, request_id=f"first-{i}"):
            found.append(1e3 * (time.perf_counter() - started))
    return median(found)


def first_prompt(work: Workload, i: int) -> Sequence[int]:
    """Too short for the prefix cache, so that every request takes the same pass."""
    return work.prompts[i % len(work.prompts)][:8]


def main() -> None:
    args = _arguments()
    with errors_told():
        if args.json is not None:
            make_folder(args.json.parent)
        print(f"{args.requests} requests at once, {args.max_tokens} tokens each, {args.rounds} rounds")
        print("policy          offline    async  ratio                    engine's 1st token, ms; extra of async")
        measured = []
        for policy in args.policies.split(","):
            measured.append(measure(args, policy))
            measured[-1].show()
        if args.json is not None:
            options = {name: value for name, value in vars(args).items() if name != "json"}
            sides = [asdict(one) for one in measured]
            write_json(args.json, {"provenance": provenance(), "options": options, "policies": sides})
    print(f"to be reached: a ratio of {LEAST_RATIO} at least, {MOST_EXTRA_MS} ms extra at most")


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--policies", default="plain,auto", help="as in dynaspec bench, separated by commas")
    parser.add_argument("--requests", type=int, default=16, help="requests at once (16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each (96)")
    parser.add_argument("--work-us", type=float, default=0.0, help="µs that the event loop computes per output (0)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    if args.requests < 1 or args.max_tokens < 2 or args.rounds < 1:
        parser.error("expected --requests and --rounds of at least 1, and --max-tokens of at least 2")
    return args


if __name__ == "__main__":
    main()
