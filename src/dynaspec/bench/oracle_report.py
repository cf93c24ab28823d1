"""The oracle study as tables, as text pictures and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.control.policies.short_names import PLAIN

from .offline import SCHEMA
from .oracle import BY_CONFIDENCE, BY_POSITION, BY_SIGNAL, ORACLE, Line, Study, TaskResult
from .oracle_steps import Walk
from .provenance import provenance

ACCEPTED, WASTED, NOTHING = "●", "○", "·"
HINDSIGHT = (BY_POSITION, BY_CONFIDENCE, BY_SIGNAL)


def as_table(result: TaskResult) -> Table:
    """One side a line: passes, tokens/s measured and computed, and the share of the gap that it closes."""
    title = f"{result.name}: {result.prompts} prompts, best fixed length {result.best_fixed.partition(':')[2]}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in ("target passes", "drafter passes", "tokens/s", "computed", "of the gap"):
        table.add_column(name, justify="right", no_wrap=True)
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


def iterations_text(result: TaskResult, sides: Sequence[str], text: int = 0) -> list[str]:
    """The steps of one text under some sides."""
    lines = [f"{result.name}, prompt {text + 1}: {ACCEPTED} accepted  {WASTED} in vain  {NOTHING} nothing drafted"]
    for side in sides:
        steps = result.line(side).walks[text]
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
