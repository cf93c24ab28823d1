"""Five ratios on one pair of models: this engine against Transformers, and against itself.

a  step time of a target pass over 8 tokens over that of a pass over 1, at a context of about 256 tokens
b  plain decoding, over Transformers' generate
c  confidence stopping, over plain decoding of this engine; by kind of prompt, too
d  confidence stopping, over Transformers' assisted generation with the same pair, as it is by default
e  tokens/s of 16 requests decoded at once, over one at a time

b to d decode the prompts of the demonstration (code and maths) greedily, one at a time, in float32, with as many
threads and the same end-of-sequence token; Transformers in a process of its own that knows nothing of dynaspec, as
importing that would set how its threads wait. The sides of each ratio alternate; a figure is the median over the
rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import dynaspec.engine  # first: it says how PyTorch's threads wait

# isort: split
import numpy as np
import torch

from dynaspec.bench.datasets import BenchPrompt, demo_prompts
from dynaspec.bench.decoders import run_once
from dynaspec.bench.offline import rotated
from dynaspec.bench.provenance import provenance
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import DecodeBatch, Drafts
from dynaspec.contract.step import ProposerTraits, SpecPlan
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from dynaspec.propose.guard import NoProposer
from dynaspec.result_output import make_folder, write_json
from hosts_transformers import Decoded, Process, Side
from study import errors_told, pair_parser
from transformers_side import ASSISTED, PLAIN, Arguments

CONTEXT, STEPS, ROWS, BATCH = 240, 32, 8, 16
CONFIDENCE = {"method": "draft_model", "draft_confidence_threshold": 0.4, "num_speculative_tokens": 20}
OURS_PLAIN, OURS_CONFIDENT = "dynaspec plain", "dynaspec confidence"
THEIRS_PLAIN, THEIRS_ASSISTED = "Transformers generate", "Transformers assisted"


@dataclass(frozen=True, slots=True)
class Ratio:
    """One of the five, with what it should reach."""

    key: str
    text: str
    rounds: tuple[float, ...]
    target: float
    at_most: bool = False
    remark: str = ""

    @property
    def value(self) -> float:
        return median(self.rounds)

    @property
    def reached(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    def line(self) -> str:
        sign, verdict = "≤" if self.at_most else "≥", "reached" if self.reached else "MISSED"
        span = f"[{min(self.rounds):.2f} … {max(self.rounds):.2f}]"
        return (
            f"({self.key}) {self.text:<57} {self.value:5.2f}  {span}  {sign} {self.target:<4}  {verdict}{self.remark}"
        )


class FixedDrafts(NoProposer):
    """Drafts one and the same token over and over, so that every target pass has as many rows as are granted."""

    traits = ProposerTraits(name="fixed", passes_per_draft="none", has_confidence=False)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        lens = np.array(plan.depth, dtype=np.int64)
        tokens = np.ones((len(lens), int(lens.max(initial=0))), dtype=np.int64)
        return Drafts(tokens=tokens, lens=lens, early_exit=np.zeros(len(lens), dtype=np.bool_))


def main() -> None:
    args = _arguments()
    with errors_told():
        if args.json is not None:
            make_folder(args.json.parent)
        report = measure(args)
    if args.json is not None:
        write_json(args.json, report)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints, and returns everything as JSON values."""
    for folder in (args.model, args.draft_model):
        if not (Path(folder) / "config.json").is_file():
            raise ConfigError(f"{folder} holds no config.json; expected a checkpoint's folder")
    prompts = demo_prompts()
    print(f"{args.model} with {args.draft_model}, {torch.get_num_threads()} threads, {args.rounds} rounds", flush=True)
    with ExitStack() as stack:
        verification = verification_ratio(args, stack)
        batching = batching_ratio(args, prompts, stack)
        sides, tokenize = decoding_sides(args, stack)
        rounds = decode_rounds(sides, [tokenize(prompt.text) for prompt in prompts], args.rounds)
    ratios = [verification, *decoding_ratios(rounds), batching]
    kinds = {
        kind: median(quotient(one, OURS_PLAIN, OURS_CONFIDENT, _places(prompts, kind)) for one in rounds)
        for kind in dict.fromkeys(prompt.category for prompt in prompts)
    }
    speeds = {name: median(speed(one[name]) for one in rounds) for name in sides}
    show(ratios, kinds, speeds, rounds)
    return {
        "provenance": provenance(),
        "options": {"model": args.model, "draft_model": args.draft_model, "max_tokens": args.max_tokens},
        "ratios": {r.key: {"text": r.text, "value": r.value, "rounds": r.rounds, "target": r.target} for r in ratios},
        "confidence_by_kind": kinds,
        "tokens_per_second": speeds,
        "outputs_differ_from_ours": differing(rounds),
    }


