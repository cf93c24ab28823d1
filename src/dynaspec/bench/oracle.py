"""Best fixed length, policies and oracle on the same texts: passes, time, and how much of the gap each closes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.estimate.costs import StepCosts
from dynaspec.control.policies.short_names import PLAIN, PolicySpec, parse_policy
from dynaspec.control.resolve import WIDTH_KEY
from dynaspec.engine.engine import Engine
from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.propose.pass_timing import CONTEXT, Runner
from dynaspec.result_output import Tell, new_table

from .datasets import BenchPrompt, fit
from .decoders import Job, SharedModels, StepTrace, open_engine, run_all
from .offline import SCHEMA, rotated
from .oracle_steps import (
    Hindsight,
    Iteration,
    KnownText,
    Passes,
    Walk,
    best_survival,
    best_threshold_per_position,
    confidence_alone,
    draft_everywhere,
    fit_costs,
    fixed,
    oracle,
    signal,
    tokens_per_second,
    walk,
)
from .profiling import time_steps
from .provenance import provenance

LONGEST = 20
"""Longest draft that is timed, and that thresholds are judged by."""
FIXED = tuple(range(1, 9))
"""Fixed lengths that compete."""
_COST_PROMPTS = 1
"""Prompts of each task on which steps are timed, in every round."""
_FEW_ROWS, _ROW_TRIALS = 8, 30
_TIMED = (0, 2, 5, 8, 12, 16, LONGEST)
"""Draft lengths whose steps are timed apart, as no fixed length that competes goes so far."""
ORACLE = "oracle"
BY_POSITION = "hindsight: threshold per position"
BY_CONFIDENCE = "hindsight: survival by confidence"
BY_SIGNAL = "hindsight: survival by signal"
_FIXED = "all fixed lengths"


@dataclass(frozen=True, slots=True)
class Task:
    """Texts of one kind, decoded greedily by the target alone."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[KnownText, ...]


@dataclass(frozen=True, slots=True)
class SideRun:
    """One policy, once over a task's prompts."""

    walks: tuple[Walk, ...]
    step_s: tuple[tuple[float, ...], ...]
    """Of each text, the seconds of each of its steps; those that only prefill are left out."""
    tokens: int
    """Emitted in them."""

    @property
    def seconds(self) -> float:
        return sum(map(sum, self.step_s))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Round:
    """Everything that ran in one round."""

    length_s: Mapping[int, float]
    """Median seconds of a step, by the length of its draft; 0 = plain decoding."""
    runs: Mapping[str, Mapping[str, SideRun]]
    """Task → side → run."""


@dataclass(frozen=True, slots=True)
class Study:
    """All that was measured, before it is summed up."""

    tasks: tuple[Task, ...]
    rounds: tuple[Round, ...]
    sides: tuple[str, ...]
    """Fixed lengths as ``constant:K``, then the other policies; plain decoding first."""
    drafter_pass_s: float
    left_out: int
    """Prompts whose continuation ends with its first token: there is nothing to speculate on."""
    row_s: float
    """Another row of the target's pass, among few."""

    @property
    def length_s(self) -> dict[int, float]:
        """Medians over the rounds."""
        return {k: median(r.length_s[k] for r in self.rounds) for k in sorted(self.rounds[0].length_s)}

    @property
    def target_pass_s(self) -> float:
        """A step of plain decoding."""
        return self.length_s[0]

    @property
    def costs(self) -> StepCosts:
        """Of a step, by its passes and rows."""
        return fit_costs(self.length_s, self.row_s, self.drafter_pass_s)


