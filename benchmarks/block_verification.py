"""What block verification accepts beyond testing token by token, on the same drafts, and how fast decoding is with it.

Every drawn chain that an engine verifies is looked at both ways. The expected number of accepted tokens, given what was
drafted, is Σ_i Π_{j≤i} min(1, P(x_j)/Q(x_j)) token by token. In blocks the mean over drafts of Σ_i p_i is that of the
accepted tokens (see ``verify.chain``), so both sums are averaged over all chains. With ``--rounds``, speed is the
median over rounds in which the two take turns.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from statistics import median
from typing import Any

import dynaspec.engine  # first: it says how PyTorch's threads wait

# isort: split
import numpy as np
import torch

from dynaspec.bench.datasets import demo_prompts
from dynaspec.engine import target
from dynaspec.sampling import ops
from dynaspec.verify.chain import BlockVerification, Bools, Int64

METHODS = ("standard", "block")


class Watched(BlockVerification):
    """Notes what both ways are expected to accept."""

    chains: list[tuple[float, float, float]]
    """Of each: token by token, in blocks; what was accepted in blocks."""

    def _passing(self, index: Int64, tokens: Int64, q: torch.Tensor) -> Bools:
        passed = super()._passing(index, tokens, q)
        at = self._slots(index)
        single = np.zeros(self._joint.shape)
        single[at] = np.minimum(ops.pick(self._p, self._place[index], tokens) / ops.pick(q, *at, tokens), 1.0)
        accepted = np.where(passed.any(1), passed.shape[1] - 1 - passed[:, ::-1].argmax(1), 0)
        columns = single.cumprod(1).sum(1), self._joint[:, 1:].sum(1), accepted
        Watched.chains += zip(*(column[np.unique(at[0])].tolist() for column in columns), strict=True)
        return passed


def engine(args: argparse.Namespace, k: int, method: str) -> Any:
    config = {"model": args.draft, "policy": "constant", "num_speculative_tokens": k, "rejection_sample_method": method}
    return dynaspec.LLM(args.target, speculative_config=config, max_num_seqs=args.batch, max_model_len=1024)


def decode(llm: Any, args: argparse.Namespace) -> tuple[float, float]:
    """(seconds, tokens)"""
    params = dynaspec.SamplingParams(
        n=args.samples, temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )
    started = time.perf_counter()
    outputs = llm.generate([prompt.text for prompt in demo_prompts()], params)
    seconds = time.perf_counter() - started
    return seconds, sum(len(one.token_ids) for output in outputs for one in output.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tests/models/target")
    parser.add_argument("--draft", default="tests/models/draft")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=128, help="of each continuation")
    parser.add_argument("--samples", type=int, default=6, help="continuations of each prompt")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=(2, 4, 8))
    parser.add_argument("--rounds", type=int, default=0, help="of timing")
    args = parser.parse_args()
    for k in args.lengths:
        expected = look(args, k)
        one_by_one, blocks, accepted = expected.mean(0)
        error = (expected[:, 1] - expected[:, 0]).std() / len(expected) ** 0.5
        print(
            f"k={k}: {len(expected)} chains, accepted {one_by_one:.3f} token by token, {blocks:.3f} in blocks "
            f"({blocks - one_by_one:+.3f} ± {error:.3f}, {(1 + blocks) / (1 + one_by_one) - 1:+.1%} tokens a step), "
            f"seen {accepted:.3f}"
        )
        if not args.rounds:
            continue
        engines = {method: engine(args, k, method) for method in METHODS}
        rates: dict[str, list[float]] = {method: [] for method in METHODS}
        for llm in engines.values():
            decode(llm, args)
        for _ in range(args.rounds):
            for method, llm in engines.items():
                seconds, tokens = decode(llm, args)
                rates[method].append(tokens / seconds)
        for method, llm in engines.items():
            stats = llm.stats()
            print(f"  {method}: {median(rates[method]):.0f} tokens/s, {stats.accepted}/{stats.verified} accepted")
            llm.close()


def look(args: argparse.Namespace, k: int) -> np.ndarray:
    """[chains, 3] of each, see ``Watched``."""
    Watched.chains = []
    target.BlockVerification = Watched  # type: ignore[attr-defined]
    try:
        with closing(engine(args, k, "block")) as llm:
            decode(llm, args)
    finally:
        target.BlockVerification = BlockVerification  # type: ignore[attr-defined]
    return np.array(Watched.chains)


if __name__ == "__main__":
    main()
