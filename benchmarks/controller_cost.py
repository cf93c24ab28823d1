"""What deciding costs: the controllers' own time, by themselves and beside a real step.

1  median plan + trim of every policy at 8, 64 and 256 requests, with the view prebuilt, in µs
2  plan + trim + observe of ``auto`` over the step time of the engine, 8 requests at once on a pair of models
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import dynaspec.engine  # first: it says how PyTorch's threads wait

# isort: split
import numpy as np

from dynaspec.bench.datasets import demo_prompts
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Controller, DraftView, Limits, ProposerTraits, SpecPlan, StepOutcome, StepView, Work
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from study import pair_parser

LIMITS = Limits(draft_lens=tuple(range(17)), proposers=(ProposerTraits("draft_model"),))
COSTS = PassCosts(target=((1, 0.02), (256, 0.022), (2048, 0.04)), drafters=(((1, 1e-3), (256, 2e-3)),))
POLICIES: dict[str, dict[str, Any]] = {
    "constant": {"policy": "constant", "num_speculative_tokens": 5},
    "heuristic": {"policy": "heuristic"},
    "confidence": {"draft_confidence_threshold": 0.4, "num_speculative_tokens": 16},
    "elastic": {"draft_length_options": [5, 10, 15]},
    "auto": {"policy": "auto", "num_speculative_tokens": 16},
}

_T = TypeVar("_T")


class Timed:
    """A controller that notes how long its calls take."""

    def __init__(self, inner: Controller) -> None:
        self._inner = inner
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def plan(self, view: StepView) -> SpecPlan:
        return self._time("plan", lambda: self._inner.plan(view))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._time("trim", lambda: self._inner.trim(view, plan, drafts))

    def observe(self, outcome: StepOutcome) -> None:
        self._time("observe", lambda: self._inner.observe(outcome))

    def forget(self, ids: Any) -> None:
        self._inner.forget(ids)

    def _time(self, name: str, call: Callable[[], _T]) -> _T:
        started = time.perf_counter()
        result = call()
        self.seconds[name].append(time.perf_counter() - started)
        return result


def alone(config: dict[str, Any], requests: int, steps: int) -> dict[str, float]:
    """Median µs of each call, where about 7 of 10 drafted tokens are accepted and rows cost little."""
    controller = Timed(build_controller(SpeculativeConfig(model="-", **config), LIMITS, costs=COSTS))
    rng = np.random.default_rng(0)
    many = (10**6,) * requests
    view = StepView(
        step=0,
        ids=tuple(map(str, range(requests))),
        context_len=(200,) * requests,
        room_depth=many,
        room_nodes=many,
        max_draft=(None,) * requests,
        temperature=(0.0,) * requests,
        lag=((0,) * requests,),
        offers=(None,),
        prefill_tokens=0,
        waiting=0,
        limits=LIMITS,
    )
    drafted = 0
    for step in range(steps):
        plan = controller.plan(replace(view, step=step))
        lens = tuple(min(depth, 4) for depth in plan.depth)
        confidence = tuple(tuple(rng.uniform(0.3, 0.99, n).tolist()) for n in lens)
        trimmed = controller.trim(view, plan, DraftView(lens, confidence))
        accepted = tuple(min(int(rng.geometric(0.3)) - 1, n) for n in trimmed.depth)
        drafted += sum(trimmed.depth)
        passes = tuple(sum(n > j for n in lens) for j in range(max(lens)))
        rows = requests + sum(trimmed.depth)
        seconds = 0.02 + 1e-5 * rows
        controller.observe(
            StepOutcome(
                plan_step=step,
                ids=view.ids,
                proposer=trimmed.proposer,
                requested=plan.depth,
                drafted=lens,
                verified=trimmed.depth,
                accepted=accepted,
                emitted=tuple(n + 1 for n in accepted),
                ended=tuple(
                    "none" if not n else "rejected" if a < n else "all_accepted"
                    for n, a in zip(trimmed.depth, accepted, strict=True)
                ),
                early_exit=(False,) * requests,
                confidence=confidence,
                work=Work(rows_per_pass=passes, verify_rows=rows),
                draft_s=1e-3 * len(passes),
                verify_s=seconds,
                step_s=1e-3 * len(passes) + seconds + 1e-3,
            )
        )
    found = {name: 1e6 * median(values[10:]) for name, values in controller.seconds.items()}
    return found | {"drafted": drafted / steps / requests}


def beside_a_step(model: str, draft_model: str, requests: int, rounds: int) -> tuple[float, float]:
    """(µs of bookkeeping a step, µs of a step) of ``auto`` on the engine, medians."""
    llm = dynaspec.LLM(model, speculative_config={"model": draft_model}, max_num_seqs=requests)
    engine: Any = llm._engine
    step = engine._loop._step
    timed = Timed(step._controller)
    step._controller = timed
    prompts = [prompt.text for prompt in demo_prompts()]
    prompts = (prompts * requests)[:requests]
    params = dynaspec.SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    llm.generate(prompts, params)
    timed.seconds.clear()
    before = llm.stats()
    for _ in range(rounds):
        llm.generate(prompts, params)
    spent = llm.stats() - before
    llm.close()
    return 1e6 * sum(sum(v) for v in timed.seconds.values()) / spent.steps, 1e6 * spent.step_s / spent.steps


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'policy':<12} {'requests':>8} {'plan':>7} {'trim':>7} {'plan+trim':>9} {'observe':>8}  µs   k")
    for name, config in POLICIES.items():
        for requests in (8, 64, 256):
            t = alone(config, requests, 120)
            print(
                f"{name:<12} {requests:>8} {t['plan']:7.0f} {t['trim']:7.0f} {t['plan'] + t['trim']:9.0f} "
                f"{t['observe']:8.0f}      {t['drafted']:.1f}",
                flush=True,
            )
    book, step = beside_a_step(args.model, args.draft_model, 8, args.rounds)
    print(f"auto at 8 requests on {args.model}: {book:.0f} µs of {step:.0f} µs a step, {100 * book / step:.2f} %")


if __name__ == "__main__":
    main()