def verification_ratio(args: argparse.Namespace, stack: ExitStack) -> Ratio:
    """(a), from the seconds that the engine itself counts for its target passes."""
    wide = {"method": "ngram", "num_speculative_tokens": ROWS - 1, "policy": "constant"}
    engines = [
        build_engine(EngineConfig.build(model=args.model, max_num_seqs=1, enable_prefix_caching=False)),
        build_engine(
            EngineConfig.build(model=args.model, max_num_seqs=1, enable_prefix_caching=False, speculative_config=wide),
            proposer=FixedDrafts(),
        ),
    ]
    for engine in engines:
        stack.callback(engine.close)
        pass_seconds(engine)  # warm-up
    seconds = [tuple(map(pass_seconds, engines)) for _ in range(args.rounds)]
    one, many = (1e3 * median(column) for column in zip(*seconds, strict=True))
    return Ratio(
        "a",
        f"pass over {ROWS} tokens / pass over 1, context {CONTEXT}+",
        tuple(many / one for one, many in seconds),
        1.35,
        at_most=True,
        remark=f"  ({one:.1f} and {many:.1f} ms)",
    )


def pass_seconds(engine: Engine) -> float:
    """Mean seconds of a target pass over decoding rows only."""
    prompt = (np.arange(CONTEXT) * 37 % 1000 + 100).tolist()
    params = dynaspec.SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    engine.add("pass", prompt, params)
    engine.step()
    before = engine.stats()
    while engine.unfinished:
        engine.step()
    counts = engine.stats() - before
    return counts.verify_s / counts.target_passes


def batching_ratio(args: argparse.Namespace, prompts: Sequence[BenchPrompt], stack: ExitStack) -> Ratio:
    """(e). The prompts lie in the prefix cache on both sides, so that it is decoding that is timed."""
    params = dynaspec.SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    llms = [dynaspec.LLM(args.model, max_num_seqs=seqs) for seqs in (1, BATCH)]
    for llm in llms:
        stack.callback(llm.close)
    tokens = [llms[0].tokenizer.encode(prompts[i % len(prompts)].text) for i in range(BATCH)]
    alone = tokens[:: BATCH // 4]
    for llm in llms:
        run_once(llm, tokens, params)  # warm-up
    rounds = []
    for _ in range(args.rounds):
        one = run_once(llms[0], alone, params).tokens_per_second
        rounds.append(run_once(llms[1], tokens, params).tokens_per_second / one)
    return Ratio("e", f"plain decoding, {BATCH} requests at once / one at a time", tuple(rounds), 5.0)


def decoding_sides(args: argparse.Namespace, stack: ExitStack) -> tuple[dict[str, Side], Callable[[str], list[int]]]:
    """The four ways to decode a prompt that (b), (c) and (d) compare."""
    plain = dynaspec.LLM(args.model, max_num_seqs=1, enable_prefix_caching=False)
    speculation = CONFIDENCE | {"model": args.draft_model}
    confident = dynaspec.LLM(args.model, speculative_config=speculation, max_num_seqs=1, enable_prefix_caching=False)
    stack.callback(plain.close)
    stack.callback(confident.close)
    process = stack.enter_context(
        Process(
            Arguments(
                target=args.model,
                assistant=args.draft_model,
                dynaspec=False,
                max_tokens=args.max_tokens,
                inference_mode=True,
                speculative_config=None,
            )
        )
    )
    process.wait_ready()
    sides = {
        OURS_PLAIN: ours(plain, args.max_tokens),
        OURS_CONFIDENT: ours(confident, args.max_tokens),
        THEIRS_PLAIN: process.side(PLAIN),
        THEIRS_ASSISTED: process.side(ASSISTED),
    }
    return sides, plain.tokenizer.encode


def ours(llm: dynaspec.LLM, max_tokens: int) -> Side:
    params = dynaspec.SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)

    def decode(tokens: Sequence[int]) -> Decoded:
        run = run_once(llm, [tokens], params)
        return Decoded(run.tokens[0], run.seconds)

    return decode


