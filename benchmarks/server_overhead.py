"""What the way through HTTP costs: ``dynaspec serve`` against the same engine used offline.

1  tokens/s of completions, 16 at once, over ``LLM.generate`` of the same prompts: answered whole, and streamed
2  time to the first token of one request on an idle server, less that of the engine alone

The server is a process of its own on the loopback; the load comes from this one. Client, server and engine share the
machine's cores, and a real client has its own: so the client's processor time is taken off the server's time, and the
figure without that is shown too. The sides alternate; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import dynaspec.engine  # first: it says how PyTorch's threads wait

# isort: split
from dynaspec.bench.datasets import demo_prompts
from dynaspec.bench.provenance import provenance
from dynaspec.bench.serving.client import send
from dynaspec.bench.serving.load import put_load
from dynaspec.bench.serving.server import Server, ServerError, Target, connect
from dynaspec.bench.serving.sweep import HOST, free_port, launched, serve_command
from dynaspec.control.policies.short_names import PolicySpec, parse_policy
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.result_output import make_folder, write_json
from study import errors_told, pair_parser

LEAST_RATIO = 0.9
MOST_EXTRA_MS = 5.0
FIRST_TOKENS = 20
"""Requests whose first token is waited for in a round, on each side."""
IDLE_S = 0.005
"""Before each of them, on each side: an engine that has slept needs longer for its first pass, whoever asks."""
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What the server gave, in tokens/s."""

    tokens_per_s: float
    """Without the client's processor time."""
    raw_tokens_per_s: float
    """With it."""
    client_cpu_share: float
    """Of the time that the server took."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one policy."""

    offline_tokens_per_s: float
    whole: Rate
    streamed: Rate
    engine_first_token_ms: float
    server_first_token_ms: float

    @property
    def extra_ms(self) -> float:
        """Of the first token."""
        return self.server_first_token_ms - self.engine_first_token_ms


class Offline:
    """The engine alone."""

    def __init__(self, model: str, spec: PolicySpec, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._llm = dynaspec.LLM(model, speculative_config=spec.config, max_num_seqs=len(prompts))
        self._prompts = prompts
        self._params = dynaspec.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def rate(self) -> float:
        started = time.perf_counter()
        outputs = self._llm.generate(self._prompts, self._params)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)

    def first_token_ms(self) -> float:
        one, found = dynaspec.SamplingParams(temperature=0, max_tokens=1), []
        for i in range(FIRST_TOKENS):
            time.sleep(IDLE_S)
            started = time.perf_counter()
            self._llm.generate([first_prompt(self._prompts, i)], one)
            found.append(1e3 * (time.perf_counter() - started))
        return median(found)

    def close(self) -> None:
        self._llm.close()


