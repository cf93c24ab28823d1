"""What ``auto`` reaches in the closed loop: the figures of the table in docs/auto.md. Takes about five minutes."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import auto_scenarios as scenarios  # from the tests
from support import copied_text

auto = scenarios.auto
SEEDS = range(1, 17)


def adversary() -> str:
    return ", ".join(f"{scenarios.adversary_cost(auto, prompt, (1, 2, 3)):.1%}" for prompt in (0, 4000))


def drifting(prices: scenarios.Prices) -> str:
    return ", ".join(f"{scenarios.drifting(auto, prices, mispriced, SEEDS[:8]):.3f}" for mispriced in (1.0, 0.6, 1.6))


def main() -> None:
    print(f"adversarial drafter, cost of 400 steps, short and 4,000-token prompts: {adversary()}")
    lengths, back = scenarios.useless_then_good(auto, SEEDS)
    print(f"drafter that turns useless, mean length thirty steps later, worst seed: {max(lengths):.2f}")
    print(f"... taken up again within 300 steps: {sum(back)} of {len(back)}")
    found = [scenarios.cold_start(auto, seed) > 0.3 for seed in range(1, 33)]
    print(f"gain of a twentieth found within 400 steps: {sum(found[:8])} of 8 ({sum(found)} of 32)")
    slow = ", ".join(f"{np.mean(scenarios.slow_first_steps(auto, quality, SEEDS)):.3f}" for quality in (1.0, 0.8))
    print(f"first steps twice as slow, over the best fixed length: {slow}")
    print(f"load and text alternate: {', '.join(f'{scenarios.alternating(auto, seed):.3f}' for seed in (1, 2))}")
    for texts in copied_text.TEXTS:
        over_best = ", ".join(f"{scenarios.copying(auto, texts, requests, (1, 2, 3)):.3f}" for requests in (1, 4, 16))
        print(f"texts that copy parts of themselves, {texts}: over the best fixed mix at 1, 4, 16 requests {over_best}")
    print(f"machine whose speed drifts, plain decoding faster: {drifting(scenarios.DEAR)}")
    print(f"... drafting faster: {drifting(scenarios.CHEAP)}")
    cases = list(product(scenarios.MACHINES, scenarios.HOSTS))
    for machine, host in track(cases, description="machines and hosts", transient=True):
        best, plain = scenarios.at_every_load(auto, machine, host)
        over_best = f"over the best fixed length at least {min(best):.3f}, on average {np.mean(best):.3f}"
        print(f"{machine}, {host}: {over_best}; over plain decoding at least {min(plain):.4f}")


if __name__ == "__main__":
    main()
