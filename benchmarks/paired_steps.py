"""How fast decoding is under a policy beside plain decoding, by single steps that take turns.

A machine that is slow for a tenth of a second slows both, so a few minutes tell differences of one per cent, which
whole turns of some seconds do not. A turn begins when all its requests have read their prompts, and ends when one has
its last token. What the drafter has to read counts, as it is read in the turn. Prints the ratio of tokens/s at each
number of requests; writes paired_steps.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import dynaspec.engine  # noqa: F401  # first: it says how PyTorch's threads wait

# isort: split
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dynaspec.bench.datasets import BenchPrompt, fit, load_prompts
from dynaspec.bench.decoders import SharedModels, open_engine
from dynaspec.bench.demo import load_demo_prompts
from dynaspec.bench.provenance import provenance
from dynaspec.cli.demo import demo_head, demo_target
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.control.policies.short_names import PLAIN, parse_policy
from dynaspec.engine.engine import Engine
from dynaspec.result_output import make_folder, write_json
from study import errors_told


@dataclass(slots=True)
class Side:
    """What one side's steps of a turn gave and took."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    plain: Side
    policy: Side
    drafted: int
    """Tokens."""

    @property
    def ratio(self) -> float:
        """Speed under the policy over that of plain decoding."""
        return self.policy.tokens / self.policy.seconds / (self.plain.tokens / self.plain.seconds)


class Decoding:
    """Requests that an engine decodes, step by step."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._engine, self._most = engine, tokens
        self._emitted = {str(number): 0 for number in range(len(prompts))}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for request, prompt in zip(self._emitted, prompts, strict=True):
            engine.add(request, list(prompt), params)

    @property
    def all_decode(self) -> bool:
        """Every request has read its prompt, and none has ended."""
        return min(self._emitted.values()) > 0 and max(self._emitted.values()) < self._most

    @property
    def reading(self) -> bool:
        """Some request has not read its prompt, and none has ended."""
        return min(self._emitted.values()) == 0 and max(self._emitted.values()) < self._most

    def step(self, side: Side) -> None:
        began = time.perf_counter()
        outputs = self._engine.step()
        side.seconds += time.perf_counter() - began
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            self._emitted[output.request_id] += count
            side.tokens += count
        side.steps += 1

    def close(self) -> None:
        """Ends all that still run."""
        for request in self._emitted:
            self._engine.abort(request)
        while self._engine.unfinished:
            self._engine.step()


def take_turn(plain: Engine, policy: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Turn:
    """Decodes the prompts on both sides.

    Raises:
        ConfigError: a request had its last token before all had read their prompts.
    """
    sides = [(Decoding(engine, prompts, tokens), Side()) for engine in (plain, policy)]
    for decoding, _ in sides:
        while decoding.reading:
            decoding.step(Side())
    drafted = policy.stats().draft_tokens
    while all(decoding.all_decode for decoding, _ in sides):
        for decoding, side in sides if sides[0][1].steps % 2 else reversed(sides):
            decoding.step(side)
    drafted = policy.stats().draft_tokens - drafted
    for decoding, _ in sides:
        decoding.close()
    if not sides[0][1].steps:
        raise ConfigError(f"tokens is {tokens}, which leaves no steps in which all decode; expected more")
    return Turn(sides[0][1], sides[1][1], drafted)


def measure(
    plain: Engine, policy: Engine, prompts: Sequence[Sequence[int]], requests: int, turns: int, tokens: int
) -> list[Turn]:
    """Turns at a number of requests, after one that warms up; each takes the prompts that follow."""
    found = []
    for number in track(range(-1, turns), description=f"{requests} at once", transient=True):
        first = max(0, number) * requests
        chosen = [prompts[(first + i) % len(prompts)] for i in range(requests)]
        found.append(take_turn(plain, policy, chosen, tokens))
    return found[1:]


def as_table(found: dict[int, list[Turn]], policy: str) -> Table:
    columns = ("at once", PLAIN, policy, f"{policy} / {PLAIN}", "turns", "tokens", "drafted")
    table = Table(*columns, title="tokens/s; tokens and drafted tokens in a step of a request")
    for requests, turns in found.items():
        ratios = [turn.ratio for turn in turns]
        sides = [[turn.plain for turn in turns], [turn.policy for turn in turns]]
        rates = [sum(s.tokens for s in side) / sum(s.seconds for s in side) for side in sides]
        steps = sum(side.steps for side in sides[1])
        table.add_row(
            str(requests),
            *(f"{rate:.1f}" for rate in rates),
            f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            str(len(turns)),
            f"{sum(side.tokens for side in sides[1]) / (steps * requests):.2f}",
            f"{sum(turn.drafted for turn in turns) / (steps * requests):.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the target (that of the demonstration)")
    parser.add_argument("--draft-model", help="its drafter (the demonstration's head)")
    parser.add_argument("--policy", default="auto", help="what plain decoding is compared with (auto)")
    parser.add_argument("--prompts", type=Path, help="prompts, see dynaspec bench offline (those that come along)")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8], help="requests at once (1 8)")
    parser.add_argument("--turns", type=int, default=7, help="at each load (7)")
    parser.add_argument("--tokens", type=int, default=128, help="of each request, at most (128)")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="of both sides, a JSON object")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for the figures")
    args = parser.parse_args()
    if args.engine_options.get("async_scheduling"):
        parser.error(
            "--engine-options: async_scheduling is on; expected it off, or a step would run in the other's time"
        )
    with errors_told():
        run(args)


def run(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    make_folder(args.output_dir)
    options = {"enable_prefix_caching": False, "max_num_seqs": max(args.loads), "max_model_len": 1024}
    options |= args.engine_options
    target, load = args.model or demo_target(), SharedModels()
    drafter = args.draft_model or (None if args.model else demo_head())
    plain, policy = (
        open_engine(target, parse_policy(name, drafter), load=load, **options) for name in (PLAIN, args.policy)
    )
    own = [BenchPrompt(prompt.prompt, prompt.kind) for prompt in load_demo_prompts()]
    given = load_prompts(args.prompts) if args.prompts else own
    longest = int(options["max_model_len"]) - args.tokens
    prompts = fit(given, plain.tokenizer, longest, chat=not args.model).token_ids
    found = {n: measure(plain, policy, prompts, n, args.turns, args.tokens) for n in args.loads}
    told = {str(n): [asdict(turn) for turn in turns] for n, turns in found.items()}
    document = {"provenance": provenance(), "policy": args.policy, "engine_options": options, "turns": told}
    write_json(args.output_dir / "paired_steps.json", document)
    Console(highlight=False).print(as_table(found, args.policy))


if __name__ == "__main__":
    main()