@dataclass(frozen=True, slots=True)
class Line:
    """One side on one task."""

    side: str
    passes: Passes
    measured: float | None
    """Tokens per second, median over the rounds; None for what cannot be run."""
    computed: float
    """Its steps × measured step costs."""
    gap: float | None
    """Share of the way from the best fixed length to the oracle, both computed; None where there is no way to go."""
    walks: tuple[Walk, ...]
    """The steps of each text, those of the last round."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """All sides on one task."""

    name: str
    prompts: int
    lines: tuple[Line, ...]
    best_fixed: str

    def line(self, side: str) -> Line:
        return next(line for line in self.lines if line.side == side)


def run_study(
    model: str,
    draft_model: str,
    prompts: Sequence[BenchPrompt],
    policies: Sequence[PolicySpec],
    max_tokens: int,
    rounds: int,
    progress: Tell,
) -> Study:
    """Decodes, drafts and measures.

    Args:
        policies: besides plain decoding and the fixed lengths.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    if max_tokens < 2 or rounds < 1:
        raise ConfigError(f"max_tokens is {max_tokens}, rounds {rounds}; expected at least 2 and 1")
    with ExitStack() as stack:
        engines = _open(model, draft_model, policies, stack, progress)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        tasks = _known_tasks(engines[PLAIN], draft_model, prompts, params, progress)
        row_s = _row_s(load_model(model, device=_device(engines[PLAIN])))
        fixed_engine = engines.pop(_FIXED)
        sides = [PLAIN, *(f"constant:{k}" for k in FIXED), *(spec.name for spec in policies)]
        decode = {name: _decoder(name, engines, fixed_engine, params) for name in sides}
        for name in sides:
            decode[name](tasks[0].prompts[:1])  # warm-up
        measured = []
        for turn in range(rounds):
            progress("rounds", turn, rounds)
            measured.append(_round(turn, sides, decode, tasks, fixed_engine, params))
        progress("rounds", rounds, rounds)
        before = fixed_engine.stats()
        for task in tasks:
            time_steps(fixed_engine, task.prompts[:1], FIXED[-1], params)
        counts = fixed_engine.stats() - before
    return Study(
        tasks=tuple(tasks),
        rounds=tuple(measured),
        sides=tuple(sides),
        drafter_pass_s=counts.draft_s / counts.drafter_passes,
        left_out=len(prompts) - sum(len(task.texts) for task in tasks),
        row_s=row_s,
    )


def summarise(study: Study) -> list[TaskResult]:
    """Every task, and all of them together if there are several."""
    results = [_result(study, task.name, [i]) for i, task in enumerate(study.tasks)]
    if len(results) > 1:
        results.append(_result(study, "all", list(range(len(study.tasks)))))
    return results


def _result(study: Study, name: str, places: Sequence[int]) -> TaskResult:
    tasks = [study.tasks[i] for i in places]
    texts = [text for task in tasks for text in task.texts]
    costs = study.costs
    walks: dict[str, tuple[Walk, ...]] = {
        side: tuple(w for task in tasks for w in study.rounds[-1].runs[task.name][side].walks) for side in study.sides
    }
    walks |= {f"constant:{k}": tuple(fixed(text, k) for text in texts) for k in FIXED}
    walks[ORACLE] = tuple(oracle(text) for text in texts)
    for side, found in _hindsights(texts, costs).items():
        walks[side] = found
    speeds = {side: tokens_per_second(of_side, costs) for side, of_side in walks.items()}
    best = max((f"constant:{k}" for k in FIXED), key=lambda side: speeds[side])
    way = speeds[ORACLE] - speeds[best]
    lines = tuple(
        Line(
            side=side,
            passes=Passes.of([step for steps in of_side for step in steps]),
            measured=_measured(study, tasks, side) if side in study.sides else None,
            computed=speeds[side],
            gap=(speeds[side] - speeds[best]) / way if way > 0 else None,
            walks=of_side,
        )
        for side, of_side in walks.items()
    )
    return TaskResult(name, len(texts), lines, best)


def _hindsights(texts: Sequence[KnownText], costs: StepCosts) -> dict[str, tuple[Walk, ...]]:
    found: dict[str, Hindsight] = {
        BY_POSITION: best_threshold_per_position(texts, costs),
        BY_CONFIDENCE: best_survival(texts, costs, confidence_alone),
        BY_SIGNAL: best_survival(texts, costs, signal),
    }
    return {
        name: tuple(walk(text, lengths) for text, lengths in zip(texts, rule.lengths, strict=True))
        for name, rule in found.items()
    }