class Online:
    """The server, as a client sees it."""

    def __init__(self, server: Server, name: str, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._server = server
        self._name = name
        self._prompts = prompts
        self._max_tokens = max_tokens

    def _body(self, prompt: Sequence[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
        fields = {"model": self._name, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return fields | {"ignore_eos": True} | (streamed if stream else {})

    async def rate(self, *, stream: bool) -> Rate:
        """Of all prompts at once."""
        bodies = [self._body(prompt, self._max_tokens, stream=stream) for prompt in self._prompts]

        async def one(index: int) -> Any:
            target = self._server.target
            return await send(self._server.session, target.url, target.api, bodies[index], {})

        load = await put_load(one, [0.0] * len(bodies), None, lambda: None)
        failed = next((record.failure for record in load.records if record.failure is not None), None)
        if failed is not None:
            raise ServerError(f"a request failed: {failed.kind}: {failed.message}")
        tokens = sum(record.output_tokens for record in load.records)
        share = load.client_cpu_s / load.duration_s
        return Rate(tokens / (load.duration_s - load.client_cpu_s), tokens / load.duration_s, share)

    async def first_token_ms(self) -> float:
        target, found = self._server.target, []
        for i in range(FIRST_TOKENS):
            await asyncio.sleep(IDLE_S)
            body = self._body(first_prompt(self._prompts, i), 1, stream=True)
            record = await send(self._server.session, target.url, target.api, body, {})
            if record.failure is not None:
                raise ServerError(f"a request failed: {record.failure.kind}: {record.failure.message}")
            found.append(1e3 * record.ttft_s)
        return median(found)


def first_prompt(prompts: Sequence[list[int]], i: int) -> list[int]:
    """Too short for the prefix cache, so that every request takes the same pass."""
    return prompts[i % len(prompts)][:8]


async def measure(args: argparse.Namespace, policy: str) -> list[Round]:
    """Loads both sides and lets them take turns; the first round warms them up and does not count."""
    spec = parse_policy(policy, args.draft_model)
    texts = [prompt.text for prompt in demo_prompts()]
    tokenizer = Tokenizer(args.model)
    prompts = [tokenizer.encode(texts[i % len(texts)]) for i in range(args.requests)]
    offline = Offline(args.model, spec, prompts, args.max_tokens)
    port = free_port()
    root = f"http://{HOST}:{port}"
    command = serve_command(args.model, spec, port, ["--max-num-seqs", str(args.requests)])
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with (
                launched(policy, command, root, Path(folder) / "server.log", START_S),
                connect(Target(root=root)) as server,
            ):
                online = Online(server, (await server.served()).name, prompts, args.max_tokens)
                return [await one_round(offline, online, number, args.rounds) for number in range(args.rounds + 1)][1:]
    finally:
        offline.close()


async def one_round(offline: Offline, online: Online, number: int, rounds: int) -> Round:
    """Both sides; they take turns at being first."""

    async def served() -> tuple[Rate, Rate, float]:
        return await online.rate(stream=False), await online.rate(stream=True), await online.first_token_ms()

    if number % 2:
        alone, alone_ms = offline.rate(), offline.first_token_ms()
        whole, streamed, served_ms = await served()
    else:
        whole, streamed, served_ms = await served()
        alone, alone_ms = offline.rate(), offline.first_token_ms()
    print(f"round {number} of {rounds} is done", file=sys.stderr, flush=True)
    return Round(alone, whole, streamed, alone_ms, served_ms)


def show(policy: str, rounds: Sequence[Round]) -> None:
    offline = median(one.offline_tokens_per_s for one in rounds)
    engine_ms = median(one.engine_first_token_ms for one in rounds)
    extra_ms = median(one.server_first_token_ms - one.engine_first_token_ms for one in rounds)
    print(f"{policy}: offline {offline:.0f} tokens/s, first token after {engine_ms:.2f} ms; served {extra_ms:+.2f} ms")
    for form in ("whole", "streamed"):
        rates: list[Rate] = [getattr(one, form) for one in rounds]
        alone = [one.offline_tokens_per_s for one in rounds]
        found = [rate.tokens_per_s / base for rate, base in zip(rates, alone, strict=True)]
        raw = median(rate.raw_tokens_per_s / base for rate, base in zip(rates, alone, strict=True))
        share = median(rate.client_cpu_share for rate in rates)
        print(
            f"  {form:<9} {median(rate.tokens_per_s for rate in rates):6.0f} tokens/s, ratio {median(found):.3f} "
            f"[{min(found):.2f} … {max(found):.2f}]; {raw:.3f} with the client's processor time, {share:.0%}",
            flush=True,
        )


def main() -> None:
    args = _arguments()
    with errors_told():
        if args.json is not None:
            make_folder(args.json.parent)
        print(f"{args.requests} requests at once, {args.max_tokens} tokens each, {args.rounds} rounds; medians")
        measured = {}
        for policy in args.policies.split(","):
            measured[policy] = asyncio.run(measure(args, policy))
            show(policy, measured[policy])
        if args.json is not None:
            sides = {policy: [asdict(one) for one in rounds] for policy, rounds in measured.items()}
            options = {name: value for name, value in vars(args).items() if name != "json"}
            write_json(args.json, {"provenance": provenance(), "options": options, "policies": sides})
    print(f"to be reached: a ratio of {LEAST_RATIO} at least, {MOST_EXTRA_MS} ms extra at most")


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--policies", default="plain,auto", help="as in dynaspec bench, separated by commas")
    parser.add_argument("--requests", type=int, default=16, help="requests at once (16)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each (96)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
