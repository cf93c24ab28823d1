"""What a useless drafter costs, and how fast a policy notices that a drafter has become useless, or useful again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Proposer
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.engine.tokenizer import Tokenizer

from .drafters import Adversarial
from .drive import ClosedLoop, StepTrace, warm_prompts
from .engines import Wrap, open_engine
from .policies import PLAIN, PolicySpec, parse_policy
from .statistics import lower_bound
from .sweep import endless

Progress = Callable[[str, int, int], None]

STEPS = 400
MOST_COST = 0.03
"""Of plain decoding's speed."""
USEFUL, USELESS = 100, 200
"""Steps that the drafter is as good as it is, and then of no use, before it is good again."""
WATCHED = slice(130, 160)
"""Steps 131 to 160, counted from 1: by then it must have been noticed."""
MOST_DRAFTED = 0.5
"""Mean draft length in them."""
_RECOVERY_STEPS = 300
_RECOVERY_WINDOW = 30
_REQUEST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class AdversaryCost:
    """The same number of steps, side by side."""

    plain_s: tuple[float, ...]
    """Seconds a token, in each round."""
    policy_s: tuple[float, ...]
    mean_draft: tuple[float, ...]
    """Drafted per request and step, in each round."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Speed of the policy over plain decoding's, in tokens per second, round by round."""
        return tuple(p / a for p, a in zip(self.plain_s, self.policy_s, strict=True))

    @property
    def cost(self) -> float:
        """Share of plain decoding's speed that is lost, in the median."""
        return 1.0 - median(self.ratios)

    @property
    def worst(self) -> float:
        """95 % upper bound of the cost."""
        return 1.0 - lower_bound(self.ratios)


@dataclass(frozen=True, slots=True)
class Drift:
    """Draft length over the steps of one request after the other, while the drafter changes."""

    drafted: tuple[float, ...]
    """Mean draft length of each step."""

    @property
    def watched(self) -> float:
        """Mean over steps 131 to 160."""
        part = self.drafted[WATCHED]
        return sum(part) / len(part)

    @property
    def recovered_after(self) -> int | None:
        """Steps from when it is good again until drafts are half as long as at first, over 30 steps; None: never."""
        before = self.drafted[USEFUL // 2 : USEFUL]
        enough = 0.5 * sum(before) / len(before)
        start = USEFUL + USELESS
        for end in range(start + _RECOVERY_WINDOW, len(self.drafted) + 1):
            part = self.drafted[end - _RECOVERY_WINDOW : end]
            if sum(part) / len(part) >= enough:
                return end - start
        return None


def adversarial(vocab_size: int, kept: list[Adversarial]) -> Callable[[Proposer], Proposer]:
    """For ``open_engine``: makes every proposer adversarial, and keeps them so that they can be switched."""

    def wrap(proposer: Proposer) -> Proposer:
        kept.append(Adversarial(proposer, vocab_size))
        return kept[-1]

    return wrap


def measure_cost(
    model: str,
    draft_model: str,
    prompts: Sequence[str],
    progress: Progress,
    *,
    policy: str = "auto",
    rounds: int = 5,
    concurrency: int = 1,
) -> AdversaryCost:
    """400 steps of plain decoding against 400 of a policy that has just started, with an adversarial drafter.

    What the policy needs to find out that the drafter is of no use is part of the cost.
    """
    plain = _open(model, PolicySpec(PLAIN, None), concurrency)
    spec = parse_policy(policy, draft_model)
    plain_s: list[float] = []
    policy_s: list[float] = []
    drafted: list[float] = []
    try:
        for turn in range(rounds):
            engine = _open(model, spec, concurrency, adversarial(plain.tokenizer.vocab_size, []))
            try:
                sides = [(plain, plain_s), (engine, policy_s)]
                for side, seconds in sides if turn % 2 == 0 else sides[::-1]:
                    trace = _steps(side, prompts, concurrency, STEPS)
                    # Tokens, not steps: a lucky guess may be accepted.
                    tokens = sum(step.counts.emitted for step in trace)
                    seconds.append(sum(step.seconds for step in trace) / tokens)
                    if side is engine:
                        drafted.append(sum(map(_draft_length, trace)) / len(trace))
            finally:
                engine.close()
            progress("adversarial drafter", turn + 1, rounds)
    finally:
        plain.close()
    return AdversaryCost(tuple(plain_s), tuple(policy_s), tuple(drafted))


def measure_drift(
    model: str, draft_model: str, prompts: Sequence[str], progress: Progress, *, policy: str = "auto"
) -> Drift:
    """A drafter that is good for 100 steps, useless for 200, then good again."""
    kept: list[Adversarial] = []
    wrap = adversarial(Tokenizer(model).vocab_size, kept)
    engine = _open(model, parse_policy(policy, draft_model), 1, wrap)
    if not kept:
        raise ConfigError(f"the policy {policy!r} drafts nothing; expected one that does")

    def at_step(step: int) -> None:
        for drafter in kept:
            drafter.active = USEFUL <= step < USEFUL + USELESS

    try:
        total = USEFUL + USELESS + _RECOVERY_STEPS
        trace = _steps(engine, prompts, 1, total, at_step)
    finally:
        engine.close()
    progress("drift", 1, 1)
    return Drift(tuple(map(_draft_length, trace)))


def _open(model: str, spec: PolicySpec, concurrency: int, wrap: Wrap | None = None) -> Engine:
    return open_engine(model, spec, wrap=wrap, max_num_seqs=concurrency)


def _steps(
    engine: Engine,
    prompts: Sequence[str],
    concurrency: int,
    count: int,
    before: Callable[[int], None] = lambda step: None,
) -> list[StepTrace]:
    """So many steps in which requests decode; prompts come from the prefix cache."""
    encoded = [tuple(engine.tokenizer.encode(prompt)) for prompt in prompts]
    before(0)
    warm_prompts(engine, encoded, concurrency)
    params = SamplingParams(temperature=0, max_tokens=_REQUEST_TOKENS, ignore_eos=True, detokenize=False)
    loop = ClosedLoop(engine, endless(encoded, params, 0), concurrency)
    trace: list[StepTrace] = []
    try:
        while len(trace) < count:
            before(len(trace))
            step = loop.step()
            if step is not None and step.counts.request_steps:
                trace.append(step)
    finally:
        loop.close()
    return trace


def _draft_length(step: StepTrace) -> float:
    return step.counts.draft_tokens / step.counts.request_steps