Round = Mapping[str, Sequence[Decoded]]
"""Side → every prompt, decoded once."""


def decode_rounds(sides: Mapping[str, Side], prompts: Sequence[Sequence[int]], rounds: int) -> list[Round]:
    """Every side decodes every prompt in every round; which begins changes with each prompt."""
    for decode in sides.values():
        decode(prompts[0])  # warm-up
    names = list(sides)
    results: list[Round] = []
    for turn in range(rounds):
        decoded: dict[str, list[Decoded]] = {name: [] for name in names}
        for i, prompt in enumerate(prompts):
            for name in rotated(names, turn + i):
                decoded[name].append(sides[name](prompt))
        results.append(decoded)
        print(f"round {turn + 1} of {rounds} is done", file=sys.stderr, flush=True)
    return results


def decoding_ratios(rounds: Sequence[Round]) -> list[Ratio]:
    """(b), (c) and (d)."""
    pairs = (
        ("b", OURS_PLAIN, THEIRS_PLAIN, 1.5),
        ("c", OURS_CONFIDENT, OURS_PLAIN, 1.5),
        ("d", OURS_CONFIDENT, THEIRS_ASSISTED, 2.5),
    )
    return [
        Ratio(key, f"{fast} / {slow}", tuple(quotient(one, slow, fast) for one in rounds), target)
        for key, fast, slow, target in pairs
    ]


def speed(decoded: Sequence[Decoded]) -> float:
    """Tokens per second."""
    return sum(len(one.tokens) for one in decoded) / sum(one.seconds for one in decoded)


def quotient(one: Round, slow: str, fast: str, places: Sequence[int] | None = None) -> float:
    """Speed of ``fast`` over that of ``slow`` in one round, on all prompts or those at some places."""
    chosen = range(len(one[fast])) if places is None else places
    return speed([one[fast][i] for i in chosen]) / speed([one[slow][i] for i in chosen])


def differing(rounds: Sequence[Round]) -> dict[str, int]:
    """By side: prompts decoded otherwise than by our plain decoding.

    Transformers' products depend on the number of rows, so that near ties may fall otherwise there; ours may not.
    """
    reference = [one.tokens for one in rounds[0][OURS_PLAIN]]
    return {
        name: sum(one.tokens != expected for one, expected in zip(decoded, reference, strict=True))
        for name, decoded in rounds[0].items()
        if name != OURS_PLAIN
    }


def show(
    ratios: Sequence[Ratio], kinds: Mapping[str, float], speeds: Mapping[str, float], rounds: Sequence[Round]
) -> None:
    for ratio in ratios:
        print(ratio.line())
    print("(c) by kind of prompt: " + ", ".join(f"{kind} {value:.2f}" for kind, value in kinds.items()))
    print("tokens/s: " + ", ".join(f"{name} {value:.1f}" for name, value in speeds.items()))
    prompts = len(rounds[0][OURS_PLAIN])
    print(f"outputs that differ from {OURS_PLAIN}, of {prompts}: " + ", ".join(
        f"{name} {count}" for name, count in differing(rounds).items()
    ))  # fmt: skip


def _places(prompts: Sequence[BenchPrompt], kind: str) -> list[int]:
    return [i for i, prompt in enumerate(prompts) if prompt.category == kind]


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is measured (3)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each continuation (128)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    if args.rounds < 1 or args.max_tokens < 2:
        parser.error(f"--rounds is {args.rounds}, --max-tokens {args.max_tokens}; expected at least 1 and 2")
    return args


if __name__ == "__main__":
    main()