def _measured(study: Study, tasks: Sequence[Task], side: str) -> float:
    """Median over the rounds of tokens over seconds of these tasks together."""
    speeds = []
    for one in study.rounds:
        runs = [one.runs[task.name][side] for task in tasks]
        speeds.append(sum(run.tokens for run in runs) / sum(run.seconds for run in runs))
    return median(speeds)


_FIXED_NAMES = frozenset(f"constant:{k}" for k in FIXED)
Decode = Callable[[Sequence[tuple[int, ...]]], SideRun]


def _open(
    model: str, draft_model: str, policies: Sequence[PolicySpec], stack: ExitStack, progress: Tell
) -> dict[str, Engine]:
    """One engine a policy, and one for all fixed lengths: requests ask it for shorter drafts than its own.

    All draft chains, which is what the best possible is computed of.
    """
    specs = {PLAIN: PolicySpec(PLAIN, None), _FIXED: parse_policy(f"constant:{LONGEST}", draft_model)}
    specs |= {spec.name: _without_trees(spec) for spec in policies}
    engines = {}
    load = SharedModels()
    for done, (name, spec) in enumerate(specs.items()):
        progress("loading", done, len(specs))
        engines[name] = open_engine(model, spec, load=load, max_num_seqs=1, enable_prefix_caching=False)
        stack.callback(engines[name].close)
    progress("loading", len(specs), len(specs))
    return engines


def _without_trees(spec: PolicySpec) -> PolicySpec:
    if spec.config is None or spec.config.policy != "auto":
        return spec
    return replace(spec, config=SpeculativeConfig(**spec.config.model_dump(exclude_none=True) | {WIDTH_KEY: 1}))


def _known_tasks(
    plain: Engine, draft_model: str, prompts: Sequence[BenchPrompt], params: SamplingParams, progress: Tell
) -> list[Task]:
    """The target's greedy texts, by kind of prompt, with drafts from all their positions.

    Raises:
        ConfigError: all texts end with their first token, or the drafter needs more than tokens.
    """
    method = checkpoint_method(draft_model)
    if method != "draft_model":
        raise ConfigError(
            f"{draft_model} is a drafter of method {method!r}; expected a draft model, which drafts from tokens"
        )
    drafter = load_model(draft_model, device=_device(plain))
    max_tokens = params.max_tokens or 0
    tasks = []
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category or "prompts", []).append(prompt)
    room = min(plain.max_model_len, drafter.config.max_position) - max_tokens - LONGEST - 1
    done = 0
    for name, group in groups.items():
        tokens = fit(group, plain.tokenizer, room).token_ids
        texts, kept = [], []
        for prompt_ids in tokens:
            progress("drafts everywhere", done, len(prompts))
            (output,) = run_all(plain, [Job(prompt_ids, params)], 1).outputs
            done += 1
            if len(output) > 1:
                texts.append(KnownText(draft_everywhere(drafter, prompt_ids, output, LONGEST), max_tokens))
                kept.append(prompt_ids)
        if texts:
            tasks.append(Task(name, tuple(kept), tuple(texts)))
    progress("drafts everywhere", len(prompts), len(prompts))
    if not tasks:
        raise ConfigError("every continuation ends with its first token; expected prompts that the target continues")
    return tasks


def _device(engine: Engine) -> str:
    return str(engine.config.device if engine.config.device != "auto" else "cpu")


def _row_s(target: Model) -> float:
    """Seconds that another row adds to the target's pass, among as few as a request's draft has."""
    arena = Arena.allocate(
        target.config.num_layers, target.kv_shapes(CONTEXT // BLOCK_SIZE + 2), target.dtype, target.device
    )
    runner = Runner(target, arena)

    def seconds(rows: int) -> float:
        started = time.perf_counter()
        runner.run(rows, CONTEXT)
        return time.perf_counter() - started

    pairs = [(seconds(1), seconds(_FEW_ROWS)) for _ in range(_ROW_TRIALS)]
    pairs = pairs[_ROW_TRIALS // 3 :]  # the first ones warm up
    return max(0.0, median(few for _, few in pairs) - median(one for one, _ in pairs)) / (_FEW_ROWS - 1)


def _decoder(name: str, engines: Mapping[str, Engine], fixed_engine: Engine, params: SamplingParams) -> Decode:
    """A policy's own engine, or the one of all fixed lengths."""
    if name in engines:
        engine, asked = engines[name], params
    else:
        engine, asked = fixed_engine, replace(params, max_draft_tokens=int(name.partition(":")[2]))

    def decode(prompts: Sequence[tuple[int, ...]]) -> SideRun:
        runs = [run_all(engine, [Job(prompt, asked)], 1) for prompt in prompts]
        decoding = [[step for step in run.steps if step.counts.request_steps] for run in runs]
        return SideRun(
            walks=tuple(tuple(map(_iteration, steps)) for steps in decoding),
            step_s=tuple(tuple(step.seconds for step in steps) for steps in decoding),
            tokens=sum(step.counts.emitted for steps in decoding for step in steps),
        )

    return decode


def _iteration(step: StepTrace) -> Iteration:
    """Accepted tokens as output shows them: those behind the end of a text do not count."""
    counts = step.counts
    return Iteration(counts.draft_tokens, counts.emitted - 1, max(0, counts.draft_tokens - counts.drafter_passes))


def _round(
    turn: int,
    sides: Sequence[str],
    decode: Mapping[str, Decode],
    tasks: Sequence[Task],
    fixed_engine: Engine,
    params: SamplingParams,
) -> Round:
    """Every side once over every task, in an order that moves on; then the steps' costs."""
    runs: dict[str, dict[str, SideRun]] = {task.name: {} for task in tasks}
    for place, task in enumerate(tasks):
        for name in rotated(sides, turn + place):
            runs[task.name][name] = decode[name](task.prompts)
    times = _fixed_step_times([of_task[name] for of_task in runs.values() for name in sides if _is_fixed(name)])
    for prompt in [prompt for task in tasks for prompt in task.prompts[:_COST_PROMPTS]]:
        for k in _TIMED:
            times.setdefault(k, []).extend(ms / 1e3 for ms in time_steps(fixed_engine, [prompt], k, params))
    return Round({k: median(seconds) for k, seconds in times.items()}, runs)


def _fixed_step_times(runs: Sequence[SideRun]) -> dict[int, list[float]]:
    """Draft length → seconds of all steps with drafts of that length."""
    times: dict[int, list[float]] = {}
    for run in runs:
        for steps, seconds in zip(run.walks, run.step_s, strict=True):
            for step, taken in zip(steps, seconds, strict=True):
                times.setdefault(step.drafted, []).append(taken)
    return times


def _is_fixed(name: str) -> bool:
    return name == PLAIN or name in _FIXED_NAMES


ACCEPTED, WASTED, NOTHING = "●", "○", "·"
HINDSIGHT = (BY_POSITION, BY_CONFIDENCE, BY_SIGNAL)


def as_table(result: TaskResult) -> Table:
    """One side a line: passes, tokens/s measured and computed, and the share of the gap that it closes."""
    title = f"{result.name}: {result.prompts} prompts, best fixed length {result.best_fixed.partition(':')[2]}"
    columns = ("policy", "target passes", "drafter passes", "tokens/s", "computed", "of the gap")
    table = new_table(title, columns, left=("policy",))
    for line in _in_order(result):
        style = {result.best_fixed: "bold", ORACLE: "bold green"}.get(
            line.side, "dim" if _also_ran(line, result) else ""
        )
        table.add_row(
            Text(line.side, style=style),
            str(line.passes.target),
            str(line.passes.drafter),
            "-" if line.measured is None else f"{line.measured:.1f}",
            f"{line.computed:.1f}",
            "-" if line.gap is None else f"{100 * line.gap:.0f} %",
            end_section=line.side == ORACLE,
        )
    return table


def explanation(study: Study) -> str:
    """What the figures rest on."""
    return (
        f"A target pass takes {1e3 * study.target_pass_s:.2f} ms, a drafter pass {1e3 * study.drafter_pass_s:.2f} ms; "
        "computed: each side's steps, at costs learnt from the median times of steps with drafts of one length; "
        f"another row of the target's pass takes {1e3 * study.row_s:.2f} ms. The gap is the way from "
        "the best fixed length to the oracle, which drafts exactly to the first mismatch. Hindsight: the best rule of "
        "its kind, chosen on these very texts. It stops by the drafter's confidence in the last token, or by the "
        "chance that the whole draft is right (survival), fitted to the confidence alone or to the signal that auto "
        "is told: by how much the drafter's first choice is ahead of the others, and whether the text, its prompt "
        "included, has gone on so before."
    )


def picture(steps: Walk, width: int = 100) -> list[str]:
    """A step a group of signs, a token a sign; lines are not wider than ``width``, but for a group that is."""
    groups = [ACCEPTED * s.accepted + WASTED * (s.drafted - s.accepted) if s.drafted else NOTHING for s in steps]
    lines = [""]
    for group in groups:
        if lines[-1] and len(lines[-1]) + 1 + len(group) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + group
    return lines


def shown_sides(result: TaskResult, policies: Sequence[str]) -> list[str]:
    """Those worth a picture: the best fixed length, the best of the policies by what was computed, and the oracle."""
    given = [line for line in result.lines if line.side in policies]
    ranked = sorted(given, key=lambda line: -line.computed)[:2]
    return [result.best_fixed, *(line.side for line in ranked), ORACLE]


def iterations_text(result: TaskResult, sides: Sequence[str]) -> list[str]:
    """The steps of the first text under some sides."""
    lines = [f"{result.name}, prompt 1: {ACCEPTED} accepted  {WASTED} in vain  {NOTHING} nothing drafted"]
    for side in sides:
        steps = result.line(side).walks[0]
        lines.append(f"  {side}: {len(steps)} target and {sum(s.drafted for s in steps)} drafter passes")
        lines += [f"    {line}" for line in picture(steps)]
    return lines


def as_document(study: Study, results: Sequence[TaskResult], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, with its provenance, as JSON values."""
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "options": dict(options),
        "target_pass_ms": 1e3 * study.target_pass_s,
        "drafter_pass_ms": 1e3 * study.drafter_pass_s,
        "prompts_left_out": study.left_out,
        "step_ms": {str(k): 1e3 * seconds for k, seconds in study.length_s.items()},
        "tasks": {result.name: _task(study, result) for result in results},
    }


def _task(study: Study, result: TaskResult) -> dict[str, Any]:
    return {
        "prompts": result.prompts,
        "best_fixed": result.best_fixed,
        "sides": {line.side: _line(study, result, line) for line in result.lines},
    }


def _line(study: Study, result: TaskResult, line: Line) -> dict[str, Any]:
    rounds = (
        [r.runs[result.name][line.side].tokens_per_second for r in study.rounds] if _ran(study, result, line) else []
    )
    return {
        "passes": asdict(line.passes),
        "tokens_per_second": line.measured,
        "tokens_per_second_rounds": rounds,
        "computed_tokens_per_second": line.computed,
        "share_of_gap": line.gap,
        "iterations": [[[s.drafted, s.accepted] for s in steps] for steps in line.walks],
    }


def _ran(study: Study, result: TaskResult, line: Line) -> bool:
    return line.side in study.sides and result.name in study.rounds[0].runs


def _in_order(result: TaskResult) -> list[Line]:
    """Plain decoding, fixed lengths, policies, hindsight, and the oracle last."""
    last = (*HINDSIGHT, ORACLE)
    return [line for line in result.lines if line.side not in last] + [result.line(side) for side in last]


def _also_ran(line: Line, result: TaskResult) -> bool:
    return line.side == PLAIN or (line.side.startswith("constant:") and line.side != result.best_fixed)
